"""Collective calls that send Python objects between replicas, or no data at all."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.closed import ClosedChannel
from hpcstrat.engine.channel.entries import collective, interrupted_call
from hpcstrat.engine.channel.sections import Section
from hpcstrat.engine.typing import Array

__all__ = ["ObjectCollectives"]


class ObjectCollectives:
    """Collective calls without arrays; ``channel`` is None for a single replica."""

    def __init__(
        self, channel: Channel | None, timeout_seconds: float | None = None
    ) -> None:
        # Seconds that each call waits for late ranks.
        self.timeout_seconds = timeout_seconds
        self.channel: Channel | ClosedChannel | None = channel
        self.size = 1 if channel is None else channel.topology.num_replicas

    @property
    def collectives(self) -> ObjectCollectives:
        """Return this object; the `collective` decorator reads the channel from it."""
        return self

    @collective
    def call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the library that makes collective calls, as one entry.

        Collective over ``topology.replica_comm``. If ``function`` fails on one replica,
        all replicas raise.
        """
        return function(*args)

    def close(self) -> None:
        """Make all later calls raise CollectiveError."""
        self.channel = ClosedChannel()

    @collective
    def barrier(self, what: str = "barrier") -> None:
        """Wait for all replicas; collective over ``topology.replica_comm``."""
        if self.channel is not None:
            self.channel.agree(describe_call(what), self.timeout_seconds)

    def section(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a section, which all replicas leave together.

        The end of the section is collective over ``topology.replica_comm``: an error of
        one replica is raised on all replicas. See `hpcstrat.engine.channel.sections`.
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

        Collective over ``topology.replica_comm``. ``value``, of any size, is ignored on
        all replicas but the root. The root returns ``value`` itself, the other replicas
        return copies. If a rank cannot pickle or unpickle the object, this rank raises
        the error of pickle, and the other ranks raise ReplicaError.
        """
        if self.channel is None:
            return value
        sends = self.channel.topology.replica_id == root
        data = pickle.dumps(value, protocol=5) if sends else b""
        call = describe_call(f"{what}(root={root})")
        received = self.exchange_bytes(data, call, root)
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
        received = self.exchange_bytes(pickle.dumps(value, protocol=5), call)
        return self._loaded(received, call)

    def exchange_bytes(
        self, data: bytes, call: Call, root: int | None = None
    ) -> list[Array]:
        """Return the bytes of all replicas, or of the root, on every replica."""
        raise NotImplementedError

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
