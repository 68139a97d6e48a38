"""Reduction of GPU memory by NCCL over all replicas."""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.algorithms.work import Work
from hpcstrat.engine.arrays.kinds import is_half
from hpcstrat.engine.arrays.packing import Piece
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
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
    """The NCCL transport; ``group`` is connected, and `close` closes it.

    Successive pieces use two lanes in turn, so that one piece is packed or unpacked
    while another piece is summed. NCCL runs the sums of a communicator one after the
    other, even if they are on different streams.
    """

    name = "nccl"

    def __init__(self, group: NcclGroup, lane: Lane) -> None:
        self.lane = lane
        self.group = group
        self._buffers = Buffers()
        # Each lane has its own buffer. Only calls of several pieces use a second lane.
        self._lanes = [lane]
        self._values: list[Any] = []
        self._tie = Mark()

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Create lanes and buffers for pieces of at most ``nbytes``; may raise."""
        # A second lane is useless if `reduce` waits for each piece.
        num_lanes = 1 if self.group.survives else min(count, 2)
        while len(self._lanes) < num_lanes:
            self._lanes.append(Lane(urgent=True))
        self._values = [self._buffers.get(n, nbytes) for n in range(num_lanes)]

    def reduce(self, work: Work, channel: Channel) -> WaitSteps:
        """Reduce all pieces; wait for their end only if the group survives lost ranks.

        Collective over ``topology.replica_comm``. Raises CollectiveError on this rank
        if NCCL reports an error.
        """
        del channel
        lanes = list(zip(self._lanes, self._values, strict=False))
        # Make the second lane, too, wait for the program's work and the previous call.
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
        self.group.all_reduce(sums, lane, work.function)
        for result in undivided:
            divide(result, work.divisor, lane)
        for run, part, divides in packed:
            unpack_run(run, work, part, lane, divides=divides)

    def close(self) -> None:
        """Free the buffers, and close the group; all calls must have ended.

        Collective over ``topology.replica_comm``.
        """
        self.lane.synchronize()
        self.group.close()
        self._values = []
        self._buffers.clear()

    def abandon(self) -> None:
        """Abort the calls in flight, because a rank has died."""
        self.group.abandon()
