"""Mailboxes, which send messages between coordinator, workers and servers.

A message is a pickled tuple. MPI sends it as one message that includes small arrays.
Large arrays (32 KiB and more) follow in pieces, without a copy into a buffer. Sends do
not block in MPI: the mailbox keeps the data until they are sent. Messages from one rank
are delivered whole, in the order in which they were sent.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.topology.kept_requests import keep
from hpcstrat.engine.topology.survival import is_loss, lost_ranks
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import RankLostError, UnavailableError
from hpcstrat.parameter_server.handles import error_of
from hpcstrat.parameter_server.wakeup_pipes import WakeupPipes

INBOX, REPLY = 1, 2
# The pieces of a message's large arrays have the tag of the message plus this number.
_PIECES = 2
_LARGE_BYTES = 32 << 10
_PIECE_BYTES = 64 << 20
_MARK = b"L"
_LOOK_SECONDS = 1.0
_MOST_KEPT_BYTES = 64 << 20


_Method = TypeVar("_Method", bound=Callable[..., Any])


def one_thread_at_a_time(method: _Method) -> _Method:
    """Decorate a method to hold its object's ``lock``, so that other threads wait.

    Any thread may call the method: decorated methods are not collective, so different
    ranks need not call them in the same order.
    """

    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return alone  # type: ignore[return-value]


class _Sending:
    """An MPI request that sends data, and a reference to the data's memory.

    Set ``request`` to the result of the MPI call directly: an interrupt in between
    would lose the request, while MPI still reads the memory.
    """

    __slots__ = ("data", "request")

    def __init__(self, data: Any) -> None:
        self.request: Any = None
        self.data = data

    def __del__(self) -> None:
        if self.request:
            keep([self.request], self.data)


class _Arriving:
    """A received message that waits for its own pieces, or for an earlier message."""

    __slots__ = ("buffers", "payload", "requests", "source")

    def __init__(self, source: int, payload: Any, buffers: Any = ()) -> None:
        self.source = source
        self.payload = payload
        self.buffers = buffers
        self.requests: list[Any] = []

    def message(self) -> Any:
        """Return the message. All its pieces must have arrived."""
        payload, buffers = self.payload, self.buffers
        if payload is None:
            payload, *buffers = buffers
        return pickle.loads(payload, buffers=buffers)

    def __del__(self) -> None:
        # After an interrupt or a loss, MPI may still write into the buffers.
        keep(self.requests, self.buffers)


class Mailbox:
    """Sends messages to the other ranks of the cluster, and receives their messages.

    Collective over ``topology.replica_comm``, as is `close`. ``lost`` is the set of
    ranks that have died; ``on_loss`` is called with each set of newly lost ranks. If a
    program has several threads, a thread must hold ``lock`` when it uses the mailbox.
    """

    def __init__(
        self, topology: Topology, channel: Channel, bells: WakeupPipes
    ) -> None:
        self._mpi = topology.mpi
        self._channel = channel
        self._survives = topology.survives
        # A duplicate can still send after a loss, which revokes the original.
        self._comm = topology.replica_comm.Dup()
        self._comm.Set_errhandler(topology.mpi.ERRORS_RETURN)
        self.wakeup_pipes = bells
        self.lock = threading.RLock()
        self.rank = self._comm.rank
        self._status = self._mpi.Status()
        self._outbox: list[_Sending] = []
        self._arriving: list[_Arriving] = []
        self._whole: deque[tuple[int, Any]] = deque()
        # Buffers for large arrays are reused, because allocating memory for each update
        # would take longer than the update.
        self._recycler = Recycler(_MOST_KEPT_BYTES)
        self._questions = itertools.count()
        self._looked_at = 0.0
        self.warn_seconds = math.inf
        self.lost: set[int] = set()
        self.on_loss: Callable[[set[int]], None] = lambda lost: None

    def send(self, rank: int, message: Any, tag: int = INBOX) -> None:
        """Send a message; wait only until its large arrays are sent.

        The caller may overwrite its arrays after the call, except those of a reply.
        """
        if rank in self.lost:
            return
        large: list[pickle.PickleBuffer] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < _LARGE_BYTES:
                return True
            large.append(buffer)
            return False

        data = pickle.dumps(message, 5, buffer_callback=is_small)
        views = [buffer.raw() for buffer in large]
        whole: bytes | None = data
        if len(data) > _PIECE_BYTES:
            # Send the pickle in pieces: an MPI call sends less than 2 GiB.
            whole, views = None, [memoryview(data), *views]
        if not views:
            self._start(rank, data, tag)
        else:
            sizes = [view.nbytes for view in views]
            self._start(rank, _MARK + pickle.dumps((whole, sizes), 5), tag)
            sent = [
                self._start(rank, view[start : start + _PIECE_BYTES], tag + _PIECES)
                for view in views
                for start in range(0, view.nbytes, _PIECE_BYTES)
            ]
        self.wakeup_pipes.ring(rank)
        if large and tag == INBOX:
            # A reply needs no wait: its arrays are copies that belong to the server.
            self.wait(
                lambda: self.drive() or not any(one in self._outbox for one in sent),
                lambda: f"rank {rank} to take {sum(sizes)} bytes",
            )

    def _start(self, rank: int, data: Any, tag: int) -> _Sending | None:
        """Start to send; return the entry in the outbox, or None if nothing is left."""
        one = _Sending(data)
        try:
            one.request = self._comm.Isend([data, self._mpi.BYTE], rank, tag)
            if one.request.Test():
                return None
        except self._mpi.Exception as error:
            self._note_loss(error)
            return None
        self._outbox.append(one)
        return one

    def drive(self) -> bool:
        """Let MPI continue sending; return whether all messages are sent."""
        if self._outbox:
            self._outbox = [one for one in self._outbox if not self._is_gone(one)]
        return not self._outbox

    def _is_gone(self, one: _Sending) -> bool:
        try:
            return bool(one.request.Test())
        except self._mpi.Exception as error:
            self._note_loss(error)
            return True

    def notice(self) -> bool:
        """Let MPI continue sending, and detect lost ranks; return False.

        Called in waits for a value in shared memory, which make no other MPI calls.
        """
        self.drive()
        if self._survives:
            try:
                self._comm.Iprobe(self._mpi.ANY_SOURCE, INBOX)
            except self._mpi.Exception as error:
                self._note_loss(error)
        return False

    def poll(self) -> tuple[int, Any] | None:
        """Return the sender and the next message of the inbox, or None."""
        if self._arriving or self._outbox:
            self.drive()
            self._take_arrived()
        if self._whole:
            return self._whole.popleft()
        return self._take(self._mpi.ANY_SOURCE, INBOX)

    def _take_arrived(self) -> None:
        still: list[_Arriving] = []
        late: set[int] = set()
        for one in self._arriving:
            if one.source not in late and self._is_whole(one):
                self._whole.append((one.source, one.message()))
            else:
                late.add(one.source)
                still.append(one)
        self._arriving = [one for one in still if one.source not in self.lost]

    def _is_whole(self, one: _Arriving) -> bool:
        try:
            return bool(self._mpi.Request.Testall(one.requests))
        except self._mpi.Exception as error:
            self._note_loss(error)
            return False

    def _take(self, source: int, tag: int) -> tuple[int, Any] | None:
        """Return the sender and a message, or None if parts have yet to arrive."""
        status = self._status
        try:
            matched = self._comm.Improbe(source, tag, status)
            if matched is None:
                return None
            source = status.Get_source()
            data = bytearray(status.Get_count(self._mpi.BYTE))
            matched.Recv([data, self._mpi.BYTE])
        except self._mpi.Exception as error:
            self._note_loss(error)
            return None
        if data[:1] != _MARK:
            if tag == INBOX and any(one.source == source for one in self._arriving):
                self._arriving.append(_Arriving(source, data))
                return None
            return source, pickle.loads(data)
        payload, sizes = pickle.loads(memoryview(data)[1:])
        kind = np.dtype(np.uint8)
        buffers = [self._recycler.empty((size,), kind) for size in sizes]
        one = _Arriving(source, payload, buffers)
        for buffer in buffers:
            for start in range(0, len(buffer), _PIECE_BYTES):
                piece = [buffer[start : start + _PIECE_BYTES], self._mpi.BYTE]
                one.requests.append(self._comm.Irecv(piece, source, tag + _PIECES))
        if tag == REPLY:
            whole = self.wait(
                lambda: self._is_whole(one) or (source in self.lost and "lost"),
                lambda: f"rank {source} to answer",
            )
            return (source, one.message()) if whole is True else None
        self._arriving.append(one)
        return None

    def ask(self, rank: int, message: Any) -> Any:
        """Send a question to a rank, and return its answer or raise its error.

        Raises UnavailableError if the rank is lost.
        """
        number = next(self._questions)
        self.send(rank, ("ask", number, message))

        def answer() -> Any:
            while (found := self._take(rank, REPLY)) is not None:
                if found[1][0] == number:
                    return found[1]
                # Drop the answer to another question, whose wait was interrupted.
            return rank in self.lost

        what = f"rank {rank} to answer {message[0]!r}"
        found = self.wait(answer, lambda: what, warns=True)
        if found is True:
            raise UnavailableError(
                f"expected an answer of rank {rank}, found that it was lost; restore "
                "the last checkpoint"
            )
        _, good, value = found
        if not good:
            raise error_of(value)
        return value

    def leave_answers(self) -> None:
        """Receive and drop the remaining answers, so that their senders can end."""
        while self._take(self._mpi.ANY_SOURCE, REPLY) is not None:
            pass

    def reply(self, rank: int, number: int, good: bool, value: Any) -> None:
        """Answer a question of `ask` by a value, or by the bytes of an error."""
        self.send(rank, (number, good, value), REPLY)

    def wait(
        self,
        ready: Callable[[], Any],
        what: Callable[[], str],
        *,
        warns: bool = False,
    ) -> Any:
        """Wait until ``ready`` returns a true value, and return that value.

        ``ready`` must call MPI, so that messages progress, and must acquire ``lock``
        unless this thread holds it. ``what`` names the awaited event for warnings and
        errors.
        """
        found = ready()
        if found:
            return found
        warned = 0.0

        def look(seconds: float) -> None:
            nonlocal warned
            self._look(seconds, what)
            if warns and seconds > warned + self.warn_seconds:
                warned = seconds
                get_logger().warning("have waited %.0f s for %s", seconds, what())

        return self.wakeup_pipes.wait(ready, busy=self._is_busy, look=look)

    def _is_busy(self) -> bool:
        return bool(self._outbox or self._arriving)

    def _look(self, seconds: float, what: Callable[[], str]) -> None:
        """Check once per second whether processes of this node have died."""
        if seconds < self._looked_at:
            self._looked_at = 0.0
        if seconds < self._looked_at + _LOOK_SECONDS:
            return
        self._looked_at = seconds
        dead = self._channel.steps.dead()
        if self._survives:
            # Record lost ranks here, because the launcher does not report ranks that
            # have left the job by themselves.
            with self.lock:
                self.hear(dead)
        elif dead:
            raise RankLostError(
                f"expected {what()}, found that the processes of ranks {list(dead)} "
                "have died; look for their last output",
                dead,
            )

    def _note_loss(self, error: Exception) -> None:
        """Record lost ranks that an error reports; raise any other error."""
        if not (self._survives and is_loss(self._mpi, error, self._comm)):
            raise error
        self._comm.Ack_failed()
        self.hear(lost_ranks(self._comm))

    def hear(self, lost: Iterable[int]) -> None:
        """Record ranks that have died; call ``on_loss`` for those not yet recorded."""
        new = set(lost) - self.lost
        self.lost |= new
        self._arriving = [one for one in self._arriving if one.source not in new]
        if new:
            self.on_loss(new)

    def close(self) -> None:
        """Wait until all messages are sent, then free the communicator."""
        self.wait(self.drive, lambda: "the last messages to be taken")
        self._comm.Free()
