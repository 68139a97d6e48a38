"""Conversion of values to NumPy or CuPy arrays, and tests for the kind of an array.

Arrays in host memory are NumPy arrays, and arrays in GPU memory are CuPy arrays. Device
arrays of other libraries become CuPy arrays without a copy.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.borrowing import borrow
from hpcstrat.engine.arrays.casting import (
    FIRST_FOREIGN_TYPE,
    PLAIN,
    cast,
    from_python,
    is_half,
    unmasked,
)
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array, ArrayLike
from hpcstrat.errors import HpcstratError

__all__ = [
    "array_module",
    "as_array",
    "device_of",
    "is_device",
    "is_half",
    "nvtx_ranges",
    "to_device",
    "to_host",
    "to_reducible",
]

# DLPack's device types whose memory CUDA kernels can read: kDLCUDA, kDLCUDAManaged.
_DLPACK_GPU = (2, 13)
# Size of the largest numbers that MAX and MIN take, which compare them as integers.
_MOST_ORDERED_BYTES = 8
# Errors that libraries raise for arrays or dtypes that they cannot convert.
_REFUSALS = (BufferError, RuntimeError, TypeError)


def is_device(value: Any) -> bool:
    """Return whether a value is a CuPy array, which is in the memory of a GPU.

    The test is cheap, and never loads CuPy. Returns False for device arrays of other
    libraries, which `as_array` converts.
    """
    # While another thread is importing CuPy, the module has no ndarray yet.
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))


def array_module(value: Any) -> Any:
    """Return the module of an array: ``cupy`` if it is on a GPU, else ``numpy``."""
    return sys.modules["cupy"] if is_device(value) else np


def device_of(array: Array) -> str:
    """Return the name of the device whose memory holds the array, such as ``GPU:0``.

    A GPU's number is its CUDA device number in this process; the host is ``CPU:0``.
    """
    device: Any = array.device
    return f"GPU:{device.id}" if is_device(array) else "CPU:0"


def to_host(array: Array) -> Array:
    """Return a NumPy array unchanged, or wait for and copy a CuPy array to the host."""
    if not is_device(array):
        return array
    host: Array = sys.modules["cupy"].asnumpy(array)
    return host


def to_device(array: Array) -> Array:
    """Return a CuPy array unchanged, or a NumPy array copied to this thread's GPU.

    The copy runs in the program's current stream. Loads CuPy.
    """
    if is_device(array):
        return array
    import cupy

    copy: Array = cupy.asarray(array)
    return copy


def _as_foreign(value: Any) -> Array | None:
    """Return another library's device array as a CuPy array; None for other values."""
    if type(value) is np.ndarray or isinstance(value, (np.generic, *PLAIN)):
        return None
    where = getattr(type(value), "__dlpack_device__", None)
    if where is None and getattr(value, "__cuda_array_interface__", None) is None:
        return None
    try:
        if where is not None and where(value)[0] not in _DLPACK_GPU:
            return None
        import cupy

        shared = cupy.asarray(value) if where is None else cupy.from_dlpack(value)
    except _REFUSALS as error:
        raise _unreadable(value, "CuPy", error) from error
    return borrow(shared)


def _unreadable(value: Any, reader: str, error: Exception) -> ValueError:
    """Return the ValueError for an array that NumPy or CuPy cannot read.

    Errors of a GPU, and hpcstrat's own errors, are re-raised unchanged.
    """
    if isinstance(error, HpcstratError) or hasattr(error, "status"):
        raise error
    kind = type(value)
    return ValueError(
        f"expected an array that {reader} can read, found a "
        f"{kind.__module__}.{kind.__qualname__} of "
        f"{getattr(value, 'dtype', 'no dtype')}: {error}; detach it from the gradient "
        "computation, or cast it"
    )


def _from_list(value: Any) -> Array | None:
    """Convert a list that begins with a CuPy array to one array; None for other values.

    An example is a list of the rows of a dataset that were read one by one.
    """
    first = value
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if first is value or not is_device(first):
        return None
    import cupy

    whole: Array = cupy.asarray(value)
    return whole


def as_array(value: ArrayLike, dtype: Any = None) -> Array:
    """Return a value as an array, without a copy if possible.

    GPU arrays of any library become CuPy arrays; other values become plain NumPy arrays
    in native byte order. Arrays keep their dtype; Python floats become float32, and
    Python integers int32. Raises ValueError if ``dtype`` cannot hold the values, for
    values that are not numbers, and for masked arrays. Raises TypeError for dtypes that
    contain object references, which are meaningless in another process.
    """
    wanted = None if dtype is None else np.dtype(dtype)
    device = value if is_device(value) else _as_foreign(value)
    if device is None:
        device = _from_list(value)
    if device is not None:
        return device if wanted is None else cast(device, wanted)
    array = _on_host(value, wanted)
    if array.dtype.kind == "O":
        raise ValueError(
            f"expected numbers, found {type(value).__name__} {value!r:.80}; pass an "
            "array, or nested sequences of numbers of equal lengths"
        )
    if array.dtype.hasobject:
        raise TypeError(
            "expected an array that contains all of its data, found dtype "
            f"{array.dtype}, which refers to other memory; use a type of fixed size"
        )
    if wanted is not None:
        array = cast(array, wanted)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _on_host(value: Any, wanted: np.dtype[Any] | None) -> Array:
    """Return a host value as a NumPy array; Python numbers are cast to ``wanted``."""
    if isinstance(value, np.ndarray):
        # Subclasses, such as numpy.matrix, become plain arrays.
        return np.asarray(unmasked(value))
    if isinstance(value, np.generic) or hasattr(value, "__array__"):
        try:
            return np.asarray(value)
        except _REFUSALS as error:
            raise _unreadable(value, "NumPy", error) from error
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    try:
        return from_python(value, wanted)
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"expected numbers that fit {wanted or 'an array'}, found "
            f"{value!r:.80}; pass another dtype, or an array"
        ) from error


def to_reducible(value: ArrayLike, op: ReduceOp = ReduceOp.SUM) -> Array:
    """Return a value as an array; ValueError if ``op`` does not take its dtype.

    Python integers become int64, so that their sum does not overflow. Python floats
    become float32, as in tf.distribute.
    """
    if type(value) is np.ndarray:
        array = value
    else:
        array = as_array(value, np.int64 if type(value) is int else None)
    dtype = array.dtype
    if not op.adds:
        _require_order(dtype, op)
        return array if dtype.isnative else array.astype(dtype.newbyteorder("="))
    # CUDA has no long double.
    if dtype.char in "gG" and is_device(array):
        raise ValueError(
            f"expected an array that a GPU can sum, found dtype {dtype}; cast it to "
            "float64 or complex128"
        )
    if dtype.kind in "iufc" and dtype.num < FIRST_FOREIGN_TYPE:
        return array if dtype.isnative else array.astype(dtype.newbyteorder("="))
    if is_half(dtype):
        return array
    advice = (
        "reduce it by ALL or ANY, or cast it, for instance to int32 to count"
        if dtype.kind == "b"
        else "reduce integer, floating or complex arrays"
    )
    raise ValueError(
        f"expected an array with a sum over replicas, found dtype {dtype}; {advice}"
    )


def _require_order(dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Raise ValueError if an operation that compares elements does not take a dtype."""
    booleans = dtype.kind == "b"
    if op is ReduceOp.ALL or op is ReduceOp.ANY:
        if not booleans:
            raise ValueError(
                f"expected booleans for {op.name}, found dtype {dtype}; compare the "
                "values first, for instance value > 0"
            )
        return
    plain = dtype.num < FIRST_FOREIGN_TYPE and dtype.kind in "iuf"
    if booleans or is_half(dtype) or (plain and dtype.itemsize <= _MOST_ORDERED_BYTES):
        return
    if dtype.kind == "c":
        advice = "reduce its absolute values, or its real and imaginary parts"
    else:
        advice = "cast it, for instance to float64"
    raise ValueError(
        "expected booleans, integers or floating-point numbers of at most 8 bytes for "
        f"{op.name}, found dtype {dtype}; {advice}"
    )


def nvtx_ranges() -> Any:
    """Return ``cupy.cuda.nvtx``, which marks ranges for Nsight, or None if missing.

    Loads CuPy.
    """
    try:
        from cupy.cuda import nvtx
    except ImportError:
        return None
    return nvtx if hasattr(nvtx, "RangePush") else None
