"""Calls between replicas that carry Python objects, or nothing."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import numpy as np

from hpcstrat.collectives.call import describe_call
from hpcstrat.collectives.closed import ClosedChannel
from hpcstrat.collectives.flat import all_gather_bytes, broadcast
from hpcstrat.collectives.header import Channel
from hpcstrat.collectives.scopes import Scope

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

    def close(self) -> None:
        """Refuse all calls from here on.

        Not collective.
        """
        self.channel = ClosedChannel()

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

    def scope(self, what: str) -> contextlib.AbstractContextManager[None]:
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
            See `hpcstrat.collectives.scopes`.
        """
        if isinstance(self.channel, Channel):
            return Scope(self.channel, what, self._timeout_seconds)
        return contextlib.nullcontext()

    def moving(self, what: str) -> contextlib.AbstractContextManager[None]:
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
            Does nothing where there is no channel.
        """
        if isinstance(self.channel, Channel):
            return self.channel.moving(describe_call(what))
        return contextlib.nullcontext()

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
            On the root, what pickling raised; the others raise ReplicaError.
        """
        if self.channel is None:
            return value
        topology = self.channel.topology
        sends = topology.replica_id == root
        data = self._pickled(value, what) if sends else b""
        call = describe_call(f"{what}(root={root})")
        self.channel.agree(call, self._timeout_seconds)
        with self.channel.moving(call):
            length = topology.replica_comm.bcast(len(data), root=root)
            received = np.empty(0 if sends else length, np.uint8)
            buffer = np.frombuffer(data, np.uint8) if sends else received
            broadcast(buffer, topology, root)
        return value if sends else pickle.loads(buffer.data)

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
            What pickling raised; the other replicas raise ReplicaError.
        """
        if self.channel is None:
            return [value]
        data = np.frombuffer(self._pickled(value, what), np.uint8)
        call = describe_call(what)
        self.channel.agree(call, self._timeout_seconds)
        topology = self.channel.topology
        with self.channel.moving(call):
            sizes = topology.replica_comm.allgather(data.size)
            out = np.empty(sum(sizes), np.uint8)
            all_gather_bytes(data, out, sizes, topology)
        ends = np.cumsum(sizes).tolist()
        parts = zip(ends, sizes, strict=True)
        return [pickle.loads(out[end - size : end].data) for end, size in parts]

    def _pickled(self, value: Any, what: str) -> bytes:
        try:
            return pickle.dumps(value, protocol=5)
        except Exception as error:
            self.fail(what, error)
            raise

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
