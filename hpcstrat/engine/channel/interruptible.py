"""Collectives of MPI in which a rank can be told that another one will not come.

A blocking call of MPI ends when all ranks have made it, or with the process. These are
the same calls, with the names and meanings that mpi4py gives them, made without
blocking and awaited as a channel awaits everything: it looks for ranks that have ended
all calls, and naps where it takes long.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.channel.waitable import Message, Waitable
from hpcstrat.engine.topology.kept_requests import keep
from hpcstrat.engine.topology.topology import Topology

__all__ = ["EAGER_BYTES", "PIECE_BYTES", "Exchange", "InterruptibleComm"]

PIECE_BYTES = 1 << 20
"""Size of the pieces; the fastest in the all-reduce of 64 MiB on two ranks."""

EAGER_BYTES = 48 << 10
"""Size of messages that MPI sends at once.

Over TCP, it sends more than 64 KiB only when the other rank has answered, and that
answer stands in the queue behind the data of other messages.
"""

_BYTES_PER_SECOND = 1e9
_TAG = 13
# Buffers of so many sizes are kept.
_MOST_SIZES = 8


class Exchange:
    """Calls of MPI under way, with the arrays that they use; for `Channel.wait`."""

    def __init__(self, *arrays: Any) -> None:
        # One by one: an error may leave it between them.
        self.requests: list[Any] = []
        self._arrays = arrays

    def agreed(self) -> bool:
        """Whether all of them are complete."""
        requests = self.requests
        if requests and type(requests[0]).Testall(requests):
            self.requests = requests = []
        return not requests

    def missing(self) -> list[int]:
        """Return ``[-1]`` until they are: it is not asked whose are missing."""
        return [] if self.agreed() else [-1]

    def __del__(self) -> None:
        # An error may have ended the wait for it.
        if self.requests:
            keep(self.requests, self._arrays)


class InterruptibleComm:
    """A communicator whose calls are awaited by ``wait``, which takes a `Waitable`."""

    def __init__(
        self, comm: Any, topology: Topology, wait: Callable[[Any], Any]
    ) -> None:
        self._comm = comm
        self._topology = topology
        self.mpi = topology.mpi
        self._wait = wait
        self.rank: int = comm.rank
        self.size: int = comm.size
        # Memory for what comes, used again: by its size, what nobody uses now.
        self._rooms: dict[int, list[Any]] = {}

    def _done(self, request: Any, nbytes: int = 0) -> None:
        self._finish(Message(request), nbytes)

    def _finish(self, awaited: Waitable, nbytes: int) -> None:
        # Data that moves takes the processor in any case.
        end = time.monotonic() + nbytes / _BYTES_PER_SECOND if nbytes else 0.0
        while not awaited.agreed():
            if time.monotonic() > end:
                self._wait(awaited)
                break
        self._topology.moves += 1

    def Barrier(self) -> None:  # noqa: N802
        """Wait for all ranks; collective over the communicator, as are all others."""
        self._done(self._comm.Ibarrier())

    def Bcast(self, buffer: Any, root: int = 0) -> None:  # noqa: N802
        """Give all ranks one rank's contiguous array."""
        self._done(self._comm.Ibcast(buffer, root), buffer.nbytes)

    def Allreduce(self, send: Any, receive: Any, op: Any) -> None:  # noqa: N802
        """Combine the arrays of all ranks."""
        self._finish(self.Iallreduce(send, receive, op), receive.nbytes)

    def Allgatherv(self, send: Any, receive: Any) -> None:  # noqa: N802
        """Give all ranks the arrays of all; ``receive`` begins with an array."""
        self._done(self._comm.Iallgatherv(send, receive), receive[0].nbytes)

    def Alltoallv(self, send: Any, receive: Any) -> None:  # noqa: N802
        """Give each rank a part of each rank's array."""
        self._done(self._comm.Ialltoallv(send, receive), receive[0].nbytes)

    def Send(self, buffer: Any, dest: int, tag: int) -> None:  # noqa: N802
        """Send an array to a rank; not collective."""
        self._done(self._comm.Isend(buffer, dest, tag), buffer.nbytes)

    def Recv(self, buffer: Any, source: int, tag: int) -> None:  # noqa: N802
        """Receive an array from a rank; not collective."""
        self._done(self._comm.Irecv(buffer, source, tag), buffer.nbytes)

    def sendrecv(self, value: Any, dest: int, source: int) -> Any:
        """Exchange objects with ranks, which make the same call; not collective."""
        data = np.frombuffer(pickle.dumps(value, 5), np.uint8)
        sent, came = np.array([data.size], np.int64), np.empty(1, np.int64)
        self.exchange({dest: sent}, {source: came}, _TAG)
        found = np.empty(int(came[0]), np.uint8)
        self.exchange({dest: data}, {source: found}, _TAG)
        return pickle.loads(found.data)

    def exchange(
        self, sent: Mapping[int, Any], received: Mapping[int, Any], tag: int
    ) -> None:
        """Send arrays to ranks, and receive those of others; not collective."""
        nbytes = sum(a.nbytes for part in (sent, received) for a in part.values())
        self._finish(self._start(sent, received, tag, max(nbytes, 1)), nbytes)

    def start(
        self, sent: Mapping[int, Any], received: Mapping[int, Any], tag: int
    ) -> Exchange:
        """Start to send arrays of uint8 to ranks, and to receive those of others.

        Not collective. Both ranks know their sizes. What two ranks exchange with a tag
        is matched in the order in which they start it.
        """
        return self._start(sent, received, tag, EAGER_BYTES)

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

    def Iallreduce(self, send: Any, receive: Any, op: Any) -> Exchange:  # noqa: N802
        """Start to combine the arrays of all ranks; collective."""
        exchange = Exchange(send, receive)
        exchange.requests.append(self._comm.Iallreduce(send, receive, op))
        return exchange

    def take_room(self, nbytes: int) -> Any:
        """Return memory that nothing else uses until `give_room` gets it."""
        free = self._rooms.get(nbytes)
        return free.pop() if free else np.empty(nbytes, np.uint8)

    def give_room(self, room: Any) -> None:
        """Let others use memory of `take_room` again."""
        if room.nbytes not in self._rooms and len(self._rooms) >= _MOST_SIZES:
            self._rooms.clear()
        self._rooms.setdefault(room.nbytes, []).append(room)

    def allreduce(self, value: int, op: Any) -> int:
        """Combine integers."""
        found = np.array([value], np.int64)
        self.Allreduce(self.mpi.IN_PLACE, found, op)
        return int(found[0])

    def lengths(self, own: Sequence[int]) -> Any:
        """Return as many integers of each rank, as an array with a row for each."""
        sent = np.array(own, np.int64)
        found = np.empty((self.size, sent.size), np.int64)
        self._done(self._comm.Iallgather(sent, found))
        return found

    def allgather(self, value: Any) -> list[Any]:
        """Give all ranks the objects of all."""
        return [pickle.loads(part) for part in self.gathered(pickle.dumps(value, 5))]

    def gathered(self, data: bytes) -> list[memoryview]:
        """Give all ranks the bytes of all."""
        sizes = self.lengths([len(data)])[:, 0]
        ends = np.cumsum(sizes)
        out = np.empty(ends[-1], np.uint8)
        byte = self.mpi.BYTE
        self.Allgatherv([np.frombuffer(data, np.uint8), byte], [out, sizes, byte])
        view: Any = out.data
        return [
            view[end - size : end]
            for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)
        ]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Give all ranks one rank's object."""
        sends = self.rank == root
        data = self.cast(pickle.dumps(value, 5) if sends else b"", root)
        return value if sends else pickle.loads(data)

    def cast(self, data: bytes, root: int) -> Any:
        """Give all ranks one rank's bytes."""
        size = np.array([len(data)], np.int64)
        self.Bcast(size, root)
        buffer: Any = np.frombuffer(data, np.uint8)
        if self.rank != root:
            buffer = np.empty(int(size[0]), np.uint8)
        self.cast_array(buffer, root)
        return buffer.data

    def cast_array(self, flat: Any, root: int) -> None:
        """Give all ranks one rank's flat array, in pieces of a size that is fast."""
        data = flat.view(np.uint8)
        for start in range(0, data.size, PIECE_BYTES):
            self.Bcast(data[start : start + PIECE_BYTES], root)

    def scatter(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        """Give each rank an object of one rank's."""
        sends = self.rank == root
        parts = [pickle.dumps(v, 5) for v in values or ()] if sends else []
        sizes = np.array([len(p) for p in parts] or [0] * self.size, np.int64)
        self.Bcast(sizes, root)
        byte, own = self.mpi.BYTE, np.empty(int(sizes[self.rank]), np.uint8)
        sent = (
            [np.frombuffer(b"".join(parts), np.uint8), sizes, byte] if sends else None
        )
        self._done(self._comm.Iscatterv(sent, [own, byte], root), own.nbytes)
        return values[root] if sends and values is not None else pickle.loads(own.data)
