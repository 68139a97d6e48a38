"""Iterables of batches: one rank per worker runs the pipeline and deals the parts.

Ranks that each ran a pipeline of their own would lose and repeat examples as soon as
its order is random. So do workers, which therefore compare the batches that they are to
share, see `hpcstrat.data.comparing`; or one rank runs the pipeline for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from hpcstrat.data.batches import batch_length, empty_like, pieces_of, warn_of_idle
from hpcstrat.data.comparing import (
    END,
    Sighting,
    digest,
    explain_difference,
    show,
)
from hpcstrat.data.dataset import Dataset
from hpcstrat.data.iterator import (
    DistributedIterator,
    EpochPlace,
    ReducibleDataset,
)
from hpcstrat.data.pipelines import PipelinePlace, Steps
from hpcstrat.data.placing import Placer, packed
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.options import InputOptions, InputReplicationMode
from hpcstrat.engine.tree import tree_map
from hpcstrat.engine.typing import Replicas, Tree
from hpcstrat.engine.values import PerReplica
from hpcstrat.errors import CollectiveError

__all__ = ["DealtDataset"]

# States of a replica in a step: no batch on any replica any more, no batch and none
# before, none any more, a batch.
_STOPPED, _ENDED, _LASTED, _GIVES = -1, 0, 1, 2
_NEXT = "next of a data set"
# In the place of the hash of a batch: this replica has none to compare.
_UNSEEN = np.iinfo(np.int64).min


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
    place : PipelinePlace
        This replica's.
    make_steps : callable
        Returns the steps; called on ranks that run a pipeline.
    options : InputOptions
        Who runs a pipeline, which batches are compared, and whether they are put on
        the replica's GPU.
    """

    def __init__(
        self,
        strategy: Replicas,
        place: PipelinePlace,
        make_steps: Callable[[], Steps],
        options: InputOptions,
    ) -> None:
        self._strategy = strategy
        self._place = place
        self._placer = Placer(strategy, options)
        per_replica = (
            options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
        )
        # True if this rank's pipeline serves no other rank's replicas.
        self._alone = per_replica or strategy.num_ranks == 1
        self._every = options.compare_every if place.num_workers > 1 else 0
        self._num_iterations = 0
        self._steps: Steps | None = None
        # Ranks that meant different things by it would wait for one another.
        pipelines = "one pipeline for all" if options.single_pipeline else "one per "
        if not options.single_pipeline:
            pipelines += "replica" if per_replica else "worker"
        what = f"creation of a distributed data set, {pipelines}"
        collectives = strategy.collectives
        if self._alone or place.leads:
            try:
                self._steps = make_steps()
            except Exception as error:
                collectives.fail(what, error)
                raise
        collectives.barrier(what)

    def __iter__(self) -> DistributedIterator:
        """Begin an iteration; its first step starts the pipeline."""
        return DistributedIterator(
            self._begin(EpochPlace(self._num_iterations, 0)), self
        )

    def _begin(self, position: EpochPlace) -> _Elements:
        elements = _Elements(
            self._strategy,
            self._place,
            self._placer,
            steps=self._steps,
            alone=self._alone,
            every=self._every,
            iteration=self._num_iterations,
            position=position,
        )
        self._num_iterations += 1
        return elements

    def __repr__(self) -> str:
        """Show what is read, and for how many replicas."""
        return f"<{type(self).__name__} of {self._source()}, for {self._strategy!r}>"

    def _source(self) -> str:
        """Say what is read."""
        return "the program's own batches"


class _Elements:
    """This replica's batches; goes on after a step that failed, if a pipeline does."""

    def __init__(
        self,
        strategy: Replicas,
        place: PipelinePlace,
        placer: Placer,
        *,
        steps: Steps | None,
        alone: bool,
        every: int,
        iteration: int,
        position: EpochPlace,
    ) -> None:
        self._strategy = strategy
        self._place = place
        self._placer = placer
        self._steps = steps
        self._alone = alone
        self._every = every
        self._iteration = iteration
        self._position = position
        self._skips = position.position
        self._index = -1
        # Hash of the step's batch, to be compared with the other workers'.
        self._mark = _UNSEEN
        self._seen: Tree = None
        self._running: Iterator[list[Tree]] | None = None
        # Batch of a step that another worker could not make.
        self._kept: list[Tree] | None = None
        self._empty: Tree = None
        self._has_failed = self._ended = False

    def __iter__(self) -> Self:
        return self

    @property
    def collectives(self) -> Any:
        """The calls between replicas; for the library's own modules."""
        return self._strategy.collectives

    @collective
    def __next__(self) -> Tree:
        # After the end no call is made: the others may have gone on to another one.
        if self._ended:
            raise StopIteration
        if self._place.num_replicas == 1:
            self._position.position += 1
            parts = self._pull()
            if parts is None:
                raise self._end()
            return self._placer.place(parts[0])
        self._index += 1
        self._position.position += 1
        self._seen, self._mark = None, _UNSEEN
        parts, most, least = self._deal(self._own_parts())
        if most < _GIVES or least == _STOPPED:
            raise self._end()
        for part in parts:
            if part is not None:
                self._empty = empty_like(part)
        if least == _ENDED:
            self._empty = self._form(self._empty)
            if self._empty is None:
                raise self._end()
        parts = [self._empty if part is None else part for part in parts]
        if len(parts) == 1:
            return tree_map(PerReplica, parts[0])
        return self._strategy.replicas.joined(parts, "a batch")

    def _end(self) -> StopIteration:
        """Return what ends the loop, and go on to the next epoch."""
        self._ended = True
        self._position.epoch += 1
        self._position.position = 0
        return StopIteration()

    def _pull(self) -> list[Tree] | None:
        """Run the pipeline for a step; None at its end."""
        assert self._steps is not None
        if self._running is None:
            try:
                if isinstance(self._steps.source, Dataset):
                    self._steps.source.epoch = self._position.epoch
                self._running = self._steps.start()
            except StopIteration as error:
                # As in a generator (PEP 479): it is not the end of the data.
                raise RuntimeError(
                    "expected an iterator, found that its making raised StopIteration; "
                    "raise another error"
                ) from error
            for _ in range(self._skips):
                # A step that failed was left out by the program, too.
                with contextlib.suppress(Exception):
                    next(self._running, None)
        return next(self._running, None)

    def _own_parts(self) -> list[Any]:
        """Return this worker's parts for the step, None at its end.

        Those of other replicas are as they travel.
        """
        collectives, place = self._strategy.collectives, self._place
        served = place.own if self._alone else place.replicas
        dealt: list[Any] = [None] * len(served)
        if self._steps is not None:
            parts, self._kept = self._kept, None
            try:
                parts = parts or self._pull()
                if self._steps.shared:
                    parts = self._cut(None if parts is None else parts[0])
                if parts is not None:
                    own = len(place.own)
                    dealt = [*parts[:own], *map(packed, parts[own:])]
            except Exception as error:
                self._has_failed = True
                collectives.fail(_NEXT, error)
                raise
            if not self._steps.shared:
                self._kept = parts
        collectives.barrier(_NEXT)
        self._kept = None
        return dealt

    def _cut(self, batch: Tree) -> list[Tree] | None:
        """Cut a batch that all workers read, and hash it; None at the end."""
        parts = None
        if batch is not None:
            place = self._place
            parts = pieces_of(batch, place.num_replicas, place.replicas)
            if not self._index and not place.replica_id:
                warn_of_idle(batch_length(batch), place.num_replicas)
        if self._every and not self._index % self._every:
            self._seen, self._mark = batch, END
            if batch is not None:
                self._mark = digest(batch, on_gpus=not self._index)
        return parts

    def _deal(self, dealt: list[Any]) -> tuple[list[Tree], int, int]:
        """Return the parts of this rank, and the furthest and the least far state."""
        collectives = self._strategy.collectives
        channel: Any = collectives.channel
        failed: Exception | None = None
        with collectives.moving(_NEXT) as comm:
            parts, came = dealt[: len(self._place.own)], None
            if not self._alone:
                own = channel.interruptible(self._place.comm)
                came = own.scatter(self._by_rank(dealt), root=0)
            try:
                if came is not None:
                    unpack = self._placer.unpacked
                    parts = [None if one is None else unpack(one) for one in came]
                else:
                    place = self._placer.place if self._alone else self._placer.own
                    parts = [None if one is None else place(one) for one in parts]
            except Exception as error:
                failed = error
            found = [self._state(part) for part in parts]
            mark = self._mark
            marks = mark, mark if mark == _UNSEEN else -mark
            # With both signs, so that one MAX gives the least, too.
            states = np.array(
                [max(found), -min(found), failed is not None, *marks], np.int64
            )
            if comm is not None:
                comm.Allreduce(comm.mpi.IN_PLACE, states, op=comm.mpi.MAX)
        if failed is not None:
            collectives.fail(_NEXT, failed)
            raise failed
        if states[2]:
            collectives.barrier(_NEXT)
        most, least = int(states[0]), -int(states[1])
        # The largest hash and, with its sign changed, the smallest.
        if states[3] != _UNSEEN and states[3] != -states[4] and least != _STOPPED:
            raise self._difference()
        self._seen = None
        return parts, most, least

    def _by_rank(self, dealt: list[Any]) -> list[Any]:
        """Return the parts for each rank; None for the first, which keeps its own."""
        groups, start = [], 0
        for count in self._place.counts:
            groups.append(dealt[start : start + count])
            start += count
        return [None, *groups[1:]]

    def _state(self, part: Tree) -> int:
        """Return how far a replica is that has got a part, or None."""
        if part is not None:
            return _GIVES
        if self._has_failed and self._steps and self._steps.shared:
            # The others go on, but with pieces of batches.
            return _STOPPED
        return _ENDED if self._empty is None else _LASTED

    def _difference(self) -> CollectiveError:
        """Return what all replicas raise where workers have different batches."""
        mine: Sighting | None = None
        if self._mark != _UNSEEN:
            place, seen = self._place, self._seen
            text = "the end of its data" if seen is None else show(seen)
            mine = place.replica_id, place.worker_id, self._mark, text
        found = self._strategy.collectives.all_gather_object(mine, "batches compared")
        where = f"batch {self._index} of iteration {self._iteration}"
        return explain_difference(where, [one for one in found if one is not None])

    def _form(self, own: Tree) -> Tree:
        """Learn the form of a batch from a replica that has one; None for scalars."""
        mine = None if own is None else packed(own)
        found = self._strategy.collectives.all_gather_object(mine, "form of a batch")
        form = next((form for form in found if form is not None), None)
        return None if form is None else self._placer.unpacked(form)
