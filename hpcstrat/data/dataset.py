"""A data set with random access, in global batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcstrat.data.batches import writable
from hpcstrat.data.sources import open_source
from hpcstrat.typing import Array, Tree

__all__ = ["Dataset"]


class Dataset:
    """Examples in memory or in an HDF5 file, as global batches.

    Iterating it by itself gives global batches, as one process would train on them;
    `Strategy.experimental_distribute_dataset` divides them between replicas, each of
    which reads only its own rows.

    Parameters
    ----------
    source : array, nested structure of arrays, sequence, path, h5py.File or Group
        One row per example. An HDF5 file or group gives a mapping of its datasets. A
        sequence whose items are tuples or mappings of arrays, such as a map-style
        dataset of PyTorch, gives batches of that structure.
    batch_size : int
        Examples in a global batch.
    shuffle : bool
        Whether each epoch goes through the rows in an order of its own, drawn from
        ``(seed, epoch)``.
    seed : int
        Key of the order.
    drop_remainder : bool
        Whether to leave out a last batch that is not full.

    Raises
    ------
    ValueError
        If the batch size is not positive, the columns' lengths differ, or a path or
        text is among them.
    FileNotFoundError
        If there is no such file.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(
                f"expected a global batch size >= 1, found {batch_size}; change it"
            )
        self.columns = open_source(source)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_remainder = drop_remainder
        self._epoch = 0

    @property
    def num_rows(self) -> int:
        """Number of examples."""
        return self.columns.num_rows

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        full, rest = divmod(self.num_rows, self.batch_size)
        return int(full + (rest > 0 and not self.drop_remainder))

    def order(self, epoch: int) -> Array | None:
        """Return the order of an epoch's rows.

        Not collective; the same on every rank.

        Parameters
        ----------
        epoch : int
            From 0.

        Returns
        -------
        ndarray of int64 of shape (num_rows,), or None
            None without shuffling.
        """
        if not self.shuffle:
            return None
        # A generator of its own for each epoch, so that a restore can begin with any.
        key = np.random.SeedSequence((self.seed, epoch))
        generator = np.random.Generator(np.random.Philox(key))
        return generator.permutation(self.num_rows)

    def rows(self, order: Array | None, start: int, stop: int) -> Array | slice:
        """Return which rows stand at places of an epoch.

        Not collective.

        Parameters
        ----------
        order : ndarray or None
            From `order`.
        start, stop : int
            The places.

        Returns
        -------
        ndarray or slice
            For `Columns.read`.
        """
        return slice(start, stop) if order is None else order[start:stop]

    def describe(self) -> str:
        """Say what ranks must agree on.

        Not collective.

        Returns
        -------
        str
            Size, batch size, order and types.
        """
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        return (
            f"a data set of {self.columns.describe()}, in batches of "
            f"{self.batch_size}, {order}"
        )

    def __iter__(self) -> Iterator[Tree]:
        """Give the global batches of the next epoch."""
        order = self.order(self._epoch)
        self._epoch += 1
        end = len(self) * self.batch_size if self.drop_remainder else self.num_rows
        for start in range(0, end, self.batch_size):
            stop = min(start + self.batch_size, self.num_rows)
            yield writable(self.columns.read(self.rows(order, start, stop)))
