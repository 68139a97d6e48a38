"""What a reduction has to do, and the copies and sums that all algorithms share.

An algorithm is a generator. It yields None once what can be done before the call's
header is done, and from then on whatever it waits for. It finds the sum of every
element over the replicas, divides it where a mean is wanted, and leaves it in the
results, which may be the sources themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpcstrat.arrays.casting import assign, quietly
from hpcstrat.arrays.packing import Piece, Run
from hpcstrat.channel.awaited import Awaits
from hpcstrat.channel.call import Call
from hpcstrat.channel.channel import Channel
from hpcstrat.typing import Array

__all__ = ["Algorithm", "Work", "drain", "fill"]


@dataclass(frozen=True, slots=True)
class Work:
    """One reduction.

    Parameters
    ----------
    call : Call
        For messages.
    pieces : iterable of Piece
        What to reduce, in order; at least one.
    sources : sequence of ndarray of shape (n,)
        This replica's values, contiguous; ``n`` differs between arrays.
    results : sequence of ndarray of shape (n,)
        Where the results go: contiguous, of the types of the results; each is the
        memory of its source, or overlaps with none.
    piece_bytes : int
        Most bytes of a piece.
    divisor : int
        By what to divide the sums; 0 for sums.
    waits : bool
        Whether blocking calls of MPI may be made.
    """

    call: Call
    pieces: Iterable[Piece]
    sources: Sequence[Array]
    results: Sequence[Array]
    piece_bytes: int
    divisor: int = 0
    waits: bool = True


Algorithm = Callable[[Work, Channel], Awaits]


def fill(run: Run, sources: Sequence[Array], buffer: Array) -> None:
    """Copy a run of the sources into a buffer.

    Not collective.

    Parameters
    ----------
    run : Run
        Which elements.
    sources : sequence of ndarray of shape (n,)
        All arrays of the work.
    buffer : ndarray of shape (run.size,)
        Of the run's type.
    """
    if len(run.spans) == 1:
        index, start, stop, _ = run.spans[0]
        quietly(assign, buffer, ..., sources[index][start:stop])
        return
    for index, start, stop, at in run.spans:
        low = at - run.start
        part = buffer[low : low + stop - start]
        quietly(assign, part, ..., sources[index][start:stop])


def drain(run: Run, results: Sequence[Array], buffer: Array) -> None:
    """Copy a run of a buffer into the results.

    Not collective.

    Parameters
    ----------
    run : Run
        Which elements.
    results : sequence of ndarray of shape (n,)
        All results of the work.
    buffer : ndarray of shape (run.size,)
        Of the run's type.
    """
    for index, start, stop, at in run.spans:
        low = at - run.start
        part = buffer[low : low + stop - start]
        quietly(assign, results[index][start:stop], ..., part)
