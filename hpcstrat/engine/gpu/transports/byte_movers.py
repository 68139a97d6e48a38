"""Broadcast and all-gather of device memory: by NCCL, messages, or through the host.

All three move bytes. Each takes sources from, and leaves results to, the program's
stream, in its order; the header of the call has been agreed before.
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
from hpcstrat.engine.gpu.transports.mpi_mover import (
    ByteSpan,
    MpiMover,
    chunks_of,
    copy_bytes,
    size_of,
)
from hpcstrat.engine.gpu.transports.mpi_sums import abandon
from hpcstrat.engine.gpu.transports.nccl_group import NcclGroup
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array

__all__ = ["Mover", "MpiMover", "NcclMover", "StagedMover", "all_gather", "broadcast"]

_STAGED_BYTES = 4 << 20


class NcclMover:
    """Moves bytes by NCCL; the group is its owner's."""

    def __init__(self, group: NcclGroup, lane: Lane) -> None:
        self.lane = lane
        self._group = group

    def prepare(self) -> None:
        """Do nothing: there are no buffers."""

    def connect(self) -> WaitSteps:
        """Make NCCL's communicator, the first time.

        Collective over ``topology.replica_comm``. Raises EveryRankError on all ranks,
        if one of them cannot.
        """
        return self._group.connect()

    def broadcast(
        self, sources: Sequence[Any], results: Sequence[Any], root: int
    ) -> WaitSteps:
        """Copy the arrays of ``root`` to all, on the lane.

        Collective over ``topology.replica_comm``.
        """
        if self._group.rank == root:
            for source, result in zip(sources, results, strict=True):
                copy_bytes(result, source, self.lane)
        self._group.broadcast(results, root)
        return self._group.ended()

    def all_gather(self, own: Any, out: Any, counts: Sequence[int]) -> WaitSteps:
        """Concatenate the replicas' arrays, of ``counts`` bytes, on all, on the lane.

        Collective over ``topology.replica_comm``.
        """
        ends = list(itertools.accumulate(counts))
        parts = [out[end - n : end] for end, n in zip(ends, counts, strict=True)]
        copy_bytes(parts[self._group.rank], own, self.lane)
        if ends[-1]:
            # NCCL is asked for nothing where no rank has bytes.
            self._group.all_gather([parts])
        return self._group.ended()

    def close(self) -> None:
        """Do nothing: the group is its owner's."""

    def abandon(self) -> None:
        """Do nothing: the group is its owner's."""


class StagedMover:
    """Moves bytes through page-locked memory of the host, two chunks at a time."""

    def __init__(
        self, topology: Topology, lane: Lane, chunk_bytes: int = _STAGED_BYTES
    ) -> None:
        self.lane = lane
        self._mpi = topology.mpi
        self._comm: Any = topology.replica_comm
        self._chunk_bytes = chunk_bytes
        self._buffers = Buffers(pinned_memory)

    def prepare(self) -> None:
        """Make the buffers, before the header; may raise."""
        self._places("passed")
        self._places("gathered")

    def connect(self) -> WaitSteps:
        """Do nothing: MPI has connected the ranks."""
        return iter(())

    def _places(self, name: str) -> tuple[Array, Array]:
        # A byte more for each rank, as their parts of a chunk are rounded.
        nbytes = self._chunk_bytes + self._comm.size
        first, second = (self._buffers.get((name, one), nbytes) for one in (0, 1))
        return first, second

    def _down(self, host: Array, source: Any) -> None:
        address, stream = host.ctypes.data, self.lane.stream
        source.data.copy_to_host_async(address, source.nbytes, stream)

    def _up(self, result: Any, host: Array) -> None:
        address, stream = host.ctypes.data, self.lane.stream
        result.data.copy_from_host_async(address, result.nbytes, stream)

    def broadcast(
        self, sources: Sequence[Any], results: Sequence[Any], root: int
    ) -> WaitSteps:
        """Copy the arrays of ``root`` to all, on the lane.

        Collective over ``topology.replica_comm``. The root copies the next chunk to the
        host while it sends one; the others copy the last one to their GPU meanwhile.
        """
        chunks = chunks_of([source.nbytes for source in sources], self._chunk_bytes)
        places, lane = self._places("passed"), self.lane
        if self._comm.rank == root:
            for source, result in zip(sources, results, strict=True):
                copy_bytes(result, source, lane)
            done = [self._all_down(chunks, 0, sources, places)]
            for number, spans in enumerate(chunks):
                done.append(self._all_down(chunks, number + 1, sources, places))
                yield done[number]
                yield from self._cast(places[number % 2][: size_of(spans)], root)
            return
        # First copies from the places by an earlier call; then those of the chunk
        # before the last.
        free = deque([lane.done(), lane.done()])
        for number, spans in enumerate(chunks):
            yield free.popleft()
            host = places[number % 2]
            yield from self._cast(host[: size_of(spans)], root)
            for index, start, stop, at in spans:
                self._up(results[index][start:stop], host[at:])
            free.append(lane.done())

    def _all_down(
        self,
        chunks: list[list[ByteSpan]],
        number: int,
        sources: Sequence[Any],
        places: tuple[Array, Array],
    ) -> Any:
        """Have a chunk copied to its place; return what is done then."""
        if number < len(chunks):
            for index, start, stop, at in chunks[number]:
                self._down(places[number % 2][at:], sources[index][start:stop])
        return self.lane.done()

    def _cast(self, host: Array, root: int) -> WaitSteps:
        """Broadcast an array of the host, in the pieces that MPI likes best."""
        for start in range(0, host.size, PIECE_BYTES):
            yield Message(self._comm.Ibcast(host[start : start + PIECE_BYTES], root))

    def all_gather(self, own: Any, out: Any, counts: Sequence[int]) -> WaitSteps:
        """Concatenate the replicas' arrays, of ``counts`` bytes, on all, on the lane.

        Collective over ``topology.replica_comm``. A chunk holds as large a share of
        each replica's array.
        """
        starts, lane = [0, *itertools.accumulate(counts)], self.lane
        chunks = -(-starts[-1] // self._chunk_bytes)
        places, gathered = self._places("passed"), self._places("gathered")

        def _bounds(rank: int, chunk: int) -> tuple[int, int]:
            count = counts[rank]
            return count * chunk // chunks, count * (chunk + 1) // chunks

        def _own_down(chunk: int) -> Any:
            if chunk < chunks:
                low, high = _bounds(self._comm.rank, chunk)
                self._down(places[chunk % 2], own[low:high])
            return lane.done()

        free = deque([lane.done(), lane.done()])
        down = _own_down(0)
        for chunk in range(chunks):
            following = _own_down(chunk + 1)
            yield down
            yield free.popleft()
            down = following
            bounds = [_bounds(rank, chunk) for rank in range(len(counts))]
            sizes = [high - low for low, high in bounds]
            host = gathered[chunk % 2]
            sent = [places[chunk % 2][: sizes[self._comm.rank]], self._mpi.BYTE]
            received = [host[: sum(sizes)], sizes, self._mpi.BYTE]
            yield Message(self._comm.Iallgatherv(sent, received))
            at = 0
            for start, (low, high) in zip(starts, bounds, strict=False):
                self._up(out[start + low : start + high], host[at:])
                at += high - low
            free.append(lane.done())

    def close(self) -> None:
        """Free the buffers, when all calls have ended."""
        self._buffers.clear()

    def abandon(self) -> None:
        """Leave the buffers to the end of the process: others have died."""
        # MPI may still write to them.
        abandon(self._buffers)


# Ways of moving bytes between the GPUs of the replicas.
Mover = NcclMover | MpiMover | StagedMover


def broadcast(
    mover: Mover, sources: Sequence[Any], results: Sequence[Any], root: int
) -> WaitSteps:
    """Give every replica the contiguous arrays of ``root``.

    Collective over ``topology.replica_comm``. On all ranks of the same sizes; each
    result may be its source itself. Sources are read on the root only.
    """
    yield HEADER
    mover.lane.enter()
    yield from mover.connect()
    yield from mover.broadcast(_as_bytes(sources), _as_bytes(results), root)
    mover.lane.leave()


def all_gather(mover: Mover, own: Any, out: Any, counts: Sequence[int]) -> WaitSteps:
    """Concatenate the replicas' contiguous arrays on every replica, in replica order.

    Collective over ``topology.replica_comm``. ``counts`` are the elements of each.
    """
    yield HEADER
    mover.lane.enter()
    yield from mover.connect()
    # Bytes, as MPI and NCCL lack types that arrays have.
    sizes = [count * out.itemsize for count in counts]
    ((own_bytes,), (out_bytes,)) = _as_bytes([own]), _as_bytes([out])
    yield from mover.all_gather(own_bytes, out_bytes, sizes)
    mover.lane.leave()


def _as_bytes(arrays: Sequence[Any]) -> list[Any]:
    return [array.reshape(-1).view("u1") for array in arrays]
