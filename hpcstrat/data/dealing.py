"""Iterables of batches: one rank per worker runs the pipeline and deals the parts.

Ranks that each ran a pipeline of their own would lose and repeat examples as soon as
its order is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hpcstrat.data.iterator import DistributedIterator, ReducibleDataset
from hpcstrat.data.placing import Placer, packed
from hpcstrat.data.splitting import (
    as_batch,
    deal_elements,
    deal_pieces,
    empty_like,
    pour_slots,
    split_pieces,
)
from hpcstrat.options import AutoShardPolicy, InputContext, InputOptions
from hpcstrat.tree import tree_map
from hpcstrat.typing import Tree
from hpcstrat.values import PerReplica

if TYPE_CHECKING:
    from hpcstrat.strategies.base import Strategy

__all__ = ["DealtDataset", "Place", "Steps", "function_steps", "iterable_steps"]

# What a replica says of a step: no batch on any replica any more, no batch and none
# before, none any more, a batch.
_STOPPED, _ENDED, _LASTED, _GIVES = -1, 0, 1, 2
_NEXT = "next of a data set"


@dataclass(frozen=True, slots=True)
class Steps:
    """What makes the steps of a worker.

    Parameters
    ----------
    source : iterable
        The program's pipeline.
    cut : callable
        Takes an iterable, and returns an iterator of lists of parts.
    shared : bool
        Whether all workers read the same elements: one that fails on any of them is
        then left out on all.
    """

    source: Iterable[Any]
    cut: Callable[[Iterable[Any]], Iterator[list[Tree]]]
    shared: bool = False

    def start(self) -> Iterator[list[Tree]]:
        """Start the pipeline.

        Not collective.

        Returns
        -------
        iterator of list of tree
            For each step, the parts of the worker's replicas.
        """
        return self.cut(self.source)


class Place:
    """Where this replica stands among the workers.

    Not collective.

    Parameters
    ----------
    strategy : Strategy
        Any strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.num_replicas = strategy.num_replicas_in_sync
        self.replica_id = strategy.replica_id
        self.worker_comm: Any = None
        self.num_workers, self.worker_id = 1, 0
        self.replicas = [self.replica_id]
        if self.num_replicas > 1:
            topology = strategy.topology
            self.worker_comm = topology.worker_comm
            self.num_workers, self.worker_id = topology.num_workers, topology.worker_id
            self.replicas = topology.worker_replicas
        self.leads = self.replica_id == self.replicas[0]


def iterable_steps(dataset: Any, place: Place) -> Steps:
    """Return what makes a worker's steps from global batches.

    Not collective.

    Parameters
    ----------
    dataset : iterable of tree of array_like, each of shape (n, ...)
        Global batches. It may have ``batch_size`` (int or None), ``auto_shard_policy``,
        ``files`` (None without files) and ``shard_files(num_shards, index)``.
    place : Place
        This replica's.

    Returns
    -------
    Steps
        To be started by each iteration.

    Raises
    ------
    ValueError
        For policy ``FILE`` without files, or with fewer files than workers.
    """
    if place.num_replicas == 1:
        return Steps(dataset, _alone)
    policy = AutoShardPolicy.parse(
        getattr(dataset, "auto_shard_policy", AutoShardPolicy.AUTO)
    )
    files = getattr(dataset, "files", None)
    if policy is AutoShardPolicy.AUTO:
        policy = AutoShardPolicy.DATA if files is None else AutoShardPolicy.FILE
    source = dataset
    if policy is AutoShardPolicy.FILE and place.num_workers > 1:
        count = 0 if files is None else len(files)
        if count < place.num_workers:
            raise ValueError(
                f"expected at least one file for each of {place.num_workers} workers "
                f"with auto-shard policy FILE, found {count}; use policy DATA"
            )
        source = dataset.shard_files(place.num_workers, place.worker_id)
    batch_size = getattr(dataset, "batch_size", None)
    count, own = place.num_replicas, place.replicas
    apart = policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE)
    if apart and batch_size:
        return Steps(
            source, lambda batches: pour_slots(batches, batch_size, count, own)
        )
    if apart and place.num_workers > 1:
        return Steps(source, lambda batches: deal_pieces(batches, count, len(own)))
    return Steps(source, lambda batches: split_pieces(batches, count, own), shared=True)


def function_steps(
    dataset_fn: Callable[[InputContext], Any], place: Place, *, per_replica: bool
) -> Steps:
    """Return what makes a worker's steps from an input function.

    Not collective.

    Parameters
    ----------
    dataset_fn : callable
        Takes an InputContext; called once, here, on the rank that runs the pipeline.
    place : Place
        This replica's.
    per_replica : bool
        Whether each replica runs a pipeline of its own.

    Returns
    -------
    Steps
        To be started by each iteration.
    """
    count = place.num_replicas
    if per_replica:
        context = InputContext(count, place.replica_id, count)
        dataset = dataset_fn(context)
        return Steps(dataset, _alone)
    dataset = dataset_fn(InputContext(place.num_workers, place.worker_id, count))
    return Steps(dataset, lambda batches: deal_elements(batches, len(place.replicas)))


def _alone(elements: Iterable[Any]) -> Iterator[list[Tree]]:
    # No generator, which an error would end.
    return map(_alone_with, elements)


def _alone_with(element: Any) -> list[Tree]:
    return [as_batch(element)]


class DealtDataset(ReducibleDataset):
    """Per-replica batches of a pipeline that one rank per worker runs.

    Collective over the strategy's replicas, as is ``next()``; ``iter()`` is not.

    An error of any pipeline is raised by ``next()`` on all replicas, which are then at
    the same place: the next one gives what the pipelines give next. A generator ends
    with the error that it raises; any other iterator may go on.

    Parameters
    ----------
    strategy : Strategy
        Whose replicas.
    place : Place
        This replica's.
    make_steps : callable
        Returns the steps; called on ranks that run a pipeline.
    options : InputOptions, optional
        Whether batches are put on the replica's GPU.
    alone : bool
        Whether each replica runs a pipeline of its own.
    """

    def __init__(
        self,
        strategy: Strategy,
        place: Place,
        make_steps: Callable[[], Steps],
        options: InputOptions | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self._strategy = strategy
        self._place = place
        self._placer = Placer(strategy, options or InputOptions())
        self._alone = alone or place.num_replicas == 1
        self._steps: Steps | None = None
        what, collectives = "creation of a distributed data set", strategy.collectives
        if self._alone or place.leads:
            try:
                self._steps = make_steps()
            except Exception as error:
                collectives.fail(what, error)
                raise
        collectives.barrier(what)

    def __iter__(self) -> DistributedIterator:
        """Begin an iteration; its first step starts the pipeline."""
        elements = _Elements(
            *(self._strategy, self._place, self._placer), self._steps, self._alone
        )
        return DistributedIterator(elements)


class _Elements:
    """This replica's batches; goes on after a step that failed, if a pipeline does."""

    def __init__(
        self,
        strategy: Strategy,
        place: Place,
        placer: Placer,
        steps: Steps | None,
        alone: bool,
    ) -> None:
        self._strategy = strategy
        self._place = place
        self._placer = placer
        self._steps = steps
        self._alone = alone
        self._running: Iterator[list[Tree]] | None = None
        # Of a step that another worker could not make.
        self._kept: list[Tree] | None = None
        self._empty: Tree = None
        self._has_failed = self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tree:
        if self._ended:
            raise StopIteration
        if self._place.num_replicas == 1:
            parts = self._pull()
            if parts is None:
                self._ended = True
                raise StopIteration
            return self._placer.place(parts[0])
        part, most, least = self._deal(self._own_parts())
        if most < _GIVES or least == _STOPPED:
            self._ended = True
            raise StopIteration
        if part is not None:
            self._empty = empty_like(part)
        if least == _ENDED:
            self._empty = self._form(self._empty)
            if self._empty is None:
                self._ended = True
                raise StopIteration
        return tree_map(PerReplica, self._empty if part is None else part)

    def _pull(self) -> list[Tree] | None:
        """Run the pipeline for a step; None at its end."""
        assert self._steps is not None
        if self._running is None:
            try:
                self._running = self._steps.start()
            except StopIteration as error:
                # As in a generator (PEP 479): it is not the end of the data.
                raise RuntimeError(
                    "expected an iterator, found that its making raised StopIteration; "
                    "raise another error"
                ) from error
        return next(self._running, None)

    def _own_parts(self) -> list[Any]:
        """Return this worker's parts for the step, None at its end.

        Those of other replicas are as they travel.
        """
        collectives, num_parts = self._strategy.collectives, len(self._place.replicas)
        dealt: list[Any] = [None] * num_parts
        if self._steps is not None:
            parts, self._kept = self._kept, None
            try:
                parts = parts or self._pull()
                if parts is not None:
                    dealt = [parts[0], *map(packed, parts[1:])]
            except Exception as error:
                self._has_failed = True
                collectives.fail(_NEXT, error)
                raise
            if not self._steps.shared:
                self._kept = parts
        collectives.barrier(_NEXT)
        self._kept = None
        return dealt

    def _deal(self, dealt: list[Any]) -> tuple[Tree, int, int]:
        """Return this replica's part, and the furthest and the least far state."""
        topology, collectives = self._strategy.topology, self._strategy.collectives
        failed: Exception | None = None
        with collectives.moving(_NEXT):
            part, came = dealt[0], None
            if not self._alone:
                came = self._place.worker_comm.scatter([None, *dealt[1:]], root=0)
            try:
                if came is not None:
                    part = self._placer.unpacked(came)
                elif part is not None:
                    place = self._placer.place if self._alone else self._placer.own
                    part = place(part)
            except Exception as error:
                failed = error
            state = _GIVES if part is not None else _LASTED
            if part is None:
                state = _ENDED if self._empty is None else _LASTED
                if self._has_failed and self._steps and self._steps.shared:
                    # The others go on, but with pieces of batches.
                    state = _STOPPED
            states = np.array([state, -state, failed is not None], np.int64)
            topology.replica_comm.Allreduce(
                topology.mpi.IN_PLACE, states, op=topology.mpi.MAX
            )
        if failed is not None:
            collectives.fail(_NEXT, failed)
            raise failed
        if states[2]:
            collectives.barrier(_NEXT)
        return part, int(states[0]), -int(states[1])

    def _form(self, own: Tree) -> Tree:
        """Learn the form of a batch from a replica that has one; None for scalars."""
        mine = None if own is None else packed(own)
        found = self._strategy.collectives.all_gather_object(mine, "form of a batch")
        form = next((form for form in found if form is not None), None)
        return None if form is None else self._placer.unpacked(form)
