"""The work of one reduction, with the copies and sums that all algorithms share.

An algorithm is a generator, see `hpcstrat.engine.channel.waitable`. It finds the sum of
every element over the replicas, divides it where a mean is wanted, and leaves it in the
results, which may be the sources themselves.
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

_CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Work:
    """One reduction."""

    call: Call
    # Pieces to reduce, in order; at least one.
    pieces: Iterable[Piece]
    # This replica's values, flat and contiguous; of different lengths.
    sources: Sequence[Array]
    # Memory for the results: contiguous, of their types; each is the memory of its
    # source, or overlaps with none.
    results: Sequence[Array]
    piece_bytes: int
    # By what to divide the sums; 0 for sums.
    divisor: int = 0


Algorithm = Callable[[Work, Channel], WaitSteps]


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm, with the size of its pieces."""

    algorithm: Algorithm
    piece_bytes: int
    # Whether values are few: each rank adds all of them, or the header carries them.
    small: bool = False
    # Whether it can be started, and awaited later.
    starts: bool = True
    # Whether the kernel, or `reduce_in_mapped_memory`, may take its place.
    in_worker: bool = False
    # In words, for timelines and `hpcstrat info`.
    how: str = ""

    def with_options(self, **options: Any) -> Choice:
        """Return the same choice, whose algorithm gets more arguments."""
        return replace(self, algorithm=functools.partial(self.algorithm, **options))


def fill(run: Run, sources: Sequence[Array], buffer: Array) -> None:
    """Copy a run of all sources of a work into a buffer of the run's size and type."""
    if len(run.spans) == 1:
        index, start, stop, _ = run.spans[0]
        call_without_fp_warnings(assign, buffer, ..., sources[index][start:stop])
        return
    for index, start, stop, at in run.spans:
        low = at - run.start
        part = buffer[low : low + stop - start]
        call_without_fp_warnings(assign, part, ..., sources[index][start:stop])


def drain(run: Run, results: Sequence[Array], buffer: Array) -> None:
    """Copy a buffer of a run's size and type into all results of a work."""
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

    That may be one of the first two terms, or any term where there is a ``scratch``, at
    least as long.
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
    """Return where one of several segments of an array begins and ends.

    Segments are whole cache lines, so that no two ranks write to the same one.
    """
    line = _CACHE_LINE_BYTES // dtype.itemsize
    length = -(-size // (of * line)) * line
    return min(number * length, size), min((number + 1) * length, size)


def slice_of(count: int, number: int, of: int) -> slice:
    """Return one of several parts of nearly equal lengths."""
    return slice(count * number // of, count * (number + 1) // of)


def divide(sums: Array, divisor: int) -> None:
    """Divide sums in their place; where they are no means, ``divisor`` is 0."""
    if not divisor:
        return
    if divisor & (divisor - 1) or sums.dtype.kind != "f":
        call_without_fp_warnings(np.divide, sums, divisor, sums)
    else:
        # By a power of two: the same bits in less time.
        call_without_fp_warnings(np.multiply, sums, 1 / divisor, sums)
