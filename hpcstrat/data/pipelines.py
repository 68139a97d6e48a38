"""Input pipelines of the program: which ranks run a pipeline, and its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from hpcstrat.data.batches import (
    as_batch,
    batch_length,
    deal_elements,
    deal_pieces,
    empty_like,
    pieces_of,
    pour_slots,
    warn_of_idle,
)
from hpcstrat.data.comparing import END, Sighting, digest, show
from hpcstrat.data.dataset import Dataset
from hpcstrat.data.elements import CallIterator, call_program
from hpcstrat.data.iterator import EpochPlace
from hpcstrat.data.placing import packed
from hpcstrat.engine.options import AutoShardPolicy, InputContext
from hpcstrat.engine.typing import Replicas, Tree

__all__ = [
    "BATCH",
    "DIFFERENT",
    "FINISHED",
    "LAST",
    "Pipeline",
    "PipelinePlace",
    "PipelineStep",
    "Steps",
    "function_steps",
    "iterable_steps",
]

FINISHED, DIFFERENT, BATCH = range(3)
"""Outcomes of a step: the data have ended, the workers' batches differ, a batch."""

LAST = object()
"""Result of `Pipeline.pull` at the end of the data."""

_COMPARISON = "comparison of batches"
# States of a replica in a step, in this order: its worker stops the iteration; its data
# ended without any element; its data ended after some elements; it has a batch.
_STOPPED, _ENDED, _LASTED, _GIVES = -1, 0, 1, 2
# Sent instead of a hash in a step in which batches are not compared.
_UNSEEN = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Steps:
    """A worker's steps: ``cut(source)`` yields one list of replicas' parts per step.

    With ``shared``, ``cut(source)`` yields whole batches, which all workers read, and
    `Pipeline` cuts; all workers leave out a batch that fails on one worker.
    """

    source: Iterable[Any]
    cut: Callable[[Iterable[Any]], Iterator[Any]]
    shared: bool = False


class PipelinePlace:
    """This rank's place among the ranks that one pipeline serves.

    ``comm`` has these ranks; it is None if the pipeline serves this rank alone. Rank 0
    of ``comm`` (its ``leads`` is True) runs the pipeline for ``replicas``. ``counts``
    has the number of replicas of each rank of ``comm``, and ``own`` the replicas of
    this rank. ``leaders`` is the communicator of the ranks that run a pipeline, or None
    for a single pipeline. With ``single``, one pipeline serves all replicas; with
    ``per_replica``, each rank runs its own pipeline.
    """

    def __init__(
        self, strategy: Replicas, *, single: bool = False, per_replica: bool = False
    ) -> None:
        self.num_replicas = strategy.num_replicas_in_sync
        # The ranks of this replica, each of which reads the same data.
        self.inside = strategy.inside
        self.replica_id = strategy.replica_id
        self.own = strategy.local_replicas
        self.comm: Any = None
        self.leaders: Any = None
        self.num_workers, self.worker_id = 1, 0
        self.replicas, self.counts = list(self.own), [len(self.own)]
        self.leads = True
        if strategy.num_ranks == 1:
            return
        topology = strategy.topology
        if per_replica:
            self.leaders = topology.replica_comm
            return
        self.comm, ranks = topology.replica_comm, range(strategy.num_ranks)
        if not single:
            self.comm, ranks = topology.worker_comm, topology.worker_replicas
            self.num_workers = topology.num_workers
            self.worker_id = topology.worker_id
        blocks = [strategy.replicas.order.block(rank) for rank in ranks]
        self.replicas = [replica for block in blocks for replica in block]
        self.counts = [len(block) for block in blocks]
        self.leads = self.comm.rank == 0
        if self.num_workers > 1:
            # This communicator has the first ranks of all workers.
            self.leaders = topology.cross_worker_comm


@dataclass(slots=True)
class PipelineStep:
    """A step of a pipeline: a part of a batch, or None, for each of its replicas.

    Parts for other ranks are pickled. ``states`` has the greatest state of a replica,
    the negated least state, the batch's hash and the negated hash, so that a single
    allreduce with MAX over all pipelines finds greatest and least values.
    """

    parts: list[Any]
    states: Any


class Pipeline:
    """An iteration over a worker's steps, on the rank that runs the pipeline.

    Workers compare the hash of every ``every``-th batch that all of them read. The
    ranks of a replica compare theirs even if workers read different batches, but not if
    they have slabs.
    """

    def __init__(
        self, steps: Steps, place: PipelinePlace, every: int, position: EpochPlace
    ) -> None:
        self._steps = steps
        self._place = place
        self._every = every
        sources = steps.source if isinstance(steps.source, list) else [steps.source]
        self._compares_inside = place.inside.size > 1 and not any(
            isinstance(source, Dataset) and source.lineage.has_slabs()
            for source in sources
        )
        # The start of the iteration; a copy, because the position will advance.
        self._begin = dataclasses.replace(position)
        self._running: Iterator[Any] | None = None
        # This worker's step, kept until all other workers have made theirs.
        self._kept: PipelineStep | None = None
        # A pickled batch of 0 rows, for replicas without data; b"" before any batch.
        self._form = b""
        self._has_failed = False
        # The hash to compare in this step, and its batch (None at the end of the data).
        self._mark = _UNSEEN
        self._seen: Tree = None

    @property
    def shares_memory(self) -> bool:
        """Return whether parts are views of buffers that the source may overwrite."""
        return self._steps.shared

    def step(self, number: int) -> PipelineStep:
        """Make the next step, or return the last step again if `accept` was not called.

        `accept` is not called if another worker failed to make its step. Shared batches
        are never returned again, because all workers leave out the batch that failed.
        """
        step, self._kept = self._kept, None
        if step is None:
            inside = self._place.inside.collectives
            compares = self._compares_inside
            try:
                with inside.all_raise(_COMPARISON) if compares else nullcontext():
                    step = self._make(number)
            except Exception:
                self._has_failed = True
                raise
        if not self._steps.shared:
            self._kept = step
        return PipelineStep(step.parts, self._agreed_inside(step.states))

    def accept(self) -> None:
        """Note that all pipelines have made this step."""
        self._kept = None

    def _make(self, number: int) -> PipelineStep:
        found, shared, place = self.pull(), self._steps.shared, self._place
        batch, self._mark, self._seen = found, _UNSEEN, None
        if shared and found is not LAST:
            batch = as_batch(found)
            found = self._cut(batch, number)
        if (
            self._every
            and not number % self._every
            and (shared or self._compares_inside)
        ):
            self._seen, self._mark = None if batch is LAST else batch, END
            if batch is not LAST:
                self._mark = digest(batch, on_gpus=not number)
        missing = _ENDED
        if found is LAST:
            found = [None] * len(place.replicas)
        elif not self._form:
            first = next((part for part in found if part is not None), None)
            empty = None if first is None else empty_like(first)
            self._form = b"" if empty is None else packed(empty)
        if shared and self._has_failed:
            # Stop all workers: this source may have ended early after the error, and no
            # other worker deals this worker's pieces of the later batches.
            missing = _STOPPED
        elif self._form:
            missing = _LASTED
        states = [missing if part is None else _GIVES for part in found]
        own, mark = len(place.own), self._mark
        parts = found[:own]
        parts += [None if part is None else packed(part) for part in found[own:]]
        marks = mark, mark if mark == _UNSEEN else -mark
        both = np.array([max(states), -min(states), *marks], np.int64)
        return PipelineStep(parts, both)

    def _agreed_inside(self, states: Any) -> Any:
        """Return the greatest states of the pipelines of this replica's ranks.

        Collective over the ranks of the replica. An error of one of them is raised on
        all.
        """
        inside = self._place.inside
        if not self._compares_inside:
            return states
        parts = [np.empty_like(states) for _ in range(inside.size)]
        inside.collectives.moves.all_gather_into(states, parts, _COMPARISON)
        states = np.max(parts, axis=0)
        mark, negative = states[2:].tolist()
        if not self._steps.shared and mark == -negative:
            # Other workers read other batches, which are not compared with this one.
            states[2:] = self._mark = _UNSEEN
        return states

    def pull(self) -> Any:
        """Return the next result of ``cut(source)``, or `LAST` at its end."""
        if self._running is None:
            source = self._steps.source
            if isinstance(source, Dataset):
                source.epoch = self._begin.epoch
            running = call_program(self._steps.cut, source)
            self._skip(running)
            self._running = running
        return next(self._running, LAST)

    def _skip(self, running: Iterator[Any]) -> None:
        """Skip the steps before the position at which this iteration continues."""
        begin = self._begin
        # A step that failed before the checkpoint may fail again. It counts if all
        # pipelines left it out, but not if the other pipelines kept their parts of it.
        all_count = self._steps.shared or self._place.leaders is None
        left = begin.position - (0 if all_count else begin.failed)
        for _ in range(begin.position):
            if not left:
                break
            try:
                next(running, LAST)
                left -= 1
            except Exception:
                left -= all_count

    def _cut(self, batch: Tree, number: int) -> list[Tree]:
        """Cut a batch that all workers read."""
        place = self._place
        if not (number or place.replica_id or place.inside.position):
            warn_of_idle(batch_length(batch), place.num_replicas)
        return pieces_of(batch, place.num_replicas, place.replicas)

    def agree(self, step: PipelineStep, leaders: Any) -> int:
        """Agree with the other pipelines on the outcome of a step, and return it.

        Collective over ``leaders`` (None for a single pipeline). If the outcome is
        BATCH, replicas whose data have ended get a part without rows.
        """
        states = step.states
        if leaders is not None:
            leaders.Allreduce(leaders.mpi.IN_PLACE, states, op=leaders.mpi.MAX)
        most, least, mark, negative = states.tolist()
        least = -least
        # ``mark`` is the largest hash, and ``-negative`` the smallest.
        if mark not in (_UNSEEN, -negative) and least != _STOPPED:
            return DIFFERENT
        self._seen = None
        if most < _GIVES or least == _STOPPED:
            return FINISHED
        if least == _ENDED and leaders is not None:
            forms = leaders.allgather(self._form)
            self._form = next(filter(None, forms), b"")
        if least != _GIVES:
            # Scalars cannot have zero rows, so the iteration ends.
            if not self._form:
                return FINISHED
            step.parts = [self._form if p is None else p for p in step.parts]
        return BATCH

    def sightings(self) -> list[Sighting]:
        """Describe the batches of this step that the replica's ranks have compared.

        Collective over the ranks of the replica, unless they have slabs.
        """
        own = [] if self._mark == _UNSEEN else [self._sighting()]
        if self._compares_inside:
            calls = self._place.inside.collectives
            own = [*chain(*calls.all_gather_object(own, _COMPARISON))]
        return own

    def _sighting(self) -> Sighting:
        place, seen = self._place, self._seen
        text = "the end of its data" if seen is None else show(seen)
        name = str(place.worker_id)
        if place.inside.size > 1:
            name += f" (position {place.inside.position} in its replica)"
        return place.replica_id, name, self._mark, text


def iterable_steps(dataset: Any, place: PipelinePlace) -> Steps:
    """Return a worker's steps over an iterable of global batches.

    The iterable may be of any library; it may have the attributes ``batch_size``,
    ``auto_shard_policy`` and ``files`` (None without files), and the methods
    ``shard_files`` and ``shard_by_hint(num_shards, index)``. With policy ``FILE``,
    raises ValueError if there are fewer files than workers.
    """
    if place.num_replicas == 1:
        hint = getattr(dataset, "shard_by_hint", None)
        return Steps(dataset if hint is None else hint(1, 0), _alone)
    policy = AutoShardPolicy.parse(
        getattr(dataset, "auto_shard_policy", AutoShardPolicy.AUTO)
    )
    files = getattr(dataset, "files", None)
    if policy is AutoShardPolicy.AUTO:
        # Prefer files if the data set has files, as tf.distribute does.
        policy = AutoShardPolicy.DATA if files is None else AutoShardPolicy.FILE
    source = dataset
    if policy is AutoShardPolicy.FILE and place.num_workers > 1:
        count = 0 if files is None else len(files)
        # A worker without a file would end the iteration of all workers.
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
    # True if each worker reads its own rows, and deals them to its own replicas.
    apart = hinted or policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE)
    if apart and batch_size:
        return Steps(
            source, lambda batches: pour_slots(batches, batch_size, count, own)
        )
    if apart and place.num_workers > 1:
        return Steps(source, lambda batches: deal_pieces(batches, count, len(own)))
    return Steps(source, iter, shared=True)


def function_steps(
    dataset_fn: Callable[[InputContext], Any],
    place: PipelinePlace,
    *,
    per_replica: bool,
) -> Steps:
    """Call an input function, and return a worker's steps over its data set.

    With ``per_replica``, each replica of this rank is a worker for the function.
    """
    count = place.num_replicas
    if per_replica:
        contexts = [InputContext(count, replica, count) for replica in place.own]
        datasets = [call_program(dataset_fn, context) for context in contexts]
        if len(datasets) == 1:
            return Steps(datasets[0], _alone)
        return Steps(datasets, _side_by_side)
    context = InputContext(place.num_workers, place.worker_id, count)
    dataset = call_program(dataset_fn, context)
    return Steps(dataset, lambda batches: deal_elements(batches, len(place.replicas)))


def _side_by_side(pipelines: Iterable[Iterable[Any]]) -> Iterator[list[Tree]]:
    """Yield lists of one element per pipeline; None for a pipeline that has ended."""
    iterators = [iter(pipeline) for pipeline in pipelines]

    def step() -> list[Tree]:
        elements = [next(iterator, LAST) for iterator in iterators]
        if all(element is LAST for element in elements):
            raise StopIteration
        return [None if one is LAST else as_batch(one) for one in elements]

    return CallIterator(step)


def _alone(elements: Iterable[Any]) -> Iterator[list[Tree]]:
    def step(element: Any) -> list[Tree]:
        return [as_batch(element)]

    # Use ``map`` here, because an error would end a generator.
    return map(step, elements)
