"""Sums of GPU memory by MPI point-to-point messages, and a kernel that adds.

This transport needs an MPI library that can send and receive GPU memory. MPI's own
reductions of GPU memory are not used, because they are often missing, slow, or wrong.

Small arrays are summed by recursive doubling (Thakur, Rabenseifner and Gropp 2005,
doi:10.1177/1094342005051521). If ``p`` is a power of two, each of ``p`` ranks sends its
whole array in each of ``log2 p`` hops. If not, the surplus ranks send their arrays to
other ranks before the first hop, and get the sums after the last hop.
Larger arrays are summed by a ring, in which each rank sends about twice the bytes of
its array to one neighbor, in ``2 (p - 1)`` hops (Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002). The array is cut into chunks, so that one chunk is
added while the next chunks are sent.

All ranks get the same bits. In a ring, each element is summed on one rank, which sends
the sum to the other ranks. In recursive doubling, two ranks compute the same sum at the
same time: both add the values of the lower ranks and of the higher ranks in the same
order.

MPI does not follow the order of a CUDA stream. The host waits for the lane before MPI
reads memory that a kernel writes, and before MPI writes memory that a kernel reads. A
kernel is launched only after the message that it reads has arrived.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.work import Work
from hpcstrat.engine.arrays.kinds import array_module
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import Exchange, WaitSteps
from hpcstrat.engine.gpu import kernels
from hpcstrat.engine.gpu.device_memory import Buffers
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports.device_reduction import pack_run, unpack_run
from hpcstrat.engine.topology.topology import Topology

__all__ = ["Limits", "MpiTransport"]

# The tag of all messages with GPU memory. One tag is enough: one call is in flight at a
# time, and all ranks make the calls in the same order, so that messages match in the
# order of sending.
_TAG = 11

_FEWEST_CHUNK_BYTES = 256 << 10
# Bytes of the scratch buffer for each chunk in flight beyond `chunk_bytes`: chunks have
# slightly different lengths, and each starts at a multiple of 64 bytes of the buffer.
_ROUNDING_BYTES = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the sizes of messages; the same on all ranks."""

    # Smallest segment of a rank for which a ring is used, not recursive doubling.
    segment_bytes: int = 64 << 10
    # Maximum size of a ring's messages, and maximum number in flight per direction.
    chunk_bytes: int = 2 << 20
    in_flight: int = 4


class MpiTransport:
    """The transport for MPI libraries that can send and receive GPU memory."""

    name = "ring"

    def __init__(
        self, topology: Topology, lane: Lane, limits: Limits | None = None
    ) -> None:
        self.lane = lane
        self._mpi: Any = topology.mpi
        self._comm: Any = topology.replica_comm
        self._rank: int = self._comm.rank
        self._size: int = self._comm.size
        self._limits = limits or Limits()
        self._buffers = Buffers()
        self._values: Any = None
        self._scratch: Any = None

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Allocate buffers for pieces of at most ``nbytes``; may raise."""
        del count
        self._values = self._buffers.get("values", nbytes)
        self._scratch = self._buffers.get("scratch", self._scratch_bytes(nbytes))

    def _scratch_bytes(self, nbytes: int) -> int:
        limits = self._limits
        ring = limits.in_flight * limits.chunk_bytes
        needed = min(nbytes, max(ring, limits.segment_bytes * self._size))
        needed += limits.in_flight * _ROUNDING_BYTES
        return needed + -needed % 64

    def reduce(self, work: Work, channel: Channel) -> WaitSteps:
        """Reduce all pieces of the work.

        Collective over ``topology.replica_comm``.
        """
        del channel
        for piece in work.pieces:
            parts = [
                (run, pack_run(run, work, self._values, self.lane)) for run in piece
            ]
            for _, part in parts:
                yield from self._sum(part, work.function)
            for run, part in parts:
                unpack_run(run, work, part, self.lane)

    def _sum(self, values: Any, function: np.ufunc) -> WaitSteps:
        """Sum contiguous values over the ranks, in place; for ``function`` see `Work`.

        Earlier work of the lane may still be writing the values. Afterwards, the lane's
        next work can read the sums.
        """
        if self._size == 1 or not values.size:
            return
        yield self.lane.done()
        if values.nbytes < self._size * self._limits.segment_bytes:
            yield from self._by_doubling(values, function)
        else:
            yield from self._by_ring(values, function)

    def _by_doubling(self, values: Any, function: np.ufunc) -> WaitSteps:
        """Sum by recursive doubling: exchange sums with ranks at distance 1, 2, 4, ...

        The number of ranks that take part is a power of two, the largest possible. Each
        surplus rank, an even rank among the first ranks, first sends its values to the
        next rank, and finally receives the sums from that rank.
        """
        active = 1 << (self._size.bit_length() - 1)
        pairs = self._size - active
        theirs = self._scratch[: values.nbytes].view(values.dtype)
        paired = self._rank < 2 * pairs
        if paired and self._rank % 2 == 0:
            yield from self._send(values, self._rank + 1)
            yield from self._receive(values, self._rank + 1)
            return
        if paired:
            yield from self._receive(theirs, self._rank - 1)
            self._add(theirs, values, values, function)
        number = self._rank // 2 if paired else self._rank - pairs
        distance = 1
        while distance < active:
            other = number ^ distance
            rank = 2 * other + 1 if other < pairs else other + pairs
            yield self.lane.done()
            yield from self._receive(theirs, rank) + self._send(values, rank)
            lower, upper = (theirs, values) if other < number else (values, theirs)
            self._add(lower, upper, values, function)
            distance *= 2
        if paired:
            yield self.lane.done()
            yield from self._send(values, self._rank - 1)

    def _by_ring(self, values: Any, function: np.ufunc) -> WaitSteps:
        """Sum by a ring: send segments to the next rank, in chunks that overlap.

        In hop ``t`` rank ``r`` sends segment ``r - t`` and receives ``r - t - 1``. In
        the first ``p - 1`` hops, the rank adds the received values to its own values.
        In the other hops, it receives sums directly into ``values``. A flight is the
        transfer of one chunk in one hop. Flights begin in order; ``window`` flights
        are in progress, at most as many as a hop has chunks. Therefore, two flights
        have ended before a flight begins: the flight one hop before, which received
        the values to send, and the flight ``p - 1`` hops before, which sent the old
        values of the chunk to receive into.
        """
        size, rank = self._size, self._rank
        chunks = self._chunks(values)
        window = min(chunks, self._limits.in_flight)
        room = len(self._scratch) // window // 64 * 64

        def part(segment: int, chunk: int) -> Any:
            start = values.size * (segment % size) // size
            length = values.size * (segment % size + 1) // size - start
            low, high = length * chunk // chunks, length * (chunk + 1) // chunks
            return values[start + low : start + high]

        adding = (size - 1) * chunks
        flights: deque[tuple[list[Exchange], Any, Any]] = deque()
        for flight in range(2 * adding + window):
            if flight >= window:
                messages, own, theirs = flights.popleft()
                yield from messages
                if theirs is not own:
                    self._add(own, theirs, own, function)
                    # Wait, because later flights reuse ``theirs``, and send the sum.
                    yield self.lane.done()
            if flight >= 2 * adding:
                continue
            hop, chunk = divmod(flight, chunks)
            own = theirs = part(rank - hop - 1, chunk)
            if flight < adding and own.nbytes:
                at = flight % window * room
                theirs = self._scratch[at : at + own.nbytes].view(values.dtype)
            messages = self._receive(theirs, (rank - 1) % size)
            messages += self._send(part(rank - hop, chunk), (rank + 1) % size)
            flights.append((messages, own, theirs))

    def _chunks(self, values: Any) -> int:
        """Return the number of chunks in which each segment is sent."""
        limits = self._limits
        segment: int = -(-values.size // self._size) * values.itemsize
        # Rounding may make a chunk one element longer.
        most: int = max(values.itemsize, limits.chunk_bytes - values.itemsize)
        wanted = min(limits.in_flight, segment // _FEWEST_CHUNK_BYTES)
        return max(1, wanted, -(-segment // most))

    def _add(self, one: Any, other: Any, out: Any, function: np.ufunc) -> None:
        if function is np.add:
            kernels.add(one, other, out, self.lane.stream)
            return
        with self.lane.stream:
            array_module(out).maximum(one, other, out=out)

    def _send(self, array: Any, rank: int) -> list[Exchange]:
        """Begin to send an array, which must not be written before completion."""
        return self._begin(self._comm.Isend, array, rank)

    def _receive(self, array: Any, rank: int) -> list[Exchange]:
        """Begin to receive an array, which must not be used before completion."""
        return self._begin(self._comm.Irecv, array, rank)

    def _begin(self, call: Any, array: Any, rank: int) -> list[Exchange]:
        nbytes = array.nbytes
        if not nbytes:
            return []
        # MPI accepts an address in GPU memory like an address in host memory.
        buffer = self._mpi.buffer.fromaddress(array.data.ptr, nbytes)
        # Keep the array alive, because the request only has its address.
        exchange = Exchange(array)
        exchange.requests.append(call([buffer, nbytes, self._mpi.BYTE], rank, _TAG))
        return [exchange]

    def close(self) -> None:
        """Free the buffers; all calls must have ended."""
        self._values = self._scratch = None
        self._buffers.clear()

    def abandon(self) -> None:
        """Keep the buffers until the process ends, because a rank has died."""
        self._buffers.abandon()
