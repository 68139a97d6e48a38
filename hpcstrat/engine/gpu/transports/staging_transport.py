"""Reduction of GPU memory on the host, if neither NCCL nor MPI can reduce it.

A piece is packed on the GPU. Parts of the piece are copied to page-locked host memory,
summed there by an algorithm for host arrays, and copied back. While one part is summed,
the next part is copied to the host, and the previous part is copied back to the GPU.
Two host buffers are enough: all copies are on one lane, so that a copy into a buffer
runs after the earlier copy from the buffer back to the GPU. The host writes to a buffer
only after the copy to the host, for which it waits, and before the copy to the GPU.

**Shared memory.** The algorithms of `hpcstrat.engine.algorithms.shared_memory` write
this rank's values to shared memory before their first step, the header of the call:
after a rank has seen the headers of all ranks, it reads the values of all ranks. In
this transport, however, the ranks agree on the header before the first part is on the
host. Therefore, the worker's ranks make one additional step for each part. This step
orders accesses to shared memory in the same way as the header of a single worker, with
the same records (`SegmentHeaders`). With several workers, a header does not order
memory, and the algorithm makes another step of its own.

Each rank makes one call of the host algorithm for each part, and ends a part before it
begins the next part. `hpcstrat.engine.channel.shared_rings` has two
requirements. First, a rank must reach step ``n - 1`` only after its last read of the
memory of step ``n - 3``. Ranks meet this requirement, because each piece of memory
belongs to one step, and a rank has read the results of step ``n - 3`` before it writes
its values for step ``n - 1``. Second, all ranks must use memory of the same sizes in
the same order. Ranks meet this requirement, because the parts depend on the plan only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat.engine.algorithms.work import Algorithm, Work
from hpcstrat.engine.arrays.packing import Run, cut
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.gpu.device_memory import Buffers, pinned_memory
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports.device_reduction import pack_run, unpack_run
from hpcstrat.engine.typing import Array

__all__ = ["StagingTransport"]

# Maximum size of a part; two buffers of this size are page-locked.
_PART_BYTES = 8 << 20

# A function of an array's size, and of whether it must be summed exactly, without
# half-precision numbers on the network. Returns an algorithm for host arrays, and the
# maximum size of its pieces. The result is the same on all ranks.
_Choose = Callable[[int, bool], tuple[Algorithm, int]]


class StagingTransport:
    """The transport that sums on the host, in parts of at most ``part_bytes``."""

    name = "staging"

    def __init__(
        self, lane: Lane, choose: _Choose, part_bytes: int = _PART_BYTES
    ) -> None:
        self.lane = lane
        self._choose = choose
        self._part_bytes = part_bytes
        self._buffers = Buffers()
        self._values: Any = None
        self._pinned = Buffers(pinned_memory)
        # The page-locked buffer of even parts, and the buffer of odd parts.
        self._in_turn: tuple[Array, ...] = ()

    def choosing(self, choose: _Choose) -> StagingTransport:
        """Return a transport with the same buffers and another function ``choose``.

        Calls of the two must not overlap. Closing this transport closes both.
        """
        other = copy.copy(self)
        other._choose = choose
        return other

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Allocate buffers for pieces of at most ``nbytes``; may raise."""
        del count
        self._values = self._buffers.get("values", nbytes)
        nbytes = max(1, min(nbytes, self._part_bytes))
        if self._in_turn and self._in_turn[0].size < nbytes:
            # Keep the old buffers: the previous call may still copy from them.
            self.lane.keep(self._in_turn)
        self._in_turn = tuple(self._pinned.get(n, nbytes) for n in range(2))

    def reduce(self, work: Work, channel: Channel) -> WaitSteps:
        """Reduce all pieces of the work.

        Collective over ``topology.replica_comm``.
        """
        for piece in work.pieces:
            packed = [
                (run, pack_run(run, work, self._values, self.lane)) for run in piece
            ]
            parts = [part for run, array in packed for part in self._parts(run, array)]
            # Stay one part ahead: copy the next part while the host sums this part.
            ahead = self._copied_down(parts)
            down: Any = next(ahead, None)
            for run, part in parts:
                (host, done), down = down, next(ahead, None)
                yield done
                yield from self._sum(run, host, work, channel)
                address, stream = host.ctypes.data, self.lane.stream
                part.data.copy_from_host_async(address, part.nbytes, stream)
            for run, array in packed:
                unpack_run(run, work, array, self.lane)

    def _parts(self, run: Run, array: Any) -> Iterator[tuple[Run, Any]]:
        length = max(1, self._part_bytes // array.itemsize)
        for start in range(0, array.size, length):
            yield run, array[start : start + length]

    def _copied_down(self, parts: list[tuple[Run, Any]]) -> Iterator[Any]:
        """Begin to copy the parts to the host, one after the other.

        Yields the host buffer of each part, and the step that waits for the copy.
        """
        for number, (run, part) in enumerate(parts):
            host = self._in_turn[number % 2][: part.nbytes].view(run.dtype)
            address, stream = host.ctypes.data, self.lane.stream
            part.data.copy_to_host_async(address, part.nbytes, stream)
            yield host, self.lane.done()

    def _sum(self, run: Run, host: Array, work: Work, channel: Channel) -> WaitSteps:
        """Sum a host array over the ranks, in place."""
        # Sums of integers are never rounded to half precision, not even for means.
        exact = work.sources[run.spans[0][0]].dtype.kind in "iu"
        algorithm, piece_bytes = self._choose(host.nbytes, exact)
        pieces = tuple(cut([(host.dtype, host.shape)], False, piece_bytes))
        own = Work(
            work.call, pieces, [host], [host], piece_bytes, function=work.function
        )
        steps = algorithm(own, channel)
        header = next(steps)
        assert header is HEADER
        yield channel.step(work.call)
        yield from steps

    def close(self) -> None:
        """Free the buffers; all calls must have ended."""
        self._values, self._in_turn = None, ()
        self._pinned.clear()
        self._buffers.clear()

    def abandon(self) -> None:
        """Keep the memory until the process ends, because a rank has died.

        Freeing GPU memory would wait for the lane, which may wait for an event of the
        dead rank. Also, MPI may still write to the host memory.
        """
        self._pinned.abandon()
        self._buffers.abandon()
