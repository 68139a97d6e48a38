"""Which values are arrays, and how plain Python values become arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from hpcstrat.typing import Array, ArrayLike

__all__ = ["as_array", "is_half", "nvtx_ranges", "to_reducible"]

_INT32 = np.iinfo(np.int32)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
# NumPy numbers its own types below this; ml_dtypes' eight-bit floats lie above.
_FIRST_FOREIGN_TYPE = 256
_PLAIN = (bool, int, float, complex)


def _from_python(value: Any, dtype: np.dtype[Any] | None) -> Array:
    """Convert Python numbers or nested sequences of them."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(str(error)) from error
    if dtype is not None:
        if array.size and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"{array.dtype} is not cast to {dtype}")
        return np.asarray(value, dtype=dtype)
    if array.dtype.kind not in "iufO":
        return array
    if not isinstance(value, _PLAIN) and any(
        hasattr(leaf, "dtype") for leaf in optree.tree_leaves(value)
    ):
        return array
    if array.dtype.kind == "f":
        finite = np.isfinite(array)
        if (np.abs(array, where=finite, out=np.zeros_like(array)) > _FLOAT32_MAX).any():
            raise ValueError(
                "expected Python floats that fit float32, the default, found "
                f"{value!r:.80}; pass dtype='float64', or an array"
            )
        return array.astype(np.float32)
    if array.size and not (
        _INT32.min <= array.min(initial=0) and array.max(initial=0) <= _INT32.max
    ):
        raise ValueError(
            "expected Python integers that fit int32, the default, found "
            f"{value!r:.80}; pass dtype='int64', or an array"
        )
    return array.astype(np.int32) if array.dtype.kind in "iuO" else array


def as_array(value: ArrayLike, dtype: Any = None) -> Array:
    """Return a value as a NumPy array, without a copy where that is possible.

    Not collective.

    Parameters
    ----------
    value : array_like of any shape
        Arrays keep their type. Python floats become float32, Python integers int32.
    dtype : dtype, optional
        The type wanted; Python numbers take it, arrays are cast to it.

    Returns
    -------
    ndarray
        In native byte order.

    Raises
    ------
    ValueError
        If a Python integer does not fit, or the value holds no numbers.
    """
    wanted = None if dtype is None else np.dtype(dtype)
    if isinstance(value, np.ndarray):
        array: Array = value if wanted is None else value.astype(wanted, copy=False)
    elif isinstance(value, np.generic) or hasattr(value, "__array__"):
        array = np.asarray(value, dtype=wanted)
    elif hasattr(value, "__dlpack__"):
        array = np.from_dlpack(value)
        array = array if wanted is None else array.astype(wanted, copy=False)
    else:
        try:
            array = _from_python(value, wanted)
        except (TypeError, OverflowError) as error:
            raise ValueError(
                f"expected numbers that fit {wanted or 'an array'}, found "
                f"{value!r:.80}; pass another dtype, or an array"
            ) from error
    if array.dtype.kind == "O":
        raise ValueError(
            f"expected numbers, found {type(value).__name__} {value!r:.80}; pass an "
            "array, or nested sequences of numbers of equal lengths"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether a type is a half-precision float: float16, or ml_dtypes' bfloat16.

    Not collective.

    Parameters
    ----------
    dtype : dtype
        Any type.

    Returns
    -------
    bool
        True for the two half types.
    """
    if dtype.num < _FIRST_FOREIGN_TYPE:
        return dtype.char == "e"
    # The name is slow to find.
    return dtype.name == "bfloat16"


def to_reducible(value: ArrayLike) -> Array:
    """Return a value as an array that can be summed over replicas.

    Not collective.

    Parameters
    ----------
    value : array_like of any shape
        A contribution to a reduction.

    Returns
    -------
    ndarray
        Of an integer, floating or complex type.

    Raises
    ------
    ValueError
        For types that have no sum.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            "expected an array without a mask, found a masked array, whose mask a sum "
            "over replicas would ignore; fill it first"
        )
    array = value if type(value) is np.ndarray else np.asarray(as_array(value))
    dtype = array.dtype
    if dtype.kind in "iufc" and dtype.num < _FIRST_FOREIGN_TYPE:
        return array if dtype.isnative else array.astype(dtype.newbyteorder("="))
    if is_half(dtype):
        return array
    advice = (
        "cast it, for instance to int32 to count, or take the MEAN of a float"
        if dtype.kind == "b"
        else "reduce integer, floating or complex arrays"
    )
    raise ValueError(
        f"expected an array with a sum over replicas, found dtype {dtype}; {advice}"
    )


def nvtx_ranges() -> Any:
    """Return what marks ranges of time for NVIDIA's profilers.

    Not collective. Loads CuPy.

    Returns
    -------
    module or None
        ``cupy.cuda.nvtx``; None where there is no CuPy, or it has no NVTX.
    """
    try:
        from cupy.cuda import nvtx
    except ImportError:
        return None
    return nvtx if hasattr(nvtx, "RangePush") else None
