"""Arrays without memory, which count the bytes that NumPy would read and write.

The algorithms of `hpcstrat.engine.collectives` can use a Phantom like a NumPy array of
any size, but nothing is computed. A Phantom has only the operations that the algorithms
use on flat arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Phantom", "Traffic"]


class Traffic:
    """Counts the bytes that were read and written since the last call of `take`."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, *arrays: Any) -> None:
        """Add the sizes of arrays that an operation reads or writes."""
        self._nbytes += sum(getattr(array, "nbytes", 0) for array in arrays)

    def take(self) -> int:
        """Return the number of bytes, and reset it to 0."""
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes


class Phantom:
    """A flat array that has a length and a data type, but no values."""

    __slots__ = ("_traffic", "dtype", "size")

    def __init__(self, size: int, dtype: np.dtype[Any], traffic: Traffic) -> None:
        self.size, self.dtype, self._traffic = size, dtype, traffic

    @property
    def nbytes(self) -> int:
        """Size in bytes of a real array of this length and type."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        """Return the number of elements."""
        return self.size

    def __getitem__(self, part: slice) -> Phantom:
        """Return a slice, whose operations are counted in the same `Traffic`."""
        start, stop, _ = part.indices(self.size)
        return Phantom(max(0, stop - start), self.dtype, self._traffic)

    def __setitem__(self, part: Any, values: Any) -> None:
        """Count a copy of values into the whole array."""
        assert part is ...
        self._traffic.add(values, self)

    def view(self, dtype: np.dtype[Any]) -> Phantom:
        """Return a view of the same bytes with another data type."""
        wanted = np.dtype(dtype)
        return Phantom(self.nbytes // wanted.itemsize, wanted, self._traffic)

    def copy(self) -> Phantom:
        """Count a copy into new memory, and return the copy."""
        self._traffic.add(self, self)
        return self[:]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Count a copy into a real array, and return an array of zeros."""
        del dtype, copy
        self._traffic.add(self, self)
        return np.broadcast_to(np.zeros((), self.dtype), self.size)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...]
    ) -> Any:
        """Count the bytes that a sum or quotient reads and writes."""
        del ufunc, method
        self._traffic.add(*inputs, *out)
        return out[0]

    def __array_function__(
        self, function: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        """Implement np.empty_like and np.may_share_memory for arrays of this class."""
        del types, kwargs
        if function is np.may_share_memory:
            return args[0] is args[1]
        if function is np.empty_like:
            return self[:]
        return NotImplemented
