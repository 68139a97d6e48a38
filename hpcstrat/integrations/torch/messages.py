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
import torch
import torch.distributed as dist

from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.call import Call, describe_call
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.waitable import Exchange, Message, Waitable, WaitSteps
from hpcstrat.engine.topology.kept_requests import let_go_of_complete
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CollectiveError
from hpcstrat.integrations.torch.host_tensors import HostTensors

__all__ = ["Messages", "ReceivedWork", "TransferWork"]

_HEADER_BYTES = 256
# Sizes of the first six chunks of a message, and of all later chunks: a short message
# needs little extra memory, and a long message has few chunks.
_CHUNK_BYTES = tuple((32 << 10) * 2**number for number in range(6))
# MPI tags for each tag of the program: one for the header, one for each chunk length.
_NUM_TAGS = 1 + len(_CHUNK_BYTES)
# Every MPI library supports tags up to this number (MPI-4.1, 9.1.2).
_LEAST_MOST_TAG = 32767


class TransferWork(dist.Work):
    """The ``Work`` object of a message that is being sent or received.

    If the program drops this object before the message is complete, MPI still sends or
    receives the message, and the buffers are kept until then.
    """

    def __init__(
        self, collectives: Collectives, steps: tuple[Call, WaitSteps], tensor: Any
    ) -> None:
        super().__init__()
        self.collectives, self._tensor = collectives, tensor
        self._call, self._steps = steps
        self._awaited: Waitable | None = next(self._steps, None)

    def is_completed(self) -> bool:
        """Return whether the message is complete; raises the same errors as `wait`."""
        return self._advance(waits=False)

    is_success = is_completed

    @collective
    def wait(self, timeout: Any = None) -> bool:
        """Wait until the message is complete, or until the group's own timeout.

        Raises CollectiveError if another rank has ended all calls, or if the other
        rank's message has another size or dtype (which ends all calls of all ranks).
        """
        return self._advance(waits=True)

    def get_future(self) -> Any:
        """Wait, and return a completed future."""
        self.wait()
        future = torch.futures.Future()
        future.set_result([self._tensor])
        return future

    def _advance(self, *, waits: bool) -> bool:
        if self._awaited is not None:
            channel: Any = self.collectives.channel
            channel.failures.refuse(self._call)
            self._awaited = channel.advance(
                self._steps, self._call, self._awaited, waits=waits
            )
        return self._awaited is None


class ReceivedWork(dist.Work):
    """The ``Work`` object of a message that was already received from any rank."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self._source = source

    def wait(self, timeout: Any = None) -> bool:
        """Return immediately, because the message was already received."""
        return True

    def is_completed(self) -> bool:
        """Return True, because the message was already received."""
        return True

    def _source_rank(self) -> int:
        return self._source


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

    def send(self, tensor: Any, dest: int, tag: int) -> TransferWork:
        """Start to send a tensor; do not write to it until the send ends."""
        steps = self._send(HostTensors().read(tensor), dest, tag)
        return TransferWork(self.collectives, steps, tensor)

    @collective
    def _send(self, array: Array, dest: int, tag: int) -> tuple[Call, WaitSteps]:
        call = self._call(f"send(dest={dest}, tag={tag})", tag, array)
        text = f"{_kind(array)} sent{_at_site()}".encode()[:_HEADER_BYTES]
        header = np.frombuffer(text.ljust(_HEADER_BYTES), np.uint8)
        if self._comm is None:
            self._own.setdefault(tag, deque()).append((header, array.copy()))
            return call, iter(())
        self._begin(call)
        exchange, start, first = Exchange(), self._comm.Isend, _NUM_TAGS * tag
        exchange.requests.append(start(header, dest, first))
        for chunk, length in _chunks(array):
            exchange.requests.append(start(chunk, dest, first + 1 + length))
        return call, iter((exchange,))

    def receive(self, tensor: Any, source: int, tag: int) -> TransferWork:
        """Start to receive a message into a tensor."""
        host = HostTensors()
        steps = self._receive(host.write(tensor), source, tag, host)
        return TransferWork(self.collectives, steps, tensor)

    @collective
    def _receive(
        self, array: Array, source: int, tag: int, host: HostTensors
    ) -> tuple[Call, WaitSteps]:
        call = self._call(f"recv(source={source}, tag={tag})", tag, array)
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
            _write(host)
            return call, iter(())
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

        def receive() -> WaitSteps:
            # Compare earlier headers first: chunks of an earlier, longer message may
            # have arrived in the buffers of this message.
            while not expected.compared:
                first = queue[0]
                yield first.message
                if not first.compared:
                    queue.popleft()
                    first.compare()
            yield exchange
            if rest is not into:
                rest[...] = into[: rest.size]
            _write(host)

        return call, receive()

    @collective
    def receive_any(self, tensor: Any, tag: int) -> ReceivedWork:
        """Receive the first message with a tag, from any rank."""
        if self._comm is None:
            self.receive(tensor, 0, tag)
            return ReceivedWork(0)
        channel: Any = self.collectives.channel
        mpi, call = channel.topology.mpi, self._call(f"recv(tag={tag})", tag)
        self._begin(call)
        probe = _Probe(self._comm, mpi, _NUM_TAGS * tag)
        with channel.moving(call):
            channel.wait(probe, call)
        source = int(probe.status.source)
        self.receive(tensor, source, tag).wait()
        return ReceivedWork(source)

    def _begin(self, call: Call) -> None:
        channel: Any = self.collectives.channel
        channel.failures.refuse(call)
        # Free the requests of completed messages that the program has dropped.
        let_go_of_complete()

    def _call(self, what: str, tag: int, array: Array | None = None) -> Call:
        if not 0 <= tag <= self._most_tag:
            raise ValueError(
                f"expected a tag from 0 to {self._most_tag} for {what}, found {tag}; "
                "change it"
            )
        if array is None:
            return describe_call(what)
        return describe_call(what, f"{array.dtype}{list(array.shape)}", array.nbytes)


class _Probe(Waitable):
    """A probe for a message from any rank; the message is not received."""

    def __init__(self, comm: Any, mpi: Any, tag: int) -> None:
        self.status = mpi.Status()
        self._look = functools.partial(comm.Iprobe, mpi.ANY_SOURCE, tag, self.status)

    def agreed(self) -> bool:
        """Return whether a message has arrived."""
        return bool(self._look())


def _write(host: HostTensors) -> None:
    with torch.no_grad():
        host.written()


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
