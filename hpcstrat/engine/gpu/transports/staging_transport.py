"""Reduction of device memory on the host, where neither NCCL nor MPI can do it.

A piece is packed on the device. Parts of it are copied to page-locked memory, summed
there by an algorithm for arrays of the host, and copied back: while one part is summed,
the next is copied down and the last one up. Two buffers suffice. All copies are work of
one lane, so that the copy down into a buffer runs after the copy up from it; and the
host writes to a buffer only between the copy down, for which it waits, and the copy up.

**Shared memory.** The algorithms of `hpcstrat.engine.collectives.shared_memory` write
this rank's values to shared memory before the header of the call, which is their first
step: a rank that has seen the headers of all ranks reads the values of all. Here the
header has been agreed before the first part is on the host. Instead, the worker's ranks
make a step for each part. It orders the memory as a header of one worker does, with the
same records (`SegmentHeaders`); where there are several workers, whose header orders no
memory, the algorithm makes a step of its own in addition.

So each rank sees a sequence of calls, one for each part, and every rank ends a part
before it begins the next. `hpcstrat.engine.channel.shared_rings` demands that a rank
comes to step ``n - 1`` only after its last look at the memory of step ``n - 3``, and
that all ranks take memory of equal sizes in equal order. The first holds, as each piece
of memory is taken for one step, and a rank writes for a step only when it has done
everything after the step before the last. The second holds, as the parts depend on the
plan alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat.engine.arrays.packing import Run, cut
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.work import Algorithm, Work
from hpcstrat.engine.gpu.device_memory import Buffers, pinned_memory
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports.device_reduction import pack_run, unpack_run
from hpcstrat.engine.typing import Array

__all__ = ["StagingTransport"]

# Most bytes of a part: twice as much is page-locked.
_PART_BYTES = 8 << 20

# Returns an algorithm for arrays of the host, and the most bytes of its pieces, for the
# size of an array, and for whether it must be summed exactly: then no half-precision
# numbers may be sent in its place. The same on all ranks.
_Choose = Callable[[int, bool], tuple[Algorithm, int]]


class StagingTransport:
    """The transport that sums on the host, at most ``part_bytes`` at once."""

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
        # The page-locked memory of even and of odd parts.
        self._places: tuple[Array, ...] = ()

    def choosing(self, choose: _Choose) -> StagingTransport:
        """Return a transport with the same buffers that makes other choices.

        For calls that do not overlap with those of this one, which is closed for both.
        """
        other = copy.copy(self)
        other._choose = choose
        return other

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Make the buffers for pieces of at most a size; may raise."""
        del count
        self._values = self._buffers.get("values", nbytes)
        nbytes = max(1, min(nbytes, self._part_bytes))
        if self._places and self._places[0].size < nbytes:
            # The last part of the call before may still be copied from there.
            self.lane.keep(self._places)
        self._places = tuple(self._pinned.get(n, nbytes) for n in range(2))

    def reduce(self, work: Work, channel: Channel) -> WaitSteps:
        """Reduce the pieces of a work.

        Collective over ``topology.replica_comm``.
        """
        for piece in work.pieces:
            packed = [
                (run, pack_run(run, work, self._values, self.lane)) for run in piece
            ]
            parts = [part for run, array in packed for part in self._parts(run, array)]
            # One part ahead: the copy of the next runs while the host sums this one.
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
        """Begin to copy one part after the other to the host.

        Yields the memory of each, and what to wait for until the part lies there.
        """
        for number, (run, part) in enumerate(parts):
            host = self._places[number % 2][: part.nbytes].view(run.dtype)
            address, stream = host.ctypes.data, self.lane.stream
            part.data.copy_to_host_async(address, part.nbytes, stream)
            yield host, self.lane.done()

    def _sum(self, run: Run, host: Array, work: Work, channel: Channel) -> WaitSteps:
        """Sum an array of the host over the ranks, in place."""
        # The mean of integers is summed in float64.
        exact = work.sources[run.spans[0][0]].dtype.kind in "iu"
        algorithm, piece_bytes = self._choose(host.nbytes, exact)
        pieces = tuple(cut([(host.dtype, host.shape)], False, piece_bytes))
        own = Work(work.call, pieces, [host], [host], piece_bytes)
        steps = algorithm(own, channel)
        header = next(steps)
        assert header is HEADER
        yield channel.step(work.call)
        yield from steps

    def close(self) -> None:
        """Free the buffers, when all calls have ended."""
        self._values, self._places = None, ()
        self._pinned.clear()
        self._buffers.clear()

    def abandon(self) -> None:
        """Leave the memory to the end of the process: a rank has died.

        To free memory of the device waits for the lane, which may wait for an event of
        the dead rank; and MPI may still write to memory of the host.
        """
        self._pinned.abandon()
        self._buffers.abandon()
