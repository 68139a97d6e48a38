"""Data sets whose batches are divided between replicas."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.data.array_comparison import compare_arrays
from hpcstrat.data.batched import Batch, Batched
from hpcstrat.data.batches import warn_of_idle
from hpcstrat.data.dataset import Dataset
from hpcstrat.data.dealing import DealtDataset, StatefulDataset, StreamDataset
from hpcstrat.data.elements import call_program
from hpcstrat.data.file_lists import require_same_files
from hpcstrat.data.iterator import (
    DistributedIterator,
    EpochPlace,
    ResumableDataset,
)
from hpcstrat.data.order import ORDER_VERSION
from hpcstrat.data.pipelines import PipelinePlace, function_steps, iterable_steps
from hpcstrat.data.placing import Placer
from hpcstrat.data.read_ahead import ReadAhead, read_batches_ahead
from hpcstrat.data.rows import Rows, in_words
from hpcstrat.engine.channel.entries import refuse_inner
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

    Each ``iter()`` begins the next epoch, and is collective over the strategy's
    replicas. ``next()`` is logically collective: all replicas must call it. If a
    replica does not, the next collective call raises an error (only calls in main
    threads are compared). With ``on_error="raise"``, ``next()`` is collective: if one
    replica cannot read its part of a batch, all replicas raise an error and skip this
    batch. Leaves of elements are PerReplica values, or arrays if there is one replica.
    Arrays are writable; an array may have zero rows.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the replicas.
    dataset : Dataset
        Data set of global batches.
    options : InputOptions, optional
        Options, such as whether batches are put on the replica's GPU.
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
        count, costs = strategy.num_replicas_in_sync, stage.costs
        if options.own_rows:
            stage = stage.divided(lambda s: s.own_rows(count, strategy.local_replicas))
        elif costs is not None:
            stage = stage.divided(lambda _: costs.division(count))
        # The stage that reads the batches; for the library's own modules.
        self.stage: Batched = stage
        self._placer = Placer(strategy, options)
        # The program uses one of the buffered batches; only the others are read ahead.
        buffered = options.experimental_per_replica_buffer_size - 1
        # Reader threads would read arrays on GPUs in another stream than the program's.
        self._ahead = 0 if stage.is_on_gpu() else max(dataset.ahead, buffered)
        # Do not warn if a whole epoch is shorter than one batch.
        size = stage.batch_size
        if strategy.writes and size and not 0 <= stage.num_rows < size and not costs:
            warn_of_idle(size, count)
        self._dealing = "own rows first, " if options.own_rows else ""

    @property
    def dataset(self) -> Dataset:
        """The data set that is divided; for the library's own modules."""
        return self._dataset

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return len(self._dataset)

    @property
    def cardinality(self) -> int:
        """Number of global batches in an epoch; -1 if it has no end."""
        return self.stage.cardinality

    @property
    def num_rows(self) -> int:
        """Number of examples in an epoch, over all replicas; -1 if it has no end."""
        return self.stage.num_rows

    def _keep_order(self, version: int) -> None:
        if self._next.position and version < ORDER_VERSION:
            self._dataset.keep_old_order(self._next.epoch)

    def __iter__(self) -> DistributedIterator:
        """Begin the next epoch, or continue at the position of `restore_state`."""
        strategy, dataset = self._strategy, self._dataset
        place = dataclasses.replace(self._next)
        if self.stage.costs is not None:
            self.stage.costs.update(strategy)
        # Ranks compare this text, so that all replicas cut the same batches.
        strategy.collectives.barrier(
            f"iteration over {dataset.describe()}, {self._dealing}epoch {place.epoch} "
            f"from row {place.position}"
        )
        with strategy.together("iteration"):
            batches = _Batches(strategy, self.stage, place, self._placer, self._ahead)
        self._begin_at(place)
        return DistributedIterator(batches, self)

    def __repr__(self) -> str:
        """Show the source of the batches, and the strategy."""
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
    """An iterator over this rank's batches; skips a batch that could not be read."""

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
        # Position after the last batch that `next` returned, for `state`.
        self.place = place
        # Start of the batch to read next, which is later if a batch has failed.
        self._start = place.position
        self._ended = False
        self._main = threading.main_thread().ident
        self._reader: ReadAhead | None = None
        # Reader threads call this function. It must not refer to this iterator, whose
        # deletion ends the threads. It also places batches, so that `next`, whose code
        # has left the CPU's caches during a step, has less to do.
        self._read = partial(_read_own, stage, strategy, placer)
        costs = stage.costs
        self._times = None if costs is None else costs.times()
        if ahead > 0:
            self._reader = read_batches_ahead(
                stage, self._read, ahead, epoch=place.epoch, position=self._start
            )

    def __next__(self) -> Tree:
        place, stage, strategy = self.place, self._stage, self._strategy
        channel = strategy.collectives.channel
        # Ranks compare only the numbers of their main threads' calls.
        own = threading.get_ident() == self._main
        if channel is not None and own:
            if channel.elsewhere is not None:
                channel.elsewhere()
            refuse_inner("next")
            channel.position.enter_next()
        if own:
            strategy.inside.count_next()
        if self._times is not None:
            self._times.end()
        if self._ended:
            raise StopIteration
        if self._start == stage.num_rows:
            self._ended = True
            with strategy.together(f"epoch {place.epoch}"):
                if self._reader is not None:
                    self._reader.close()
                place.epoch, place.position = place.epoch + 1, 0
            raise StopIteration
        # Advance first, so that a batch that cannot be read is skipped.
        read = stage.batch_at(place.epoch, self._start)
        self._start = read.stop
        with strategy.together(f"reading rows {read.start} to {read.stop}"):
            pieces = self._read(read) if self._reader is None else next(self._reader)
            if not self._placer.leaves_on_host:
                pieces = [self._placer.place(piece) for piece in pieces]
            batch = self._placer.wrap(pieces)
        place.position = read.stop
        if self._times is not None:
            count = strategy.num_replicas_in_sync
            first, last = stage.part(read, count, strategy.replica_id)
            self._times.begin(stage.numbers(read, first, last))
        return batch


def _read_own(
    stage: Batched, strategy: Replicas, placer: Placer, batch: Batch
) -> list[Tree]:
    """Read the pieces of a batch for this rank's replicas; any thread may call this."""
    count = strategy.num_replicas_in_sync
    pieces = [
        stage.read(batch, *stage.part(batch, count, replica))
        for replica in strategy.local_replicas
    ]
    return [placer.place(p) for p in pieces] if placer.leaves_on_host else pieces


# Policies under which workers do not read the same global batches.
_UNEVEN = (AutoShardPolicy.OFF, AutoShardPolicy.FILE, AutoShardPolicy.HINT)


def _require_one_program(strategy: Replicas, options: InputOptions) -> None:
    """Raise RuntimeError if each rank would read all data, unless ``independent``."""
    # Ask the launcher for the number of ranks: this strategy may not have started MPI.
    size = launch_from_environment().size
    if strategy.distributes or size == 1 or options.independent:
        return
    raise RuntimeError(
        f"expected a strategy over the {size} ranks of this job, found {strategy!r}, "
        "with which each rank would read the whole data set; use "
        "MultiWorkerMirroredStrategy, or pass InputOptions(independent=True)"
    )


def _require_one_division(dataset: Any, options: InputOptions, uneven: bool) -> None:
    """Raise ValueError if the rows of batches cannot be divided by one rule."""
    stage = getattr(dataset, "stage", None)
    if options.own_rows and (uneven or not isinstance(stage, Batched)):
        found = "one that is sharded otherwise" if uneven else type(dataset).__name__
        raise ValueError(
            "expected a hpcstrat.Dataset with random access, in batches, for own_rows, "
            f"found {found}; leave own_rows out"
        )
    costs = stage.costs if isinstance(stage, Batched) else None
    if costs is not None and (options.own_rows or uneven):
        found = "own_rows" if options.own_rows else "an auto-shard policy"
        raise ValueError(
            "expected costs as the only rule by which replicas divide batches, found "
            f"{found} as well; leave one of them out"
        )


def _slabs(strategy: Replicas, dataset: Any) -> Any:
    """Replace splits of a data set by the slabs of this rank of its replica."""
    return dataset.slabs(strategy.inside) if isinstance(dataset, Dataset) else dataset


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
        Source of global batches.
    options : InputOptions
        Options, such as ``own_rows``.

    Returns
    -------
    DistributedDataset or DealtDataset
        Iterable of per-replica batches.

    Raises
    ------
    NotImplementedError
        If the replication mode is ``PER_REPLICA``.
    RuntimeError
        If the strategy has one replica, but the job has several ranks.
    ValueError
        If an option does not suit the data set, such as ``single_pipeline`` with random
        access, or if the data are not batches.
    """
    # With PER_REPLICA, each replica would read the whole data set.
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "expected one pipeline per worker for a data set of global batches, found "
            "PER_REPLICA; use distribute_datasets_from_function"
        )
    _require_one_program(strategy, options)
    whole, dataset = dataset, _slabs(strategy, dataset)
    uneven = isinstance(dataset, Dataset) and dataset.auto_shard_policy in _UNEVEN
    stage = getattr(dataset, "stage", None)
    _require_one_division(dataset, options, uneven)
    if isinstance(dataset, Dataset):
        files = dataset.stage.files()
        # With policy OFF, each worker may have its own files; with a single pipeline,
        # only replica 0 reads files.
        is_off = dataset.auto_shard_policy is AutoShardPolicy.OFF
        if files and not is_off and not options.single_pipeline:
            require_same_files(strategy, files)
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
        # With own_rows, a rank may have filled only its own part of the arrays.
        if options.compare_every and not options.own_rows:
            compare_arrays(strategy, dataset.describe(), whole.stage.arrays())
        if stage.costs is not None:
            stage.costs.agree(strategy)
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
    # `DealtDataset` calls the lambda only on ranks that run a pipeline.
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
    """Call a function, and distribute its data set's batches, one to each replica.

    Collective over the strategy's replicas.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the replicas.
    dataset_fn : callable
        Function that takes an InputContext, and returns an iterable of batches.
    options : InputOptions
        Options, such as the replication mode.

    Returns
    -------
    DealtDataset
        Iterable of per-replica batches.

    Raises
    ------
    ValueError
        If options exclude each other.
    RuntimeError
        If the strategy has one replica, but the job has several ranks.
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
        lambda: function_steps(
            lambda context: _slabs(strategy, call_program(dataset_fn, context)),
            place,
            per_replica=per_replica,
        ),
        options,
    )
