"""Messages from one replica to another, each with a header that says what it is.

Nobody else takes part, so that no header of all ranks can compare what the two do: the
sender tells size and type ahead of the data, and the receiver compares them before it
uses any of the data.

The receives of the data are started before the header has come, because the sender may
wait for nothing else. So each receive buffer needs room for any message: an MPI library
may write a longer message past the end of the buffer (Open MPI 5.0 does if it copies
directly from the sender's memory). All data are therefore cut at the same places, and
the tag of a part says how long it may be. Each receive with that tag has a buffer of
that length; for the last part of an array it is a separate buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.waitable import Exchange, Message, Waitable, WaitSteps
from hpcstrat.engine.reduction.object_collectives import ObjectCollectives
from hpcstrat.engine.topology.kept_requests import let_go_of_complete
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CollectiveError

__all__ = ["Messages", "Transfer"]

_HEADER_BYTES = 256
# Sizes of the parts of a message, one after the other; further parts are as long as the
# last. Little data so need little other memory, and much data few messages.
_PART_BYTES = tuple((32 << 10) * 2**number for number in range(6))
# For each tag of the program: one of the header, then one for each length of a part.
_NUM_TAGS = 1 + len(_PART_BYTES)
# Every MPI library has tags up to here (MPI-4.1, 9.1.2).
_LEAST_MOST_TAG = 32767


class Transfer:
    """A message under way; ends when its rank waits for it, or looks whether it has.

    Where a program drops it before the end, MPI still sends or receives the message,
    and keeps the memory until then.
    """

    def __init__(
        self, collectives: ObjectCollectives, call: Call, steps: WaitSteps
    ) -> None:
        self.collectives = collectives
        self._call, self._steps = call, steps
        self._awaited: Waitable | None = next(steps, None)

    def test(self) -> bool:
        """Whether it has ended; not collective, as is `wait`; raises what that does."""
        if self._awaited is None:
            return True
        channel: Any = self.collectives.channel
        channel.failures.refuse(self._call)
        with channel.moving(self._call):
            while self._awaited is not None and self._awaited.agreed():
                self._awaited = next(self._steps, None)
            if self._awaited is not None:
                channel.failures.look()
        return self._awaited is None

    @collective
    def wait(self) -> None:
        """Wait for its end.

        CollectiveError where the other rank's message is not of this size and type,
        which ends all calls of all ranks, or where another rank has ended them.
        """
        if self._awaited is None:
            return
        channel: Any = self.collectives.channel
        channel.failures.refuse(self._call)
        with channel.moving(self._call):
            while self._awaited is not None:
                channel.wait(self._awaited, self._call)
                self._awaited = next(self._steps, None)


class _Expected:
    """A header that a receive awaits, and the array that it should describe."""

    def __init__(self, array: Array, where: str) -> None:
        self._kind, self._where = _kind(array), where
        self.memory = np.empty(_HEADER_BYTES, np.uint8)
        self.message: Any = None
        self.compared = False

    def compare(self) -> None:
        """Compare the header, which has come."""
        self.compared = True
        # A long name may be cut inside of a letter.
        found = self.memory.tobytes().decode(errors="replace").rstrip()
        # Sizes, not shapes: a receiver may see the same numbers in another shape.
        if found.partition(" sent")[0] != self._kind:
            raise CollectiveError(
                f"expected {self._kind} {self._where}, found {found}; make the two "
                "equal"
            )


class Messages:
    """Messages between replicas, in the order of the sends between any two.

    Collective over ``topology.replica_comm``, as is `close`: it has a communicator of
    its own. Receives are matched by the sends of their source with the same tag in the
    order in which they are started, headers with headers and data with data.
    """

    def __init__(self, collectives: ObjectCollectives) -> None:
        self.collectives = collectives
        channel: Any = collectives.channel
        comm: Any = None if channel is None else channel.topology.duplicate()
        most = None if comm is None else comm.Get_attr(channel.topology.mpi.TAG_UB)
        self._comm = comm
        self._most_tag = (most or _LEAST_MOST_TAG) // _NUM_TAGS - 1
        # By source and tag, the headers that no receive has compared yet.
        self._expected: dict[tuple[int, int], deque[_Expected]] = {}
        # Headers and arrays that a single replica sends to itself, by tag.
        self._own: dict[int, deque[tuple[Array, Array]]] = {}

    def close(self) -> None:
        """Free the communicator."""
        if self._comm is not None:
            self._comm.Free()
            self._comm = None

    @collective
    def send(self, array: Array, dest: int, tag: int, what: str) -> Transfer:
        """Start to send a contiguous array, which is not written before the end."""
        call = self._call(f"{what}(dest={dest}, tag={tag})", array, tag)
        text = f"{_kind(array)} sent{_at_site()}".encode()[:_HEADER_BYTES]
        header = np.frombuffer(text.ljust(_HEADER_BYTES), np.uint8)
        if self._comm is None:
            self._own.setdefault(tag, deque()).append((header, array.copy()))
            return Transfer(self.collectives, call, iter(()))
        self._begin(call)
        exchange, start = Exchange(), self._comm.Isend
        exchange.requests.append(start(header, dest, _NUM_TAGS * tag))
        for part, length in _parts(array):
            exchange.requests.append(start(part, dest, _NUM_TAGS * tag + 1 + length))
        return Transfer(self.collectives, call, iter((exchange,)))

    @collective
    def receive(self, array: Array, source: int, tag: int, what: str) -> Transfer:
        """Start to receive into a contiguous array."""
        call = self._call(f"{what}(source={source}, tag={tag})", array, tag)
        expected = _Expected(array, f"from rank {source} in {call.text}{_at_site()}")
        if self._comm is None:
            kept = self._own.get(tag)
            if not kept:
                raise CollectiveError(
                    f"expected a message from this rank itself for {call.text}, found "
                    "none; send it first"
                )
            expected.memory, own = kept.popleft()
            expected.compare()
            array[...] = own.reshape(array.shape)
            return Transfer(self.collectives, call, iter(()))
        self._begin(call)
        exchange, start = Exchange(), self._comm.Irecv
        expected.message = Message(start(expected.memory, source, _NUM_TAGS * tag))
        queue = self._expected.setdefault((source, tag), deque())
        queue.append(expected)
        rest = room = np.empty(0, np.uint8)
        for part, length in _parts(array):
            into = part
            if part.size < _PART_BYTES[length]:
                rest, into = part, np.empty(_PART_BYTES[length], np.uint8)
                room = into
            exchange.requests.append(start(into, source, _NUM_TAGS * tag + 1 + length))
        steps = _received(queue, expected, exchange, rest, room)
        return Transfer(self.collectives, call, steps)

    @collective
    def receive_any(self, array: Array, tag: int, what: str) -> int:
        """Receive from whoever sends first with a tag; returns the rank."""
        if self._comm is None:
            self.receive(array, 0, tag, what)
            return 0
        channel: Any = self.collectives.channel
        mpi, call = channel.topology.mpi, self._call(f"{what}(tag={tag})", array, tag)
        self._begin(call)
        probe = _Probe(self._comm, mpi, _NUM_TAGS * tag)
        with channel.moving(call):
            channel.wait(probe, call)
        source = int(probe.status.source)
        self.receive(array, source, tag, what).wait()
        return source

    def _begin(self, call: Call) -> None:
        channel: Any = self.collectives.channel
        channel.failures.refuse(call)
        # Requests of messages that the program has dropped are freed here.
        let_go_of_complete()

    def _call(self, what: str, array: Array, tag: int) -> Call:
        if not array.flags.c_contiguous:
            raise ValueError(
                f"expected a contiguous array for {what}, found strides "
                f"{array.strides}; pass a copy"
            )
        if not 0 <= tag <= self._most_tag:
            raise ValueError(
                f"expected a tag from 0 to {self._most_tag} for {what}, found {tag}; "
                "change it"
            )
        return describe_call(what, f"{array.dtype}{list(array.shape)}", array.nbytes)


def _received(
    queue: deque[_Expected],
    expected: _Expected,
    data: Exchange,
    rest: Array,
    room: Array,
) -> WaitSteps:
    """Await a header after those before it, then its data; ``room`` has the rest."""
    # Parts of a longer message before this one may lie in its memory.
    while not expected.compared:
        first = queue[0]
        yield first.message
        if not first.compared:
            queue.popleft()
            first.compare()
    yield data
    rest[...] = room[: rest.size]


class _Probe:
    """A message from anybody, which is left where it is."""

    def __init__(self, comm: Any, mpi: Any, tag: int) -> None:
        self.status = mpi.Status()
        self._look = comm.Iprobe
        self._any, self._tag = mpi.ANY_SOURCE, tag

    def agreed(self) -> bool:
        """Whether it has come."""
        return bool(self._look(self._any, self._tag, self.status))

    def missing(self) -> list[int]:
        """Return ``[-1]`` until it has."""
        return [] if self.agreed() else [-1]


def _kind(array: Array) -> str:
    """Say what both ends of a message must agree on."""
    return f"{array.size} elements of {array.dtype}"


def _at_site() -> str:
    site = call_site()
    return f" at {site}" if site else ""


def _parts(array: Array) -> Iterator[tuple[Array, int]]:
    """Return the bytes of an array in parts, and which length each may have."""
    data = array.reshape(-1).view(np.uint8)
    start = length = 0
    while start < data.size:
        yield data[start : start + _PART_BYTES[length]], length
        start += _PART_BYTES[length]
        length = min(length + 1, len(_PART_BYTES) - 1)
