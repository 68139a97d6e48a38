"""Reduction of device memory by NCCL: over all replicas, or over those of a worker."""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.arrays.packing import Piece
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.collectives.work import Work
from hpcstrat.engine.gpu.device_memory import Buffers
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports.device_reduction import (
    pack_run,
    straight,
    unpack_run,
)
from hpcstrat.engine.gpu.transports.nccl_group import NcclGroup
from hpcstrat.engine.topology.topology import Topology

__all__ = ["NcclTransport"]

# More than there are types of arrays.
_MOST_RUNS = 32
_LINE_BYTES = 256


class NcclTransport:
    """The transport of all replicas by NCCL; without a topology, of one alone."""

    name = "nccl"

    def __init__(self, topology: Topology | None, lane: Lane) -> None:
        mpi: Any = None if topology is None else topology.mpi
        comm: Any = None if topology is None else topology.replica_comm
        self.lane = lane
        survives = topology is not None and topology.survives
        self.group = NcclGroup(mpi, comm, lane, survives=survives)
        self._buffers = Buffers()
        self._values: Any = None

    def prepare(self, nbytes: int) -> None:
        """Make what this rank needs for pieces of at most a size; may raise."""
        self._values = self._buffers.get("values", nbytes)

    def connect(self, work: Work, channel: Channel) -> WaitSteps:
        """Make NCCL's communicator, the first time.

        Collective over ``topology.replica_comm``. Raises EveryRankError on all ranks,
        if one of them cannot.
        """
        del work, channel
        return self.group.connect()

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> WaitSteps:
        """Reduce one piece; waits for nobody, unless the loss of a rank is survived.

        Collective over ``topology.replica_comm``. Raises CollectiveError on this rank,
        if NCCL says so.
        """
        del channel
        pairs, packed = [], []
        for run in piece:
            # A single large array is summed where it lies: two copies less.
            pair = straight(run, work)
            if pair is None:
                part = pack_run(run, work, self._values, self.lane)
                packed.append((run, part))
                pair = part, part
            pairs.append(pair)
        self.group.all_reduce(pairs)
        for run, part in packed:
            unpack_run(run, work, part, self.lane)
        return self.group.ended()

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.replica_comm``.
        """
        self.lane.synchronize()
        self.group.close()
        self._values = None
        self._buffers.clear()

    def abandon(self) -> None:
        """Give up what is in flight: others have died."""
        self.group.abandon()
