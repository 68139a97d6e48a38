"""The work of one reduction, with the copies and sums that all algorithms share.

An algorithm is a generator, see `hpcstrat.engine.channel.waitable`. It sums every
element over the replicas, divides the sums for a mean, and writes them into the
results, which may be the memory of the sources. MAX and MIN are made in the same way,
with ``numpy.maximum`` of unsigned integers instead of the addition, see
`hpcstrat.engine.arrays.order_keys`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.packing import Piece, Run
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.typing import Array

__all__ = [
    "IN_HEADER",
    "Algorithm",
    "Choice",
    "Work",
    "add_in_order",
    "divide",
    "drain",
    "fill",
    "segment_of",
    "slice_of",
]

IN_HEADER = "in the header of the call"
"""Description of a sum in the header, for `Choice.how`."""

_CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Work:
    """The arrays of one reduction, and how they are cut into pieces."""

    call: Call
    # Pieces to reduce, in order; at least one.
    pieces: Iterable[Piece]
    # This replica's values, flat and contiguous; of different lengths.
    sources: Sequence[Array]
    # Arrays for the results: flat and contiguous. Each result is the memory of its
    # source, or overlaps with no source.
    results: Sequence[Array]
    piece_bytes: int
    # Divisor for a mean; 0 for a sum.
    divisor: int = 0
    # Combines two terms: ``numpy.add``, or ``numpy.maximum`` of unsigned integers.
    function: np.ufunc = np.add


Algorithm = Callable[[Work, Channel], WaitSteps]


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm, with the size of its pieces."""

    algorithm: Algorithm
    piece_bytes: int
    # True if the call is small: each rank adds all values, or the header carries them.
    small: bool = False
    # True if a call by this algorithm can be started now and awaited later.
    starts: bool = True
    # True if a `KernelPlan` or `MappedSum` may replace this algorithm.
    in_worker: bool = False
    # Description of the algorithm for timelines and `hpcstrat info`.
    how: str = ""

    def with_options(self, **options: Any) -> Choice:
        """Return a copy of this choice that passes more arguments to its algorithm."""
        return replace(self, algorithm=functools.partial(self.algorithm, **options))


def fill(run: Run, sources: Sequence[Array], buffer: Array) -> None:
    """Copy a run's values from the sources to a buffer of the run's size and dtype."""
    if len(run.spans) == 1:
        index, start, stop, _ = run.spans[0]
        call_without_fp_warnings(assign, buffer, ..., sources[index][start:stop])
        return
    for index, start, stop, at in run.spans:
        low = at - run.start
        part = buffer[low : low + stop - start]
        call_without_fp_warnings(assign, part, ..., sources[index][start:stop])


def drain(run: Run, results: Sequence[Array], buffer: Array) -> None:
    """Copy a run's values from a buffer of the run's size and dtype to the results."""
    for index, start, stop, at in run.spans:
        low = at - run.start
        part = buffer[low : low + stop - start]
        call_without_fp_warnings(assign, results[index][start:stop], ..., part)


def add_in_order(
    terms: Sequence[Array],
    total: Array,
    scratch: Array | None = None,
    function: Callable[..., Any] = np.add,
) -> None:
    """Add arrays in their order into ``total``, or combine them by another ufunc.

    ``total`` may be one of the first two terms. If there is a ``scratch`` array of at
    least the same length, ``total`` may be any of the terms.
    """
    if len(terms) == 1:
        if terms[0] is not total:
            call_without_fp_warnings(assign, total, ..., terms[0])
        return
    if scratch is None or len(terms) == 2:
        scratch = total
    scratch = scratch[: len(total)]
    *first, last = terms
    partial = first[0]
    for term in first[1:]:
        call_without_fp_warnings(function, partial, term, out=scratch)
        partial = scratch
    call_without_fp_warnings(function, partial, last, out=total)


def segment_of(
    size: int, dtype: np.dtype[Any], number: int, of: int
) -> tuple[int, int]:
    """Return the bounds of segment ``number``, which consists of whole cache lines."""
    line = _CACHE_LINE_BYTES // dtype.itemsize
    length = -(-size // (of * line)) * line
    return min(number * length, size), min((number + 1) * length, size)


def slice_of(count: int, number: int, of: int) -> slice:
    """Return slice ``number`` of ``count`` elements in ``of`` nearly equal slices."""
    return slice(count * number // of, count * (number + 1) // of)


def divide(sums: Array, divisor: int) -> None:
    """Divide sums in place by ``divisor``; if ``divisor`` is 0, do nothing."""
    if not divisor:
        return
    if divisor & (divisor - 1) or sums.dtype.kind != "f":
        call_without_fp_warnings(np.divide, sums, divisor, sums)
    else:
        # Multiply by the inverse of a power of two: faster, and the same bits.
        call_without_fp_warnings(np.multiply, sums, 1 / divisor, sums)
