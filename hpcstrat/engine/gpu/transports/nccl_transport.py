"""Reduction of device memory by NCCL over all replicas."""

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

__all__ = ["NcclTransport"]


class NcclTransport:
    """The transport by NCCL, whose group is connected; it frees the group, too.

    Pieces that follow one another take two lanes in turn, so that one is packed or
    unpacked while another is summed; NCCL itself makes the sums of a communicator one
    after the other, on whichever streams.
    """

    name = "nccl"

    def __init__(self, group: NcclGroup, lane: Lane) -> None:
        self.lane = lane
        self.group = group
        self._buffers = Buffers()
        # Each with its memory; the second for calls of several pieces only.
        self._lanes = [lane]
        self._values: list[Any] = []
        self._tie = Mark()

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Make lanes, and memory for some pieces of at most a size; may raise."""
        # A second lane is of no use to calls that are awaited one by one.
        num_lanes = 1 if self.group.survives else min(count, 2)
        while len(self._lanes) < num_lanes:
            self._lanes.append(Lane(urgent=True))
        self._values = [self._buffers.get(n, nbytes) for n in range(num_lanes)]

    def reduce(self, work: Work, channel: Channel) -> WaitSteps:
        """Reduce all pieces; waits for no rank, unless the loss of one is survived.

        Collective over ``topology.replica_comm``. Raises CollectiveError on this rank,
        if NCCL says so.
        """
        del channel
        lanes = list(zip(self._lanes, self._values, strict=False))
        # Like the first lane, the second comes after the program's work, and the call
        # before.
        self.lane.leave(self._tie)
        for lane, _ in lanes[1:]:
            lane.enter(self._tie)
        for number, piece in enumerate(work.pieces):
            self._reduce(piece, work, *lanes[number % len(lanes)])
            yield from self.group.ended()
        for lane, _ in lanes[1:]:
            lane.leave(self._tie)
            self.lane.enter(self._tie)

    def _reduce(self, piece: Piece, work: Work, lane: Lane, memory: Any) -> None:
        sums, packed, undivided = [], [], []
        for run in piece:
            averages = work.divisor > 0 and is_half(run.dtype)
            pairs, rest = straight(run, work)
            if work.divisor and not averages:
                undivided += [result for _, result in pairs]
            if rest is not None:
                part = pack_run(rest, work, memory, lane)
                packed.append((rest, part, not averages))
                pairs = [*pairs, (part, part)]
            sums += [(values, result, averages) for values, result in pairs]
        self.group.all_reduce(sums, lane)
        for result in undivided:
            divide(result, work.divisor, lane)
        for run, part, divides in packed:
            unpack_run(run, work, part, lane, divides=divides)

    def close(self) -> None:
        """Free everything, when all calls have ended.

        Collective over ``topology.replica_comm``.
        """
        self.lane.synchronize()
        self.group.close()
        self._values = []
        self._buffers.clear()

    def abandon(self) -> None:
        """Give up what is in flight: a rank has died."""
        self.group.abandon()
