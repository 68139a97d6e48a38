"""Updates of single rows of a variable."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.arrays.indexed_slices import IndexedSlices
from hpcstrat.arrays.kinds import as_array, is_device, to_device
from hpcstrat.arrays.row_updates import apply_at, replace_at
from hpcstrat.typing import Array

__all__ = ["NOT_SUMMABLE", "ScatterMethods"]

# What arrays have, of whatever library, and numbers of Python have not.
_MARKS = ("dtype", "__dlpack__", "__array__", "__cuda_array_interface__")
_SCATTER = {
    "scatter_add": "add",
    "scatter_sub": "subtract",
    "scatter_mul": "multiply",
    "scatter_div": "divide",
    "scatter_min": "minimum",
    "scatter_max": "maximum",
}
NOT_SUMMABLE = ("scatter_min", "scatter_max", "scatter_update")


def _advice(found: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    """Say what to do about a type; to cast a value may change it."""
    whole = wanted.kind in "iub"
    if found.kind == "c" and wanted.kind != "c":
        return "take the value's real part, if that is meant"
    if whole and found.kind not in "iub":
        return "create the variable with a floating dtype, or round the value"
    return "cast the value with astype"


class ScatterMethods:
    """The ``scatter_*`` methods; for classes that have a component."""

    name: str
    _component: Array

    def _typed(self, method: str, value: Any) -> Array:
        """Return a value as an array of this variable's dtype.

        The one rule for all that updates variables: arrays must have the dtype, and
        numbers of Python take it, if it holds them.
        """
        dtype = self._component.dtype
        array = value if type(value) is np.ndarray else None
        if array is None:
            is_array = any(hasattr(value, mark) for mark in _MARKS)
            array = as_array(value, None if is_array else dtype)
        if array.dtype != dtype:
            raise ValueError(
                f"expected dtype {dtype} in {method} of variable {self.name!r}, found "
                f"{array.dtype}; {_advice(array.dtype, dtype)}"
            )
        return array

    def _scatter(self, method: str, rows: IndexedSlices) -> Any:
        raise NotImplementedError(method)

    def _scatter_own(self, method: str, rows: IndexedSlices) -> Any:
        """Update this replica's component."""
        values, indices = self._rows(method, rows), rows.indices
        if is_device(self._component):
            values, indices = to_device(values), to_device(indices)
        if method == "scatter_update":
            replace_at(self._component, indices, values)
        else:
            apply_at(_SCATTER[method], self._component, indices, values)
        return self._component.copy()

    def _rows(self, method: str, rows: IndexedSlices) -> Array:
        """Check rows against this variable and return them."""
        dtype = self._component.dtype
        if method == "scatter_div" and dtype.kind in "biu":
            raise ValueError(
                f"expected a floating variable for scatter_div, found {self.name!r} of "
                f"{dtype}; make it a float, or assign its whole value"
            )
        shape = self._component.shape
        length = shape[0] if shape else 0
        indices = rows.indices
        if indices.size and (indices.min() < 0 or indices.max() >= length):
            raise ValueError(
                f"expected indices from 0 to {length - 1} for variable {self.name!r}, "
                f"found {indices.min()} to {indices.max()}; check the rows"
            )
        if rows.values.shape[1:] != shape[1:]:
            raise ValueError(
                f"expected rows of shape {shape[1:]} for variable {self.name!r}, "
                f"found {rows.values.shape[1:]}; check the rows"
            )
        if is_device(rows.values) and not is_device(self._component):
            raise ValueError(
                f"expected rows in host memory for variable {self.name!r}, found rows "
                "on a GPU; make the variable of a CuPy array, or copy them with "
                "cupy.asnumpy"
            )
        return self._typed(method, rows.given)

    def scatter_add(self, sparse_delta: IndexedSlices) -> Any:
        """Add rows.

        Collective over the strategy's replicas as `assign` is.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            Rows of the variable's dtype and other dimensions; one that comes several
            times counts several times. In replica context the replicas' rows are put
            one after the other; with ``MEAN`` they are divided by their number first.

        Returns
        -------
        ndarray
            The new value.

        Raises
        ------
        ValueError
            For an index, a shape or a dtype that does not fit.
        NotImplementedError
            For a SyncOnRead variable.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Any:
        """Subtract rows.

        Collective over the strategy's replicas as `scatter_add` is.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            As for `scatter_add`.

        Returns
        -------
        ndarray
            The new value.
        """
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Any:
        """Multiply by rows.

        Collective over the strategy's replicas as `scatter_add` is.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            As for `scatter_add`.

        Returns
        -------
        ndarray
            The new value.
        """
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> Any:
        """Divide by rows.

        Collective over the strategy's replicas as `scatter_add` is.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            As for `scatter_add`.

        Returns
        -------
        ndarray
            The new value.
        """
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> Any:
        """Take the smaller of the value and the rows.

        Collective over the strategy's replicas as `scatter_add` is.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            As for `scatter_add`.

        Returns
        -------
        ndarray
            The new value.

        Raises
        ------
        NotImplementedError
            With aggregation ``SUM`` or ``MEAN``.
        """
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Any:
        """Take the larger of the value and the rows.

        Collective over the strategy's replicas as `scatter_add` is.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            As for `scatter_add`.

        Returns
        -------
        ndarray
            The new value.

        Raises
        ------
        NotImplementedError
            With aggregation ``SUM`` or ``MEAN``.
        """
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Any:
        """Replace rows.

        Collective over the strategy's replicas as `scatter_add` is.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            As for `scatter_add`.

        Returns
        -------
        ndarray
            The new value.

        Raises
        ------
        NotImplementedError
            With aggregation ``SUM`` or ``MEAN``.
        """
        return self._scatter("scatter_update", sparse_delta)
