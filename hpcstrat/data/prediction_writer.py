"""Predictions of all replicas in the order of the rows, in memory or in one file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from hpcstrat.data.files.row_file import RowArray, RowFile
from hpcstrat.engine.arrays.kinds import as_array, to_host
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Replicas, Tree

__all__ = ["PredictionWriter"]

_WHAT = "predictions"
_FLUSH_SECONDS = 10.0


class PredictionWriter:
    """Collects the predictions of all replicas, in the order of the rows.

    Collective over the strategy's replicas, as is `result`; `add` is not. Each replica
    adds the predictions of its own rows with the rows' numbers, in any order. A row
    that is added twice counts once, so that padded batches do no harm.

    With a path, every rank writes its rows into one file, which has an array of
    ``num_rows`` rows for each array of ``like``. If the program is killed and started
    again, it finds the rows that the file lacks in `remaining`. The ranks need a file
    system on which they see each other's bytes, such as a local disk, Lustre or GPFS.
    NFS can lose rows if several nodes write to the same page of a file: there, collect
    predictions in memory.

    Parameters
    ----------
    strategy : Strategy
        The strategy whose replicas predict.
    num_rows : int
        Number of rows of the data set.
    like : nested structure of arrays or ArraySpec
        The prediction of one row, for its structure, shapes and dtypes.
    path : str or path, optional
        HDF5 file, or Zarr store if the name ends with ``.zarr``; default: memory. A
        single array has the name ``predictions``, other names are those of ``like``,
        with slashes. ``rows_written`` (uint8) is 1 for rows that are complete.

    Raises
    ------
    ValueError
        If the file exists, and was made for other predictions.
    OSError
        If the file cannot be made or read.

    Examples
    --------
    >>> import numpy as np
    >>> import hpcstrat as hs
    >>> strategy = hs.get_strategy()
    >>> writer = hs.data.PredictionWriter(strategy, 3, np.float32(0))
    >>> writer.add([2, 0], np.array([4, 0], np.float32))
    >>> writer.add([1], np.array([1], np.float32))
    >>> writer.result()
    array([0., 1., 4.], dtype=float32)
    """

    def __init__(
        self,
        strategy: Replicas,
        num_rows: int,
        like: Tree,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._strategy, self._num_rows = strategy, int(num_rows)
        leaves, self._structure = flatten(like)
        paths = self._structure.paths()
        self._columns = [
            RowArray("/".join(map(str, place)) or _WHAT, num_rows, *_type_of(leaf))
            for place, leaf in zip(paths, leaves, strict=True)
        ]
        # In memory: the rows and predictions that were added.
        self._parts: list[list[Array]] = []
        self._file: RowFile | None = None
        # A byte for each row, which is 1 if the row is complete.
        self._mark = RowArray("rows_written", num_rows, np.dtype(np.uint8), ())
        # Numbers of rows that are written, but not yet marked.
        self._unmarked: list[Array] = []
        self._flush_at = time.monotonic() + _FLUSH_SECONDS
        self._remaining: Array = np.arange(self._num_rows)
        calls = strategy.all_ranks.collectives
        told, where = ", ".join(map(str, self._columns)), "a file" if path else "memory"
        calls.barrier(f"predictions of {num_rows} rows in {where}: {told}")
        if path is None:
            return
        path = Path(path)
        offsets: dict[str, int] = {}
        with calls.all_raise(_WHAT):
            if calls.rank == 0:
                arrays = [*self._columns, self._mark]
                if not path.exists():
                    RowFile.create(path, arrays)
                offsets = RowFile.open_file(path, arrays)
                marks = RowFile(path, offsets).read(self._mark)
                self._remaining = np.flatnonzero(marks == 0)
        found = calls.broadcast_object((offsets, self._remaining), 0, _WHAT)
        offsets, self._remaining = found
        self._file = RowFile(path, offsets)

    def __repr__(self) -> str:
        where = "memory" if self._file is None else repr(str(self._file.path))
        return f"PredictionWriter({self._num_rows} rows, in {where})"

    @property
    def remaining(self) -> Array:
        """Numbers (int64) of the rows that the file lacked when it was opened.

        The same on all ranks, in increasing order; without a file: all rows.
        """
        return self._remaining

    def add(self, rows: Any, predictions: Tree) -> None:
        """Add the predictions of rows.

        Not collective: each replica adds its own rows.

        Parameters
        ----------
        rows : array_like of int, of shape (n,)
            Numbers of the rows, from 0.
        predictions : nested structure of arrays of shape (n, ...)
            Arrays of any library, in the structure and with the dtypes of ``like``;
            copied.

        Raises
        ------
        ValueError
            On this rank, if a row does not exist, or if shapes, dtypes or the structure
            are not those of ``like``.
        OSError
            If the file cannot be written, such as on a full disk.
        """
        numbers = np.asarray(to_host(as_array(rows)), np.int64).reshape(-1)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self._num_rows:
            raise ValueError(
                f"expected rows from 0 to {self._num_rows - 1}, found numbers from "
                f"{numbers.min()} to {numbers.max()}; pass the rows' own numbers"
            )
        leaves, structure = flatten(predictions)
        arrays = [to_host(as_array(leaf)) for leaf in leaves]
        found = [(a.dtype, a.shape) for a in arrays]
        expected = [(c.dtype, (len(numbers), *c.shape)) for c in self._columns]
        if structure != self._structure or found != expected:
            raise ValueError(
                f"expected predictions of {len(numbers)} rows, each of "
                f"{', '.join(map(str, self._columns))}, found "
                f"{', '.join(f'{dtype}{list(shape)}' for dtype, shape in found)}; "
                "convert them, or pass another prediction as like="
            )
        if self._file is None:
            self._parts.append([numbers, *(array.copy() for array in arrays)])
            return
        # The last of several predictions of a row counts, as in memory.
        numbers, last = np.unique(numbers[::-1], return_index=True)
        for column, array in zip(self._columns, arrays, strict=True):
            self._file.write(column, numbers, array[::-1][last])
        self._unmarked.append(numbers)
        if time.monotonic() > self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Write the rows added so far to the disk, and mark them as complete.

        Not collective. `add` calls this every 10 seconds; after a crash, rows that were
        added later are predicted again.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        if self._file is None:
            return
        # A row must be on the disk before its mark is.
        self._file.sync()
        for numbers in self._unmarked:
            self._file.write(self._mark, numbers, np.ones(len(numbers), np.uint8))
        self._unmarked = []
        self._file.sync()
        self._flush_at = time.monotonic() + _FLUSH_SECONDS

    def result(self) -> Tree:
        """Return the predictions of all rows, or complete the file.

        Collective over the strategy's replicas, in cross-replica context.

        Returns
        -------
        nested structure of ndarray of shape (num_rows, ...), or None
            The predictions in the order of the rows, the same on all ranks; None if
            they are in a file, which other programs may then read.

        Raises
        ------
        ValueError
            If a row has no prediction; on all ranks.
        OSError
            If the file cannot be written; on all ranks.
        """
        calls = self._strategy.all_ranks.collectives
        is_done, whole = np.zeros(self._num_rows, bool), []
        if self._file is None:
            empty = [np.empty((0, *c.shape), c.dtype) for c in self._columns]
            parts = [[np.empty(0, np.int64), *empty], *self._parts]
            own = [np.concatenate(column) for column in zip(*parts, strict=True)]
            rows, *found = calls.all_gather(own, 0, _WHAT)
            is_done[rows] = True
            for column, values in zip(self._columns, found, strict=True):
                whole.append(np.empty((self._num_rows, *column.shape), column.dtype))
                whole[-1][rows] = values
        else:
            with calls.all_raise(_WHAT):
                self.flush()
            calls.barrier(_WHAT)
            with calls.all_raise(_WHAT):
                if calls.rank == 0:
                    is_done = self._file.read(self._mark) == 1
            is_done = calls.broadcast_object(is_done, 0, _WHAT)
        if not is_done.all():
            missing = np.flatnonzero(~is_done)
            raise ValueError(
                f"expected predictions of all {self._num_rows} rows, found none of "
                f"{len(missing)} rows, the first of which is row {missing[0]}; call "
                "add() for every row before result()"
            )
        return unflatten(self._structure, whole) if self._file is None else None


def _type_of(leaf: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    known = hasattr(leaf, "shape") and isinstance(leaf.dtype, np.dtype)
    found = leaf if known else to_host(as_array(leaf))
    return np.dtype(found.dtype), tuple(found.shape)
