"""Reduction of device memory over an MPI that can send and receive it.

A piece is packed into memory that is not of CuPy's pool, summed there in place by
messages between pairs of ranks (`hpcstrat.engine.gpu.transports.mpi_sums`), and
unpacked.
"""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.arrays.packing import Piece
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.collectives.work import Work
from hpcstrat.engine.gpu.device_memory import Buffers
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports.device_reduction import pack_run, unpack_run
from hpcstrat.engine.gpu.transports.mpi_sums import (
    DeviceMessages,
    Limits,
    MpiSum,
    abandon,
)
from hpcstrat.engine.topology.topology import Topology

__all__ = ["MpiTransport"]


class MpiTransport:
    """The transport for an MPI that can send and receive device memory."""

    name = "ring"

    def __init__(
        self, topology: Topology, lane: Lane, limits: Limits | None = None
    ) -> None:
        self.lane = lane
        peers = DeviceMessages(topology.mpi, topology.replica_comm)
        self._sum = MpiSum(peers, lane, limits)
        self._buffers = Buffers()
        self._values: Any = None
        self._scratch: Any = None

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Make what this rank needs for pieces of at most a size; may raise."""
        del count
        # Not of CuPy's pool, whose arrays are parts of larger blocks, which MPI could
        # have another process open only as a whole.
        self._values = self._buffers.get("values", nbytes)
        self._scratch = self._buffers.get("scratch", self._sum.scratch_bytes(nbytes))

    def connect(self, work: Work, channel: Channel) -> WaitSteps:
        """Do nothing: MPI has connected the ranks."""
        del work, channel
        return iter(())

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> WaitSteps:
        """Reduce one piece.

        Collective over ``topology.replica_comm``.
        """
        del channel
        parts = [(run, pack_run(run, work, self._values, self.lane)) for run in piece]
        for _, part in parts:
            yield from self._sum.steps(part, self._scratch)
        for run, part in parts:
            unpack_run(run, work, part, self.lane)

    def close(self) -> None:
        """Free the buffers, when all calls have ended."""
        self._values = self._scratch = None
        self._buffers.clear()

    def abandon(self) -> None:
        """Leave the buffers to the end of the process: others have died."""
        # MPI may still write to them.
        abandon(self._buffers)
