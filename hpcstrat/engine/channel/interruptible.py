"""MPI calls that end if another rank has failed; MPI's own calls would deadlock.

A blocking MPI call ends only when all ranks have made it, or when the process ends. The
calls of this module have mpi4py's names and meanings, but they use nonblocking MPI
calls. While the channel waits for a nonblocking call, it looks for abort messages of
other ranks, and sleeps if the wait takes long.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.channel.waitable import Exchange, Message, Waitable
from hpcstrat.engine.topology.topology import Topology

__all__ = ["EAGER_BYTES", "PIECE_BYTES", "InterruptibleComm"]

PIECE_BYTES = 1 << 20
"""Size of the pieces of an array; the fastest in sums of 64 MiB on two ranks."""

EAGER_BYTES = 48 << 10
"""Size of messages that MPI sends without waiting for an answer of the receiver.

Over TCP, MPI sends a message of more than 64 KiB only after the receiver has answered,
and this answer waits in the queue behind the data of other messages.
"""

# Limits of one MPI call: many MPI libraries support no counts past 2**31 - 1.
_MOST_MESSAGE_BYTES = 64 << 20
_MOST_GATHERED_BYTES = 1 << 30
_BYTES_PER_SECOND = 1e9
_TAG = 13
# Buffers are kept for at most this many different sizes.
_MOST_SIZES = 8


class InterruptibleComm:
    """A communicator whose calls wait by calling ``wait`` with a `Waitable`.

    Methods are collective over the communicator, unless they say otherwise.
    """

    def __init__(
        self, comm: Any, topology: Topology, wait: Callable[[Any], Any]
    ) -> None:
        self._comm = comm
        self._topology = topology
        self.mpi = topology.mpi
        self._wait = wait
        self.rank: int = comm.rank
        self.size: int = comm.size
        # Free receive buffers that can be reused, by size.
        self._rooms: dict[int, list[Any]] = {}

    def _finish(self, awaited: Waitable, nbytes: int) -> None:
        # Do not sleep in the expected time, because this might stop the transfer.
        end = time.monotonic() + nbytes / _BYTES_PER_SECOND if nbytes else 0.0
        while not awaited.agreed():
            if time.monotonic() > end:
                self._wait(awaited)
                break
            if self._topology.shares_cores:
                os.sched_yield()
        self._topology.moves += 1

    def finish(self, messages: Iterable[Exchange]) -> None:
        """Wait for MPI calls, each of which is made after the one before has ended."""
        for message in messages:
            self._finish(message, message.nbytes)

    def Barrier(self) -> None:  # noqa: N802
        """Wait for all ranks."""
        self._finish(Message(self._comm.Ibarrier), 0)

    def Bcast(self, buffer: Any, root: int = 0) -> None:  # noqa: N802
        """Copy the root's contiguous array into ``buffer`` of all ranks."""
        self._finish(Message(self._comm.Ibcast, buffer, root), buffer.nbytes)

    def Allreduce(self, send: Any, receive: Any, op: Any) -> None:  # noqa: N802
        """Combine the arrays of all ranks by an operation of MPI."""
        self._finish(self.Iallreduce(send, receive, op), receive.nbytes)

    def Iallreduce(self, send: Any, receive: Any, op: Any) -> Exchange:  # noqa: N802
        """Start to combine the arrays of all ranks by an operation of MPI."""
        return Message(self._comm.Iallreduce, send, receive, op)

    def Allgatherv(self, send: Any, receive: Any) -> None:  # noqa: N802
        """Concatenate the arrays of all ranks into the array ``receive[0]``."""
        self._finish(Message(self._comm.Iallgatherv, send, receive), receive[0].nbytes)

    def Alltoallv(self, send: Any, receive: Any) -> None:  # noqa: N802
        """Send part ``r`` of this rank's array to each rank ``r``."""
        self._finish(Message(self._comm.Ialltoallv, send, receive), receive[0].nbytes)

    def start(
        self, sent: Mapping[int, Any], received: Mapping[int, Any], tag: int
    ) -> Exchange:
        """Start to send uint8 arrays to ranks, and to receive arrays from other ranks.

        Not collective. Sender and receiver must use the same sizes. Exchanges between
        two ranks with the same tag are matched in the order in which they are started.
        """
        return self._start(sent, received, tag, EAGER_BYTES)

    def exchange(
        self, sent: Mapping[int, Any], received: Mapping[int, Any], tag: int
    ) -> None:
        """Exchange flat arrays of any dtype, and wait for the data; not collective."""
        self.finish([self.exchanging(sent, received, tag)])

    def exchanging(
        self, sent: Mapping[int, Any], received: Mapping[int, Any], tag: int
    ) -> Exchange:
        """Start to exchange flat arrays of any dtype; not collective."""
        out, into = (
            {rank: array.view(np.uint8) for rank, array in arrays.items()}
            for arrays in (sent, received)
        )
        exchange = self._start(out, into, tag, _MOST_MESSAGE_BYTES)
        exchange.nbytes = sum(a.nbytes for a in (*out.values(), *into.values()))
        return exchange

    def _start(
        self, sent: Mapping[int, Any], received: Mapping[int, Any], tag: int, most: int
    ) -> Exchange:
        exchange = Exchange(sent, received)
        calls = (self._comm.Irecv, received), (self._comm.Isend, sent)
        for call, arrays in calls:
            for rank, array in arrays.items():
                for start in range(0, array.nbytes, most):
                    message = array[start : start + most]
                    exchange.requests.append(call(message, rank, tag))
        return exchange

    def take_room(self, nbytes: int) -> Any:
        """Return a buffer that is only the caller's until it calls `give_room`."""
        free = self._rooms.get(nbytes)
        return free.pop() if free else np.empty(nbytes, np.uint8)

    def give_room(self, room: Any) -> None:
        """Return a buffer of `take_room`, so that later calls can reuse it."""
        if room.nbytes not in self._rooms and len(self._rooms) >= _MOST_SIZES:
            self._rooms.clear()
        self._rooms.setdefault(room.nbytes, []).append(room)

    def allreduce(self, value: int, op: Any) -> int:
        """Return the integers of all ranks combined by an operation of MPI."""
        found = np.array([value], np.int64)
        self.Allreduce(self.mpi.IN_PLACE, found, op)
        return int(found[0])

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

    def gathered(self, data: bytes) -> list[memoryview]:
        """Return the bytes of all ranks, in rank order."""
        own, sizes = np.array([len(data)]), np.empty(self.size, np.int64)
        self._finish(Message(self._comm.Iallgather, own, sizes), 0)
        whole = np.empty(sizes.sum(), np.uint8)
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        parts[self.rank][...] = np.frombuffer(data, np.uint8)
        self.finish(self.gathering(whole, sizes.tolist()))
        return [part.data for part in parts]

    def allgather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""
        return [pickle.loads(part) for part in self.gathered(pickle.dumps(value, 5))]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's object on all ranks."""
        sends = self.rank == root
        data = self.cast(pickle.dumps(value, 5) if sends else b"", root)
        return value if sends else pickle.loads(data)

    def cast(self, data: bytes, root: int) -> Any:
        """Return the root's bytes on all ranks."""
        size = np.array([len(data)], np.int64)
        self.Bcast(size, root)
        buffer: Any = np.frombuffer(data, np.uint8)
        if self.rank != root:
            buffer = np.empty(int(size[0]), np.uint8)
        self.cast_array(buffer, root)
        return buffer.data

    def cast_array(self, flat: Any, root: int) -> None:
        """Copy the root's flat array into ``flat`` of all ranks."""
        self.finish(self.casting(flat, root))

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

    def sendrecv(self, value: Any, dest: int, source: int) -> Any:
        """Send an object to ``dest``, and return the object of ``source``.

        Not collective, but ``dest`` and ``source`` must make matching calls.
        """
        return self.exchange_objects({dest: value}, [source])[source]

    def scatter(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's object from the root's list of objects."""
        if self.rank != root:
            return self.exchange_objects({}, [root])[root]
        assert values is not None
        others = {rank: v for rank, v in enumerate(values) if rank != root}
        self.exchange_objects(others, ())
        return values[root]
