"""Reduction of arrays on GPUs: the part that all transports share.

A piece is packed into a buffer of the transport by a kernel for each run, is reduced,
and is unpacked by a kernel for each run. All this is work of a lane, which the host
only describes; results are ready for the program's stream, in its order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from hpcstrat.engine.arrays.kinds import is_half
from hpcstrat.engine.arrays.packing import Piece, Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.work import Work
from hpcstrat.engine.gpu import kernels
from hpcstrat.engine.gpu.kernels import Span
from hpcstrat.engine.gpu.streams import Lane, Mark

__all__ = [
    "Transport",
    "divide",
    "pack_run",
    "reduce_on_device",
    "straight",
    "unpack_run",
]

# Arrays of this size among others are reduced where they lie. To pack one and unpack it
# moves its bytes twice each, which takes longer than the launch of a collective.
_LARGE_BYTES = 1 << 20


class Transport(Protocol):
    """A carrier of pieces between the replicas' GPUs; all its work is on its lane."""

    name: str
    lane: Lane

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Make the memory that this rank needs for some pieces of at most a size.

        Before the header; may raise. Both numbers are the same on every rank.
        """
        ...

    def reduce(self, work: Work, channel: Channel) -> WaitSteps:
        """Reduce all pieces, from the sources of the work to its results.

        Collective over ``topology.replica_comm``.
        """
        ...

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.replica_comm``.
        """
        ...

    def abandon(self) -> None:
        """Give up everything on this rank: another rank has died."""
        ...


def reduce_on_device(
    work: Work,
    channel: Channel,
    transport: Transport,
    begin: Mark | None = None,
    end: Mark | None = None,
    *,
    in_half: bool = False,
) -> WaitSteps:
    """Reduce contiguous arrays of this rank's GPU with those of the other ranks.

    Collective over ``topology.replica_comm``. A call that is started, whose steps other
    threads may take, has two marks: the program has recorded ``begin`` after it gave
    the sources and results to its stream, and joins ``end`` when it waits for the call.
    Without marks the call comes in the order of this thread's current stream.
    ``in_half`` adds arrays of half types in these.
    """
    pieces = tuple(work.pieces)
    if in_half:
        pieces = tuple(_in_half(piece, work) for piece in pieces)
    work = replace(work, pieces=pieces)
    lane = transport.lane
    # Before the header, which tells all ranks of an error of one.
    transport.prepare(max(map(_piece_bytes, pieces)), len(pieces))
    _compile(pieces, work)
    lane.enter(begin)
    yield HEADER
    yield from transport.reduce(work, channel)
    if end is not None:
        # The program may drop the arrays before it waits for the call.
        lane.keep((work.sources, work.results))
    lane.leave(end)


def _compile(pieces: Sequence[Piece], work: Work) -> None:
    for piece in pieces:
        for run in piece:
            # The arrays of a run are of one type.
            index = run.spans[0][0]
            kernels.prepare(work.sources[index].dtype, run.dtype)
            kernels.prepare(work.results[index].dtype, run.dtype)


def _piece_bytes(piece: Piece) -> int:
    """Return the bytes of a piece, to the end of its last run."""
    last = piece[-1]
    return (last.start + last.size) * last.dtype.itemsize


def straight(run: Run, work: Work) -> tuple[list[tuple[Any, Any]], Run | None]:
    """Return arrays of a run that are reduced where they lie, and a run of the rest.

    Parts of sources, each with that of its result, which may be the same memory. They
    are of the type in which they are added, and large or alone; so it is on every rank
    or none. They may begin at any multiple of their item size.
    """
    # The arrays of a run are of one type.
    index = run.spans[0][0]
    if not work.sources[index].dtype == work.results[index].dtype == run.dtype:
        return [], run
    large, rest = _split(run)
    pairs = [
        (work.sources[index][start:stop], work.results[index][start:stop])
        for index, start, stop, _ in large
    ]
    return pairs, rest


@functools.lru_cache(maxsize=256)
def _split(run: Run) -> tuple[tuple[Span, ...], Run | None]:
    """Return the spans of a run that are large or alone, and a run of the others."""
    if len(run.spans) == 1:
        return run.spans, None
    least = _LARGE_BYTES // run.dtype.itemsize
    large = tuple(span for span in run.spans if span[2] - span[1] >= least)
    if not large:
        return (), run
    rest, at = [], run.start
    for index, start, stop, _ in run.spans:
        if stop - start < least:
            rest.append((index, start, stop, at))
            at += stop - start
    if not rest:
        return large, None
    return large, Run(run.dtype, run.start, at - run.start, tuple(rest))


def _in_half(piece: Piece, work: Work) -> Piece:
    """Return a piece whose runs of half types are added without a cast to float32."""
    runs = []
    for run in piece:
        dtype = work.sources[run.spans[0][0]].dtype
        start = run.start * run.dtype.itemsize // dtype.itemsize
        half = replace(run, dtype=dtype, start=start) if is_half(dtype) else run
        runs.append(half)
    return tuple(runs)


def pack_run(run: Run, work: Work, buffer: Any, lane: Lane) -> Any:
    """Copy a run of the sources into its part of a piece's buffer; return that part.

    The buffer has bytes of the whole piece, and begins at a multiple of 16.
    """
    size = run.dtype.itemsize
    part = buffer[run.start * size : (run.start + run.size) * size].view(run.dtype)
    kernels.pack(run.spans, work.sources, part, lane.stream)
    return part


def unpack_run(
    run: Run, work: Work, part: Any, lane: Lane, *, divides: bool = True
) -> None:
    """Copy the sums of a run into the results, divided as the work says."""
    kernels.unpack(
        part.data.ptr,
        run.spans,
        work.results,
        lane.stream,
        dtype=run.dtype,
        divisor=work.divisor if divides else 0,
    )


def divide(array: Any, divisor: int, lane: Lane) -> None:
    """Divide an array in place, in the type in which its values were added."""
    spans, dtype = [(0, 0, array.size, 0)], array.dtype
    address, stream = array.data.ptr, lane.stream
    kernels.unpack(address, spans, [array], stream, dtype=dtype, divisor=divisor)
