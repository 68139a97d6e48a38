"""Reduction of arrays on GPUs: what all transports share.

A piece is packed into a buffer of the transport by one kernel for each run, is reduced,
and is unpacked by one kernel for each run. All this is work of a lane, which the host
only describes; results are ready for the program's stream, in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hpcstrat.arrays.packing import Piece, Run
from hpcstrat.channel.awaited import HEADER, Awaits
from hpcstrat.channel.channel import Channel
from hpcstrat.collectives.work import Work
from hpcstrat.gpu import kernels
from hpcstrat.gpu.streams import Lane, Mark

__all__ = [
    "EarlyTransport",
    "Transport",
    "pack_run",
    "piece_bytes",
    "reduce_on_device",
    "run_part",
    "segment",
    "straight",
    "unpack_run",
]

_LINE_BYTES = 256


class Transport(Protocol):
    """What carries pieces between the GPUs of the replicas.

    Attributes
    ----------
    name : str
        For messages: "peer", "ring", "nccl" and so on.
    lane : Lane
        On which all its work runs.
    """

    name: str
    lane: Lane

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs for pieces of a size; before the header.

        Not collective; may raise.

        Parameters
        ----------
        nbytes : int
            Most bytes of a piece; the same on every rank.
        """
        ...

    def connect(self, work: Work, channel: Channel) -> Awaits:
        """Reach the other ranks, where that has not been done; after the header.

        Collective over ``topology.replica_comm``. Yields nothing where nothing is to
        be done, which is so on all ranks or none.

        Parameters
        ----------
        work : Work
            What is to be reduced.
        channel : Channel
            Of the replicas.

        Yields
        ------
        object
            See `hpcstrat.collectives.work`.

        Raises
        ------
        EveryRankError
            On all ranks, if one of them could not.
        """
        ...

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> Awaits:
        """Reduce one piece, from the sources of the work to its results.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        piece : Piece
            Which elements.
        work : Work
            What to reduce.
        channel : Channel
            Of the replicas.

        Yields
        ------
        object
            See `hpcstrat.collectives.work`.
        """
        ...

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.replica_comm``.
        """
        ...

    def abandon(self) -> None:
        """Let go of everything on this rank: others have died.

        Not collective.
        """
        ...


class EarlyTransport(Transport, Protocol):
    """A transport that packs the first piece of a call before its header."""

    def start(self, piece: Piece, work: Work) -> None:
        """Do what can be done for the first piece before the header, such as packing.

        Not collective; may raise; may do nothing. Called once before each call's first
        `reduce`, with the same piece; a call that fails in its header is not continued.

        Parameters
        ----------
        piece : Piece
            The first one.
        work : Work
            What to reduce.
        """
        ...


def reduce_on_device(
    work: Work,
    channel: Channel,
    transport: Transport,
    begin: Mark | None = None,
    end: Mark | None = None,
) -> Awaits:
    """Reduce arrays of this rank's GPU with those of the other ranks.

    Collective over ``topology.replica_comm``.

    Parameters
    ----------
    work : Work
        What to reduce; sources and results are contiguous CuPy arrays.
    channel : Channel
        Of the replicas.
    transport : Transport
        How.
    begin : Mark, optional
        Recorded by the program after it has given the sources and results to its
        stream: for calls that are started, whose steps other threads may take, and at
        any time. Default: the end of this thread's current stream, at the first step.
    end : Mark, optional
        Recorded here at the end of the work, for the program to join when it awaits a
        call that was started. Default: this thread's current stream joins at the last
        step.

    Yields
    ------
    object or None
        See `hpcstrat.collectives.work`.
    """
    pieces = tuple(work.pieces)
    lane = transport.lane
    transport.prepare(max(piece_bytes(piece) for piece in pieces))
    _prepare_kernels(pieces, work)
    lane.enter(begin)
    early = getattr(transport, "start", None)
    if early is not None:
        early(pieces[0], work)
    yield HEADER
    yield from transport.connect(work, channel)
    for piece in pieces:
        yield from transport.reduce(piece, work, channel)
    if end is not None:
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
    """Return the size of a piece.

    Not collective; the same on every rank.

    Parameters
    ----------
    piece : Piece
        Not empty.

    Returns
    -------
    int
        Bytes from its start to the end of its last run.
    """
    last = piece[-1]
    return (last.start + last.size) * last.dtype.itemsize


def straight(run: Run, work: Work) -> tuple[Any, Any] | None:
    """Return the memory of a run, where it can be reduced without being packed.

    Not collective; the same on every rank.

    Parameters
    ----------
    run : Run
        Which elements.
    work : Work
        What to reduce.

    Returns
    -------
    (cupy.ndarray, cupy.ndarray) or None
        Part of the source, and of its result, of shape (run.size,) and in the type in
        which they are added: where the run is a single span of such arrays, and the sum
        is wanted. They may be the same memory, and nothing says that they begin at
        multiples of more than their item size.
    """
    if len(run.spans) != 1 or work.divisor:
        return None
    index, start, stop, _ = run.spans[0]
    source, result = work.sources[index], work.results[index]
    if not source.dtype == result.dtype == run.dtype:
        return None
    return source[start:stop], result[start:stop]


def pack_run(run: Run, work: Work, buffer: Any, lane: Lane) -> Any:
    """Copy a run of the sources into a piece's buffer, on a lane.

    Not collective.

    Parameters
    ----------
    run : Run
        Which elements.
    work : Work
        What to reduce.
    buffer : cupy.ndarray of shape (n,)
        Bytes of the whole piece, at a multiple of 16 bytes.
    lane : Lane
        On which.

    Returns
    -------
    cupy.ndarray of shape (run.size,)
        The run's part of the buffer, of the run's type.
    """
    part = run_part(run, buffer)
    kernels.pack(run.spans, work.sources, part, lane.stream)
    return part


def run_part(run: Run, buffer: Any) -> Any:
    """Return a run's part of a piece's buffer.

    Not collective.

    Parameters
    ----------
    run : Run
        Which elements.
    buffer : cupy.ndarray of shape (n,)
        Bytes of the whole piece.

    Returns
    -------
    cupy.ndarray of shape (run.size,)
        Of the run's type.
    """
    size = run.dtype.itemsize
    return buffer[run.start * size : (run.start + run.size) * size].view(run.dtype)


def unpack_run(run: Run, work: Work, part: Any, lane: Lane) -> None:
    """Copy the sums of a run into the results, on a lane.

    Not collective. Divides by the work's divisor.

    Parameters
    ----------
    run : Run
        Which elements.
    work : Work
        What to reduce.
    part : cupy.ndarray of shape (run.size,)
        The sums, of the run's type.
    lane : Lane
        On which.
    """
    kernels.unpack(
        *([(part.data.ptr, 0, run.size)], run.spans, work.results, lane.stream),
        dtype=run.dtype,
        divisor=work.divisor,
    )


def segment(run: Run, number: int, parts: int) -> tuple[int, int]:
    """Return where a segment of a run begins and ends, in elements of the run.

    Not collective; the same on every rank.

    Parameters
    ----------
    run : Run
        Which run.
    number : int
        Which segment.
    parts : int
        How many there are.

    Returns
    -------
    int
        Where it begins: at a multiple of 256 bytes from the run's start.
    int
        Where it ends.
    """
    line = _LINE_BYTES // run.dtype.itemsize
    length = -(-run.size // (parts * line)) * line
    return min(number * length, run.size), min((number + 1) * length, run.size)
