"""The program's own pipelines: where they run, and what makes steps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from hpcstrat.data.batches import as_batch
from hpcstrat.data.splitting import deal_elements, deal_pieces, pour_slots
from hpcstrat.engine.options import AutoShardPolicy, InputContext
from hpcstrat.engine.typing import Replicas, Tree

__all__ = ["PipelinePlace", "Steps", "function_steps", "iterable_steps"]


@dataclass(frozen=True, slots=True)
class Steps:
    """A worker's steps: ``cut`` turns the source into lists of parts.

    ``shared``: all workers read the same batches, and one that fails on any of them is
    left out on all. The steps are then whole batches, still to be cut.
    """

    source: Iterable[Any]
    cut: Callable[[Iterable[Any]], Iterator[list[Tree]]]
    shared: bool = False

    def start(self) -> Iterator[list[Tree]]:
        """Start the pipeline; each step has the parts of the worker's replicas."""
        return self.cut(self.source)


class PipelinePlace:
    """This rank's place among those that one pipeline serves.

    Rank 0 of ``comm`` runs the pipeline (``leads``) for ``replicas``, of which each
    rank has as many as ``counts`` says; ``own`` are this rank's. With ``single`` one
    serves all replicas, as if they were one worker.
    """

    def __init__(self, strategy: Replicas, *, single: bool = False) -> None:
        self.num_replicas = strategy.num_replicas_in_sync
        self.replica_id = strategy.replica_id
        self.own = strategy.local_replicas
        self.comm: Any = None
        self.num_workers, self.worker_id = 1, 0
        self.replicas, self.counts = list(self.own), [len(self.own)]
        self.leads = True
        if strategy.num_ranks > 1:
            topology = strategy.topology
            self.comm, ranks = topology.replica_comm, range(strategy.num_ranks)
            if not single:
                self.comm, ranks = topology.worker_comm, topology.worker_replicas
                self.num_workers = topology.num_workers
                self.worker_id = topology.worker_id
            blocks = [strategy.replicas.order.block(rank) for rank in ranks]
            self.replicas = [replica for block in blocks for replica in block]
            self.counts = [len(block) for block in blocks]
            self.leads = self.comm.rank == 0


def iterable_steps(dataset: Any, place: PipelinePlace) -> Steps:
    """Return what makes a worker's steps from global batches.

    The data set may have ``batch_size`` (int or None), ``auto_shard_policy``, ``files``
    (None without files), ``shard_files`` and ``shard_by_hint(num_shards, index)``.
    Raises ValueError for policy ``FILE`` without files, or with fewer than workers.
    """
    if place.num_replicas == 1:
        hint = getattr(dataset, "shard_by_hint", None)
        return Steps(dataset if hint is None else hint(1, 0), _alone)
    # Asked by attributes, so that any library's data sets can say it.
    policy = AutoShardPolicy.parse(
        getattr(dataset, "auto_shard_policy", AutoShardPolicy.AUTO)
    )
    files = getattr(dataset, "files", None)
    if policy is AutoShardPolicy.AUTO:
        # As in tf.distribute, which also prefers files where a data set has them.
        policy = AutoShardPolicy.DATA if files is None else AutoShardPolicy.FILE
    source = dataset
    if policy is AutoShardPolicy.FILE and place.num_workers > 1:
        count = 0 if files is None else len(files)
        # A worker without a file would end at once, and with it all others.
        if count < place.num_workers:
            raise ValueError(
                f"expected at least one file for each of {place.num_workers} workers "
                f"with auto-shard policy FILE, found {count}; use policy DATA"
            )
        source = dataset.shard_files(place.num_workers, place.worker_id)
    hinted = policy is AutoShardPolicy.HINT and hasattr(dataset, "shard_by_hint")
    if hinted:
        source = dataset.shard_by_hint(place.num_workers, place.worker_id)
    batch_size = getattr(dataset, "batch_size", None)
    count, own = place.num_replicas, place.replicas
    # Whether each worker reads rows of its own, and none of the others'.
    apart = hinted or policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE)
    if apart and batch_size:
        return Steps(
            source, lambda batches: pour_slots(batches, batch_size, count, own)
        )
    if apart and place.num_workers > 1:
        return Steps(source, lambda batches: deal_pieces(batches, count, len(own)))
    return Steps(source, _alone, shared=True)


def function_steps(
    dataset_fn: Callable[[InputContext], Any],
    place: PipelinePlace,
    *,
    per_replica: bool,
) -> Steps:
    """Return what makes a worker's steps from an input function.

    It is called once, here, on the rank that runs the pipeline: ``per_replica`` says
    whether each replica runs one of its own.
    """
    count = place.num_replicas
    if per_replica:
        # To the function each replica is then a worker by itself.
        contexts = [InputContext(count, replica, count) for replica in place.own]
        datasets = [dataset_fn(context) for context in contexts]
        if len(datasets) == 1:
            return Steps(datasets[0], _alone)
        return Steps(datasets, _SideBySide)
    dataset = dataset_fn(InputContext(place.num_workers, place.worker_id, count))
    return Steps(dataset, lambda batches: deal_elements(batches, len(place.replicas)))


class _SideBySide:
    """Steps of several pipelines; a replica whose pipeline has ended has None."""

    def __init__(self, pipelines: Iterable[Iterable[Any]]) -> None:
        self._iterators = [iter(pipeline) for pipeline in pipelines]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Tree]:
        elements = [next(iterator, None) for iterator in self._iterators]
        if all(element is None for element in elements):
            raise StopIteration
        return [None if one is None else as_batch(one) for one in elements]


def _alone(elements: Iterable[Any]) -> Iterator[list[Tree]]:
    # No generator, which an error would end.
    return map(_alone_with, elements)


def _alone_with(element: Any) -> list[Tree]:
    return [as_batch(element)]
