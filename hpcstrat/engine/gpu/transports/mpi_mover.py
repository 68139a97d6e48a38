"""Copies of device memory from rank to rank by messages: see `byte_movers`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from hpcstrat.engine.channel.waitable import Message, WaitSteps
from hpcstrat.engine.gpu.device_memory import Buffers
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports.mpi_sums import DeviceMessages, abandon
from hpcstrat.engine.topology.topology import Topology

__all__ = ["ByteSpan", "MpiMover", "chunks_of", "copy_bytes", "size_of"]

# Index of an array, from which to which of its bytes, and where in the chunk.
ByteSpan = tuple[int, int, int, int]

_CHUNK_BYTES = 2 << 20
_IN_FLIGHT = 3


def copy_bytes(target: Any, source: Any, lane: Lane) -> None:
    """Copy bytes on the device; the target may be longer, or the same memory."""
    if source.nbytes and target.data.ptr != source.data.ptr:
        target.data.copy_from_device_async(source.data, source.nbytes, lane.stream)


def chunks_of(sizes: Sequence[int], chunk_bytes: int) -> list[list[ByteSpan]]:
    """Cut arrays of bytes, one behind the other, into chunks, and these into spans.

    No span is empty.
    """
    chunks: list[list[ByteSpan]] = []
    room = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                chunks.append([])
                room = chunk_bytes
            stop = min(size, start + room)
            chunks[-1].append((index, start, stop, chunk_bytes - room))
            room -= stop - start
            start = stop
    return chunks


def size_of(spans: Sequence[ByteSpan]) -> int:
    """Return the bytes of a chunk of `chunks_of`."""
    _, start, stop, at = spans[-1]
    return at + stop - start


class MpiMover:
    """Moves bytes by messages of an MPI that can send and receive device memory.

    Arrays of CuPy's pool are not given to MPI: chunks go through memory that is not. A
    broadcast takes the binomial tree, an all-gather the ring.
    """

    def __init__(
        self, topology: Topology, lane: Lane, chunk_bytes: int = _CHUNK_BYTES
    ) -> None:
        self.lane = lane
        self._peers = DeviceMessages(topology.mpi, topology.replica_comm)
        self._chunk_bytes = chunk_bytes
        self._buffers = Buffers()

    def prepare(self) -> None:
        """Make the buffers, before the header; may raise."""
        self._slots("passed")
        self._slots("received")

    def connect(self) -> WaitSteps:
        """Do nothing: MPI has connected the ranks."""
        return iter(())

    def _slots(self, name: str) -> list[Any]:
        # Each slot begins at a multiple of 256 bytes, as memory of CUDA does.
        room = self._chunk_bytes + -self._chunk_bytes % 256
        memory = self._buffers.get(name, _IN_FLIGHT * room)
        return [memory[slot * room :][:room] for slot in range(_IN_FLIGHT)]

    def broadcast(
        self, sources: Sequence[Any], results: Sequence[Any], root: int
    ) -> WaitSteps:
        """Copy the arrays of ``root`` to all, on the lane.

        Collective over ``topology.replica_comm``.
        """
        chunks = chunks_of([source.nbytes for source in sources], self._chunk_bytes)
        parent, children = self._relatives(root)
        if parent is None:
            for source, result in zip(sources, results, strict=True):
                copy_bytes(result, source, self.lane)
            if children:
                yield from self._send_down(chunks, sources, children)
        else:
            yield from self._pass_on(chunks, results, parent, children)

    def _relatives(self, root: int) -> tuple[int | None, list[int]]:
        """Return this rank's parent and children in a binomial tree of the ranks.

        Chunks come from the parent. The child with the largest part comes first.
        """
        size = self._peers.size
        number = (self._peers.rank - root) % size
        step = number & -number if number else 1 << size.bit_length()
        parent = None if not number else (number - step + root) % size
        children = []
        while step > 1:
            step //= 2
            if number + step < size:
                children.append((number + step + root) % size)
        return parent, children

    def _send_down(
        self, chunks: list[list[ByteSpan]], sources: Sequence[Any], children: list[int]
    ) -> WaitSteps:
        """Send the root's chunks; while one is packed, those before are under way."""
        slots, lane = self._slots("passed"), self.lane
        sent: deque[list[Message]] = deque()
        for number, spans in enumerate(chunks):
            if len(sent) == _IN_FLIGHT:
                yield from sent.popleft()
            slot = slots[number % _IN_FLIGHT]
            for index, start, stop, at in spans:
                copy_bytes(slot[at:], sources[index][start:stop], lane)
            yield lane.done()
            sent.append(self._sent(slot, size_of(spans), children))
        for messages in sent:
            yield from messages

    def _pass_on(
        self,
        chunks: list[list[ByteSpan]],
        results: Sequence[Any],
        parent: int,
        children: list[int],
    ) -> WaitSteps:
        """Receive chunks, some ahead, and send each on as soon as it has come."""
        slots, lane, peers = self._slots("passed"), self.lane, self._peers
        received: deque[list[Message]] = deque()
        sent: deque[list[Message]] = deque()
        posted = 0
        for number, spans in enumerate(chunks):
            # Wait for earlier copies from the slots, also those of another call.
            yield lane.done()
            while posted < min(len(chunks), number + _IN_FLIGHT):
                if posted >= _IN_FLIGHT:
                    yield from sent.popleft()
                slot, nbytes = slots[posted % _IN_FLIGHT], size_of(chunks[posted])
                received.append(peers.receive(slot, 0, nbytes, parent))
                posted += 1
            yield from received.popleft()
            slot = slots[number % _IN_FLIGHT]
            sent.append(self._sent(slot, size_of(spans), children))
            for index, start, stop, at in spans:
                copy_bytes(
                    results[index][start:stop], slot[at : at + stop - start], lane
                )
        for messages in sent:
            yield from messages

    def _sent(self, slot: Any, nbytes: int, children: list[int]) -> list[Message]:
        messages = []
        for child in children:
            messages += self._peers.send(slot, 0, nbytes, child)
        return messages

    def all_gather(self, own: Any, out: Any, counts: Sequence[int]) -> WaitSteps:
        """Concatenate the replicas' arrays, of ``counts`` bytes, on all, on the lane.

        Collective over ``topology.replica_comm``. In step ``t`` rank ``r`` sends part
        ``r - t``, which it has had since step ``t - 1``, and receives ``r - t - 1``.
        """
        peers, lane = self._peers, self.lane
        size, rank = peers.size, peers.rank
        starts = [0, *itertools.accumulate(counts)]
        copy_bytes(out[starts[rank] :], own, lane)
        chunks = max(1, -(-max(counts) // self._chunk_bytes))
        window = min(chunks, _IN_FLIGHT)
        total = (size - 1) * chunks if max(counts) else 0
        sending, receiving = self._slots("passed"), self._slots("received")

        def _part(number: int, chunk: int) -> Any:
            start, count = starts[number % size], counts[number % size]
            low, high = count * chunk // chunks, count * (chunk + 1) // chunks
            return out[start + low : start + high]

        flights: deque[tuple[list[Message], Any, Any]] = deque()
        for flight in range(total + window if total else 0):
            if flight >= window:
                messages, received, part = flights.popleft()
                yield from messages
                copy_bytes(part, received[: part.nbytes], lane)
            if flight >= total:
                continue
            step, chunk = divmod(flight, chunks)
            sent, slot = _part(rank - step, chunk), sending[flight % window]
            copy_bytes(slot, sent, lane)
            # Also the copy out of the slot that receives.
            yield lane.done()
            part, received = _part(rank - step - 1, chunk), receiving[flight % window]
            messages = peers.receive(received, 0, part.nbytes, (rank - 1) % size)
            messages += peers.send(slot, 0, sent.nbytes, (rank + 1) % size)
            flights.append((messages, received, part))

    def close(self) -> None:
        """Free the buffers, when all calls have ended."""
        self._buffers.clear()

    def abandon(self) -> None:
        """Leave the buffers to the end of the process: others have died."""
        # MPI may still write to them.
        abandon(self._buffers)
