"""Reduction of device memory on the host, where nothing better is there.

A piece is packed on the device. Parts of it go to page-locked memory, are summed there
by an algorithm for arrays of the host, and go back: while one part is summed, the next
comes down and the last goes up. Two buffers do. All copies are work of one lane, so
that the copy down into a buffer runs after the copy up from it; and the host writes to
a buffer only between the copy down, which it awaits, and the copy up.

**Places in shared memory.** The algorithms of
`hpcstrat.engine.collectives.shared_memory` lay out their first part before the header
of the call, which is their first step: whoever has seen the headers of all ranks reads
what they had laid out. Here the header has been agreed before the first part is on the
host. In its place stands a step of the worker's ranks, for each part. That is the same
to the memory: the records of a step are those of a header of one worker
(`SegmentHeaders`), and order it alike; where there are several workers, whose header
orders nothing, the algorithm makes a step of its own in addition.

So each rank's ring sees what it would see in a sequence of calls: it takes a place,
lays out, comes to a step, reads; and the next part begins when the last has ended, on
each rank. `hpcstrat.engine.channel.shared_rings` asks of such a sequence that a rank
comes to step ``n - 1`` only after its last look at the place of ``n - 3``, and that all
ranks take places of equal sizes in equal order. The first holds, since each place is
taken for one step, and a rank lays out for a step only when it has done what follows
the step before the last: its algorithm did so within a part, and between parts it has
done all. The step of an algorithm that follows a part's last look at its places, and
the one here that adds none, only come earlier. The second holds since the parts depend
on the plan alone. A step with no place before it, as for an algorithm without places,
makes the sequence no shorter between two uses of a place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcstrat.engine.arrays.packing import Piece, Run, cut
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.work import Algorithm, Work
from hpcstrat.engine.gpu.device_memory import Buffers, pinned_memory
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports.device_reduction import pack_run, unpack_run
from hpcstrat.engine.gpu.transports.mpi_sums import abandon
from hpcstrat.engine.typing import Array

__all__ = ["STAGED_BYTES", "HostCopies", "HostSums", "StagingTransport"]

# Most bytes of a part: twice as much is page-locked.
STAGED_BYTES = 8 << 20

# Sums an array of the host over ranks, in place: a part of a run of a work.
HostSums = Callable[[Run, Array, Work, Channel], WaitSteps]


class HostCopies:
    """Takes arrays of the device to the host and back, ``part_bytes`` at a time."""

    def __init__(self, lane: Lane, part_bytes: int = STAGED_BYTES) -> None:
        self._lane = lane
        self._part_bytes = part_bytes
        self._pinned = Buffers(pinned_memory)
        self._places: tuple[Array, Array] | None = None

    def prepare(self, nbytes: int) -> None:
        """Make the buffers for arrays of at most a size; may raise."""
        nbytes = max(1, min(nbytes, self._part_bytes))
        if self._places is not None and self._places[0].size < nbytes:
            # The last part of the call before may still be copied from there.
            self._lane.keep(self._places)
        self._places = self._pinned.get(0, nbytes), self._pinned.get(1, nbytes)

    def steps(
        self,
        arrays: Sequence[tuple[Run, Any]],
        work: Work,
        channel: Channel,
        sums: HostSums,
    ) -> WaitSteps:
        """Sum contiguous arrays, each of its run's type, on the host, in place.

        Collective over the ranks over which ``sums`` does. What the lane has been given
        so far may still write them; in the end they are the sums, for the lane's next
        work.
        """
        parts = [part for run, array in arrays for part in self._parts(run, array)]
        if not parts:
            return
        # One part ahead: the copy of the next runs while the host sums this one.
        down = self._copied_down(parts, 0)
        for number, (run, part) in enumerate(parts):
            (host, done), down = down, None
            if number + 1 < len(parts):
                down = self._copied_down(parts, number + 1)
            yield done
            yield from sums(run, host, work, channel)
            stream = self._lane.stream
            part.data.copy_from_host_async(host.ctypes.data, part.nbytes, stream)

    def _parts(self, run: Run, array: Any) -> Iterator[tuple[Run, Any]]:
        length = max(1, self._part_bytes // array.itemsize)
        for start in range(0, array.size, length):
            yield run, array[start : start + length]

    def _copied_down(self, parts: list[tuple[Run, Any]], number: int) -> Any:
        """Return memory of the host, and what is done when a part lies there."""
        assert self._places is not None
        run, part = parts[number]
        host = self._places[number % 2][: part.nbytes].view(run.dtype)
        part.data.copy_to_host_async(host.ctypes.data, part.nbytes, self._lane.stream)
        return host, self._lane.done()

    def close(self) -> None:
        """Free the buffers, when all calls have ended."""
        self._places = None
        self._pinned.clear()

    def abandon(self) -> None:
        """Leave the buffers to the end of the process: others have died."""
        # MPI may still write to them.
        abandon(self._pinned)


class StagingTransport:
    """The transport that sums on the host, at most ``part_bytes`` at once.

    ``choose`` returns an algorithm for arrays of the host, and the most bytes of its
    pieces, for the size of an array, and for whether it must be summed exactly: then no
    half-precision numbers may be sent in its place. The same on all ranks.
    """

    name = "staging"

    def __init__(
        self,
        lane: Lane,
        choose: Callable[[int, bool], tuple[Algorithm, int]],
        part_bytes: int = STAGED_BYTES,
    ) -> None:
        self.lane = lane
        self._choose = choose
        self._copies = HostCopies(lane, part_bytes)
        self._buffers = Buffers()
        self._values: Any = None

    def choosing(
        self, choose: Callable[[int, bool], tuple[Algorithm, int]]
    ) -> StagingTransport:
        """Return a transport with the same buffers that makes other choices.

        For calls that do not overlap with those of this one, which is closed for both.
        """
        other = copy.copy(self)
        other._choose = choose
        return other

    def prepare(self, nbytes: int, count: int = 1) -> None:
        """Make what this rank needs for pieces of at most a size; may raise."""
        del count
        self._values = self._buffers.get("values", nbytes)
        self._copies.prepare(nbytes)

    def connect(self, work: Work, channel: Channel) -> WaitSteps:
        """Do nothing: the host's algorithms have what they need."""
        del work, channel
        return iter(())

    def reduce(self, piece: Piece, work: Work, channel: Channel) -> WaitSteps:
        """Reduce one piece.

        Collective over ``topology.replica_comm``.
        """
        parts = [(run, pack_run(run, work, self._values, self.lane)) for run in piece]
        yield from self._copies.steps(parts, work, channel, self._sums)
        for run, part in parts:
            unpack_run(run, work, part, self.lane)

    def _sums(self, run: Run, host: Array, work: Work, channel: Channel) -> WaitSteps:
        """Sum by the algorithm for arrays of the host."""
        # The mean of integers is summed in float64.
        exact = work.sources[run.spans[0][0]].dtype.kind in "iu"
        algorithm, piece_bytes = self._choose(host.nbytes, exact)
        pieces = cut([(host.dtype, host.shape)], False, piece_bytes)
        own = Work(
            work.call, tuple(pieces), [host], [host], piece_bytes, waits=work.waits
        )
        steps = algorithm(own, channel)
        header = next(steps)
        assert header is HEADER
        yield channel.step(work.call)
        yield from steps

    def close(self) -> None:
        """Free the buffers, when all calls have ended."""
        self._values = None
        self._copies.close()
        self._buffers.clear()

    def abandon(self) -> None:
        """Leave the memory to the end of the process: others have died."""
        # To free memory of the device waits for the lane, which may wait for an event
        # of the dead.
        abandon(self._buffers)
        self._copies.abandon()
