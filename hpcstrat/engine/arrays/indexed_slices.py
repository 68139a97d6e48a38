"""Sparse rows of an array, such as the gradient of an embedding."""

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
        The rows. Python numbers become float32 or int32; in an update of a variable,
        they are cast to the variable's dtype.
    indices : array_like of int of shape (n,)
        Row number of each row in ``values``; a row number may occur several times, and
        each occurrence counts. The indices are stored on the same device as ``values``.
    dense_shape : sequence of int, optional
        Shape of the whole array.

    Raises
    ------
    ValueError
        If the numbers of rows and indices differ, or the indices are not integers.
    """

    __slots__ = ("_given", "dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self._given = values
        self.values: Array = as_array(values)
        # NumPy would make a float array of an empty list.
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
        """The ``values`` argument as passed: an array, or Python numbers.

        For the library's own modules.
        """
        return self._given

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        return self.values.dtype

    def to_dense(self) -> Array:
        """Return the whole array, with the rows of repeated indices added up.

        Not collective.

        Returns
        -------
        ndarray of shape dense_shape
            A new array.

        Raises
        ------
        ValueError
            If ``dense_shape`` is None, or an index lies outside of it.
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
