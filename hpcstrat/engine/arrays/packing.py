"""Plans that group arrays into pieces, and the copies that follow them.

A broadcast packs the arrays of one type into one buffer. A reduction never holds such a
buffer: it cuts the arrays, one behind the other, into pieces that fit a cache.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_half
from hpcstrat.engine.typing import Array

__all__ = [
    "Bucket",
    "Pack",
    "Piece",
    "Run",
    "cut",
    "pack",
    "plan",
    "side_by_side",
    "spans_of",
    "unpack",
    "wire_dtype",
]

Signature = tuple[np.dtype[Any], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The arrays of one type, laid out one behind the other."""

    dtype: np.dtype[Any]
    # Indices of the arrays, in order.
    indices: tuple[int, ...]
    # Start and end of each array in the pack, in elements, and the array's shape.
    parts: tuple[tuple[int, int, tuple[int, ...]], ...]
    size: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A plan for arrays of these signatures."""

    signatures: tuple[Signature, ...]
    # One for each type, in the order in which the types appear.
    buckets: tuple[Bucket, ...]


# Runs begin at multiples of a cache line.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of one type that lie one behind the other in a piece.

    ``start`` is counted in elements of the type in which they are added.
    """

    dtype: np.dtype[Any]
    start: int
    size: int
    # Index of the array; its first element and the one behind its last, in C order; the
    # place of the first in the piece. All in elements.
    spans: tuple[tuple[int, int, int, int], ...]


Piece = tuple[Run, ...]


def cut(
    signatures: Sequence[Signature], means: bool, piece_bytes: int
) -> Iterator[Piece]:
    """Cut arrays, laid one behind the other by type, into pieces.

    The same on every rank for the same arrays. ``piece_bytes``, at least 64, is the
    most that a piece holds in the types of the wire.
    """
    runs: list[Run] = []
    used = 0
    for bucket in plan(tuple(signatures)).buckets:
        dtype, _ = wire_dtype(bucket.dtype, means)
        done = 0
        while done < bucket.size:
            room = (piece_bytes - used) // dtype.itemsize
            if room < 1:
                yield tuple(runs)
                runs, used = [], 0
                continue
            size = min(room, bucket.size - done)
            start = used // dtype.itemsize
            spans = spans_of(bucket, done, done + size, start - done)
            runs.append(Run(dtype, start, size, spans))
            done += size
            used += size * dtype.itemsize
            used += -used % _ALIGNMENT_BYTES
    if runs:
        yield tuple(runs)


def spans_of(
    bucket: Bucket, low: int, high: int, shift: int
) -> tuple[tuple[int, int, int, int], ...]:
    """Return the spans, as `Run` has them, of a bucket's arrays between two elements.

    An element of the bucket, plus ``shift``, is its place.
    """
    starts = [start for start, _, _ in bucket.parts]
    spans = []
    for place in range(bisect.bisect_right(starts, low) - 1, len(starts)):
        start, end, _ = bucket.parts[place]
        if start >= high:
            break
        first, last = max(low, start), min(high, end)
        if first < last:
            index = bucket.indices[place]
            spans.append((index, first - start, last - start, first + shift))
    return tuple(spans)


@functools.lru_cache(maxsize=1024)
def plan(signatures: tuple[Signature, ...]) -> Pack:
    """Plan which arrays share a buffer; the same on every rank for the same arrays."""
    # The order of first appearance: the same on all ranks, unlike that of hashes.
    by_dtype: dict[np.dtype[Any], list[int]] = {}
    for index, (dtype, _) in enumerate(signatures):
        by_dtype.setdefault(dtype, []).append(index)
    buckets = []
    for dtype, indices in by_dtype.items():
        parts, end = [], 0
        for index in indices:
            start, shape = end, signatures[index][1]
            end = start + math.prod(shape)
            parts.append((start, end, shape))
        buckets.append(Bucket(dtype, tuple(indices), tuple(parts), end))
    return Pack(signatures, tuple(buckets))


def pack(bucket: Bucket, arrays: Sequence[Array], flat: Array) -> Array:
    """Copy a bucket's arrays into one flat, contiguous buffer, cast to its type.

    ``arrays`` are all those of the plan, in any memory order.
    """
    for index, (start, end, shape) in zip(bucket.indices, bucket.parts, strict=True):
        np.copyto(flat[start:end].reshape(shape), arrays[index], casting="unsafe")
    return flat


def unpack(bucket: Bucket, flat: Array) -> list[Array]:
    """Return the parts of a flat buffer in their own shapes: views of the buffer."""
    return [flat[start:end].reshape(shape) for start, end, shape in bucket.parts]


def side_by_side(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Return views of a flat buffer, one behind the other."""
    views, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        views.append(flat[start:end].reshape(shape))
        start = end
    return views


def wire_dtype(dtype: np.dtype[Any], means: bool) -> tuple[np.dtype[Any], bool]:
    """Return the type in which values are added, and whether the sum is cast back."""
    # Half types have too few digits for sums.
    if dtype.itemsize == 2 and is_half(dtype):
        return np.dtype(np.float32), True
    if dtype.kind in "iu" and means:
        return np.dtype(np.float64), False
    # Some MPI libraries add narrow integers with saturation; NumPy wraps around.
    if dtype.kind in "iu" and dtype.itemsize < np.dtype(np.int32).itemsize:
        return np.dtype(np.int32), True
    return dtype.newbyteorder("="), False
