"""Order keys: integers whose largest one stands for the MAX or MIN of values.

Keys are unsigned. The largest key belongs to the maximum (or minimum) of the values, to
NaN if there is one, and in a maximum to 0.0 rather than to -0.0. The maximum of
integers is the same in any order of the terms, so that every algorithm, every MPI
library and NCCL return the same bits, which is not true of floating-point numbers.
``engine/native/elements.h`` computes the same keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import array_module, is_device, is_half
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array

__all__ = ["from_keys", "largest_along", "to_keys"]

# Number of elements that are converted together on the host.
_BLOCK = 1 << 15


def to_keys(array: Array, op: ReduceOp) -> Array:
    """Return the keys of an array's elements: a new contiguous array of its shape.

    ``op`` is MAX or MIN, or ANY or ALL of booleans, which are the same. The keys have
    the size of the elements.
    """
    keys: Array = array.copy("C").view(f"u{array.dtype.itemsize}")
    if array.dtype.kind in "biu":
        keys ^= _mask(array.dtype, op)
        return keys
    for bits in _blocks(keys):
        _encode(bits, array.dtype, op)
    return keys


def _encode(bits: Array, dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Replace the bits of floating-point numbers by keys, in place."""
    sign, ones = _masks(bits.dtype)
    nans = bits & ~sign > _infinity(dtype)
    if _is_least(op):
        bits ^= sign
    # Invert all bits of negative numbers, and the sign of the others.
    bits ^= (0 - (bits >> _last_bit(bits))) | sign
    bits[nans] = ones


def from_keys(keys: Array, dtype: np.dtype[Any], op: ReduceOp) -> Array:
    """Return the values of contiguous keys, as an array of ``dtype`` in their memory.

    All NaNs have the bits of ``numpy.nan``.
    """
    if dtype.kind in "biu":
        keys ^= _mask(dtype, op)
    else:
        for bits in _blocks(keys):
            _decode(bits, dtype, op)
    values: Array = keys.view(dtype)
    return values


def _decode(bits: Array, dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Replace keys by the bits of floating-point numbers, in place."""
    sign, _ = _masks(bits.dtype)
    bits ^= ((bits >> _last_bit(bits)) - 1) | sign
    if _is_least(op):
        bits ^= sign
    nan = np.array(np.nan, dtype).view(bits.dtype)
    bits[bits & ~sign > _infinity(dtype)] = nan[()]


def largest_along(array: Array, axes: tuple[int, ...], op: ReduceOp) -> Array:
    """Return the MAX, MIN, ALL or ANY of an array along axes.

    Without elements, the result is the value that changes no other: for MAX, minus
    infinity, the smallest integer, or False.
    """
    if math.prod(array.shape[axis] for axis in axes):
        keys = array_module(array).asarray(to_keys(array, op).max(axis=axes))
        return from_keys(keys, array.dtype, op)
    shape = [n for axis, n in enumerate(array.shape) if axis not in axes]
    neutral: Array = array_module(array).full(shape, _neutral(array.dtype, op))
    return neutral.astype(array.dtype)


def _neutral(dtype: np.dtype[Any], op: ReduceOp) -> Any:
    if dtype.kind == "b":
        return _is_least(op)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return dtype.type(limits.max if _is_least(op) else limits.min)
    return np.inf if _is_least(op) else -np.inf


def _is_least(op: ReduceOp) -> bool:
    return op is ReduceOp.MIN or op is ReduceOp.ALL


def _blocks(keys: Array) -> Iterator[Array]:
    """Yield flat parts of contiguous keys, whose temporary arrays fit a cache."""
    flat = keys.reshape(-1)
    most = max(1, flat.size) if is_device(keys) else _BLOCK
    for start in range(0, flat.size, most):
        yield flat[start : start + most]


def _last_bit(keys: Array) -> int:
    return 8 * int(keys.dtype.itemsize) - 1


def _masks(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the sign bit, and all bits, in an unsigned type."""
    ones = np.iinfo(dtype).max
    return dtype.type(ones // 2 + 1), dtype.type(ones)


def _mask(dtype: np.dtype[Any], op: ReduceOp) -> Any:
    """Return the bits in which booleans or integers differ from their keys."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign, ones = _masks(unsigned)
    mask = sign if dtype.kind == "i" else unsigned.type(0)
    return mask ^ ones if _is_least(op) else mask


def _infinity(dtype: np.dtype[Any]) -> Any:
    """Return the bits of infinity; the bits of NaNs are larger, without the sign."""
    if is_half(dtype) and dtype.char != "e":
        return np.uint16(0x7F80)
    bits = np.array(np.inf, dtype).view(f"u{dtype.itemsize}")
    return bits[()]
