"""Broadcast and all-gather of GPU memory, by NCCL or through host memory.

Both movers copy bytes in the order of the program's stream, after the ranks have agreed
on the header of the call.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from hpcstrat.engine.channel.interruptible import PIECE_BYTES
from hpcstrat.engine.channel.waitable import HEADER, Message, WaitSteps
from hpcstrat.engine.gpu.device_memory import Buffers, pinned_memory
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports.nccl_group import NcclGroup
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array

__all__ = ["Mover", "NcclMover", "StagedMover", "all_gather", "broadcast"]

_STAGED_BYTES = 4 << 20

# Index of an array, start and stop of a range of its bytes, and its offset in a chunk.
_ByteSpan = tuple[int, int, int, int]


class NcclMover:
    """Moves bytes by NCCL; ``group`` is connected, and its owner closes it."""

    def __init__(self, group: NcclGroup, lane: Lane) -> None:
        self.lane = lane
        self._group = group

    def broadcast(
        self, sources: Sequence[Any], results: Sequence[Any], root: int
    ) -> WaitSteps:
        """Copy the arrays of ``root`` to all ranks; see the function `broadcast`."""
        if self._group.rank == root:
            _copy_all(results, sources, self.lane)
        self._group.broadcast(results, root)
        return self._group.ended()

    def all_gather(self, own: Any, out: Any, counts: Sequence[int]) -> WaitSteps:
        """Concatenate all ranks' bytes, ``counts[r]`` of rank r; see `all_gather`."""
        ends = list(itertools.accumulate(counts))
        parts = [out[end - n : end] for end, n in zip(ends, counts, strict=True)]
        _copy_all([parts[self._group.rank]], [own], self.lane)
        if ends[-1]:
            # Do not call NCCL if no rank has any bytes.
            self._group.all_gather(parts)
        return self._group.ended()


class StagedMover:
    """Moves bytes through page-locked host memory, with two chunks in progress."""

    def __init__(
        self, topology: Topology, lane: Lane, chunk_bytes: int = _STAGED_BYTES
    ) -> None:
        self.lane = lane
        self._mpi = topology.mpi
        self._comm: Any = topology.replica_comm
        self._chunk_bytes = chunk_bytes
        # One extra byte per rank, because rounding may lengthen its part of a chunk.
        nbytes = chunk_bytes + self._comm.size
        self._buffers = Buffers(pinned_memory)
        self._passed = [self._buffers.get(("passed", n), nbytes) for n in range(2)]
        self._gathered = [self._buffers.get(("gathered", n), nbytes) for n in range(2)]

    def _down(self, host: Array, source: Any) -> None:
        address, stream = host.ctypes.data, self.lane.stream
        source.data.copy_to_host_async(address, source.nbytes, stream)

    def _up(self, result: Any, host: Array) -> None:
        address, stream = host.ctypes.data, self.lane.stream
        result.data.copy_from_host_async(address, result.nbytes, stream)

    def broadcast(
        self, sources: Sequence[Any], results: Sequence[Any], root: int
    ) -> WaitSteps:
        """Copy the arrays of ``root`` to all ranks; see the function `broadcast`.

        While a chunk is broadcast, the root copies the next chunk to the host, and the
        other ranks copy the previous chunk to their GPUs.
        """
        chunks = _chunks_of([source.nbytes for source in sources], self._chunk_bytes)
        buffers, lane = self._passed, self.lane
        if self._comm.rank == root:
            _copy_all(results, sources, lane)
            done = [self._chunk_down(chunks, 0, sources)]
            for number, spans in enumerate(chunks):
                done.append(self._chunk_down(chunks, number + 1, sources))
                yield done[number]
                yield from self._cast(buffers[number % 2], spans, root)
            return
        # Before a host buffer is overwritten, wait for the copies from it to the GPU:
        # at first the copies of an earlier call, then the copies of the chunk before
        # the previous one.
        free = deque([lane.done(), lane.done()])
        for number, spans in enumerate(chunks):
            yield free.popleft()
            host = buffers[number % 2]
            yield from self._cast(host, spans, root)
            for index, start, stop, at in spans:
                self._up(results[index][start:stop], host[at:])
            free.append(lane.done())

    def _chunk_down(
        self, chunks: list[list[_ByteSpan]], number: int, sources: Sequence[Any]
    ) -> Any:
        """Begin to copy a chunk to the host; return a step that waits for it."""
        for index, start, stop, at in chunks[number] if number < len(chunks) else ():
            self._down(self._passed[number % 2][at:], sources[index][start:stop])
        return self.lane.done()

    def _cast(self, host: Array, spans: list[_ByteSpan], root: int) -> WaitSteps:
        """Broadcast a chunk in host memory, in pieces of the best size for MPI."""
        _, first, last, at = spans[-1]
        size = at + last - first
        for start in range(0, size, PIECE_BYTES):
            piece = host[start : min(size, start + PIECE_BYTES)]
            yield Message(self._comm.Ibcast, piece, root)

    def all_gather(self, own: Any, out: Any, counts: Sequence[int]) -> WaitSteps:
        """Concatenate the ranks' bytes, ``counts[r]`` of rank ``r``; see `all_gather`.

        Each chunk has the same fraction of every rank's bytes.
        """
        starts, lane = [0, *itertools.accumulate(counts)], self.lane
        chunks = -(-starts[-1] // self._chunk_bytes)

        def bounds(rank: int, chunk: int) -> tuple[int, int]:
            count = counts[rank]
            return count * chunk // chunks, count * (chunk + 1) // chunks

        def own_down(chunk: int) -> Any:
            if chunk < chunks:
                low, high = bounds(self._comm.rank, chunk)
                self._down(self._passed[chunk % 2], own[low:high])
            return lane.done()

        free = deque([lane.done(), lane.done()])
        down = own_down(0)
        for chunk in range(chunks):
            following = own_down(chunk + 1)
            yield down
            yield free.popleft()
            down = following
            shares = [bounds(rank, chunk) for rank in range(len(counts))]
            sizes = [high - low for low, high in shares]
            host = self._gathered[chunk % 2]
            sent = self._passed[chunk % 2][: sizes[self._comm.rank]]
            received = [host[: sum(sizes)], sizes, self._mpi.BYTE]
            yield Message(self._comm.Iallgatherv, [sent, self._mpi.BYTE], received)
            at = 0
            for start, (low, high) in zip(starts, shares, strict=False):
                self._up(out[start + low : start + high], host[at:])
                at += high - low
            free.append(lane.done())

    def close(self) -> None:
        """Free the buffers; all calls must have ended."""
        self._passed, self._gathered = [], []
        self._buffers.clear()

    def abandon(self) -> None:
        """Keep the buffers until the process ends, because MPI may write to them."""
        self._buffers.abandon()


def _copy_all(targets: Sequence[Any], sources: Sequence[Any], lane: Lane) -> None:
    """Copy bytes within the GPU; skip a target that is its own source."""
    for target, source in zip(targets, sources, strict=True):
        if source.nbytes and target.data.ptr != source.data.ptr:
            target.data.copy_from_device_async(source.data, source.nbytes, lane.stream)


def _chunks_of(sizes: Sequence[int], chunk_bytes: int) -> list[list[_ByteSpan]]:
    """Cut concatenated byte arrays into chunks, and chunks into nonempty spans."""
    chunks: list[list[_ByteSpan]] = []
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


# The ways to move bytes between the GPUs of the replicas.
Mover = NcclMover | StagedMover


def broadcast(
    mover: Mover, sources: Sequence[Any], results: Sequence[Any], root: int
) -> WaitSteps:
    """Copy the contiguous arrays of replica ``root`` to every replica.

    Collective over ``topology.replica_comm``. The sizes are equal on all ranks. A
    result may be the same memory as its source. Only the root reads its sources.
    """
    yield HEADER
    mover.lane.enter()
    yield from mover.broadcast(_as_bytes(sources), _as_bytes(results), root)
    mover.lane.leave()


def all_gather(mover: Mover, own: Any, out: Any, counts: Sequence[int]) -> WaitSteps:
    """Concatenate the replicas' contiguous arrays on every replica, in replica order.

    Collective over ``topology.replica_comm``. ``counts`` has the number of elements of
    each replica's array.
    """
    yield HEADER
    mover.lane.enter()
    # Move bytes, because MPI and NCCL do not support all dtypes of arrays.
    sizes = [count * out.itemsize for count in counts]
    own_bytes, out_bytes = _as_bytes([own, out])
    yield from mover.all_gather(own_bytes, out_bytes, sizes)
    mover.lane.leave()


def _as_bytes(arrays: Sequence[Any]) -> list[Any]:
    return [array.reshape(-1).view("u1") for array in arrays]
