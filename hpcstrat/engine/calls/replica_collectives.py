"""All collective calls between replicas, in one object for the rest of the library."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.calls.field_moves import FieldMoves
from hpcstrat.engine.calls.gathers import Gathers
from hpcstrat.engine.calls.moves import Moves
from hpcstrat.engine.calls.part_reductions import PartReductions
from hpcstrat.engine.calls.reductions import Reductions
from hpcstrat.engine.calls.repeated_moves import RepeatedMoves
from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.channel import Channel, ClosedChannel
from hpcstrat.engine.channel.entries import collective, enter, interrupted_call
from hpcstrat.engine.channel.failures import Section
from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.engine.typing import Array

__all__ = ["Collectives"]


class Collectives:
    """All collective calls between replicas, each with its header.

    ``channel`` is None for a single replica, which sends nothing. ``ops`` and
    ``options`` are the defaults of every call. ``moves`` has the calls that fill arrays
    of the caller, and ``parts`` those that combine parts of arrays.
    """

    def __init__(
        self,
        channel: Channel | None,
        ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        options = options or CommunicationOptions()
        # Seconds that each call waits for late ranks.
        self.timeout_seconds = options.timeout_seconds
        self.channel: Channel | ClosedChannel | None = channel
        self.size = 1 if channel is None else channel.topology.num_replicas
        self.rank = 0 if channel is None else channel.topology.replica_id
        self.ops = ops or CrossDeviceOps()
        # Makes all calls that move data.
        self.repeated = RepeatedMoves(self)
        self._gathers, self.moves = Gathers(self), Moves(self)
        self.parts = PartReductions(self)
        self.fields = FieldMoves(self)
        self._reductions = Reductions(self, self.ops, options)
        # Reductions by other algorithms, if a program calls a CrossDeviceOps itself.
        self._by_others: dict[CrossDeviceOps, Reductions] = {}
        # Methods of other objects, bound here so that a call needs no extra lookup.
        self.all_gather = self._gathers.all_gather
        self.broadcast = self._gathers.broadcast
        self.repeat_gather = self.repeated.repeat
        self.start_all_gather = self._gathers.start_all_gather
        self.barrier = self.moves.barrier
        self.batch_reduce = self._reductions.batch_reduce
        self.reduce_in_call = self._reductions.reduce_in_call
        self.repeat = self._reductions.repeat
        self.start_reduce = self._reductions.start_reduce
        self.start_in_call = self._reductions.start_in_call
        self.use_mapped_memory = self._reductions.use_mapped_memory

    @property
    def collectives(self) -> Collectives:
        """Return this object; the `collective` decorator reads the channel from it."""
        return self

    def call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that makes collective calls; if it fails, all replicas raise.

        Collective over ``topology.replica_comm``.
        """
        return enter(self.channel, what, function, *args)

    def section(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a section, which all replicas leave together.

        The end of the section is collective over ``topology.replica_comm``: an error of
        one replica is raised on all replicas. See `hpcstrat.engine.channel.failures`.
        """
        if isinstance(self.channel, Channel):
            return Section(self.channel, what, self.timeout_seconds)
        return contextlib.nullcontext()

    def moving(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for an exchange of data that follows a barrier.

        The value of ``as`` is an InterruptibleComm of all replicas, or None for a
        single replica. An error inside the block prevents all further calls, see
        `Channel.moving`.
        """
        if isinstance(self.channel, Channel):
            return self.channel.moving(describe_call(what))
        return contextlib.nullcontext()

    @collective
    def broadcast_object(self, value: Any, root: int, what: str) -> Any:
        """Send the root's Python object to every replica.

        Collective over ``topology.replica_comm``. The root returns ``value`` itself. A
        rank that cannot pickle or unpickle it raises pickle's error, and the other
        ranks raise ReplicaError.
        """
        if self.channel is None:
            return value
        sends = self.rank == root
        data = pickle.dumps(value, protocol=5) if sends else b""
        call = describe_call(f"{what}(root={root})")
        received = self._gathers.gathered_bytes(data, call, root)
        copies = self._loaded([] if sends else received, call)
        return value if sends else copies[0]

    @collective
    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Return the Python objects of all replicas, in replica order, on each replica.

        Collective over ``topology.replica_comm``. A rank that cannot pickle or unpickle
        an object raises pickle's error, and the other ranks raise ReplicaError.
        """
        if self.channel is None:
            return [value]
        call = describe_call(what)
        received = self._gathers.gathered_bytes(pickle.dumps(value, protocol=5), call)
        return self._loaded(received, call)

    @collective
    def _loaded(self, parts: list[Array], call: Call) -> list[Any]:
        """Unpickle on all ranks, or raise on all if a rank lacks a class or memory."""
        values = [pickle.loads(part.data) for part in parts]
        channel: Any = self.channel
        channel.agree(describe_call(f"end of {call.text}"), self.timeout_seconds)
        return values

    def fail(self, what: str, error: BaseException) -> None:
        """Let the other replicas raise at their next call; the caller raises ``error``.

        Collective over ``topology.replica_comm``: matches the other ranks' next call.
        Does nothing in a function that interrupts a call, such as a signal handler.
        """
        if self.channel is not None and not interrupted_call():
            self.channel.failures.fail(what, error)

    @contextlib.contextmanager
    def all_raise(self, what: str) -> Iterator[None]:
        """Make the other replicas raise, too, if an Exception leaves this block.

        As in `fail`, the report matches the other ranks' next call. Use this block
        after an entry's first header; until then, the `collective` decorator reports
        errors.
        """
        try:
            yield
        except Exception as error:
            self.fail(what, error)
            raise

    def reductions_by(self, ops: CrossDeviceOps) -> Reductions:
        """Return the Reductions of these replicas that use ``ops``; not collective."""
        if ops is self.ops:
            return self._reductions
        if ops not in self._by_others:
            options = CommunicationOptions(timeout_seconds=self.timeout_seconds)
            self._by_others[ops] = Reductions(self, ops, options)
        return self._by_others[ops]

    @property
    def overlaps(self) -> bool:
        """True if MPI sends data of a started reduction while the ranks compute."""
        return self._reductions.overlaps

    def close(self) -> None:
        """Make all later calls raise CollectiveError."""
        self.channel = ClosedChannel()
        self.repeated.close()
        for some in (self._reductions, *self._by_others.values()):
            some.close()
