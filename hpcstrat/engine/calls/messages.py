"""Messages from one replica to another, each with a header that gives size and dtype.

Only two ranks take part, so the channel's headers, which all ranks post, cannot compare
the send with the receive. Instead the sender sends size and dtype ahead of the data,
and the receiver compares them with its own array before it uses the data.

The receives of the data are started before the header has arrived, because the sender
may wait until all of its data is received. Each receive buffer must be large enough for
any message, because an MPI library may write a longer message past the end of the
buffer (Open MPI 5.0 does so if it copies directly from the sender's memory). Therefore
all data are cut at the same offsets, and the tag of a chunk determines its largest
length. Each receive with this tag has a buffer of this length; the last chunk of an
array is received into a separate buffer.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.waitable import Exchange, Message, Waitable, WaitSteps
from hpcstrat.engine.topology.kept_requests import let_go_of_complete
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CollectiveError

__all__ = ["Messages", "Transfer"]

_HEADER_BYTES = 256
# Sizes of the first six chunks of a message, and of all later chunks: a short message
# needs little extra memory, and a long message has few chunks.
_CHUNK_BYTES = tuple((32 << 10) * 2**number for number in range(6))
# MPI tags for each tag of the program: one for the header, one for each chunk length.
_NUM_TAGS = 1 + len(_CHUNK_BYTES)
# Every MPI library supports tags up to this number (MPI-4.1, 9.1.2).
_LEAST_MOST_TAG = 32767


class Transfer:
    """A message under way, which is completed by `wait`, or by `test`.

    If the program drops this object before the message is complete, MPI still sends or
    receives the message, and the buffers are kept until then.
    """

    def __init__(self, collectives: Collectives, call: Call, steps: WaitSteps) -> None:
        self.collectives = collectives
        self._call, self._steps = call, steps
        self._awaited: Waitable | None = next(steps, None)

    def test(self) -> bool:
        """Return whether the message is complete; not collective; raises as `wait`."""
        return self._advance(waits=False)

    @collective
    def wait(self) -> None:
        """Wait until the message is complete; not collective.

        Raises CollectiveError if another rank has ended all calls, or if the other
        rank's message has another size or dtype (which ends all calls of all ranks).
        """
        self._advance(waits=True)

    def _advance(self, *, waits: bool) -> bool:
        if self._awaited is not None:
            channel: Any = self.collectives.channel
            channel.failures.refuse(self._call)
            self._awaited = channel.advance(
                self._steps, self._call, self._awaited, waits=waits
            )
        return self._awaited is None


class _Expected:
    """The header that a receive awaits, and the array that the header must describe."""

    def __init__(self, array: Array, where: str) -> None:
        self._kind, self._where = _kind(array), where
        self.memory = np.empty(_HEADER_BYTES, np.uint8)
        self.message: Any = None
        self.compared = False

    def compare(self) -> None:
        """Raise CollectiveError if the received header does not describe the array."""
        self.compared = True
        # The sender may have cut its text within a multi-byte character.
        found = self.memory.tobytes().decode(errors="replace").rstrip()
        # Compare sizes, not shapes: the receiver's array may have another shape.
        if found.partition(" sent")[0] != self._kind:
            raise CollectiveError(
                f"expected {self._kind} {self._where}, found {found}; make the two "
                "equal"
            )


class Messages:
    """Messages between pairs of replicas, on a communicator of their own.

    The constructor and `close` are collective over ``topology.replica_comm``. Sends and
    receives between two ranks with the same tag are matched in the order in which they
    are started, headers with headers and data with data.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        channel: Any = collectives.channel
        comm: Any = None if channel is None else channel.topology.duplicate()
        most = None if comm is None else comm.Get_attr(channel.topology.mpi.TAG_UB)
        self._comm = comm
        # The ranks in the job, which errors name.
        self._job_ranks = [] if comm is None else channel.topology.job_ranks
        self._most_tag = (most or _LEAST_MOST_TAG) // _NUM_TAGS - 1
        # Headers that have not been compared yet, by source and tag.
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
        """Start to send a contiguous array; do not write to it until the send ends."""
        call = self._call(f"{what}(dest={dest}, tag={tag})", array, tag)
        text = f"{_kind(array)} sent{_at_site()}".encode()[:_HEADER_BYTES]
        header = np.frombuffer(text.ljust(_HEADER_BYTES), np.uint8)
        if self._comm is None:
            self._own.setdefault(tag, deque()).append((header, array.copy()))
            return Transfer(self.collectives, call, iter(()))
        self._begin(call)
        exchange, start, first = Exchange(), self._comm.Isend, _NUM_TAGS * tag
        exchange.requests.append(start(header, dest, first))
        for chunk, length in _chunks(array):
            exchange.requests.append(start(chunk, dest, first + 1 + length))
        return Transfer(self.collectives, call, iter((exchange,)))

    @collective
    def receive(self, array: Array, source: int, tag: int, what: str) -> Transfer:
        """Start to receive a message into a contiguous array."""
        call = self._call(f"{what}(source={source}, tag={tag})", array, tag)
        name = 0 if self._comm is None else self._job_ranks[source]
        expected = _Expected(array, f"from rank {name} in {call.text}{_at_site()}")
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
        exchange, start, first = Exchange(), self._comm.Irecv, _NUM_TAGS * tag
        expected.message = Message(start, expected.memory, source, first)
        queue = self._expected.setdefault((source, tag), deque())
        queue.append(expected)
        rest = into = np.empty(0, np.uint8)
        for chunk, length in _chunks(array):
            rest = into = chunk
            if chunk.size < _CHUNK_BYTES[length]:
                into = np.empty(_CHUNK_BYTES[length], np.uint8)
            exchange.requests.append(start(into, source, first + 1 + length))
        steps = _received(queue, expected, exchange, rest, into)
        return Transfer(self.collectives, call, steps)

    @collective
    def receive_any(self, array: Array, tag: int, what: str) -> int:
        """Receive the first message with a tag, from any rank; return that rank."""
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
        # Free the requests of completed messages that the program has dropped.
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
    """Wait for a header and its data; copy the last chunk ``rest`` from ``room``."""
    # Compare earlier headers first: chunks of an earlier, longer message may have
    # arrived in the buffers of this message.
    while not expected.compared:
        first = queue[0]
        yield first.message
        if not first.compared:
            queue.popleft()
            first.compare()
    yield data
    if rest is not room:
        rest[...] = room[: rest.size]


class _Probe(Waitable):
    """A probe for a message from any rank; the message is not received."""

    def __init__(self, comm: Any, mpi: Any, tag: int) -> None:
        self.status = mpi.Status()
        self._look = functools.partial(comm.Iprobe, mpi.ANY_SOURCE, tag, self.status)

    def agreed(self) -> bool:
        """Return whether a message has arrived."""
        return bool(self._look())


def _kind(array: Array) -> str:
    """Return an array's size and dtype as a text that both ends compare."""
    return f"{array.size} elements of {array.dtype}"


def _at_site() -> str:
    site = call_site()
    return f" at {site}" if site else ""


def _chunks(array: Array) -> Iterator[tuple[Array, int]]:
    """Yield the chunks of an array's bytes, each with its index in ``_CHUNK_BYTES``."""
    data = array.reshape(-1).view(np.uint8)
    start = length = 0
    while start < data.size:
        yield data[start : start + _CHUNK_BYTES[length]], length
        start += _CHUNK_BYTES[length]
        length = min(length + 1, len(_CHUNK_BYTES) - 1)
