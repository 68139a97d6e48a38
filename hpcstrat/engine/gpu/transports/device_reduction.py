"""Reduction of arrays on GPUs: what all transports share.

A piece is packed into a buffer of the transport by one kernel for each run, is reduced,
and is unpacked by one kernel for each run. All this is work of a lane, which the host
only describes; results are ready for the program's stream, in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hpcstrat.engine.arrays.packing import Piece, Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.work import Work
from hpcstrat.engine.gpu import kernels
from hpcstrat.engine.gpu.streams import Lane, Mark

__all__ = [
    "EarlyTransport",
    "Transport",
    "pack_run",
    "piece_bytes",
    "reduce_on_device",
    "run_part",
    "straight",
    "unpack_run",
]

# As CUDA aligns its own memory, so that segments are read by whole lines.
_LINE_BYTES = 256


class Transport(Protocol):
    """A carrier of pieces between the replicas' GPUs; all its work is on its lane."""

    name: str
    lane: Lane

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs for pieces of at most a size; before the header.

        May raise. The size is the same on every rank.
        """
        ...

    def connect(self, work: Work, channel: Channel) -> WaitSteps:
        """Reach the other ranks, where that has not been done; after the header.

        Collective over ``topology.replica_comm``. Yields nothing where nothing is to be
        done, which is so on all ranks or none. Raises EveryRankError on all, if one
        could not.
        """
        ...

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> WaitSteps:
        """Reduce one piece, from the sources of the work to its results.

        Collective over ``topology.replica_comm``.
        """
        ...

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.replica_comm``.
        """
        ...

    def abandon(self) -> None:
        """Let go of everything on this rank: others have died."""
        ...


class EarlyTransport(Transport, Protocol):
    """A transport that packs the first piece of a call before its header."""

    def start(self, piece: Piece, work: Work) -> None:
        """Do what can be done for the first piece before the header, such as packing.

        May raise; may do nothing. Called once before each call's first `reduce`, with
        the same piece; a call that fails in its header is not continued.
        """
        ...


def reduce_on_device(
    work: Work,
    channel: Channel,
    transport: Transport,
    begin: Mark | None = None,
    end: Mark | None = None,
) -> WaitSteps:
    """Reduce contiguous arrays of this rank's GPU with those of the other ranks.

    Collective over ``topology.replica_comm``. Calls that are started, whose steps other
    threads may take, and at any time, have two marks. The program has recorded
    ``begin`` after it gave the sources and results to its stream, by default it is the
    end of this thread's current stream at the first step. ``end`` is recorded here, for
    the program to join when it awaits the call; by default this thread's current stream
    joins at the last step.
    """
    pieces = tuple(work.pieces)
    lane = transport.lane
    # Before the header: what fails on one rank here is told to all by it.
    transport.prepare(max(piece_bytes(piece) for piece in pieces))
    _prepare_kernels(pieces, work)
    lane.enter(begin)
    yield HEADER
    yield from transport.connect(work, channel)
    for piece in pieces:
        yield from transport.reduce(piece, work, channel)
    if end is not None:
        # The program may let go of them before it awaits the call.
        lane.keep((work.sources, work.results))
    lane.leave(end)


def _prepare_kernels(pieces: Sequence[Piece], work: Work) -> None:
    """Do before the header what may fail, or take its time: compile, make tables."""
    counts = [len(run.spans) for piece in pieces for run in piece]
    # For packing and for unpacking.
    kernels.reserve(counts * 2)
    for piece in pieces:
        for run in piece:
            # The arrays of a run are of one type.
            index = run.spans[0][0]
            kernels.prepare(work.sources[index].dtype, run.dtype)
            kernels.prepare(work.results[index].dtype, run.dtype)


def piece_bytes(piece: Piece) -> int:
    """Return the bytes of a piece, to the end of its last run."""
    last = piece[-1]
    return (last.start + last.size) * last.dtype.itemsize


def straight(run: Run, work: Work) -> tuple[Any, Any] | None:
    """Return the memory of a run, where it can be reduced without being packed.

    Parts of the source and of its result, of shape (run.size,) and in the type in which
    they are added: where the run is a single span of such arrays, and the sum is
    wanted. So it is on every rank or none. They may be the same memory, and nothing
    says that they begin at multiples of more than their item size.
    """
    if len(run.spans) != 1 or work.divisor:
        return None
    index, start, stop, _ = run.spans[0]
    source, result = work.sources[index], work.results[index]
    if not source.dtype == result.dtype == run.dtype:
        return None
    return source[start:stop], result[start:stop]


def pack_run(run: Run, work: Work, buffer: Any, lane: Lane) -> Any:
    """Copy a run of the sources into its part of a piece's buffer, on a lane.

    The buffer has bytes of the whole piece, and begins at a multiple of 16.
    """
    part = run_part(run, buffer)
    kernels.pack(run.spans, work.sources, part, lane.stream)
    return part


def run_part(run: Run, buffer: Any) -> Any:
    """Return a run's part of a piece's buffer of bytes, in the run's type."""
    size = run.dtype.itemsize
    return buffer[run.start * size : (run.start + run.size) * size].view(run.dtype)


def unpack_run(run: Run, work: Work, part: Any, lane: Lane) -> None:
    """Copy the sums of a run into the results, divided as the work says, on a lane."""
    kernels.unpack(
        [(part.data.ptr, 0, run.size)],
        run.spans,
        work.results,
        lane.stream,
        dtype=run.dtype,
        divisor=work.divisor,
    )
