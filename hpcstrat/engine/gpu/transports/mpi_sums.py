"""Sums of device memory by messages between pairs of ranks, and kernels that add.

For an MPI that moves device memory from rank to rank. MPI's own reductions are left
alone: of device memory they are often missing, slow, or wrong.

Small arrays are summed by recursive doubling, in which each rank sends its whole array
in each of ``log2 p`` steps; larger ones by recursive halving and doubling, in which it
sends about twice its bytes in all; the largest by a ring, which sends as few bytes, to
one neighbor only, in ``2 (p - 1)`` steps. The first two are those of Thakur,
Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521, also for numbers of ranks
that are no power of two; the ring is that of Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002, cut into chunks so that one is added while the next ones
travel.

All ranks get the same bits. In a ring, and by halving, each element is summed on one
rank, which the others have it from. By doubling two ranks make the same sum at the same
time: both add the values of the lower ranks to those of the higher ones.

MPI knows nothing of the order of a stream. Before it reads what a kernel writes, and
before it writes what a kernel reads, the host awaits the lane; a kernel is launched
only when the message that it reads has come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from hpcstrat.engine.channel.waitable import Message, WaitSteps
from hpcstrat.engine.gpu import kernels
from hpcstrat.engine.gpu.streams import Lane

__all__ = ["DEVICE_TAG", "DeviceMessages", "Limits", "MpiSum", "abandon"]

# All messages with device memory have this tag. One call is in flight at a time, and
# all ranks make the calls in one order, so that they match in the order of sending.
DEVICE_TAG = 11

_FEWEST_CHUNK_BYTES = 256 << 10
# Chunks of unequal lengths, each at a multiple of 64 bytes.
_ROUNDING_BYTES = 128

# Buffers that MPI may write to after a death.
_abandoned: list[Any] = []


def abandon(buffers: Any) -> None:
    """Keep buffers to the end of the process: others have died."""
    _abandoned.append(buffers)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes up to which each algorithm is used; the same on all ranks."""

    # Most bytes that are summed by recursive doubling.
    doubling_bytes: int = 32 << 10
    # A ring serves from this size of a rank's segment; where it is smaller, recursive
    # halving and doubling does.
    segment_bytes: int = 64 << 10
    # Most bytes of a message of a ring, and how many are under way at once in each
    # direction.
    chunk_bytes: int = 2 << 20
    in_flight: int = 4


class DeviceMessages:
    """Messages with device memory to ranks of a communicator, which is the caller's."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._byte = mpi.BYTE
        # The address alone: MPI is given device memory as it is given any other.
        self._buffer = mpi.buffer.fromaddress
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size

    def send(self, array: Any, start: int, nbytes: int, rank: int) -> list[Message]:
        """Begin to send bytes of an array, not to be written before the end.

        At most 2**31 - 1 bytes, from the byte ``start`` of the contiguous array on.
        """
        return self._begin(self._comm.Isend, array, start, nbytes, rank)

    def receive(self, array: Any, start: int, nbytes: int, rank: int) -> list[Message]:
        """Begin to receive bytes of an array, not to be used before the end."""
        return self._begin(self._comm.Irecv, array, start, nbytes, rank)

    def _begin(
        self, call: Any, array: Any, start: int, nbytes: int, rank: int
    ) -> list[Message]:
        if not nbytes:
            return []
        data = [self._buffer(array.data.ptr + start, nbytes), nbytes, self._byte]
        # The array keeps the memory, of which MPI's request has the address alone.
        return [Message(call(data, rank, DEVICE_TAG), array)]


class MpiSum:
    """Sums a flat array on the device over the ranks of a communicator, in place."""

    def __init__(
        self, peers: DeviceMessages, lane: Lane, limits: Limits | None = None
    ) -> None:
        self._peers = peers
        self._lane = lane
        self._limits = limits or Limits()

    def scratch_bytes(self, nbytes: int) -> int:
        """Return how much memory `steps` needs beside the values: a multiple of 64.

        The same on every rank.
        """
        limits, size = self._limits, self._peers.size
        ring = limits.in_flight * limits.chunk_bytes
        # All values: with other numbers of ranks than powers of two some send them.
        small = max(limits.doubling_bytes, limits.segment_bytes * size)
        needed = min(nbytes, max(ring, small)) + limits.in_flight * _ROUNDING_BYTES
        return needed + -needed % 64

    def steps(self, values: Any, scratch: Any) -> WaitSteps:
        """Sum contiguous values.

        Collective over the communicator. What the lane has been given so far may still
        write them; in the end they are the sums, which the lane's next work may read.
        ``scratch`` has ``scratch_bytes`` of device memory that MPI may be given.
        """
        size, limits = self._peers.size, self._limits
        if size == 1 or not values.size:
            return
        if values.nbytes <= limits.doubling_bytes:
            yield from self._folded(values, scratch, self._doubling)
        elif values.nbytes < size * limits.segment_bytes:
            yield from self._folded(values, scratch, self._halving)
        else:
            yield from self._ring(values, scratch)

    def _folded(self, values: Any, scratch: Any, algorithm: Any) -> WaitSteps:
        """Let an algorithm for a power of two run on as many ranks.

        Of the first ranks, each second one gives its values to the next before, and has
        the sums from it afterwards. Numbers of those that take part go by rank.
        """
        peers = self._peers
        active = 1 << (peers.size.bit_length() - 1)
        pairs = peers.size - active
        nbytes = values.nbytes
        paired, gives = peers.rank < 2 * pairs, peers.rank % 2 == 0
        yield self._lane.done()
        if paired and gives:
            yield from peers.send(values, 0, nbytes, peers.rank + 1)
            yield from peers.receive(values, 0, nbytes, peers.rank + 1)
            return
        if paired:
            other = scratch[:nbytes].view(values.dtype)
            yield from peers.receive(other, 0, nbytes, peers.rank - 1)
            self._add(other, values, values)
        number = peers.rank // 2 if paired else peers.rank - pairs

        def rank_of(other: int) -> int:
            return 2 * other + 1 if other < pairs else other + pairs

        if active > 1:
            yield from algorithm(values, scratch, number, active, rank_of)
        if paired:
            yield self._lane.done()
            yield from peers.send(values, 0, nbytes, peers.rank - 1)

    def _doubling(
        self, values: Any, scratch: Any, me: int, active: int, rank_of: Any
    ) -> WaitSteps:
        """Let all of a block of ranks, and then of one twice as large, have its sum."""
        nbytes = values.nbytes
        theirs = scratch[:nbytes].view(values.dtype)
        distance = 1
        while distance < active:
            rank = rank_of(me ^ distance)
            yield self._lane.done()
            yield from self._swap((values, 0, nbytes), (theirs, 0, nbytes), rank)
            lower, upper = (theirs, values) if me & distance else (values, theirs)
            self._add(lower, upper, values)
            distance *= 2

    def _halving(
        self, values: Any, scratch: Any, me: int, active: int, rank_of: Any
    ) -> WaitSteps:
        """Sum one segment on each rank, a half at a time, and exchange them again."""
        itemsize = values.itemsize
        bounds = [values.size * number // active for number in range(active + 1)]

        def memory(low: int, high: int) -> tuple[Any, int, int]:
            nbytes = (bounds[high] - bounds[low]) * itemsize
            return values, bounds[low] * itemsize, nbytes

        low, distance = 0, active // 2
        while distance:
            kept, sent = (low, low + distance), (low + distance, low + 2 * distance)
            if me & distance:
                kept, sent = sent, kept
            nbytes = memory(*kept)[-1]
            yield self._lane.done()
            theirs = scratch[:nbytes].view(values.dtype)
            received = theirs, 0, nbytes
            yield from self._swap(memory(*sent), received, rank_of(me ^ distance))
            own = values[bounds[kept[0]] : bounds[kept[1]]]
            self._add(own, theirs, own)
            low = kept[0]
            distance //= 2
        yield self._lane.done()
        distance = 1
        while distance < active:
            low, other = me // distance * distance, (me ^ distance) // distance
            sent, kept = (low, low + distance), (other * distance,) * 2
            received = memory(kept[0], kept[0] + distance)
            yield from self._swap(memory(*sent), received, rank_of(me ^ distance))
            distance *= 2

    def _swap(
        self, sent: tuple[Any, int, int], received: tuple[Any, int, int], rank: int
    ) -> WaitSteps:
        messages = self._peers.receive(*received, rank)
        messages += self._peers.send(*sent, rank)
        yield from messages

    def _ring(self, values: Any, scratch: Any) -> WaitSteps:
        """Send segments to the next rank, and chunks of them before it has the last.

        In step ``t`` rank ``r`` sends segment ``r - t`` and receives ``r - t - 1``. In
        the first ``p - 1`` steps it adds what it receives to its own values; in the
        others it receives sums, in their places. Flights are chunks of steps, in order;
        ``window`` of them are under way, at most the chunks of a step. So the flight
        that brought what one sends, a step before, has ended; and so has the one that
        sent what lay where one receives a sum, ``p - 1`` steps before.
        """
        peers, lane = self._peers, self._lane
        size, rank = peers.size, peers.rank
        itemsize = values.itemsize
        chunks = self._chunks(values)
        window = min(chunks, self._limits.in_flight)
        room = len(scratch) // window // 64 * 64

        def bounds(segment: int, chunk: int) -> tuple[int, int]:
            start = values.size * segment // size
            length = values.size * (segment + 1) // size - start
            low, high = length * chunk // chunks, length * (chunk + 1) // chunks
            return start + low, start + high

        adding = (size - 1) * chunks
        flights: deque[tuple[list[Message], Any, Any]] = deque()
        yield lane.done()
        for flight in range(2 * adding + window):
            if flight >= window:
                messages, own, theirs = flights.popleft()
                yield from messages
                if theirs is not None:
                    self._add(own, theirs, own)
                    # The next flight reuses its memory, and a later one sends the sum.
                    yield lane.done()
            if flight >= 2 * adding:
                continue
            step, chunk = divmod(flight, chunks)
            low, high = bounds((rank - step) % size, chunk)
            first, last = bounds((rank - step - 1) % size, chunk)
            nbytes = (last - first) * itemsize
            own = theirs = None
            into, at = values, first * itemsize
            if flight < adding and nbytes:
                own = values[first:last]
                place = flight % window * room
                theirs = scratch[place : place + nbytes].view(values.dtype)
                into, at = theirs, 0
            messages = peers.receive(into, at, nbytes, (rank - 1) % size)
            messages += peers.send(
                values, low * itemsize, (high - low) * itemsize, (rank + 1) % size
            )
            flights.append((messages, own, theirs))

    def _chunks(self, values: Any) -> int:
        """Return in how many chunks each segment is sent."""
        limits = self._limits
        segment: int = -(-values.size // self._peers.size) * values.itemsize
        # A chunk's last element may be half in it.
        most: int = max(values.itemsize, limits.chunk_bytes - values.itemsize)
        wanted = min(limits.in_flight, segment // _FEWEST_CHUNK_BYTES)
        return max(1, wanted, -(-segment // most))

    def _add(self, own: Any, other: Any, out: Any) -> None:
        kernels.add(own, other, out, self._lane.stream)
