"""Arrays of all fixed-size types, in many memory layouts, with repeatable contents.

Each rank can compute the contents of all ranks' arrays, because they depend only on a
key of integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

__all__ = [
    "FORMS",
    "NUMBERS",
    "TYPES",
    "clear",
    "contents",
    "difference",
    "empty",
    "formed",
    "length",
    "numbers",
    "partition",
    "shape_of",
    "window",
]

Array = np.ndarray[Any, Any]
Key = tuple[int, ...]

_HALVES = ["e", *([ml_dtypes.bfloat16] if ml_dtypes is not None else [])]
NUMBERS = [np.dtype(code) for code in (*"bBhHiIqQfdgFDG", *_HALVES)]
"""The types that sums take."""

TYPES = [
    *NUMBERS,
    *map(np.dtype, ("?", "S5", "U3", "M8[s]", "m8[ms]", "V7")),
    np.dtype([("a", "i4"), ("b", "f8"), ("c", "S3")]),
    np.dtype([("a", "u1"), ("b", "f8", (2,))], align=True),
]
"""All types of calls that only move data."""

# Offsets and periods are no powers of two, so that a swap of pieces changes values.
_POOL = np.random.default_rng(53).integers(0, 256, 1 << 21, np.uint8)
_MOST_START, _LEAST_PERIOD, _MORE_PERIOD = 1_000_003, 700_001, 300_007
_MOST_BYTES = 6_000_000


def _octets(nbytes: int, key: Key) -> Array:
    mark = hash(key)
    start, period = mark % _MOST_START, _LEAST_PERIOD + (mark >> 32) % _MORE_PERIOD
    if nbytes <= period:
        return _POOL[start : start + nbytes].copy()
    return np.resize(_POOL[start : start + period], nbytes)


def contents(dtype: np.dtype[Any], count: int, key: Key) -> Array:
    """Return a flat array of valid values of a type, with all bits where possible."""
    if dtype.kind == "?" or dtype == np.bool_:
        return (_octets(count, key) & 1).view(np.bool_)
    if dtype.kind in "SU":
        letters = _octets(
            count * (dtype.itemsize // (4 if dtype.kind == "U" else 1)), key
        )
        letters = letters % 26 + 65
        wide = letters.astype(np.uint32) if dtype.kind == "U" else letters
        return wide.view(dtype)
    if dtype.char in "gG":
        # Padding bytes of long doubles are not part of their values.
        return numbers(dtype, count, key)
    octets = _octets(count * dtype.itemsize, key)
    found = octets.view(dtype)
    if dtype.names and dtype.isalignedstruct:
        found = np.zeros(count, dtype)
        # Without NaN, because the padding prevents a comparison of bytes.
        for name in dtype.names:
            values = octets.view(dtype)[name]
            found[name] = np.where(values == values, values, 7)
    return found


def numbers(dtype: np.dtype[Any], count: int, key: Key) -> Array:
    """Return small integers of a type, whose sums and products are exact."""
    return (_octets(count, key) % 3).astype(dtype)


def difference(found: Any, wanted: Array) -> str:
    """Return a description of the first difference of two arrays, or an empty text."""
    found = np.asarray(found)
    name = f"{wanted.dtype}{list(wanted.shape)}"
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return f"{name} became {found.dtype}{list(found.shape)}"
    one, other = found.reshape(-1), wanted.reshape(-1)
    if wanted.dtype.char in "gG" or wanted.dtype.isalignedstruct:
        wrong = one != other
    else:
        shape = (wanted.size, wanted.dtype.itemsize)
        rows = [
            np.ascontiguousarray(a).view(np.uint8).reshape(shape) for a in (one, other)
        ]
        if np.array_equal(*rows):
            return ""
        wrong = (rows[0] != rows[1]).any(axis=1)
    places = np.flatnonzero(wrong)
    if not places.size:
        return ""
    first = int(places[0])
    return (
        f"{name}: {places.size} of {wanted.size} elements differ, from {first} to "
        f"{int(places[-1])}: {one[first]!r} instead of {other[first]!r}"
    )


def clear(array: Array) -> None:
    """Set all bytes of a contiguous array to zero."""
    array.reshape(-1).view(np.uint8)[...] = 0


# Sizes and shapes.


def length(draw: Random, itemsize: int, most_bytes: int = _MOST_BYTES) -> int:
    """Draw a number of elements: mostly small, at times of several pieces."""
    kind = draw.random()
    if kind < 0.1:
        return draw.choice((0, 1, 1, 2, 3))
    most = (
        300 if kind < 0.6 else 5_000 if kind < 0.85 else 100_000 if kind < 0.95 else 0
    )
    if kind > 0.98:
        most = most_bytes
    elif not most:
        # A whole number of the pieces in which large arrays are copied, or nearly so.
        piece = draw.choice((64, 128, 256, 512)) << 10
        return max(
            (draw.choice((1, 2, 3)) * piece) // itemsize + draw.choice((-1, 0, 1)), 0
        )
    return draw.randrange(min(most, most_bytes) // itemsize + 2)


def shape_of(draw: Random, count: int) -> tuple[int, ...]:
    """Draw a shape with this number of elements."""
    if count == 1 and draw.random() < 0.5:
        return ()
    if count and draw.random() < 0.3:
        rows = draw.choice([n for n in (1, 2, 3, 5) if count % n == 0])
        return (rows, count // rows)
    return (count,)


# Memory.


def empty(draw: Random, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Return a contiguous array, at times misaligned or a part of a larger array."""
    shape, kind = tuple(shape), draw.random()
    nbytes = math.prod(shape) * dtype.itemsize
    if kind < 0.15:
        return np.ndarray(
            shape, dtype, bytearray(nbytes + 8), offset=draw.randrange(1, 8)
        )
    if kind < 0.4:
        offset = dtype.itemsize * draw.randrange(5)
        return np.ndarray(shape, dtype, bytearray(nbytes + offset + 64), offset=offset)
    return np.zeros(shape, dtype)


def partition(
    draw: Random, dtype: np.dtype[Any], shapes: Sequence[tuple[int, ...]]
) -> tuple[Array | None, list[Array]]:
    """Return arrays of some shapes, and the flat array that has them all, or None."""
    if draw.random() < 0.3:
        return None, [empty(draw, dtype, shape) for shape in shapes]
    counts = [math.prod(shape) for shape in shapes]
    whole = empty(draw, dtype, (sum(counts),))
    parts, start = [], 0
    for shape, count in zip(shapes, counts, strict=True):
        parts.append(whole[start : start + count].reshape(shape))
        start += count
    return whole, parts


def window(draw: Random, whole: Array, shape: tuple[int, ...]) -> Array:
    """Return a view of some elements of a flat array, which has at least as many."""
    count = math.prod(shape)
    start = draw.randrange(whole.size - count + 1)
    return whole[start : start + count].reshape(shape)


def _strided(array: Array) -> Array:
    return np.repeat(array, 2, axis=-1)[..., ::2]


def _misaligned(array: Array) -> Array:
    found = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes + 1), offset=1)
    found[...] = array
    return found


def _read_only(array: Array) -> Array:
    found = array.copy()
    found.flags.writeable = False
    return found


FORMS: list[Callable[[Array], Array]] = [
    *[np.ndarray.copy] * 3,
    np.asfortranarray,
    _strided,
    _misaligned,
    _read_only,
    lambda array: array[::-1].copy()[::-1],
    lambda array: array.T.copy().T,
]
"""Functions that copy an array of at least one dimension to another memory layout."""


def formed(draw: Random, array: Array) -> Array:
    """Return a copy of an array in a random memory layout."""
    return draw.choice(FORMS)(array) if array.ndim else array.copy()
