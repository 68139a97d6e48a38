"""Data sets divided between replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.data.batches import piece, warn_of_idle
from hpcstrat.data.dataset import Dataset
from hpcstrat.data.dealing import DealtDataset
from hpcstrat.data.iterator import DistributedIterator, ReducibleDataset
from hpcstrat.data.pipelines import Place, function_steps, iterable_steps
from hpcstrat.data.placing import Placer
from hpcstrat.options import InputContext, InputOptions, InputReplicationMode
from hpcstrat.tree import tree_map
from hpcstrat.typing import Replicas, Tree
from hpcstrat.values import PerReplica

__all__ = [
    "DistributedDataset",
    "distribute_dataset",
    "distribute_from_function",
]


class DistributedDataset(ReducibleDataset):
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
        Whose replicas.
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
        self._strategy = strategy
        self._dataset = dataset
        self._placer = Placer(strategy, options or InputOptions())
        # An epoch that is shorter than a batch is no mistake of the batch size.
        if strategy.replica_id == 0 and dataset.num_rows >= dataset.batch_size:
            warn_of_idle(dataset.batch_size, strategy.num_replicas_in_sync)
        self._next = (0, 0)
        self._latest: _EpochPlace | None = None

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._dataset)

    @property
    def cardinality(self) -> int:
        """Number of global batches of an epoch."""
        return len(self)

    @property
    def num_rows(self) -> int:
        """Number of examples of an epoch, over all replicas."""
        return self._dataset.num_rows

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or that of the next, where it has ended.

        Setting it makes the next iteration that epoch, from its beginning.
        """
        return self.state()["epoch"]

    @epoch.setter
    def epoch(self, value: int) -> None:
        """Begin the next iteration with this epoch.

        Not collective.

        Parameters
        ----------
        value : int
            From 0.
        """
        self._next, self._latest = (int(value), 0), None

    def state(self) -> dict[str, int]:
        """Return where the latest iteration stands.

        Not collective; the same on every replica after the same step.

        Returns
        -------
        dict of str to int
            ``epoch``, ``global_position`` (examples given out in it, over all
            replicas), ``shuffle_seed`` and ``num_rows``.
        """
        epoch, position = self._next
        if self._latest is not None:
            epoch, position = self._latest.epoch, self._latest.position
        return {
            "epoch": epoch,
            "global_position": position,
            "shuffle_seed": self._dataset.seed,
            "num_rows": self._dataset.num_rows,
        }

    def check_state(self, state: dict[str, int]) -> None:
        """Check that a state is of this data set.

        Not collective.

        Parameters
        ----------
        state : dict of str to int
            From `state`, perhaps of another number of replicas.

        Raises
        ------
        ValueError
            If it is that of another data set.
        """
        own = self.state()
        for key in ("num_rows", "shuffle_seed"):
            if int(state[key]) != own[key]:
                raise ValueError(
                    f"expected the position in a data set with {key} {own[key]}, found "
                    f"{int(state[key])}; restore with the data set that was saved"
                )

    def restore_state(self, state: dict[str, int]) -> None:
        """Make the next iteration go on where another stood.

        Not collective: call it on every replica with the same state.

        Parameters
        ----------
        state : dict of str to int
            From `state`, perhaps of another number of replicas.

        Raises
        ------
        ValueError
            If the state is that of another data set.
        """
        self.check_state(state)
        self._next = (int(state["epoch"]), int(state["global_position"]))
        self._latest = None

    def __iter__(self) -> DistributedIterator:
        """Begin the next epoch, or go on where `restore_state` said."""
        strategy, dataset = self._strategy, self._dataset
        epoch, position = self._next
        # The header compares what would make the replicas read different rows.
        strategy.collectives.barrier(
            f"iteration over {dataset.describe()}, epoch {epoch} from row {position}"
        )
        with strategy.together("iteration"):
            place = _EpochPlace(epoch, position)
            batches = _Batches(strategy, dataset, place, self._placer)
        # At once, so that a loop that is left early does not repeat its epoch.
        self._next = (epoch + 1, 0)
        self._latest = batches.place
        return DistributedIterator(batches)


class _Batches:
    """This replica's batches of an epoch; goes on after a batch that cannot be read."""

    def __init__(
        self,
        strategy: Replicas,
        dataset: Dataset,
        place: _EpochPlace,
        placer: Placer,
    ) -> None:
        self._strategy = strategy
        self._dataset = dataset
        self._placer = placer
        self.place = place
        self._order = dataset.order(place.epoch)
        self._end = dataset.num_rows
        if dataset.drop_remainder:
            self._end = len(dataset) * dataset.batch_size
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tree:
        place, dataset, strategy = self.place, self._dataset, self._strategy
        channel = strategy.collectives.channel
        # A thread that reads ahead is at no point of the program that ranks compare.
        own = threading.get_ident() == threading.main_thread().ident
        if channel is not None and own:
            if channel.elsewhere is not None:
                channel.elsewhere()
            channel.position.enter_next()
        if self._ended:
            raise StopIteration
        if place.position >= self._end:
            self._ended = True
            with strategy.together(f"epoch {place.epoch}"):
                place.epoch, place.position = place.epoch + 1, 0
            raise StopIteration
        # The position moves on in any case: a batch that cannot be read is skipped.
        start = place.position
        stop = place.position = min(start + dataset.batch_size, self._end)
        count = strategy.num_replicas_in_sync
        first, last = piece(stop - start, count, strategy.replica_id)
        with strategy.together(f"reading rows {start} to {stop}"):
            try:
                rows = dataset.rows(self._order, start + first, start + last)
                batch = self._placer.place(dataset.columns.read(rows))
            except StopIteration as error:
                # As in a generator (PEP 479): it must not end the epoch here alone.
                raise RuntimeError(
                    "expected rows, found that a column raised StopIteration; raise "
                    "another error"
                ) from error
            return tree_map(PerReplica, batch) if count > 1 else batch


# Shared by an iteration and its data set, whose `state` tells where the latest stands.
class _EpochPlace:
    """Where an iteration stands: examples given out in an epoch, over all replicas."""

    __slots__ = ("epoch", "position")

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position


def _require_one_program(strategy: Replicas, options: InputOptions) -> None:
    """Refuse N programs that each go through everything, unless they are meant."""
    # By the launcher, as such a strategy starts no MPI that could be asked.
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
        Whose replicas.
    dataset : Dataset or iterable of batches
        Gives global batches.
    options : InputOptions
        How.

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
    # Of one data set each replica would go through everything by itself.
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "expected one pipeline per worker for a data set of global batches, found "
            "PER_REPLICA; use distribute_datasets_from_function"
        )
    _require_one_program(strategy, options)
    if isinstance(dataset, Dataset):
        if options.single_pipeline:
            raise ValueError(
                "expected an iterable with single_pipeline, found a hpcstrat.Dataset, "
                "of which every replica reads its own rows; leave single_pipeline out"
            )
        return DistributedDataset(strategy, dataset, options)
    bare = isinstance(dataset, (tuple, dict)) or hasattr(dataset, "__dlpack__")
    if bare or hasattr(dataset, "file"):
        raise ValueError(
            "expected a Dataset, or an iterable of global batches, found "
            f"{type(dataset).__name__}, whose rows are not batches; wrap it: "
            "hpcstrat.Dataset(arrays, batch_size)"
        )
    # The steps are made later, on the ranks that run a pipeline alone.
    place = Place(strategy, single=options.single_pipeline)
    return DealtDataset(
        strategy, place, lambda: iterable_steps(dataset, place), options
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
        Whose replicas.
    dataset_fn : callable
        Takes an InputContext.
    options : InputOptions
        How.

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
    place = Place(strategy, single=options.single_pipeline)
    return DealtDataset(
        strategy,
        place,
        lambda: function_steps(dataset_fn, place, per_replica=per_replica),
        options,
    )
