"""Reduction of arrays on GPUs: the code that all transports share.

One kernel per run packs a piece into a buffer of the transport. The buffer is reduced,
and one kernel per run unpacks the sums. All this work is enqueued on a lane, and the
program's stream waits for the lane before it uses the results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from hpcstrat.engine.algorithms.work import Work
from hpcstrat.engine.arrays.kinds import is_half
from hpcstrat.engine.arrays.packing import Piece, Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
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

# Arrays of at least this size are reduced in place: packing and unpacking them would
# take longer than the launch of one more collective.
_LARGE_BYTES = 1 << 20


class Transport(Protocol):
    """The interface of a transport, which reduces pieces over the replicas' GPUs."""

    name: str
    lane: Lane

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Allocate the buffers for ``count`` pieces of at most ``nbytes`` each.

        Called before the header of a call; may raise an exception. ``nbytes`` and
        ``count`` are the same on every rank.
        """
        ...

    def reduce(self, work: Work, channel: Channel) -> WaitSteps:
        """Reduce all pieces of the work, from its sources to its results.

        Collective over ``topology.replica_comm``.
        """
        ...

    def close(self) -> None:
        """Free all resources; all calls must have ended.

        Collective over ``topology.replica_comm``.
        """
        ...

    def abandon(self) -> None:
        """Abandon all resources on this rank, because another rank has died."""
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
    """Reduce contiguous arrays on the GPUs of all ranks.

    Collective over ``topology.replica_comm``. A pending call, which other threads may
    advance, has two marks: the program has recorded ``begin`` after its work on sources
    and results, and joins ``end`` when it waits for the call. If there are no marks,
    the call is ordered with this thread's current stream. If ``in_half``, arrays of
    half types are added in half precision.
    """
    pieces = tuple(work.pieces)
    if in_half:
        pieces = tuple(_in_half(piece, work) for piece in pieces)
    work = replace(work, pieces=pieces)
    lane = transport.lane
    # Allocate before the header, which reports a rank's error to all ranks.
    transport.prepare(max(map(_piece_bytes, pieces)), len(pieces))
    _compile(pieces, work)
    lane.enter(begin)
    yield HEADER
    yield from transport.reduce(work, channel)
    if end is not None:
        # Keep the arrays: the program may delete them before it waits for the call.
        lane.keep((work.sources, work.results))
    lane.leave(end)


def _compile(pieces: Sequence[Piece], work: Work) -> None:
    for piece in pieces:
        for run in piece:
            index = run.spans[0][0]
            kernels.prepare(work.sources[index].dtype, run.dtype)
            kernels.prepare(work.results[index].dtype, run.dtype)


def _piece_bytes(piece: Piece) -> int:
    """Return the size of a piece in bytes, up to the end of its last run."""
    last = piece[-1]
    return (last.start + last.size) * last.dtype.itemsize


def straight(run: Run, work: Work) -> tuple[list[tuple[Any, Any]], Run | None]:
    """Return the arrays of a run to reduce in place, and a run of the other arrays.

    The arrays are pairs of a source and its result, which may be the same memory. Each
    array has the dtype in which it is added, and is large or the only array of the run.
    The choice is the same on every rank. The arrays may start at any multiple of their
    item size.
    """
    index = run.spans[0][0]  # All arrays of a run have the same type.
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
    """Return the spans that are large or alone, and a run of the other spans."""
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
    """Return a piece whose half-precision runs are added without a cast to float32."""
    runs = []
    for run in piece:
        dtype = work.sources[run.spans[0][0]].dtype
        start = run.start * run.dtype.itemsize // dtype.itemsize
        half = replace(run, dtype=dtype, start=start) if is_half(dtype) else run
        runs.append(half)
    return tuple(runs)


def pack_run(run: Run, work: Work, buffer: Any, lane: Lane) -> Any:
    """Pack a run of the sources into its part of a piece's buffer; return that part.

    The buffer has the bytes of the whole piece; its address is a multiple of 16.
    """
    size = run.dtype.itemsize
    part = buffer[run.start * size : (run.start + run.size) * size].view(run.dtype)
    kernels.pack(run.spans, work.sources, part, lane.stream)
    return part


def unpack_run(
    run: Run, work: Work, part: Any, lane: Lane, *, divides: bool = True
) -> None:
    """Unpack a run's sums into the results; if ``divides``, divide by the divisor."""
    kernels.unpack(
        part.data.ptr,
        run.spans,
        work.results,
        lane.stream,
        dtype=run.dtype,
        divisor=work.divisor if divides else 0,
    )


def divide(array: Any, divisor: int, lane: Lane) -> None:
    """Divide an array in place, in its own dtype."""
    spans, dtype = [(0, 0, array.size, 0)], array.dtype
    address, stream = array.data.ptr, lane.stream
    kernels.unpack(address, spans, [array], stream, dtype=dtype, divisor=divisor)
