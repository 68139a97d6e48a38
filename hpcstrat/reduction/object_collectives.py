"""Calls between replicas that carry Python objects, or nothing."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

from hpcstrat.channel.call import Call, describe_call
from hpcstrat.channel.channel import Channel
from hpcstrat.channel.closed import ClosedChannel
from hpcstrat.channel.entries import collective
from hpcstrat.channel.sections import Section

__all__ = ["ObjectCollectives"]


class ObjectCollectives:
    """The part of `Collectives` that knows nothing of arrays.

    Parameters
    ----------
    channel : Channel or None
        Carries the headers; None for a single replica.
    timeout_seconds : float, optional
        How long a call waits for late ranks.

    Attributes
    ----------
    size : int
        Number of replicas.
    """

    def __init__(
        self, channel: Channel | None, timeout_seconds: float | None = None
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self.channel: Channel | ClosedChannel | None = channel
        self.size = 1 if channel is None else channel.topology.num_replicas

    @property
    def collectives(self) -> ObjectCollectives:
        """Itself: its calls are entries of the library, too."""
        return self

    @collective
    def call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that makes a collective call of the program.

        Collective over ``topology.replica_comm``. If it fails on a replica, all raise.

        Parameters
        ----------
        what : str
            The call, for messages.
        function : callable
            Not the program's own.
        *args : object
            Its arguments.

        Returns
        -------
        object
            What it returns.
        """
        return function(*args)

    def close(self) -> None:
        """Refuse all calls from here on.

        Not collective.
        """
        self.channel = ClosedChannel()

    @collective
    def barrier(self, what: str = "barrier") -> None:
        """Wait for all replicas.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        what : str
            The call, for messages.
        """
        if self.channel is not None:
            self.channel.agree(describe_call(what), self._timeout_seconds)

    def section(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return what surrounds a part of the program that all replicas leave together.

        Collective over ``topology.replica_comm`` is its end: an error of one replica is
        raised on all.

        Parameters
        ----------
        what : str
            The part, for messages.

        Returns
        -------
        context manager
            See `hpcstrat.channel.sections`.
        """
        if isinstance(self.channel, Channel):
            return Section(self.channel, what, self._timeout_seconds)
        return contextlib.nullcontext()

    def moving(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Return what surrounds an exchange that follows a barrier.

        Not collective. An error in it leaves the other replicas in the call, and no
        further call can be made.

        Parameters
        ----------
        what : str
            The call, for messages.

        Returns
        -------
        context manager
            Gives a PatientComm of all replicas; does nothing where there is no channel.
        """
        if isinstance(self.channel, Channel):
            return self.channel.moving(describe_call(what))
        return contextlib.nullcontext()

    @collective
    def broadcast_object(self, value: Any, root: int, what: str) -> Any:
        """Give every replica one replica's Python object.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        value : object
            Anything that pickles; of any size. Ignored on the other replicas.
        root : int
            The replica whose object is taken.
        what : str
            The call, for messages.

        Returns
        -------
        object
            The object itself on the root, a copy elsewhere.

        Raises
        ------
        Exception
            Where pickling or unpickling fails, what it raised; the other replicas raise
            ReplicaError.
        """
        if self.channel is None:
            return value
        sends = self.channel.topology.replica_id == root
        data = pickle.dumps(value, protocol=5) if sends else b""
        call = describe_call(f"{what}(root={root})")
        self.channel.agree(call, self._timeout_seconds)
        channel: Any = self.channel
        with channel.moving(call) as comm:
            received = comm.cast(data, root)
        [copy] = self._loaded([b"" if sends else received], call)
        return value if sends else copy

    @collective
    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Give every replica the Python objects of all.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        value : object
            Anything that pickles.
        what : str
            The call, for messages.

        Returns
        -------
        list of object
            In replica order.

        Raises
        ------
        Exception
            Where pickling or unpickling fails, what it raised; the other replicas raise
            ReplicaError.
        """
        if self.channel is None:
            return [value]
        data = pickle.dumps(value, protocol=5)
        call = describe_call(what)
        self.channel.agree(call, self._timeout_seconds)
        channel: Any = self.channel
        with channel.moving(call) as comm:
            parts = comm.gathered(data)
        return self._loaded(parts, call)

    @collective
    def _loaded(self, parts: list[Any], call: Call) -> list[Any]:
        """Unpickle on all ranks or none: classes, or memory, may be missing on some."""
        values = [pickle.loads(part) if part else None for part in parts]
        channel: Any = self.channel
        channel.agree(describe_call(f"end of {call.text}"), self._timeout_seconds)
        return values

    def fail(self, what: str, error: BaseException) -> None:
        """Make the other replicas raise at their next call; then raise ``error``.

        Collective over ``topology.replica_comm``: it stands for this rank's next call.

        Parameters
        ----------
        what : str
            What this rank was doing.
        error : BaseException
            Why it cannot go on.
        """
        if self.channel is not None:
            self.channel.fail(what, error)
