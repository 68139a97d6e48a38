"""Plans that group arrays into buffers or pieces, and copies according to a plan.

A broadcast packs all arrays of one dtype into one buffer. A reduction needs no such
buffer: it treats the arrays as concatenated, and cuts them into pieces that fit a
cache.
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
    """The arrays of one dtype, laid out one after the other."""

    dtype: np.dtype[Any]
    # Indices of the bucket's arrays among all arrays, in order.
    indices: tuple[int, ...]
    # Start and end of each array in the bucket, in elements, and the array's shape.
    parts: tuple[tuple[int, int, tuple[int, ...]], ...]
    size: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A plan that groups arrays of these signatures (dtype and shape) into buckets."""

    signatures: tuple[Signature, ...]
    # One bucket for each dtype, in the order of first appearance.
    buckets: tuple[Bucket, ...]


# Runs begin at multiples of a cache line.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one dtype in a piece.

    ``start`` is counted in elements of ``dtype``, the type in which the sum is
    computed.
    """

    dtype: np.dtype[Any]
    start: int
    size: int
    # For each array: its index; the first element and the end (exclusive) of the range,
    # in C order; the position of the first element in the piece. All numbers count
    # elements.
    spans: tuple[tuple[int, int, int, int], ...]


Piece = tuple[Run, ...]


def cut(
    signatures: Sequence[Signature], means: bool, piece_bytes: int
) -> Iterator[Piece]:
    """Cut arrays, concatenated by dtype, into pieces.

    The result is the same on every rank for the same signatures. A piece has at most
    ``piece_bytes`` (at least 64), measured in the types of `wire_dtype`.
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
    """Return the spans (as in `Run`) of a bucket's elements from ``low`` to ``high``.

    The position of an element is its index in the bucket plus ``shift``.
    """
    starts = [start for start, _, _ in bucket.parts]
    spans = []
    for number in range(bisect.bisect_right(starts, low) - 1, len(starts)):
        start, end, _ = bucket.parts[number]
        if start >= high:
            break
        first, last = max(low, start), min(high, end)
        if first < last:
            index = bucket.indices[number]
            spans.append((index, first - start, last - start, first + shift))
    return tuple(spans)


@functools.lru_cache(maxsize=1024)
def plan(signatures: tuple[Signature, ...]) -> Pack:
    """Return the plan of one buffer per dtype; equal signatures give equal plans."""
    # A dict keeps the order of first appearance, which is the same on all ranks.
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
    """Copy a bucket's arrays into a flat, contiguous buffer of the bucket's dtype.

    ``arrays`` are all arrays of the plan, in any memory layout.
    """
    for index, (start, end, shape) in zip(bucket.indices, bucket.parts, strict=True):
        np.copyto(flat[start:end].reshape(shape), arrays[index], casting="unsafe")
    return flat


def unpack(bucket: Bucket, flat: Array) -> list[Array]:
    """Return the arrays of a packed buffer as views of the buffer, in their shapes."""
    return [flat[start:end].reshape(shape) for start, end, shape in bucket.parts]


def side_by_side(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Return consecutive views of a flat buffer, in these shapes."""
    views, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        views.append(flat[start:end].reshape(shape))
        start = end
    return views


def wire_dtype(dtype: np.dtype[Any], means: bool) -> tuple[np.dtype[Any], bool]:
    """Return the dtype in which values are added, and whether the sum is cast back."""
    # Half-precision types have too few bits for sums.
    if dtype.itemsize == 2 and is_half(dtype):
        return np.dtype(np.float32), True
    if dtype.kind in "iu" and means:
        return np.dtype(np.float64), False
    # Some MPI libraries saturate sums of narrow integers, but NumPy wraps around.
    if dtype.kind in "iu" and dtype.itemsize < np.dtype(np.int32).itemsize:
        return np.dtype(np.int32), True
    return dtype.newbyteorder("="), False
