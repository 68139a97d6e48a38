"""MPI calls that end if another rank has failed; MPI's own calls would deadlock.

A blocking MPI call ends only when all ranks have made it, or when the process ends. The
calls of this module have mpi4py's names and meanings, but they use nonblocking MPI
calls, for which the channel waits: it looks for abort messages of other ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.channel.waitable import Exchange, Message, Waitable

__all__ = ["EAGER_BYTES", "MOST_MESSAGE_BYTES", "PIECE_BYTES", "InterruptibleComm"]

PIECE_BYTES = 1 << 20
"""Size of the pieces of an array; the fastest in sums of 64 MiB on two ranks."""

EAGER_BYTES = 63 << 10
"""Size of messages that MPI sends without waiting for an answer of the receiver.

Over TCP, MPI sends a message of more than 64 KiB only after the receiver has answered,
and this answer waits in the queue behind the data of other messages.
"""

MOST_MESSAGE_BYTES = 64 << 20
"""Size of the largest messages: many MPI libraries support no counts past 2**31 - 1."""

_MOST_GATHERED_BYTES = 1 << 30
_TAG = 13
_RECYCLED_BYTES = 32 << 20


class InterruptibleComm:
    """A communicator whose calls wait for each `Waitable` by calling ``wait``.

    Methods are collective over the communicator, unless they say otherwise.
    """

    def __init__(self, comm: Any, mpi: Any, wait: Callable[[Waitable], None]) -> None:
        self._comm, self.mpi, self._wait = comm, mpi, wait
        self.rank: int = comm.rank
        self.size: int = comm.size
        # Returns an uninitialized array, in memory that is reused when it is dropped.
        self.empty = Recycler(_RECYCLED_BYTES).empty

    def finish(self, messages: Iterable[Exchange]) -> None:
        """Wait for MPI calls, each of which is made after the one before has ended."""
        for message in messages:
            self._wait(message)

    def Barrier(self) -> None:  # noqa: N802
        """Wait for all ranks."""
        self._wait(Message(self._comm.Ibarrier))

    def Bcast(self, buffer: Any, root: int = 0) -> None:  # noqa: N802
        """Copy the root's flat array into ``buffer`` of all ranks."""
        self.finish(self.casting(buffer, root))

    def Allreduce(self, send: Any, receive: Any, op: Any) -> None:  # noqa: N802
        """Combine the arrays of all ranks by an operation of MPI."""
        self._wait(self.Iallreduce(send, receive, op))

    def Iallreduce(self, send: Any, receive: Any, op: Any) -> Exchange:  # noqa: N802
        """Start to combine the arrays of all ranks by an operation of MPI."""
        made = self._comm.Iallreduce, send, receive, op
        return Message(*made, nbytes=receive.nbytes)

    def Allgatherv(self, whole: Any, sizes: Sequence[int]) -> None:  # noqa: N802
        """Send this rank's part of a uint8 array to all ranks; see `gathering`."""
        self.finish(self.gathering(whole, sizes))

    def Alltoallv(self, send: Any, receive: Any) -> None:  # noqa: N802
        """Send part ``r`` of this rank's array to each rank ``r``."""
        made = self._comm.Ialltoallv, send, receive
        self._wait(Message(*made, nbytes=receive[0].nbytes))

    def start(
        self,
        sent: Mapping[int, Any],
        received: Mapping[int, Any],
        tag: int,
        most_bytes: int = EAGER_BYTES,
    ) -> Exchange:
        """Start to send flat arrays to ranks, and to receive arrays from other ranks.

        Not collective. Sender and receiver must use the same sizes and the same limit
        of a message, ``most_bytes``. Exchanges between two ranks with the same tag are
        matched in the order in which they are started.
        """
        exchange = Exchange(sent, received)
        calls = (self._comm.Irecv, received), (self._comm.Isend, sent)
        for call, arrays in calls:
            for rank, array in arrays.items():
                # Send bytes, so that dtypes without an MPI datatype work, too.
                data = array.view(np.uint8)
                exchange.nbytes += data.nbytes
                for start in range(0, data.nbytes, most_bytes):
                    message = data[start : start + most_bytes]
                    exchange.requests.append(call(message, rank, tag))
        return exchange

    def exchange(
        self, sent: Mapping[int, Any], received: Mapping[int, Any], tag: int
    ) -> None:
        """Exchange flat arrays of any dtype, and wait for the data; not collective."""
        self._wait(self.start(sent, received, tag, MOST_MESSAGE_BYTES))

    def gathering(self, whole: Any, sizes: Sequence[int]) -> Iterator[Message]:
        """Send this rank's part of a uint8 array to all ranks, and receive their parts.

        Part ``r`` has ``sizes[r]`` bytes, and the parts are adjacent in rank order.
        Yields the MPI calls, to wait for one after the other.
        """
        if 0 < whole.nbytes < _MOST_GATHERED_BYTES:
            given = self.mpi.IN_PLACE, [whole, sizes, self.mpi.BYTE]
            yield Message(self._comm.Iallgatherv, *given, nbytes=whole.nbytes)
            return
        start = 0
        for root, nbytes in enumerate(sizes):
            yield from self.casting(whole[start : start + nbytes], root)
            start += nbytes

    def casting(self, flat: Any, root: int) -> Iterator[Message]:
        """Copy the root's flat array into ``flat`` of all ranks.

        Yields the MPI calls, to wait for one after the other.
        """
        data = flat.view(np.uint8)
        for start in range(0, data.size, _MOST_GATHERED_BYTES):
            piece = data[start : start + _MOST_GATHERED_BYTES]
            yield Message(self._comm.Ibcast, piece, root, nbytes=piece.nbytes)

    def allgather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, which must be small, in rank order."""
        data = np.frombuffer(pickle.dumps(value, 5), np.uint8)
        own, sizes = np.array([data.size]), np.empty(self.size, np.int64)
        self._wait(Message(self._comm.Iallgather, own, sizes))
        whole = np.empty(sizes.sum(), np.uint8)
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        parts[self.rank][...] = data
        self.Allgatherv(whole, sizes.tolist())
        return [pickle.loads(part.data) for part in parts]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return a copy of the root's object, which must be small, on all ranks."""
        return self.allgather(value if self.rank == root else None)[root]

    def exchange_objects(
        self, sent: Mapping[int, Any], sources: Iterable[int]
    ) -> dict[int, Any]:
        """Send objects to ranks; return the objects of ``sources``; not collective."""
        data = {r: np.frombuffer(pickle.dumps(v, 5), np.uint8) for r, v in sent.items()}
        sizes = {rank: np.empty(1, np.int64) for rank in sources}
        told = {rank: np.array([array.size]) for rank, array in data.items()}
        self.exchange(told, sizes, _TAG)
        found = {rank: np.empty(size[0], np.uint8) for rank, size in sizes.items()}
        self.exchange(data, found, _TAG)
        return {rank: pickle.loads(array.data) for rank, array in found.items()}
