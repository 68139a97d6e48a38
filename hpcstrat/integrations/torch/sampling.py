"""Global batches of PyTorch's datasets; each replica reads its part of each batch.

A loader with workers requests batches long before the program receives them. So the
loader of `GlobalBatchSampler.loader` reports to the sampler which batches the program
has received, and the sampler's position counts only these batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, default_collate, get_worker_info

from hpcstrat.data import Dataset
from hpcstrat.data.batched import Batch, Batched
from hpcstrat.data.elements import call_with
from hpcstrat.data.measured_costs import StepTimes
from hpcstrat.data.order import ORDER_VERSION
from hpcstrat.data.row_division import ShareDivision
from hpcstrat.integrations.frameworks import refuse_logical_replicas
from hpcstrat.strategies import Strategy

__all__ = ["GlobalBatchSampler"]


class GlobalBatchSampler(Sampler[list[int]]):
    """Gives each replica its rows of every global batch: each row once per epoch.

    Logically collective over the strategy's replicas; each ``iter()``, which begins an
    epoch, is collective.

    The global batches are the same on any number of replicas; the last batch may be
    smaller. All replicas make the same number of steps. With ``costs``, replicas divide
    each global batch so that the largest sum of costs is small, and may have different
    numbers of rows; see `hpcstrat.Dataset.batch`. Pass the sampler to a
    `CheckpointManager`: the next ``iter()`` after a restore continues after the batches
    that the program had received, even on another number of replicas.

    Iterate over the result of `loader`, or over a plain
    ``DataLoader(dataset, batch_sampler=sampler)`` if that has no workers and each
    global batch has a row for every replica.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        A dataset with ``__len__`` and ``__getitem__``, the same on every replica.
    batch_size : int or None
        Rows in a global batch; may be None with ``max_cost``.
    strategy : Strategy
        The strategy whose replicas read the dataset.
    shuffle : bool
        Whether each epoch has its own order, drawn from ``(seed, epoch)`` like the
        order of `hpcstrat.Dataset`.
    seed : int
        Seed of the order.
    drop_remainder : bool
        Whether to leave out a last batch that is not full.
    costs : array_like of shape (num_rows,), str, callable or MeasuredCosts, optional
        Costs >= 0 of the rows: an array; the name of an item of each sample; a function
        of a sample (items of a tuple become arguments), or costs that are measured. In
        the first ``iter()``, ranks call a function together, each for a part of the
        rows.
    max_cost : float, optional
        Greatest sum of costs of a global batch. The sampler has no length then.
    equal_rows : bool
        Whether replicas get equal numbers of rows, up to one.

    Raises
    ------
    ValueError
        If the batch size is not positive; in the first ``iter()``, if a cost is
        negative, not finite or above ``max_cost``, or if there is not one cost for each
        row.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> import hpcstrat.integrations.torch as hst
    >>> sampler = hst.GlobalBatchSampler(range(5), 2, hs.get_strategy())
    >>> list(sampler)
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        strategy: Strategy,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        costs: Any = None,
        max_cost: float | None = None,
        equal_rows: bool = False,
    ) -> None:
        advice = (
            "give a DataLoader of global batches to "
            "strategy.experimental_distribute_dataset"
        )
        refuse_logical_replicas(strategy, "GlobalBatchSampler", advice)
        self.dataset = dataset
        self.distribute_strategy = strategy
        # A dataset of row numbers, which determines the order and batches of rows.
        numbers = Dataset(np.arange(len(dataset)), shuffle=shuffle, seed=seed)
        self._rows = numbers.batch(
            batch_size,
            drop_remainder,
            costs=_of_samples(costs, dataset),
            max_cost=max_cost,
            equal_rows=equal_rows,
        )
        stage, count = self._rows.stage, strategy.num_replicas_in_sync
        assert isinstance(stage, Batched)
        self._costs = stage.costs
        divide = ShareDivision if self._costs is None else self._costs.division
        self._stage = stage.divided(lambda _: divide(count))
        # True if the ranks have compared the costs.
        self._is_agreed = self._costs is None
        self._times: StepTimes | None = None
        self._epoch = self._position = 0
        # True if the program has received a part of the latest iteration's batches.
        self._is_begun = False
        self._is_known = True
        # True while a loader of `loader` calls ``iter(sampler)``: it calls `took`.
        self.is_reported = False

    @property
    def has_length(self) -> bool:
        """Whether the number of global batches is known; for the library's modules."""
        return self._costs is None or self._costs.max_cost is None

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration; after its end, the next epoch.

        Setting the epoch makes the next iteration start this epoch at its beginning.
        """
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        """Start the next iteration at the beginning of this epoch; epochs count from 0.

        Not collective.
        """
        self._epoch, self._position, self._is_begun = int(value), 0, False

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start an epoch; do nothing if it is the current one.

        Not collective: call it on every replica. The Trainer of Lightning and other
        programs for ``DistributedSampler`` call this method before each epoch. A
        position that was restored is kept if it is of this epoch.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0.
        """
        if epoch != self._epoch:
            self.epoch = epoch

    @property
    def sampler(self) -> GlobalBatchSampler:
        """The sampler itself, as Lightning looks here for `set_epoch`."""
        return self

    def __iter__(self) -> Iterator[list[int]]:
        """Begin an epoch, or continue with an epoch that was restored."""
        counts = not self.is_reported
        loader = _loader_of(sys._getframe(1)) if counts else None
        if self._is_begun:
            # The program left the epoch early, or a loader calls `iter` a second time.
            self.ended()
        rows, strategy = self._rows, self.distribute_strategy
        if loader is not None and loader.collate_fn is default_collate:
            self._require_rows()
        self._is_known = not (loader is not None and loader.num_workers)
        # Replicas compare this text, which contains all that determines their rows.
        if self._costs is not None:
            if not self._is_agreed:
                self._costs.agree(strategy)
                self._is_agreed = True
            self._costs.update(strategy)
            self._times = self._costs.times()
        strategy.collectives.barrier(
            f"iteration over {rows.describe()}, epoch {self._epoch} from row "
            f"{self._position}"
        )
        return self._batches(counts)

    def _require_rows(self) -> None:
        """Raise ValueError on all replicas if a replica would get an empty batch."""
        count = self.distribute_strategy.num_replicas_in_sync
        least, position = count, self._position
        while position != self._stage.num_rows and least >= count:
            batch = self._stage.batch_at(self._epoch, position)
            least, position = len(batch), batch.stop
        if least < count:
            raise ValueError(
                f"expected a row of every batch for each of {count} replicas, found a "
                f"batch of {least} rows, and PyTorch cannot make an empty batch; "
                "iterate over sampler.loader(), or choose another batch_size, or "
                "drop_remainder=True"
            )

    def _batches(self, counts: bool) -> Iterator[list[int]]:
        stage, epoch, position = self._stage, self._epoch, self._position
        while position != stage.num_rows:
            batch = stage.batch_at(epoch, position)
            position = batch.stop
            if counts:
                self.took()
            yield stage.read(batch, *self._part(batch)).tolist()
        if counts:
            self.ended()

    def _part(self, batch: Batch) -> tuple[int, int]:
        strategy = self.distribute_strategy
        return self._stage.part(
            batch, strategy.num_replicas_in_sync, strategy.replica_id
        )

    def took(self) -> None:
        """Count a batch that the program receives; for the library's own modules."""
        batch = self._stage.batch_at(self._epoch, self._position)
        if self._times is not None:
            self._times.end()
            self._times.begin(self._stage.numbers(batch, *self._part(batch)))
        self._position = batch.stop
        self._is_begun = True

    def ended(self) -> None:
        """Advance to the next epoch; for the library's own modules."""
        if self._times is not None:
            self._times.end()
        self._epoch, self._position, self._is_begun = self._epoch + 1, 0, False

    def loader(
        self, *, collate_fn: Callable[[list[Any]], Any] | None = None, **options: Any
    ) -> DataLoader[Any]:
        """Make a loader of the dataset's global batches.

        Not collective; the first ``next()`` of each iteration over the loader is
        collective over the strategy's replicas.

        A batch without a row for this replica has the usual structure, with tensors
        that have no rows. With workers, the position of the sampler counts the batches
        that the program has received, not the batches that were read ahead.

        Parameters
        ----------
        collate_fn : callable, optional
            Makes a batch from a list of samples; default: PyTorch's function. For a
            batch without rows, it is called with the dataset's first sample, and this
            row is removed from the result.
        **options : object
            Options of `torch.utils.data.DataLoader`, such as ``num_workers``. Start
            workers with ``multiprocessing_context="spawn"`` or ``"forkserver"``: a fork
            of a process that runs MPI may crash.

        Returns
        -------
        torch.utils.data.DataLoader
            The loader; only one iteration over it may run at a time.
        """
        collate = _Collate(self.dataset, collate_fn or default_collate)
        options = {"generator": _Seeded(), **options}
        return _Loader(self.dataset, batch_sampler=self, collate_fn=collate, **options)

    def state(self) -> dict[str, int]:
        """Return the position of the latest iteration.

        Not collective; the same on every replica after the same step.

        Returns
        -------
        dict of str to int
            ``epoch``, ``global_position`` (number of rows of this epoch that all
            replicas together have received), ``shuffle_seed``, ``num_rows`` and
            ``order_version``.

        Raises
        ------
        ValueError
            If the iteration is by a DataLoader with workers that `loader` did not make.
        """
        if not self._is_known:
            raise ValueError(
                "expected a loader that knows which batches the program has received, "
                "found a DataLoader with workers, which reads ahead; iterate over "
                "sampler.loader(num_workers=...)"
            )
        return {
            "epoch": self._epoch,
            "global_position": self._position,
            "shuffle_seed": self._rows.seed,
            "num_rows": self._rows.num_rows,
            "order_version": ORDER_VERSION,
        }

    def check_state(self, state: dict[str, int]) -> None:
        """Raise ValueError if a state belongs to another dataset.

        For the library's own modules.
        """
        own = {"num_rows": self._rows.num_rows, "shuffle_seed": self._rows.seed}
        for key, value in own.items():
            if int(state[key]) != value:
                raise ValueError(
                    f"expected the position in a data set with {key} {value}, found "
                    f"{int(state[key])}; restore with the data set that was saved"
                )

    def restore_state(self, state: dict[str, int]) -> None:
        """Make the next iteration continue from a state that `state` returned.

        Not collective: call it on every replica with the same state.

        Parameters
        ----------
        state : dict of str to int
            The state may be from another number of replicas. Raises ValueError for a
            state of another dataset.
        """
        self.check_state(state)
        self.epoch = state["epoch"]
        self._position = int(state["global_position"])
        self._is_known = True
        if self._position and int(state.get("order_version", 1)) < ORDER_VERSION:
            # The rest of the saved epoch must use the old order, in which it began.
            self._rows.keep_old_order(self._epoch)

    def __repr__(self) -> str:
        """Return the sampled rows and the epoch as text."""
        return (
            f"<{type(self).__name__} of {self._rows.describe()}, epoch {self._epoch}>"
        )


def _of_samples(costs: Any, dataset: Any) -> Any:
    """Return costs as `Dataset.batch` takes them; functions get the row's number."""
    if isinstance(costs, str):
        return lambda row: dataset[int(row)][costs]
    if callable(costs):
        return lambda row: call_with(costs, dataset[int(row)])
    return costs


def _loader_of(caller: FrameType) -> DataLoader[Any] | None:
    """Return the loader that called ``iter(sampler)``, or None if the program did.

    The caller's stack frame has the loader. torch offers nothing else: a loader calls
    ``iter(sampler)`` without an argument, and then reads batches.
    """
    if caller.f_globals["__name__"] != DataLoader.__module__:
        return None
    loader: DataLoader[Any] = caller.f_locals["loader"]
    return loader


class _Seeded(torch.Generator):
    """A loader's own generator, which draws the seeds of its workers.

    An iteration would otherwise draw a number from torch's generator, also where it
    resumes an epoch, so that a resumed program would have other numbers after it.
    """


class _Loader(DataLoader[Any]):
    """A loader that reports to its sampler which batches the program has received."""

    # The state before the latest batch, if the loader has no length.
    _before: dict[str, int] | None = None

    @property
    def _sampler_of_rows(self) -> GlobalBatchSampler:
        """The sampler, also if Lightning has wrapped it to record the rows."""
        sampler: Any = self.batch_sampler
        return getattr(sampler, "_batch_sampler", sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, and count them; the first one begins it.

        Lightning calls ``set_epoch`` between ``iter()`` and the first ``next()``.
        """
        sampler = self._sampler_of_rows
        batches, epoch = self._begin(), sampler.epoch
        for batch in batches:
            self._before = None if sampler.has_length else sampler.state()
            sampler.took()
            yield batch
            if sampler.epoch != epoch:
                raise ValueError(
                    f"expected to continue with epoch {sampler.epoch}, found a batch "
                    f"of epoch {epoch}, which Lightning has requested early, because "
                    "it ignores the position in a checkpoint of a whole epoch; set "
                    f"sampler.epoch = {sampler.epoch} before fit, or leave out max_cost"
                )
        self._before = None
        sampler.ended()

    def _begin(self) -> Iterator[Any]:
        sampler = self._sampler_of_rows
        if isinstance(self.generator, _Seeded):
            self.generator.manual_seed((torch.initial_seed() + sampler.epoch) % 2**63)
        sampler.is_reported = True
        try:
            return super().__iter__()
        finally:
            sampler.is_reported = False

    def state_dict(self) -> dict[str, int]:
        """Return the position for a checkpoint of Lightning.

        Lightning requests each batch of a loader without a length one step early, to
        recognize the last batch. The position is then the one before this batch.
        """
        return self._before or self._sampler_of_rows.state()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next iteration continue from a position of `state_dict`."""
        self._sampler_of_rows.restore_state(state)


class _Collate:
    """Makes batches, even without rows; each worker process has its own dataset."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self.collate(samples)
        worker = get_worker_info()
        dataset = self.dataset if worker is None else worker.dataset
        return _without_rows(self.collate([dataset[0]]))

    def __reduce__(self) -> Any:
        return _Collate, (None, self.collate)


def _without_rows(batch: Any) -> Any:
    """Return a batch of one row with that row removed."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch[:0]
    if isinstance(batch, dict):
        return type(batch)({key: _without_rows(part) for key, part in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_without_rows, batch))
    if isinstance(batch, (list, tuple)):
        # A list of values that are not tensors has one item per row.
        plain = all(not isinstance(p, (torch.Tensor, dict, list, tuple)) for p in batch)
        return type(batch)([] if plain else map(_without_rows, batch))
    raise ValueError(
        f"expected tensors in a batch, found {type(batch).__name__}, of which an empty "
        "batch cannot be made; choose another batch_size, or drop_remainder=True"
    )
