"""Simulated ranks in one process, with messages in any order, to test schedules.

The channel, the plan and the algorithm of each rank are the library's own; only MPI and
shared memory are simulated. Messages are matched in the order of their sends and
receives, as in MPI, but arrive in any order. Each message is, by a random draw, either
copied from the sender's memory on arrival or buffered at once.
"""

from __future__ import annotations

import functools
import mmap
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.topology.topology import RECORD_BYTES, SLOTS_IN_RING, STATUS_BYTES

__all__ = ["Wire", "pretend_channels"]

_POISON = 0xA5


class Wire:
    """The messages in flight between the ranks of a job."""

    def __init__(self, random: Random) -> None:
        self.random = random
        # Bytes of sent messages, by rank of the sender.
        self.sent_bytes = Counter[int]()
        # Sends without a matching receive, and receives without a matching send.
        self.sends = defaultdict[Any, deque[Any]](deque)
        self.receives = defaultdict[Any, deque[Any]](deque)
        # Terms of the ranks in an allreduce of MPI.
        self.terms = defaultdict[Any, list[Any]](list)
        self._ready: list[Callable[[], None]] = []

    def match(self, key: Any) -> None:
        """Mark a message as deliverable if both its send and its receive are posted."""
        sends, receives = self.sends[key], self.receives[key]
        while sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            self._ready.append(functools.partial(_come, send, receive))

    def add_up(self, key: Any, size: int, op: np.ufunc) -> None:
        """Mark an allreduce as deliverable if all ranks have posted their terms."""
        if len(self.terms[key]) == size:
            terms = self.terms.pop(key)
            self._ready.append(functools.partial(_add_up, terms, op))

    def deliver(self) -> bool:
        """Deliver a random message or sum; return False if there is none."""
        ready = self._ready
        if not ready:
            return False
        place = self.random.randrange(len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        ready.pop()()
        return True

    def left(self) -> list[Any]:
        """Return the unmatched sends and receives."""
        found = [*self.sends.items(), *self.receives.items(), *self.terms.items()]
        return [key for key, queue in found if queue] + list(self._ready)


class _Request:
    """A nonblocking MPI operation."""

    def __init__(self, begin: Callable[[_Request], None]) -> None:
        self._begin = begin
        self.memory: Any = None
        self.taken: Any = None
        self.done = True

    def __bool__(self) -> bool:
        return not self.done

    def Start(self) -> None:  # noqa: N802
        assert self.done, "it is started twice"
        self.done = False
        self._begin(self)

    def Test(self) -> bool:  # noqa: N802
        return self.done

    @staticmethod
    def Testall(requests: Sequence[_Request]) -> bool:  # noqa: N802
        return all(request.done for request in requests)

    def Free(self) -> None:  # noqa: N802
        assert self.done, "MPI may still use its memory"


def _come(send: _Request, receive: _Request) -> None:
    taken = send.taken
    if not send.done:
        assert np.array_equal(send.memory, taken), "memory was written that is sent"
    assert taken.size <= receive.memory.size, "a message is too long"
    receive.memory[: taken.size] = taken
    send.done = receive.done = True


def _add_up(terms: list[tuple[int, Any, Any, _Request]], op: np.ufunc) -> None:
    terms.sort(key=lambda term: term[0])
    total = terms[0][1].copy()
    for _, values, _, _ in terms[1:]:
        op(total, values, out=total)
    for _, _, result, request in terms:
        result[...] = total
        request.done = True


class _Comm:
    """A communicator, with the mpi4py methods that schedules use.

    ``ranks`` are the ranks in the job. ``told`` maps this rank's term in an allgather
    to the terms of all ranks, because each rank creates its channel alone.
    """

    def __init__(
        self,
        wire: Wire,
        name: Any,
        ranks: Sequence[int],
        rank: int,
        told: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self.handle, self.rank, self.size = name, rank, len(ranks)
        self._wire, self._own = wire, ranks[rank]
        self.allgather = told or (lambda value: [value] * len(ranks))
        self._num_sums = 0

    def Send_init(self, buffer: Any, dest: int, tag: int) -> _Request:  # noqa: N802
        wire, key = self._wire, (self.handle, self.rank, dest, tag)

        def begin(request: _Request) -> None:
            request.memory = _octets(buffer)
            request.taken = request.memory.copy()
            request.done = wire.random.random() < 0.3
            wire.sent_bytes[self._own] += request.taken.size
            # Copy a completed request, because it may be restarted before its message
            # arrives.
            wire.sends[key].append(_copy(request) if request.done else request)
            wire.match(key)

        return _Request(begin)

    def Recv_init(self, buffer: Any, source: int, tag: int) -> _Request:  # noqa: N802
        wire, key = self._wire, (self.handle, source, self.rank, tag)

        def begin(request: _Request) -> None:
            request.memory = _octets(buffer)
            request.memory[:] = _POISON
            wire.receives[key].append(request)
            wire.match(key)

        return _Request(begin)

    def Isend(self, buffer: Any, dest: int, tag: int) -> _Request:  # noqa: N802
        request = self.Send_init(buffer, dest, tag)
        request.Start()
        return request

    def Irecv(self, buffer: Any, source: int, tag: int) -> _Request:  # noqa: N802
        request = self.Recv_init(buffer, source, tag)
        request.Start()
        return request

    def Iallreduce(self, values: Any, total: Any, op: Any) -> _Request:  # noqa: N802
        assert op in (np.add, np.maximum)
        assert not np.may_share_memory(values, total)
        wire, key = self._wire, (self.handle, self._num_sums)
        self._num_sums += 1

        def begin(request: _Request) -> None:
            wire.terms[key].append((self.rank, values, total, request))
            wire.add_up(key, self.size, op)

        request = _Request(begin)
        request.Start()
        return request

    def Improbe(self, tag: int) -> None:  # noqa: N802
        """Return that no rank has ended all calls."""

    def bcast(self, value: Any) -> Any:
        return value

    def Free(self) -> None:  # noqa: N802
        pass


def _octets(buffer: Any) -> Any:
    return np.asarray(buffer).reshape(-1).view(np.uint8)


def _copy(request: _Request) -> _Request:
    copy = _Request(request._begin)
    copy.taken = request.taken
    return copy


class _Topology(SimpleNamespace):
    """The attributes of a topology that channels and algorithms use."""

    def duplicate(self) -> Any:
        return self.make_comm("channel")

    def status(self, index: int) -> memoryview:
        start = 2 * RECORD_BYTES * self.worker_comm.size + index * STATUS_BYTES
        view: memoryview = self.segment.buffer[start : start + STATUS_BYTES]
        return view


def pretend_channels(
    wire: Wire, sizes: Sequence[int], slot_bytes: int = mmap.PAGESIZE
) -> list[Channel]:
    """Return the channel of each rank, for workers with these numbers of ranks."""
    job, starts = range(sum(sizes)), [sum(sizes[:i]) for i in range(len(sizes))]
    # The first rank of each rank's worker, and the rank's index in the worker.
    firsts = [
        (start, index)
        for start, size in zip(starts, sizes, strict=True)
        for index in range(size)
    ]
    part_bytes, mpi = (
        SLOTS_IN_RING * slot_bytes,
        SimpleNamespace(SUM=np.add, MAX=np.maximum, Exception=()),
    )
    channels = []
    for worker, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        common_bytes = (2 * RECORD_BYTES + STATUS_BYTES) * size
        common_bytes += -common_bytes % mmap.PAGESIZE
        segment = SimpleNamespace(
            buffer=memoryview(bytearray(common_bytes + size * part_bytes)),
            common_bytes=common_bytes,
            part_bytes=part_bytes,
        )
        for rank in range(size):
            me = start + rank

            def make_comm(name: str, me: int = me) -> _Comm:
                return _Comm(wire, name, job, me, lambda _: list(firsts))

            # The ranks with this local rank, one of each worker.
            across = [s + rank for s, n in zip(starts, sizes, strict=True) if n > rank]
            topology = _Topology(
                mpi=mpi,
                make_comm=make_comm,
                replica_comm=make_comm("replicas"),
                worker_comm=_Comm(
                    wire, ("worker", worker), job[start : start + size], rank
                ),
                cross_worker_comm=_Comm(
                    wire, ("across", rank), across, across.index(me)
                ),
                num_replicas=len(job),
                replica_id=me,
                job_ranks=list(job),
                num_workers=len(sizes),
                worker_id=worker,
                worker_replicas=list(job[start : start + size]),
                smallest_worker=min(sizes),
                segment=segment,
                slot_bytes=slot_bytes,
                shares_cores=size > 1,
                survives=False,
                moves=0,
            )
            channels.append(Channel(topology))  # type: ignore[arg-type]
    return channels
