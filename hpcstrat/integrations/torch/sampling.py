"""Global batches of PyTorch's data sets, of which each replica reads its part.

A loader with workers asks for batches long before the program gets them. So the loader
of `GlobalBatchSampler.loader` tells the sampler which batches the program has got, and
the sampler's position counts only these.
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
from hpcstrat.data.batches import share
from hpcstrat.data.order import ORDER_VERSION
from hpcstrat.integrations.frameworks import refuse_logical_replicas
from hpcstrat.strategies import Strategy

__all__ = ["GlobalBatchSampler"]


class GlobalBatchSampler(Sampler[list[int]]):
    """Gives each replica its rows of every global batch: each row once per epoch.

    Logically collective over the strategy's replicas; each ``iter()``, which begins an
    epoch, is collective.

    The batches are those of one process, on any number of replicas; the last one may be
    smaller. All replicas make the same number of steps. Give it to a
    `CheckpointManager`, and the next ``iter()`` after a restore goes on behind the
    batches that the program had got, also on another number of replicas.

    Iterate over `loader`. A ``DataLoader(dataset, batch_sampler=sampler)`` will do
    where it has no workers and each global batch has a row for every replica.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        With ``__len__`` and ``__getitem__``, the same on every replica.
    batch_size : int
        Rows in a global batch.
    strategy : Strategy
        Whose replicas.
    shuffle : bool
        Whether each epoch has an order of its own, drawn from ``(seed, epoch)``: that
        of `hpcstrat.Dataset`.
    seed : int
        Key of the order.
    drop_remainder : bool
        Whether to leave out a last batch that is not full.

    Raises
    ------
    ValueError
        If the batch size is not positive.

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
        batch_size: int,
        strategy: Strategy,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        advice = (
            "give a DataLoader of global batches to "
            "strategy.experimental_distribute_dataset"
        )
        refuse_logical_replicas(strategy, "GlobalBatchSampler", advice)
        self.dataset = dataset
        self.distribute_strategy = strategy
        # Data set of the numbers of rows: their order, in batches.
        self._rows = Dataset(
            np.arange(len(dataset)),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_remainder=drop_remainder,
        )
        self._batch_size = batch_size
        self._epoch = self._position = 0
        # Whether the program has taken some batches of the latest iteration, not all.
        self._is_begun = False
        self._is_known = True

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration; after its end, that of the next one.

        Setting it makes the next iteration that epoch, from its beginning.
        """
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        """Begin the next iteration with this epoch, from 0.

        Not collective.
        """
        self._epoch, self._position, self._is_begun = int(value), 0, False

    def __iter__(self) -> Iterator[list[int]]:
        """Begin an epoch, or go on with one that was restored."""
        loader = _loader_of(sys._getframe(1))
        if self._is_begun:
            # The program left the epoch early; or a loader with workers calls twice.
            self.ended()
        counts = not isinstance(loader, _Loader)
        rows, strategy = self._rows, self.distribute_strategy
        if loader is not None and loader.collate_fn is default_collate:
            self._require_rows()
        self._is_known = not (counts and loader is not None and loader.num_workers)
        # The header compares everything that decides which rows replicas read.
        strategy.collectives.barrier(
            f"iteration over {rows.describe()}, epoch {self._epoch} from row "
            f"{self._position}"
        )
        return self._batches(counts)

    def _require_rows(self) -> None:
        """Refuse batches of no rows, which PyTorch cannot make; on all replicas."""
        count = self.distribute_strategy.num_replicas_in_sync
        left = self._end() - self._position
        least = left % self._batch_size or min(left, self._batch_size)
        if 0 < least < count:
            raise ValueError(
                f"expected a row of every batch for each of {count} replicas, found a "
                f"batch of {least} rows, and PyTorch makes no batch of none; iterate "
                "over sampler.loader(), or choose another batch_size, or "
                "drop_remainder=True"
            )

    def _end(self) -> int:
        rows = self._rows
        return len(rows) * self._batch_size if rows.drop_remainder else rows.num_rows

    def _batches(self, counts: bool) -> Iterator[list[int]]:
        rows, strategy = self._rows, self.distribute_strategy
        count, replica = strategy.num_replicas_in_sync, strategy.replica_id
        epoch, end = self._epoch, self._end()
        for start in range(self._position, end, self._batch_size):
            size = min(self._batch_size, end - start)
            first, last = (start + at for at in share(size, count, replica))
            if counts:
                self.took()
            found = rows.rows(epoch, first, last)
            slices = isinstance(found, slice)
            yield list(range(first, last)) if slices else np.asarray(found).tolist()
        if counts:
            self.ended()

    def took(self) -> None:
        """Count a batch that the program gets; for the library's own modules."""
        self._position = min(self._position + self._batch_size, self._end())
        self._is_begun = True

    def ended(self) -> None:
        """Go on to the next epoch; for the library's own modules."""
        self._epoch, self._position, self._is_begun = self._epoch + 1, 0, False

    def loader(
        self, *, collate_fn: Callable[[list[Any]], Any] | None = None, **options: Any
    ) -> DataLoader[Any]:
        """Make a loader of the data set's global batches.

        Not collective; each ``iter()`` of it is collective over the strategy's
        replicas.

        A batch without a row for this replica has the usual structure, of tensors
        without rows. With workers, the position of the sampler counts the batches that
        the program has got, not those that were read ahead.

        Parameters
        ----------
        collate_fn : callable, optional
            Makes a batch of a list of samples; default: PyTorch's. For a batch without
            rows, its result for the first sample is cut to no rows.
        **options : object
            Of `torch.utils.data.DataLoader`, such as ``num_workers``. Start workers
            with ``multiprocessing_context="spawn"`` or ``"forkserver"``: a fork of a
            process that runs MPI may crash.

        Returns
        -------
        torch.utils.data.DataLoader
            For one iteration at a time.
        """
        collate = _Collate(self.dataset, collate_fn or default_collate)
        return _Loader(self.dataset, batch_sampler=self, collate_fn=collate, **options)

    def state(self) -> dict[str, int]:
        """Return the position of the latest iteration.

        Not collective; the same on every replica after the same step.

        Returns
        -------
        dict of str to int
            ``epoch``, ``global_position`` (rows given out in it, over all replicas),
            ``shuffle_seed``, ``num_rows`` and ``order_version``.

        Raises
        ------
        ValueError
            If a DataLoader of another kind reads ahead, by workers.
        """
        if not self._is_known:
            raise ValueError(
                "expected a loader that says which batches the program has got, found "
                "a DataLoader with workers, which reads ahead; iterate over "
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
        """Check that a state is of this data set; ValueError where it is not.

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
        """Make the next iteration go on from a state of `state`.

        Not collective: call it on every replica with the same state.

        Parameters
        ----------
        state : dict of str to int
            Perhaps of another number of replicas. ValueError for a state of another
            data set.
        """
        self.check_state(state)
        self.epoch = state["epoch"]
        self._position = int(state["global_position"])
        self._is_known = True
        if self._position and int(state.get("order_version", 1)) < ORDER_VERSION:
            # The rest of that epoch must be the rest of its order.
            self._rows.keep_old_order(self._epoch)

    def __repr__(self) -> str:
        """Show what is sampled, and the epoch."""
        return (
            f"<{type(self).__name__} of {self._rows.describe()}, epoch {self._epoch}>"
        )


def _loader_of(caller: FrameType) -> DataLoader[Any] | None:
    """Return the loader that begins to read a sampler; None if it is the program.

    torch has no hook for it: a loader calls ``iter(sampler)`` without an argument, and
    a sampler gets no other call before batches are read.
    """
    if caller.f_globals["__name__"] != DataLoader.__module__:
        return None
    loader: DataLoader[Any] = caller.f_locals["loader"]
    return loader


class _Loader(DataLoader[Any]):
    """Tells its sampler which batches the program has got."""

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        sampler: Any = self.batch_sampler
        return self._told(sampler, super().__iter__())

    @staticmethod
    def _told(sampler: GlobalBatchSampler, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            sampler.took()
            yield batch
        sampler.ended()


class _Collate:
    """Makes batches, also of no rows; workers take the data set that they have."""

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
    """Return a batch of one row without it."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch[:0]
    if isinstance(batch, dict):
        return type(batch)({key: _without_rows(part) for key, part in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_without_rows, batch))
    if isinstance(batch, (list, tuple)):
        # Values that are no tensors come as they are, in a list of rows.
        plain = all(not isinstance(p, (torch.Tensor, dict, list, tuple)) for p in batch)
        return type(batch)([] if plain else map(_without_rows, batch))
    raise ValueError(
        f"expected tensors in a batch, found {type(batch).__name__}, which cannot be "
        "cut to no rows; choose another batch_size, or drop_remainder=True"
    )
