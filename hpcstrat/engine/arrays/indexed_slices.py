"""Sparse rows of an array, as gradients of embeddings have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import (
    array_module,
    as_array,
    is_device,
    to_device,
    to_host,
)
from hpcstrat.engine.arrays.row_updates import apply_at
from hpcstrat.engine.typing import Array

__all__ = ["IndexedSlices"]


class IndexedSlices:
    """Rows of an array of ``dense_shape``, whose other rows are zero.

    Parameters
    ----------
    values : array_like of shape (n, ...)
        The rows. Python numbers are float32 or int32 here, and take the type of the
        variable that they update.
    indices : array_like of int of shape (n,)
        Which rows; the same one may come several times and then counts several times.
        Kept in the memory of the rows.
    dense_shape : sequence of int, optional
        Shape of the whole array.

    Raises
    ------
    ValueError
        If there are not as many rows as indices, or indices are no integers.
    """

    __slots__ = ("_given", "dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self._given = values
        self.values: Array = as_array(values)
        # An empty list has no type of its own.
        untyped = not hasattr(indices, "dtype") and not np.size(indices)
        self.indices: Array = as_array(indices, np.int32 if untyped else None)
        if is_device(self.values) != is_device(self.indices):
            move = to_device if is_device(self.values) else to_host
            self.indices = move(self.indices)
        self.dense_shape: tuple[int, ...] | None = (
            None if dense_shape is None else tuple(int(n) for n in dense_shape)
        )
        if self.indices.dtype.kind not in "iu":
            raise ValueError(
                f"expected integers as indices, found {self.indices.dtype}; cast them"
            )
        rows = self.values.shape[:1]
        if self.indices.ndim != 1 or rows != self.indices.shape:
            raise ValueError(
                "expected one index for each row, found indices of shape "
                f"{self.indices.shape} and values of shape {self.values.shape}; give "
                "both the same first dimension"
            )

    @property
    def given(self) -> Any:
        """The rows as they were given: an array, or numbers of Python.

        For the library's own modules.
        """
        return self._given

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the rows."""
        return self.values.dtype

    def to_dense(self) -> Array:
        """Return the whole array, rows that come several times added up.

        Not collective.

        Returns
        -------
        ndarray of shape dense_shape
            A fresh array.

        Raises
        ------
        ValueError
            If the shape is not known, or an index lies outside of it.
        """
        if self.dense_shape is None:
            raise ValueError(
                "expected a dense_shape, found None; give it to IndexedSlices"
            )
        length, indices = self.dense_shape[0], self.indices
        if indices.size and (indices.min() < 0 or indices.max() >= length):
            raise ValueError(
                f"expected indices from 0 to {length - 1}, found {indices.min()} to "
                f"{indices.max()}; check the rows"
            )
        module = array_module(self.values)
        dense: Array = module.zeros(self.dense_shape, self.values.dtype)
        apply_at("add", dense, self.indices, self.values)
        return dense

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape})"
        )
