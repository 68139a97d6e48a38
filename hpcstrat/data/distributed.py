"""Data sets divided between replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.data.batched import Batched
from hpcstrat.data.batches import piece, warn_of_idle
from hpcstrat.data.dataset import Dataset
from hpcstrat.data.dealing import DealtDataset, StatefulDataset, StreamDataset
from hpcstrat.data.iterator import (
    DistributedIterator,
    EpochPlace,
    ResumableDataset,
)
from hpcstrat.data.order import ORDER_VERSION
from hpcstrat.data.pipelines import PipelinePlace, function_steps, iterable_steps
from hpcstrat.data.placing import Placer
from hpcstrat.data.read_ahead import ReadAhead, read_batches_ahead, read_rows
from hpcstrat.data.rows import Rows, in_words
from hpcstrat.engine.html import table
from hpcstrat.engine.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from hpcstrat.engine.typing import Replicas, Tree

__all__ = [
    "DistributedDataset",
    "distribute_dataset",
    "distribute_from_function",
]


class DistributedDataset(ResumableDataset):
    """Per-replica batches; made by `Strategy.experimental_distribute_dataset`.

    Each ``iter()`` is collective over the strategy's replicas, and the next epoch;
    ``next()`` is logically collective: all replicas must call it, and where one does
    not, the next collective call says so, except for a thread that reads ahead. With
    ``on_error="raise"`` it is collective: a batch that cannot be read on one replica is
    then skipped by all. Elements have PerReplica leaves, bare arrays where there is one
    replica; an array may have no rows, and may be written.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the replicas.
    dataset : Dataset
        Global batches.
    options : InputOptions, optional
        Whether batches are put on the replica's GPU.
    """

    def __init__(
        self,
        strategy: Replicas,
        dataset: Dataset,
        options: InputOptions | None = None,
    ) -> None:
        options = options or InputOptions()
        stage = dataset.stage
        assert isinstance(stage, Batched)
        self._strategy = strategy
        self._dataset = dataset
        if options.own_rows:
            count = strategy.num_replicas_in_sync
            stage = stage.owned(count, strategy.local_replicas)
        # The stage that reads its batches; also for the library's own modules.
        self.stage: Batched = stage
        self._placer = Placer(strategy, options)
        # One of the buffered batches is the one that the program works on.
        buffered = options.experimental_per_replica_buffer_size - 1
        # Threads would read a GPU's arrays out of order with the program's stream.
        self._ahead = 0 if stage.is_on_gpu() else max(dataset.ahead, buffered)
        # The batch size is no mistake if a whole epoch is shorter.
        is_short = 0 <= stage.num_rows < stage.batch_size
        if strategy.replica_id == 0 and not is_short:
            warn_of_idle(stage.batch_size, strategy.num_replicas_in_sync)
        self._dealing = "own rows first, " if options.own_rows else ""

    @property
    def dataset(self) -> Dataset:
        """The data set that is divided; for the library's own modules."""
        return self._dataset

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._dataset)

    @property
    def cardinality(self) -> int:
        """Number of global batches of an epoch; -1 where it has no end."""
        return self.stage.cardinality

    @property
    def num_rows(self) -> int:
        """Number of examples of an epoch, over all replicas; -1 without an end."""
        return self.stage.num_rows

    def _keep_order(self, version: int) -> None:
        epoch, position = self._next
        if position and version < ORDER_VERSION:
            # An epoch that began in an older order goes on in it.
            self._dataset.keep_old_order(epoch)

    def __iter__(self) -> DistributedIterator:
        """Begin the next epoch, or go on where `restore_state` said."""
        strategy, dataset = self._strategy, self._dataset
        epoch, position = self._next
        # Ranks compare this text: replicas that differ in it read different rows.
        strategy.collectives.barrier(
            f"iteration over {dataset.describe()}, {self._dealing}epoch {epoch} from "
            f"row {position}"
        )
        with strategy.together("iteration"):
            place = EpochPlace(epoch, position)
            batches = _Batches(strategy, self.stage, place, self._placer, self._ahead)
        self._begin_at(place)
        return DistributedIterator(batches, self)

    def __repr__(self) -> str:
        """Show what is read, and for how many replicas."""
        source = self.stage.describe()
        return f"<{type(self).__name__} of {source}, for {self._strategy!r}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        rows = {
            "global batches": in_words(self.cardinality),
            "examples": in_words(self.num_rows),
            "global batch": self.stage.batch_size,
            "made of": self.stage.describe(),
            "strategy": self._strategy,
        }
        return table(type(self).__name__, rows)


class _Batches(Iterator[Tree]):
    """This replica's batches of an epoch; goes on after a batch that cannot be read."""

    def __init__(
        self,
        strategy: Replicas,
        stage: Batched,
        place: EpochPlace,
        placer: Placer,
        ahead: int,
    ) -> None:
        self._strategy = strategy
        self._stage = stage
        self._placer = placer
        self.place = place
        self._ended = False
        self._main = threading.main_thread().ident
        self._reader: ReadAhead | None = None
        # Threads must not hold the iterator, whose end ends them. They do all they can:
        # after a step, the code of `next` is no longer in the caches.
        self._read = partial(_read_own, stage, strategy, placer, place.epoch)
        if ahead > 0:
            start = place.position
            self._reader = read_batches_ahead(stage, self._read, ahead, start)

    def __next__(self) -> Tree:
        place, stage, strategy = self.place, self._stage, self._strategy
        channel = strategy.collectives.channel
        # Ranks compare where their main threads are, and no other thread.
        own = threading.get_ident() == self._main
        if channel is not None and own:
            if channel.elsewhere is not None:
                channel.elsewhere()
            channel.position.enter_next()
        if self._ended:
            raise StopIteration
        if place.position == stage.num_rows:
            self._ended = True
            with strategy.together(f"epoch {place.epoch}"):
                if self._reader is not None:
                    self._reader.close()
                place.epoch, place.position = place.epoch + 1, 0
            raise StopIteration
        # The position moves on in any case: a batch that cannot be read is skipped.
        start = place.position
        stop = place.position = stage.stop(start)
        with strategy.together(f"reading rows {start} to {stop}"):
            pieces = self._read(start) if self._reader is None else next(self._reader)
            if not self._placer.leaves_on_host:
                pieces = [self._placer.place(piece) for piece in pieces]
            return self._placer.wrap(pieces)


def _read_own(
    stage: Batched, strategy: Replicas, placer: Placer, epoch: int, start: int
) -> list[Tree]:
    """Read the pieces of a batch that this rank's replicas have, in any thread."""
    count, length = strategy.num_replicas_in_sync, stage.stop(start) - start
    pieces = [
        read_rows(stage, epoch, start, *piece(length, count, replica))
        for replica in strategy.local_replicas
    ]
    return [placer.place(p) for p in pieces] if placer.leaves_on_host else pieces


# Policies under which workers do not read the same global batches.
_UNEVEN = (AutoShardPolicy.OFF, AutoShardPolicy.FILE, AutoShardPolicy.HINT)


def _require_one_program(strategy: Replicas, options: InputOptions) -> None:
    """Refuse N programs that each read all data, unless ``independent``."""
    # The launcher knows the number of ranks: such a strategy starts no MPI.
    size = launch_from_environment().size
    if strategy.distributes or size == 1 or options.independent:
        return
    raise RuntimeError(
        f"expected a strategy over the {size} ranks of this job, found {strategy!r}, "
        "with which each rank would go through the whole data set; use "
        "MultiWorkerMirroredStrategy, or pass InputOptions(independent=True)"
    )


def distribute_dataset(
    strategy: Replicas, dataset: Any, options: InputOptions
) -> DistributedDataset | DealtDataset:
    """Divide global batches between replicas.

    Collective over the strategy's replicas.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the replicas.
    dataset : Dataset or iterable of batches
        Gives global batches.
    options : InputOptions
        Options of the distribution.

    Returns
    -------
    DistributedDataset or DealtDataset
        Iterable of per-replica batches.

    Raises
    ------
    NotImplementedError
        For ``PER_REPLICA``.
    RuntimeError
        For a strategy of one replica in a job of several ranks.
    ValueError
        For ``single_pipeline`` with a Dataset, and for arrays that are no batches.
    """
    # Each replica would go through all of one data set by itself.
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "expected one pipeline per worker for a data set of global batches, found "
            "PER_REPLICA; use distribute_datasets_from_function"
        )
    _require_one_program(strategy, options)
    uneven = isinstance(dataset, Dataset) and dataset.auto_shard_policy in _UNEVEN
    stage = getattr(dataset, "stage", None)
    if options.own_rows and (uneven or not isinstance(stage, Batched)):
        found = "one that is sharded otherwise" if uneven else type(dataset).__name__
        raise ValueError(
            "expected a hpcstrat.Dataset with random access, in batches, for own_rows, "
            f"found {found}; leave own_rows out"
        )
    if isinstance(dataset, Dataset):
        if isinstance(stage, Rows):
            raise ValueError(
                "expected global batches, found single examples; call batch("
                "global_batch_size) on the data set before it is distributed"
            )
        if isinstance(stage, Batched) and options.single_pipeline:
            raise ValueError(
                "expected a stream with single_pipeline, found a hpcstrat.Dataset with "
                "random access, of which every replica reads its own rows; leave "
                "single_pipeline out"
            )
        if uneven or not isinstance(stage, Batched):
            return _deal(strategy, dataset, options)
        return DistributedDataset(strategy, dataset, options)
    bare = isinstance(dataset, (tuple, dict)) or hasattr(dataset, "__dlpack__")
    if bare or hasattr(dataset, "file"):
        raise ValueError(
            "expected a Dataset, or an iterable of global batches, found "
            f"{type(dataset).__name__}, whose rows are not batches; wrap it: "
            "hpcstrat.Dataset(arrays, batch_size)"
        )
    return _deal(strategy, dataset, options)


def _deal(strategy: Replicas, dataset: Any, options: InputOptions) -> DealtDataset:
    # Only ranks that run a pipeline make the steps, later.
    place = PipelinePlace(strategy, single=options.single_pipeline)
    kind = DealtDataset
    if isinstance(dataset, Dataset):
        kind = StreamDataset
    elif hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        kind = StatefulDataset
    return kind(
        strategy, place, lambda: iterable_steps(dataset, place), options, dataset
    )


def distribute_from_function(
    strategy: Replicas,
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions,
) -> DealtDataset:
    """Distribute per-replica batches that a function makes.

    Collective over the strategy's replicas.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the replicas.
    dataset_fn : callable
        Takes an InputContext.
    options : InputOptions
        Options of the distribution.

    Returns
    -------
    DealtDataset
        Iterable of per-replica batches.

    Raises
    ------
    ValueError
        For options that exclude each other.
    RuntimeError
        For a strategy of one replica in a job of several ranks.
    """
    _require_one_program(strategy, options)
    per_replica = (
        options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    )
    if options.experimental_place_dataset_on_device and (
        options.experimental_fetch_to_device or not per_replica
    ):
        raise ValueError(
            "expected experimental_place_dataset_on_device with PER_REPLICA and "
            f"without experimental_fetch_to_device, found {options}; change the options"
        )
    place = PipelinePlace(
        strategy, single=options.single_pipeline, per_replica=per_replica
    )
    return DealtDataset(
        strategy,
        place,
        lambda: function_steps(dataset_fn, place, per_replica=per_replica),
        options,
    )
