"""Iterables of batches: one rank per worker runs the pipeline and deals the parts.

If each rank ran its own pipeline and the order were random, examples would be lost and
repeated. The same can happen between workers. Therefore workers that share batches
compare them (see `hpcstrat.data.comparing`), or one rank runs the pipeline for all.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from hpcstrat.data.comparing import explain_difference
from hpcstrat.data.iterator import (
    DistributedIterator,
    EpochPlace,
    ReducibleDataset,
    ResumableDataset,
)
from hpcstrat.data.pipelines import (
    BATCH,
    DIFFERENT,
    FINISHED,
    LAST,
    Pipeline,
    PipelinePlace,
    PipelineStep,
    Steps,
)
from hpcstrat.data.placing import Placer
from hpcstrat.engine.arrays.kinds import as_array
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.options import (
    AutoShardPolicy,
    InputOptions,
    InputReplicationMode,
)
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Replicas, Tree
from hpcstrat.errors import CollectiveError

__all__ = ["DealtDataset", "StatefulDataset", "StreamDataset"]

_NEXT = "next of a data set"


class DealtDataset(ReducibleDataset):
    """Per-replica batches of a pipeline that one rank per worker runs.

    Collective over the strategy's replicas, as is ``next()``; ``iter()`` is not.

    If a pipeline raises an error, ``next()`` raises an error on all replicas, which
    stay at the same step. The following ``next()`` returns the pipelines' next batch,
    if these can continue after an error. A Python generator cannot: after its error,
    the following ``next()`` ends the iteration. All replicas also raise an error if one
    replica cannot copy its part to its device.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the replicas.
    place : PipelinePlace
        Place of this rank among the ranks that its pipeline serves.
    make_steps : callable
        Function that returns the steps; called on ranks that run a pipeline.
    options : InputOptions
        Options, such as how often workers compare batches, and whether batches are put
        on the replica's GPU.
    dataset : Dataset or iterable, optional
        Source of the batches.
    """

    def __init__(
        self,
        strategy: Replicas,
        place: PipelinePlace,
        make_steps: Callable[[], Steps],
        options: InputOptions,
        dataset: Any = None,
    ) -> None:
        self._strategy = strategy
        self._dataset = dataset
        self._place = place
        self._placer = Placer(strategy, options)
        several = place.num_workers > 1 or place.inside.size > 1
        self._every = options.compare_every if several else 0
        self._num_iterations = 0
        self._steps: Steps | None = None
        # Ranks compare this text: ranks with other kinds of pipelines would deadlock.
        mode = options.experimental_replication_mode
        per_replica = mode is InputReplicationMode.PER_REPLICA
        pipelines = "one per " + ("replica" if per_replica else "worker")
        if options.single_pipeline:
            pipelines = "one pipeline for all"
        what = f"creation of a distributed data set, {pipelines}"
        if place.leads:
            with strategy.collectives.all_raise(what):
                self._steps = make_steps()
        strategy.collectives.barrier(what)

    def __iter__(self) -> DistributedIterator:
        """Begin an iteration; its first step starts the pipeline."""
        return self._begin(EpochPlace(self._num_iterations, 0))

    def _begin(self, position: EpochPlace) -> DistributedIterator:
        iteration, self._num_iterations = self._num_iterations, self._num_iterations + 1
        pipeline = None
        if self._steps is not None:
            pipeline = Pipeline(self._steps, self._place, self._every, position)
        batches = _DealtBatches(
            self._strategy,
            self._place,
            self._placer,
            pipeline=pipeline,
            iteration=iteration,
            position=position,
        )
        return DistributedIterator(batches, self)

    def __repr__(self) -> str:
        """Show the source of the batches, and the strategy."""
        return f"<{type(self).__name__} of {self._source()}, for {self._strategy!r}>"

    def _source(self) -> str:
        return "the program's own batches"


class _DealtBatches(Iterator[Tree]):
    """An iterator over this rank's batches, which can continue after an error."""

    def __init__(
        self,
        strategy: Replicas,
        place: PipelinePlace,
        placer: Placer,
        *,
        pipeline: Pipeline | None,
        iteration: int,
        position: EpochPlace,
    ) -> None:
        # The decorator `collective` reads this attribute.
        self.collectives = strategy.collectives
        self._place = place
        self._placer = placer
        self._pipeline = pipeline
        self._iteration = iteration
        # Position after the last batch that `__next__` returned, for `state`.
        self._position = position
        # Number of steps that were begun, and of those that the pipelines have made.
        self._num_begun = position.position
        self._num_made = position.position - position.failed
        # Copy the parts if this rank's pipeline may overwrite their memory.
        shares = pipeline is not None and pipeline.shares_memory
        self._copies = shares and place.comm is not None
        self._number = -1
        self._ended = False

    @collective
    def __next__(self) -> Tree:
        # Make no collective call after the end: other ranks may not call ``next``.
        if self._ended:
            raise StopIteration
        collectives, step = self.collectives, None
        self._number += 1
        self._num_begun += 1
        if self._place.num_replicas == self._place.inside.size == 1:
            assert self._pipeline is not None
            parts = self._pipeline.pull()
            if parts is LAST:
                raise self._end()
            self._num_made += 1
            return self._returned(self._placer.place(parts[0]))
        if self._pipeline is not None:
            with collectives.all_raise(_NEXT):
                step = self._pipeline.step(self._number)
        collectives.barrier(_NEXT)
        self._num_made += 1
        with collectives.moving(_NEXT):
            outcome, parts = self._deal(step)
        if outcome == DIFFERENT:
            raise self._difference()
        if outcome == FINISHED:
            raise self._end()
        # If one rank cannot place its part, all ranks raise an error and skip theirs.
        with collectives.all_raise(_NEXT):
            found: Tree = self._placer.deliver(parts, copies=self._copies)
        collectives.barrier(_NEXT)
        return self._returned(found)

    def _returned(self, batch: Tree) -> Tree:
        """Advance the position to the end of a batch, and return the batch."""
        position = self._position
        position.position = self._num_begun
        position.failed = self._num_begun - self._num_made
        return batch

    def _end(self) -> StopIteration:
        """Advance to the next epoch, and return the StopIteration that ends a loop."""
        self._ended = True
        self._position.epoch += 1
        self._position.position = self._position.failed = 0
        return StopIteration()

    def _deal(self, step: PipelineStep | None) -> tuple[int, list[Any]]:
        """Send the step's parts to their ranks; return outcome and this rank's parts.

        Collective over the replicas; first, the pipelines agree on the outcome.
        """
        place, channel = self._place, self.collectives.channel
        outcome, parts = BATCH, []
        sent = dict[int, Any]()
        if step is not None:
            assert self._pipeline is not None
            self._pipeline.accept()
            leaders = place.leaders
            if leaders is not None:
                leaders = channel.interruptible(leaders)
            outcome = self._pipeline.agree(step, leaders)
            parts = step.parts if outcome == BATCH else []
            # This rank (rank 0 of ``comm``) keeps its own parts.
            end = place.counts[0]
            for rank, count in enumerate(place.counts[1:], 1):
                start, end = end, end + count
                sent[rank] = outcome, parts[start:end]
        if place.comm is not None:
            comm = channel.interruptible(place.comm)
            came = comm.exchange_objects(sent, [0] if step is None else [])
            outcome, parts = came.get(0, (outcome, parts[: place.counts[0]]))
        return outcome, parts

    def _difference(self) -> CollectiveError:
        """Gather descriptions of all workers' batches; return the error to raise."""
        mine = [] if self._pipeline is None else self._pipeline.sightings()
        found = self.collectives.all_gather_object(mine, "batches compared")
        where = f"batch {self._number} of iteration {self._iteration}"
        return explain_difference(where, [*chain(*found)])


class StreamDataset(ResumableDataset, DealtDataset):
    """Per-replica batches of a data set without random access, with saved positions.

    The class works like `DealtDataset`. A restored iteration makes the batches before
    its position again, and drops them. If workers read different parts of the data
    (policies FILE, OFF and HINT), the iteration can continue only with the same number
    of workers and replicas.
    """

    def __iter__(self) -> DistributedIterator:
        """Begin the next epoch, or continue at the position of `restore_state`."""
        place = dataclasses.replace(self._next)
        self._begin_at(place)
        return self._begin(place)

    def _more_state(self, place: EpochPlace) -> dict[str, int]:
        parts = 1
        if self._dataset.lineage.policy() is not AutoShardPolicy.DATA:
            parts = self._place.num_workers * self._place.num_replicas
        return {"num_parts": parts, "num_failed": place.failed}

    def _source(self) -> str:
        return self._dataset.describe()


class StatefulDataset(DealtDataset):
    """Per-replica batches of an iterable that can save its position itself.

    The class works like `DealtDataset`. The iterable has ``state_dict`` and
    ``load_state_dict``, like torchdata's StatefulDataLoader. All workers read the same
    batches, so that a restored job may have another number of replicas.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the iterable's position, after the batches that were read so far.

        Collective over the strategy's replicas.

        Returns
        -------
        dict
            State of replica 0, on all replicas: numbers, strings and bytes.

        Raises
        ------
        ValueError
            If workers read different parts of the data, which have no common position.
        """
        mine: dict[str, Any] = {}
        several = self._place.num_replicas > 1
        if self._steps is not None and (self._steps.shared or not several):
            mine = self._own_state()
        if several:
            found = self._strategy.collectives.all_gather_object(mine, "position")
            mine = found[0]
        if not mine:
            raise ValueError(
                "expected workers that read the same batches, so that there is one "
                "position to save, found workers that read their own parts; use "
                "auto-shard policy DATA or single_pipeline=True, or leave the data set "
                "out"
            )
        return mine

    def _own_state(self) -> dict[str, Any]:
        leaves, structure = flatten(self._dataset.state_dict())
        arrays: list[Any] = []
        for number, leaf in enumerate(leaves):
            # Leaves may be arrays, such as the state of a torch random generator.
            if isinstance(leaf, np.ndarray) or hasattr(leaf, "__dlpack__"):
                array = np.ascontiguousarray(as_array(leaf))
                is_tensor = not isinstance(leaf, (np.ndarray, np.generic))
                parts = [array.dtype.str, list(array.shape), array.tobytes()]
                arrays.append([number, is_tensor, *parts])
                leaves[number] = None
        return {"state": unflatten(structure, leaves), "arrays": arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue at a saved position.

        Not collective: call it on every replica with the same state.

        Parameters
        ----------
        state : dict
            State that `state_dict` returned.
        """
        if self._steps is None:
            return
        leaves, structure = flatten(state["state"])
        torch = sys.modules.get("torch")
        for number, is_tensor, dtype, shape, data in state["arrays"]:
            array = np.frombuffer(data, dtype).reshape(shape).copy()
            tensor = torch is not None and is_tensor
            leaves[number] = torch.from_numpy(array) if tensor else array  # type: ignore[union-attr]
        self._dataset.load_state_dict(unflatten(structure, leaves))

    def _source(self) -> str:
        return f"a {type(self._dataset).__name__}"
