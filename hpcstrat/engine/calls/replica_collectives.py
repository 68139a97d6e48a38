"""All collective calls between replicas, in one object for the rest of the library."""

from __future__ import annotations

from hpcstrat.engine.algorithms.mapped_memory import MappedMemory
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.calls.field_moves import FieldMoves
from hpcstrat.engine.calls.moves import Moves
from hpcstrat.engine.calls.object_collectives import ObjectCollectives
from hpcstrat.engine.calls.part_reductions import PartReductions
from hpcstrat.engine.calls.reductions import Reductions
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.options import CommunicationOptions

__all__ = ["Collectives"]


class Collectives(ObjectCollectives):
    """All collective calls that move data between replicas, each with its header.

    The class has the methods of ObjectCollectives, and the methods of `Moves` and
    `Reductions` for arrays. ``channel`` is None for a single replica, which sends
    nothing. ``ops`` and ``options`` are the defaults of every call.
    """

    def __init__(
        self,
        channel: Channel | None,
        ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        options = options or CommunicationOptions()
        super().__init__(channel, options.timeout_seconds)
        self.moves = moves = Moves(self)
        self.ops = ops or CrossDeviceOps()
        self.parts = PartReductions(moves)
        self.fields = FieldMoves(self)
        self._reductions = Reductions(moves, self.ops, options)
        # Reductions by other algorithms, if a program calls a CrossDeviceOps itself.
        self._by_others: dict[CrossDeviceOps, Reductions] = {}
        # Methods of other objects, bound here so that a call needs no extra lookup.
        self.all_gather = moves.all_gather
        self.broadcast = moves.broadcast
        self.repeat_gather = moves.repeat_gather
        self.exchange_bytes = moves.exchange_bytes  # type: ignore[method-assign]
        self.batch_reduce = self._reductions.batch_reduce
        self.reduce_in_call = self._reductions.reduce_in_call
        self.repeat = self._reductions.repeat
        self.start_reduce = self._reductions.start_reduce
        self.start_in_call = self._reductions.start_in_call

    def reductions_by(self, ops: CrossDeviceOps) -> Reductions:
        """Return the Reductions of these replicas that use ``ops``; not collective."""
        if ops is self.ops:
            return self._reductions
        if ops not in self._by_others:
            options = CommunicationOptions(timeout_seconds=self.timeout_seconds)
            self._by_others[ops] = Reductions(self.moves, ops, options)
        return self._by_others[ops]

    def barrier(self, what: str = "barrier") -> None:
        """Wait for all replicas; collective over ``topology.replica_comm``."""
        if what == "barrier":
            self.moves.barrier()
        else:
            super().barrier(what)

    def use_mapped_memory(self, areas: MappedMemory) -> None:
        """Use ``areas`` in later sums; all ranks must call this at the same point."""
        self._reductions.use_mapped_memory(areas)

    @property
    def overlaps(self) -> bool:
        """True if MPI sends data of a started reduction while the ranks compute."""
        return self._reductions.overlaps

    def close(self) -> None:
        """Make all later calls raise CollectiveError."""
        super().close()
        self.moves.close()
        self.parts.close()
        self.fields.close()
        for reductions in (self._reductions, *self._by_others.values()):
            reductions.close()
