"""Calls between replicas that carry Python objects, or nothing."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.closed import ClosedChannel
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.sections import Section

__all__ = ["ObjectCollectives"]


class ObjectCollectives:
    """Calls that know nothing of arrays; ``channel`` is None for a single replica."""

    def __init__(
        self, channel: Channel | None, timeout_seconds: float | None = None
    ) -> None:
        # Calls wait so long for late ranks.
        self.timeout_seconds = timeout_seconds
        self.channel: Channel | ClosedChannel | None = channel
        # Number of replicas.
        self.size = 1 if channel is None else channel.topology.num_replicas

    @property
    def collectives(self) -> ObjectCollectives:
        """Itself: its calls are entries of the library, too."""
        return self

    @collective
    def call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that makes a collective call of the program.

        Collective over ``topology.replica_comm``. If it fails on a replica, all raise.
        It is none of the program's own.
        """
        return function(*args)

    def close(self) -> None:
        """Refuse all calls from here on."""
        self.channel = ClosedChannel()

    @collective
    def barrier(self, what: str = "barrier") -> None:
        """Wait for all replicas; collective over ``topology.replica_comm``."""
        if self.channel is not None:
            self.channel.agree(describe_call(what), self.timeout_seconds)

    def section(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return what surrounds a part of the program that all replicas leave together.

        Collective over ``topology.replica_comm`` is its end: an error of one replica is
        raised on all. See `hpcstrat.engine.channel.sections`.
        """
        if isinstance(self.channel, Channel):
            return Section(self.channel, what, self.timeout_seconds)
        return contextlib.nullcontext()

    def moving(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Return what surrounds an exchange that follows a barrier.

        An error in it leaves the other replicas in the call, and no further call can be
        made. It gives an InterruptibleComm of all replicas; it does nothing where
        there is no channel.
        """
        if isinstance(self.channel, Channel):
            return self.channel.moving(describe_call(what))
        return contextlib.nullcontext()

    @collective
    def broadcast_object(self, value: Any, root: int, what: str) -> Any:
        """Give every replica one replica's Python object.

        Collective over ``topology.replica_comm``. ``value``, of any size, is ignored on
        the other replicas; the root keeps the object itself, the others get copies.
        Where pickling or unpickling fails, that rank raises what it raised, and the
        others ReplicaError.
        """
        if self.channel is None:
            return value
        sends = self.channel.topology.replica_id == root
        data = pickle.dumps(value, protocol=5) if sends else b""
        call = describe_call(f"{what}(root={root})")
        self.channel.agree(call, self.timeout_seconds)
        channel: Any = self.channel
        with channel.moving(call) as comm:
            received = comm.cast(data, root)
        [copy] = self._loaded([b"" if sends else received], call)
        return value if sends else copy

    @collective
    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Give every replica the Python objects of all, in replica order.

        Collective over ``topology.replica_comm``. Where pickling or unpickling fails,
        that rank raises what it raised, and the others ReplicaError.
        """
        if self.channel is None:
            return [value]
        data = pickle.dumps(value, protocol=5)
        call = describe_call(what)
        self.channel.agree(call, self.timeout_seconds)
        channel: Any = self.channel
        with channel.moving(call) as comm:
            parts = comm.gathered(data)
        return self._loaded(parts, call)

    @collective
    def _loaded(self, parts: list[Any], call: Call) -> list[Any]:
        """Unpickle on all ranks or none: classes, or memory, may be missing on some."""
        values = [pickle.loads(part) if part else None for part in parts]
        channel: Any = self.channel
        channel.agree(describe_call(f"end of {call.text}"), self.timeout_seconds)
        return values

    def fail(self, what: str, error: BaseException) -> None:
        """Make the other replicas raise at their next call; then raise ``error``.

        Collective over ``topology.replica_comm``: it stands for this rank's next call.
        """
        if self.channel is not None:
            self.channel.failures.fail(what, error)

    @contextlib.contextmanager
    def all_raise(self, what: str) -> Iterator[None]:
        """Make the other replicas raise, too, where an Exception leaves this block.

        As `fail`: it stands for this rank's next call. An entry does the same for what
        fails before its first header; this is for what comes later.
        """
        try:
            yield
        except Exception as error:
            self.fail(what, error)
            raise
