"""Reduction of device memory over several workers: inside each, across, inside again.

Rank ``r`` of every worker has the sums of segment ``r`` of a piece over its worker from
what reaches the worker's GPUs (NCCL, or each other's memory), sums them over the ranks
with the same position in all workers, and all ranks of a worker copy the sums. Where
the workers differ in size, as many ranks of each have segments as the smallest one has.

Across, the segments go by messages with device memory, where MPI moves it; else by way
of the host, which alone can send half-precision numbers in their place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.arrays.packing import Piece, Run
from hpcstrat.channel.awaited import Awaits
from hpcstrat.channel.channel import Channel
from hpcstrat.channel.patient import PIECE_BYTES
from hpcstrat.collectives.hierarchical import sum_over_workers
from hpcstrat.collectives.work import Work
from hpcstrat.gpu.device_memory import Buffers
from hpcstrat.gpu.streams import Lane
from hpcstrat.gpu.transports.mpi_sums import DeviceMessages, Limits, MpiSum, abandon
from hpcstrat.gpu.transports.nccl_transport import NcclWorker
from hpcstrat.gpu.transports.peer_transport import PeerTransport
from hpcstrat.gpu.transports.staging_transport import STAGED_BYTES, HostCopies
from hpcstrat.topology.topology import Topology
from hpcstrat.typing import Array

__all__ = ["HierarchicalTransport", "HostAcross", "MpiAcross"]

_Segments = list[tuple[Run, Any]]


class MpiAcross:
    """Sums segments by messages with device memory."""

    def __init__(
        self, topology: Topology, lane: Lane, limits: Limits | None = None
    ) -> None:
        peers = DeviceMessages(topology.mpi, topology.cross_worker_comm)
        self._sum = MpiSum(peers, lane, limits)
        self._buffers = Buffers()
        self._scratch: Any = None

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs for segments of at most a size; may raise."""
        self._scratch = self._buffers.get("scratch", self._sum.scratch_bytes(nbytes))

    def steps(self, segments: _Segments, work: Work, channel: Channel) -> Awaits:
        """Sum this rank's segments over the workers, in place.

        Collective over ``topology.cross_worker_comm``. They lie in memory that MPI may
        be given.
        """
        del work, channel
        for _, segment in segments:
            yield from self._sum.steps(segment, self._scratch)

    def close(self) -> None:
        """Free everything, when all calls have ended."""
        self._buffers.clear()

    def abandon(self) -> None:
        """Let go of everything on this rank: others have died."""
        abandon(self._buffers)


class HostAcross:
    """Sums segments by way of the host, at most ``part_bytes`` at once.

    ``wire_dtype`` is what float32 and float64 travel in, see `reduce_hierarchically`.
    """

    def __init__(
        self,
        lane: Lane,
        wire_dtype: np.dtype[Any] | None = None,
        part_bytes: int = STAGED_BYTES,
    ) -> None:
        self._wire_dtype = wire_dtype
        self._copies = HostCopies(lane, part_bytes)

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs for segments of at most a size; may raise."""
        self._copies.prepare(nbytes)

    def steps(self, segments: _Segments, work: Work, channel: Channel) -> Awaits:
        """Sum this rank's segments over the workers, in place.

        Collective over ``topology.cross_worker_comm``.
        """
        return self._copies.steps(segments, work, channel, self._sums)

    def _sums(self, run: Run, host: Array, work: Work, channel: Channel) -> Awaits:
        # In pieces of the size that serves MPI best, see `hpcstrat.channel.patient`.
        length = PIECE_BYTES // host.itemsize
        parts = [
            (run, host[start : start + length]) for start in range(0, host.size, length)
        ]
        return sum_over_workers(work, channel, self._wire_dtype, parts)

    def close(self) -> None:
        """Free everything, when all calls have ended."""
        self._copies.close()

    def abandon(self) -> None:
        """Let go of everything on this rank: others have died."""
        self._copies.abandon()


class HierarchicalTransport:
    """The transport of several workers.

    ``inside`` reaches the GPUs of a worker, ``across`` sums over the workers on its
    lane.
    """

    name = "hierarchical"

    def __init__(
        self,
        topology: Topology,
        inside: NcclWorker | PeerTransport,
        across: MpiAcross | HostAcross,
    ) -> None:
        self.lane: Lane = inside.lane
        self._inside = inside
        self._across = across
        # As many ranks of each worker have segments.
        self._movers = topology.smallest_worker

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs for pieces of at most a size; may raise."""
        self._inside.prepare(nbytes)
        # Segments begin at multiples of 256 bytes.
        self._across.prepare(-(-nbytes // self._movers) + 256)

    def start(self, piece: Piece, work: Work) -> None:
        """Do what can be done for the first piece before the header; may raise."""
        early = getattr(self._inside, "start", None)
        if early is not None:
            early(piece, work)

    def connect(self, work: Work, channel: Channel) -> Awaits:
        """Reach the other ranks of the worker, where that has not been done.

        Collective over ``topology.replica_comm``.
        """
        return self._inside.connect(work, channel)

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> Awaits:
        """Reduce one piece.

        Collective over ``topology.replica_comm``.
        """
        segments = yield from self._inside.scatter(piece, work, channel)
        # A rank beyond the smallest worker's size has no segments, and waits in
        # `gather`.
        yield from self._across.steps(segments, work, channel)
        yield from self._inside.gather(piece, work, channel)

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.replica_comm``.
        """
        self._across.close()
        self._inside.close()

    def abandon(self) -> None:
        """Let go of everything on this rank: others have died."""
        self._across.abandon()
        self._inside.abandon()
