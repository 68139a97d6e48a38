"""Messages from one replica to another, each with a header that says what it is.

Nobody else takes part, so that no header of all ranks can compare what the two do: the
sender tells size and type ahead of the data, and the receiver compares them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from hpcstrat.call_sites import call_site
from hpcstrat.channel.awaited import Message
from hpcstrat.channel.call import Call, describe_call
from hpcstrat.channel.entries import collective
from hpcstrat.errors import CollectiveError
from hpcstrat.reduction.object_collectives import ObjectCollectives
from hpcstrat.typing import Array

__all__ = ["Messages", "Transfer"]

_HEADER_BYTES = 256
_LARGEST_BYTES = 1 << 30


class Transfer:
    """A message under way; ends when it is awaited, or looked at, by its rank."""

    def __init__(
        self, collectives: ObjectCollectives, call: Call, array: Array
    ) -> None:
        self.collectives = collectives
        self.call = call
        # MPI reads or writes them until the end.
        self.array = array
        self.header: Array | None = None
        # Of the header, and of the data.
        self.requests: deque[Any] = deque()
        # From whom, of a message whose header has not come.
        self.source: int | None = None

    def test(self) -> bool:
        """Whether it has ended; not collective, as is `wait`, which raises errors."""
        while self.requests and self.source is None and self.requests[0].Test():
            self.requests.popleft()
        return not self.requests or all(request.Test() for request in self.requests)

    @collective
    def wait(self) -> None:
        """Wait for its end.

        CollectiveError where the other rank's message is not of this size and type,
        which ends all calls of all ranks, or where another rank has ended them.
        """
        channel: Any = self.collectives.channel
        if channel is None or not self.requests:
            return
        channel.refuse_if_broken(self.call)
        with channel.moving(self.call):
            while self.requests:
                channel.wait(Message(self.requests[0]), self.call)
                self.requests.popleft()
                if self.source is not None:
                    self._check_header()

    def _check_header(self) -> None:
        """Compare a header that has come, before anything is asked of the data."""
        assert self.header is not None
        source, self.source = self.source, None
        # A long name may be cut inside of a letter.
        found = bytes(self.header).decode(errors="replace").rstrip()
        # Sizes, not shapes: a receiver may see the same numbers in another shape.
        expected = _kind(self.array).partition(" sent")[0]
        if found.partition(" sent")[0] != expected:
            raise CollectiveError(
                f"expected {expected} from rank {source} in {self.call.text}"
                f"{_at(call_site())}, found {found}; make the two equal"
            )


class Messages:
    """What replicas send each other, in the order of the sends between any two.

    Collective over ``topology.replica_comm``, as is `close`: it has a communicator of
    its own. Receives are matched by the sends of their source with the same tag in the
    order in which they are started, headers with headers and data with data.
    """

    def __init__(self, collectives: ObjectCollectives) -> None:
        self.collectives = collectives
        channel: Any = collectives.channel
        self._comm: Any = None if channel is None else channel.topology.duplicate()
        # Of a single replica, to itself: arrays by tag.
        self._own: dict[int, deque[Array]] = {}

    def close(self) -> None:
        """Free the communicator."""
        if self._comm is not None:
            self._comm.Free()
            self._comm = None

    @collective
    def send(self, array: Array, dest: int, tag: int, what: str) -> Transfer:
        """Start to send a contiguous array, which is not written before the end."""
        call = self._call(f"{what}(dest={dest}, tag={tag})", array, tag)
        transfer = Transfer(self.collectives, call, array)
        if self._comm is None:
            self._own.setdefault(tag, deque()).append(array.copy())
            return transfer
        self._refuse(call)
        text = _kind(array).encode()[:_HEADER_BYTES]
        transfer.header = np.frombuffer(text.ljust(_HEADER_BYTES), np.uint8)
        start = self._comm.Isend
        transfer.requests.append(start(transfer.header, dest, 2 * tag))
        for part in _parts(array):
            transfer.requests.append(start(part, dest, 2 * tag + 1))
        return transfer

    @collective
    def receive(self, array: Array, source: int, tag: int, what: str) -> Transfer:
        """Start to receive into a contiguous array."""
        call = self._call(f"{what}(source={source}, tag={tag})", array, tag)
        transfer = Transfer(self.collectives, call, array)
        if self._comm is None:
            kept = self._own.get(tag)
            if not kept:
                raise CollectiveError(
                    f"expected a message from this rank itself for {call.text}, found "
                    "none; send it first"
                )
            array[...] = kept.popleft().reshape(array.shape)
            return transfer
        self._refuse(call)
        transfer.header = np.empty(_HEADER_BYTES, np.uint8)
        transfer.source, start = source, self._comm.Irecv
        transfer.requests.append(start(transfer.header, source, 2 * tag))
        # Before the header has come, too: the sender may wait for nothing else.
        for part in _parts(array):
            transfer.requests.append(start(part, source, 2 * tag + 1))
        return transfer

    @collective
    def receive_any(self, array: Array, tag: int, what: str) -> int:
        """Receive from whoever sends first with a tag; returns the rank."""
        if self._comm is None:
            self.receive(array, 0, tag, what)
            return 0
        channel: Any = self.collectives.channel
        mpi, call = channel.topology.mpi, self._call(f"{what}(tag={tag})", array, tag)
        self._refuse(call)
        probe = _Probe(self._comm, mpi, 2 * tag)
        with channel.moving(call):
            channel.wait(probe, call)
        source = int(probe.status.source)
        self.receive(array, source, tag, what).wait()
        return source

    def _refuse(self, call: Call) -> None:
        channel: Any = self.collectives.channel
        channel.refuse_if_broken(call)

    def _call(self, what: str, array: Array, tag: int) -> Call:
        if not array.flags.c_contiguous:
            raise ValueError(
                f"expected a contiguous array for {what}, found strides "
                f"{array.strides}; pass a copy"
            )
        if tag < 0:
            raise ValueError(f"expected a tag of 0 or more, found {tag}; change it")
        return describe_call(what, f"{array.dtype}{list(array.shape)}", array.nbytes)


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
    """Say what ends of a message must agree on, and where it is sent."""
    return f"{array.size} elements of {array.dtype} sent{_at(call_site())}"


def _at(site: str) -> str:
    return f" at {site}" if site else ""


def _parts(array: Array) -> list[Array]:
    """Return the bytes of an array, in parts whose sizes any MPI takes."""
    data = array.reshape(-1).view(np.uint8)
    return [
        data[start : start + _LARGEST_BYTES]
        for start in range(0, data.size, _LARGEST_BYTES)
    ]
