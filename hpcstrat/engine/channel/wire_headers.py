"""The headers of ranks on several workers, and the few values that are sent in them.

The ranks of a worker compare their records in its shared segment. The first rank of
each worker then exchanges headers with the other workers by the dissemination of Bruck
et al. (doi:10.1109/71.642949). In hop ``k`` it sends one header, on behalf of itself
and the ``2**k - 1`` workers after it, to the worker that is ``2**k`` workers before it.
So each of ``p`` workers knows the headers of all workers after ``ceil(log2(p))``
messages. Then one more step in the segment reports the result to the worker's ranks.
Both steps in the segment order memory, see `hpcstrat.engine.channel.headers`.

The values of a small reduction follow the header in its message. Values larger than
`EAGER_BYTES` are sent in further messages, which are received after the header has
arrived, because the header contains their size. Over TCP on one host, two workers added
64 KiB in 26 us in this way, and in 51 us by one message. If a rank receives a header
that differs from its own, it ignores the values, and sends from then on a header that
is equal to no other header. So all ranks learn of the difference in the same number of
hops. Ranks that are in different calls send messages of different lengths; each is
received into a buffer for the longest message.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.channel.headers import SegmentHeaders
from hpcstrat.engine.channel.interruptible import EAGER_BYTES
from hpcstrat.engine.channel.shared_rings import SharedRings
from hpcstrat.engine.channel.waitable import HeaderPayload, Waitable
from hpcstrat.engine.native import load
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array

__all__ = [
    "HEADER_BYTES",
    "HeaderValues",
    "WireHeaders",
    "WorkerValues",
    "carried_bytes",
    "make_worker_values",
    "room_bytes",
]

_HEADER = struct.Struct("=4q")
HEADER_BYTES = _HEADER.size
"""Size of a header between workers; the values that it carries follow it."""

# The header that reports a difference. No rank posts such a header for a call, because
# sequence numbers are positive.
_DIFFERENT = b"\xff" * HEADER_BYTES
_TAG = 17
# Bytes that a network sends in the latency of a message: 10 Gbit/s for 13 us.
_DELAY_BYTES = 16 << 10
# With two workers, a header carries at most this number times _DELAY_BYTES. Larger
# values are faster in pieces: one piece is sent while the ranks add another.
_MOST_DELAYS = 16
_ALIGNMENT_BYTES, _LINE_BYTES = 16, 64
# The last number of a header has the flags in its lowest 8 bits, and above them the
# sizes in bytes of the values that follow the header: those of worker 0, and above
# ``_SIZE_BITS`` bits those of each other worker.
_FLAG_BITS, _SIZE_BITS = 8, 24

# Persistent requests of one hop (new requests take twice as long): the send of the
# header with the first values, and the sends and the receives of further values.
_Requests = tuple[Any, Sequence[Any], Sequence[Any]]

# Objects with buffers to which MPI may still write; never freed.
_left: list[Any] = []


def room_bytes(num_workers: int, *, narrows: bool = False) -> int:
    """Return the largest size in bytes of a worker's values that a header carries.

    Up to this size, headers are faster than parts (`algorithms.exchanged`). By
    headers, a rank receives ``p - 1`` times the bytes of the values. By parts, it
    receives ``2 (p - 1) / p`` times these bytes, or half of that if ``wire_dtype``
    ``narrows`` parts, but in two more exchanges, each as long as sending
    ``_DELAY_BYTES``.
    """
    delays = float(_MOST_DELAYS)
    if narrows:
        delays = 2 * num_workers / max(1, num_workers - 1)
    elif num_workers > 2:
        delays = min(delays, 2 * num_workers / (num_workers - 2))
    room = int(delays * _DELAY_BYTES) // max(1, num_workers - 1)
    return room // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES


def carried_bytes(nbytes: int) -> int:
    """Return the size in bytes of values in a header, rounded up from ``nbytes``.

    The multiple of a power of two is at least a long double's alignment, and at most an
    eighth of the size: so there are few different sizes.
    """
    unit = max(_ALIGNMENT_BYTES, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // unit) * unit


class WorkerValues:
    """Memory for the values of all workers, and a kernel for it; not collective.

    A worker of one replica shares no memory with other ranks. Its kernel adds its
    values to those of the other workers in private memory, which has the form of a
    shared segment: a record and a place for each worker, instead of each rank. The
    values of other workers come into their places from messages. After the headers have
    been compared, the records of all workers are made equal (``kernel.arrive``). A
    place has ``room_bytes`` of values, and before them a header, so that both can be
    sent as one message.
    """

    def __init__(
        self, worker: int, num_workers: int, room_bytes: int, *, native: bool = True
    ) -> None:
        self.place_bytes = -(-room_bytes // _LINE_BYTES) * _LINE_BYTES
        stride = _LINE_BYTES + self.place_bytes
        # Two records of each worker, which the kernel uses in turn, then the places.
        records = 2 * num_workers * _LINE_BYTES
        memory = mmap.mmap(-1, records + num_workers * stride + _LINE_BYTES)
        self.kernel: Any = None
        if native:
            sizes = records + _LINE_BYTES, stride, self.place_bytes, self.place_bytes
            self.kernel = load().Kernel(memory, *sizes, worker, num_workers)
        array = np.frombuffer(memory, np.uint8, num_workers * stride, records)
        rows = array.reshape(num_workers, stride)
        # The values of all workers, one row for each, and the messages with headers.
        self.places: Array = rows[:, _LINE_BYTES:]
        self.messages: Array = rows[:, _LINE_BYTES - HEADER_BYTES :]


def make_worker_values(topology: Topology, *, native: bool) -> WorkerValues | None:
    """Return the memory for `WireHeaders` on the first rank of a worker, else None.

    Only a worker of one replica has a kernel for it. Not collective: a sum has the same
    bits with and without the kernel.
    """
    size, alone = topology.num_workers, topology.worker_comm.size == 1
    if size == 1 or topology.worker_comm.rank:
        return None
    native = native and alone and load() is not None
    return WorkerValues(topology.worker_id, size, room_bytes(size), native=native)


class WireHeaders(Waitable):
    """The headers of one rank among several workers.

    The constructor is collective over ``topology.replica_comm``. ``comm`` is the
    channel's own communicator. With two workers, messages are sent from the memory
    ``values`` and received into it.
    """

    def __init__(
        self,
        topology: Topology,
        comm: Any,
        segment: SegmentHeaders,
        rings: SharedRings,
        values: WorkerValues | None,
    ) -> None:
        self._comm, self._segment, self._rings = comm, segment, rings
        self.alone = topology.worker_comm.size == 1
        # The first replica of each worker, in the order of the workers.
        told = comm.allgather((topology.worker_replicas[0], topology.worker_comm.rank))
        firsts = sorted({first for first, _ in told})
        # The worker of each replica, and the replica's index among the worker's ranks.
        self.where = [(firsts.index(first), index) for first, index in told]
        me, size = topology.worker_id, len(firsts)
        self.worker, self.num_workers = me, size
        self.room_bytes = room = room_bytes(size)
        # For each hop: the ranks to send to and to receive from, and the number of
        # workers whose values are sent.
        self._peers, self.counts = [], list[int]()
        for distance in (1 << hop for hop in range((size - 1).bit_length())):
            to, source = firsts[(me - distance) % size], firsts[(me + distance) % size]
            self._peers.append((to, source))
            self.counts.append(min(distance, size - distance))
        # The kernel and the rows for the values of all workers; the send buffer, with
        # this worker's values first; the receive buffers. Only the first rank of a
        # worker has them.
        self.kernel: Any = None if values is None else values.kernel
        self.places, self.came = np.empty((0, room), np.uint8), list[Array]()
        self.out: Array = np.zeros(HEADER_BYTES, np.uint8)
        if values is not None:
            self.places, counts = values.places, self.counts
            if size == 2:
                self.out, *self.came = values.messages[me], values.messages[1 - me]
            else:
                self.out = np.zeros(HEADER_BYTES + max(counts) * room, np.uint8)
                self.came = [
                    np.zeros(HEADER_BYTES + n * room, np.uint8) for n in counts
                ]
        self._header: Any = self.out.data[:HEADER_BYTES]
        self._reads = [came.data[:HEADER_BYTES].tobytes for came in self.came]
        self._receives = [
            comm.Recv_init(came, source, _TAG)
            for came, (_, source) in zip(self.came, self._peers, strict=False)
        ]
        # The requests of each hop, by the sizes of each worker's values and of its own.
        self._kept: dict[tuple[int, int], list[_Requests]] = {}
        self._requests_for(0, 0)
        # The running comparison of a header, as a generator; whether it has ended,
        # whether messages are under way, and whether all headers so far are equal.
        self._steps: Iterator[None] = iter(())
        self._done, self._travels, self._same = True, False, True
        self._posted = 0

    def _requests_for(self, own_bytes: int, their_bytes: int) -> list[_Requests]:
        """Return the requests of all hops for values of these sizes; see `post`.

        They are kept; `carried_bytes` limits the number of different sizes.
        """
        found = self._kept.get((own_bytes, their_bytes))
        if found is None:
            found, make = [], self._comm
            for hop, came in enumerate(self.came):
                to, source = self._peers[hop]
                sent = _cuts(HEADER_BYTES + self.counts[hop] * own_bytes)
                received = _cuts(HEADER_BYTES + self.counts[hop] * their_bytes)
                first, *sends = [make.Send_init(self.out[c], to, _TAG) for c in sent]
                receives = [make.Recv_init(came[c], source, _TAG) for c in received[1:]]
                found.append((first, sends, receives))
            self._kept[own_bytes, their_bytes] = found
        return found

    def _last_number(self, own_bytes: int, their_bytes: int) -> int:
        """Return the last number of a header without flags: equal on two workers."""
        first, other = own_bytes, their_bytes
        if self.worker:
            first, other = their_bytes, own_bytes
        return (other << _SIZE_BITS | first) << _FLAG_BITS

    def _size_from(self, hop: int, header: bytes) -> int:
        """Return the size of each worker's values that follow a header."""
        sizes: int = max(0, _HEADER.unpack(header)[-1] >> _FLAG_BITS)
        source = (self.worker + (1 << hop)) % self.num_workers
        return sizes >> _SIZE_BITS if source else sizes & ((1 << _SIZE_BITS) - 1)

    def exchange(self, own_bytes: int, their_bytes: int) -> tuple[Any, ...]:
        """Return what the kernel needs to exchange headers with values.

        Functions that start the send and the receive of one message, and test the
        receive and the send; then the last number of the header. An empty tuple if the
        kernel cannot exchange the messages, because there are more than one.
        """
        [(first, sends, receives), *more] = self._requests_for(own_bytes, their_bytes)
        if self.kernel is None or sends or receives or more:
            return ()
        came, last = self._receives[0], self._last_number(own_bytes, their_bytes)
        return first.Start, came.Start, came.Test, first.Test, last

    def post(
        self,
        sequence: int,
        run: int,
        digest: int,
        flags: int,
        load: HeaderPayload | None,
        *,
        sent: bool = False,
    ) -> None:
        """Post this rank's header, with the values of ``load``; does not wait.

        ``sequence`` is the number of the header. ``sent`` says whether the kernel has
        started the messages of the first hop, see `exchange`.
        """
        sizes = (0, 0) if load is None else load.sizes
        last = self._last_number(*sizes) | flags
        own = _HEADER.pack(sequence, run, digest, last)
        if not self.alone:
            # Each worker has its own rings: compare their next places only inside it.
            self._segment.post(run, digest ^ self._rings.next, flags)
        self._done, self._same, self._posted = False, True, sequence
        # If the header has a flag, do not add the values now: all ranks will post the
        # call's header again, with the same values.
        self._steps = self._compare(own, load, finishes=not flags, sent=sent)
        next(self._steps, None)

    def has_posted(self, sequence: int) -> bool:
        """Return whether this rank, or its kernel, has posted this header."""
        return sequence in (self._posted, _HEADER.unpack(self._header)[0])

    def agreed(self) -> bool:
        """Return whether all ranks' headers are equal; False while some are missing."""
        if not self._done:
            next(self._steps, None)
        return self._done and self._same

    def missing(self) -> list[int]:
        """Return ``[-1]`` while headers are missing: their ranks are not known."""
        self.agreed()
        return [] if self._done else [-1]

    def close(self) -> None:
        """Free the requests; not collective."""
        if self._travels:
            # An error has ended the comparison of a header: a message may still arrive.
            _left.append(self)
            return
        for first, sends, receives in itertools.chain(*self._kept.values()):
            for request in (first, *sends, *receives):
                request.Free()
        for request in self._receives:
            request.Free()
        self._kept, self._receives = {}, []

    def _compare(
        self, own: bytes, load: HeaderPayload | None, *, finishes: bool, sent: bool
    ) -> Iterator[None]:
        """Compare headers in the worker and, on its first rank, between workers."""
        if not self.alone:
            yield from self._compare_inside()
        if self._receives:
            if not self._same:
                own, load = _DIFFERENT, None
            yield from self._compare_across(own, load, sent)
            if self._same and load is not None and finishes:
                load.finish()
        if not self.alone:
            self._segment.post(0, 0, int(not self._same))
            yield from self._compare_inside()
        self._done = True

    def _compare_across(
        self, own: bytes, load: HeaderPayload | None, sent: bool
    ) -> Iterator[None]:
        """Exchange headers with the other workers; yield while messages are missing."""
        requests = self._requests_for(*((0, 0) if load is None else load.sizes))
        if not sent:
            if load is not None:
                load.gather()
            self._header[:] = own
        self._travels = True
        for hop, receive in enumerate(self._receives):
            first, sends, receives = requests[hop]
            if hop or not sent:
                first.Start()
                receive.Start()
            behind = _started(sends)
            # Wait for the send, too, because the next message uses the same buffer.
            while not (receive.Test() and first.Test()):
                yield
            header = self._reads[hop]()
            if not self._same or header != own:
                # From now on this rank sends a header that reports the difference. It
                # must still receive the values that follow the received header: if not,
                # they would arrive in the receives of the next call.
                self._same, load, requests = False, None, self._requests_for(0, 0)
                self._header[:] = _DIFFERENT
                nbytes = self._size_from(hop, header)
                receives = self._requests_for(0, nbytes)[hop][-1]
            behind += _started(receives)
            while behind and not type(behind[0]).Testall(behind):
                yield
            if load is not None:
                load.take(hop)
        self._travels = False

    def _compare_inside(self) -> Iterator[None]:
        """Compare headers inside the worker; set ``_same`` to False if they differ."""
        segment = self._segment
        while not segment.agreed():
            if not segment.missing():
                # Compare again, because ranks may have arrived between the two calls.
                self._same = self._same and segment.agreed()
                return
            yield


class HeaderValues:
    """The `HeaderPayload` of a call: few values of each worker, in the messages.

    ``own_bytes`` is the size of this worker's values, and ``their_bytes`` that of each
    other worker's; default: the same. On the first rank of a worker, ``rows`` has the
    values of all workers; it is empty on the other ranks. If this class is not derived
    from, the kernel adds or copies the values in ``rows``. With two workers, ``rows``
    are parts of the messages; with more, values are copied.
    """

    def __init__(
        self, headers: WireHeaders, own_bytes: int, their_bytes: int | None = None
    ) -> None:
        their_bytes = own_bytes if their_bytes is None else their_bytes
        self.headers, self.sizes = headers, (own_bytes, their_bytes)
        self.nbytes = nbytes = max(self.sizes)
        self.rows = rows = headers.places[:, :nbytes]
        # Destination and source of copies: before the first message, and, for each
        # hop, of the received values.
        self._gathered: list[tuple[Array, Array]] = []
        self._taken: list[list[tuple[Array, Array]]] = [[] for _ in headers.came]
        if headers.num_workers == 2 or not headers.came:
            return
        # The values of this worker and of the next workers, in the messages it sends.
        me, most = headers.worker, max(headers.counts)
        sent = _blocks(headers.out, most, nbytes)
        self._gathered = [(sent[0], rows[me])]
        for hop, count in enumerate(headers.counts):
            came = _blocks(headers.came[hop], count, nbytes)
            first = (me + (1 << hop)) % headers.num_workers
            until_last = min(count, headers.num_workers - first)
            later = max(0, min(count, most - (1 << hop)))
            self._taken[hop] = [
                (rows[first : first + until_last], came[:until_last]),
                (rows[: count - until_last], came[until_last:]),
                (sent[1 << hop :][:later], came[:later]),
            ]

    def gather(self) -> None:
        """Copy this worker's values behind the header of its message."""
        for to, source in self._gathered:
            to[...] = source

    def take(self, hop: int) -> None:
        """Copy the values received in a hop to their rows, and to later messages."""
        for to, source in self._taken[hop]:
            to[...] = source

    def finish(self) -> None:
        """Let the kernel find the records of all workers."""
        self.headers.kernel.arrive()


def _blocks(message: Array, count: int, nbytes: int) -> Array:
    """Return the values behind a message's header, one row for each worker."""
    behind = message[HEADER_BYTES : HEADER_BYTES + count * nbytes]
    return behind.reshape(count, nbytes)


def _cuts(end: int) -> list[slice]:
    """Return the messages of the first ``end`` bytes of a buffer."""
    starts = range(0, end, EAGER_BYTES)
    return [slice(start, min(start + EAGER_BYTES, end)) for start in starts]


def _started(requests: Sequence[Any]) -> list[Any]:
    for request in requests:
        request.Start()
    return list(requests)
