"""Reduction of device memory by NCCL: over all replicas, or over those of a worker."""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.arrays.kinds import is_half
from hpcstrat.engine.arrays.packing import Piece
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.collectives.work import Work
from hpcstrat.engine.gpu.device_memory import Buffers
from hpcstrat.engine.gpu.streams import Lane, Mark
from hpcstrat.engine.gpu.transports.device_reduction import (
    divide,
    pack_run,
    straight,
    unpack_run,
)
from hpcstrat.engine.gpu.transports.nccl_group import NcclGroup
from hpcstrat.engine.topology.topology import Topology

__all__ = ["NcclTransport"]


class NcclTransport:
    """The transport of all replicas by NCCL; without a topology, of one alone.

    Pieces that follow one another are those of two lanes in turn, so that one is packed
    or unpacked while another is summed; NCCL itself makes sums of a communicator one
    after the other, on whichever streams.
    """

    name = "nccl"

    def __init__(self, topology: Topology | None, lane: Lane) -> None:
        mpi: Any = None if topology is None else topology.mpi
        comm: Any = None if topology is None else topology.replica_comm
        self.lane = lane
        survives = topology is not None and topology.survives
        self.group = NcclGroup(mpi, comm, lane, survives=survives)
        self._buffers = Buffers()
        # Each with its memory; the second for calls of several pieces only.
        self._lanes = [lane]
        self._values: list[Any] = []
        self._tie = Mark()
        self._left = 0

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Make what this rank needs for some pieces of at most a size; may raise."""
        # A second lane is of no use to calls that are awaited one by one.
        num_lanes = 1 if self.group.survives else min(count, 2)
        while len(self._lanes) < num_lanes:
            self._lanes.append(Lane(urgent=True))
        self._values = [self._buffers.get(n, nbytes) for n in range(num_lanes)]

    def connect(self, work: Work, channel: Channel) -> WaitSteps:
        """Make NCCL's communicator, the first time.

        Collective over ``topology.replica_comm``. Raises EveryRankError on all ranks,
        if one of them cannot.
        """
        del channel
        yield from self.group.connect()
        self._left = len(tuple(work.pieces))
        # As the first lane: after the program's work, and the call before.
        self.lane.leave(self._tie)
        for lane in self._lanes[1 : len(self._values)]:
            lane.enter(self._tie)

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> WaitSteps:
        """Reduce one piece; waits for nobody, unless the loss of a rank is survived.

        Collective over ``topology.replica_comm``. Raises CollectiveError on this rank,
        if NCCL says so.
        """
        del channel
        self._left -= 1
        turn = self._left % len(self._values)
        lane, memory = self._lanes[turn], self._values[turn]
        pairs, packed, undivided = [], [], []
        for run in piece:
            averages = work.divisor > 0 and is_half(run.dtype)
            own, rest = straight(run, work)
            if work.divisor and not averages:
                undivided += [result for _, result in own]
            if rest is not None:
                part = pack_run(rest, work, memory, lane)
                packed.append((rest, part, not averages))
                own = [*own, (part, part)]
            pairs += [(values, sums, averages) for values, sums in own]
        self.group.all_reduce(pairs, lane)
        for result in undivided:
            divide(result, work.divisor, lane)
        for run, part, divides in packed:
            unpack_run(run, work, part, lane, divides=divides)
        if lane is not self.lane and self._left < 2:
            # The last piece of this lane.
            lane.leave(self._tie)
        if not self._left and len(self._values) > 1:
            self.lane.enter(self._tie)
        return self.group.ended()

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.replica_comm``.
        """
        self.lane.synchronize()
        self.group.close()
        self._values = []
        self._buffers.clear()

    def abandon(self) -> None:
        """Give up what is in flight: others have died."""
        self.group.abandon()
