"""All calls between replicas that the rest of the library makes, in one object."""

from __future__ import annotations

from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.collectives.mapped_memory import MappedMemory
from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.engine.reduction.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.reduction.gathers import Gathers
from hpcstrat.engine.reduction.object_collectives import ObjectCollectives
from hpcstrat.engine.reduction.reductions import Reductions

__all__ = ["Collectives"]


class Collectives(ObjectCollectives):
    """The calls that move data between replicas, each with its header.

    Those of objects, with `Gathers` and `Reductions` of arrays. ``channel`` is None for
    a single replica, where nothing moves; ``ops`` and ``options`` are the defaults of
    every call.
    """

    def __init__(
        self,
        channel: Channel | None,
        ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        options = options or CommunicationOptions()
        super().__init__(channel, options.timeout_seconds)
        self._gathers = gathers = Gathers(self)
        self.ops = ops or CrossDeviceOps()
        self._reductions = Reductions(gathers, self.ops, options)
        # By other algorithms, for programs that call one by itself.
        self._by_others: dict[CrossDeviceOps, Reductions] = {}
        # Bound here, which costs a call nothing where it is made.
        self.all_gather = gathers.all_gather
        self.broadcast = gathers.broadcast
        self.batch_reduce = self._reductions.batch_reduce
        self.reduce_in_call = self._reductions.reduce_in_call
        self.repeat = self._reductions.repeat
        self.start_reduce = self._reductions.start_reduce
        self.start_in_call = self._reductions.start_in_call

    def reductions_by(self, ops: CrossDeviceOps) -> Reductions:
        """Return the sums of these replicas by an algorithm; not collective."""
        if ops is self.ops:
            return self._reductions
        if ops not in self._by_others:
            options = CommunicationOptions(timeout_seconds=self.timeout_seconds)
            self._by_others[ops] = Reductions(self._gathers, ops, options)
        return self._by_others[ops]

    def use_mapped_memory(self, areas: MappedMemory) -> None:
        """Look for arrays in areas from here on; on all ranks at the same point."""
        self._reductions.use_mapped_memory(areas)

    @property
    def overlaps(self) -> bool:
        """Whether a reduction that is started goes on while ranks compute."""
        return self._reductions.overlaps

    def close(self) -> None:
        """Refuse all calls from here on."""
        super().close()
        for reductions in (self._reductions, *self._by_others.values()):
            reductions.close()
