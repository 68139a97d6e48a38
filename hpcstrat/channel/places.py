"""The shared memory in which the ranks of a worker lay out their values.

Each rank's part of the segment is a ring: the data of each step takes the next place in
it. All ranks of a worker take places of equal sizes in equal order, and so know where
the others' data lies.

A place is written while others may still look at those of the two steps before: what
was laid out for step ``n - 1``, and results in the places of step ``n - 2``. Sizes are
powers of two, and places begin at multiples of their size, so that three places in a
row never reach over more than three of the four largest places of a ring. All that lies
before has been left: a rank comes to step ``n - 1`` only after its last look at the
place of step ``n - 3``.

The ring is larger than a core's cache on purpose. A place that another core has read
stays in its cache, and writing there means to have each line thrown out first: in a
ring of a few small places the copies took up to four times as long. Where the ranks'
cores share no cache at all, on several dies or sockets, it is ten times and more,
unless the ring is larger than their last-level caches: which of the two it is, a few
copies show when the ring is made. The size of the ring changes no result.
"""

from __future__ import annotations

import math
import mmap
import time
from typing import Any

import numpy as np

from hpcstrat.arrays.packing import Run
from hpcstrat.topology.topology import SLOTS_IN_RING, Topology
from hpcstrat.typing import Array

__all__ = ["Places"]

_MOST_ROWS = 512
_MOST_KEPT = 1 << 15
_PROBES = 12
_PROBE_BYTES = 64 << 10
# Writing took 2.3 to 3 times as long as in private memory on cores that share a cache,
# and 6 to 14 times on those that do not.
_APART = 4.5
# Small calls keep views of each place: there are to be few.
_SMALLEST_PLACE_BYTES = 32 << 10


class Places:
    """The rings of a worker's ranks, in the topology's segment."""

    def __init__(self, topology: Topology, kernel: Any = None) -> None:
        segment, comm = topology.segment, topology.worker_comm
        parts = np.frombuffer(segment.buffer, np.uint8, offset=segment.common_bytes)
        parts = parts.reshape(comm.size, segment.room_bytes)
        # Size of the largest place, and of a ring.
        self.slot_bytes = topology.slot_bytes
        self.ring_bytes = topology.slot_bytes * SLOTS_IN_RING
        self._kernel = kernel
        # The kernel's copies may go past the cache, and need no large ring.
        if kernel is None and 1 < comm.size <= topology.num_cores:
            apart = _are_apart(parts[:, : self.slot_bytes], comm)
            if max(comm.allgather(apart)) and segment.grow():
                self.ring_bytes = segment.part_bytes
        self._bytes = parts[:, : self.ring_bytes]
        self._next = 0
        # Views that callers have made, see `keep`.
        self.kept: dict[Any, Any] = {}
        self._num_kept = 0
        self._typed: dict[np.dtype[Any], Array] = {}
        self._scratch: dict[np.dtype[Any], Array] = {}
        self._rows: dict[Any, list[Array]] = {}

    @property
    def next(self) -> int:
        """Where the next place may begin; the same on all ranks of a worker."""
        return self._next if self._kernel is None else int(self._kernel.next)

    def place_bytes(self, nbytes: int) -> int:
        """Return the size of a place for some bytes: a power of two.

        At most ``slot_bytes``, as are the bytes.
        """
        wanted = max(_SMALLEST_PLACE_BYTES, 1 << (nbytes - 1).bit_length())
        return min(wanted, self.slot_bytes)

    def take(self, place_bytes: int) -> int:
        """Return where the next place begins in each rank's ring, in bytes.

        Logically collective over ``topology.worker_comm``. ``place_bytes`` comes from
        the method of that name; the place begins at a multiple of it.
        """
        if self._kernel is not None:
            return int(self._kernel.take(place_bytes))
        start = (self._next + place_bytes - 1) // place_bytes * place_bytes
        if start >= self.ring_bytes:
            start = 0
        self._next = start + place_bytes
        return start

    def restart(self) -> None:
        """Begin at the start of the rings again, when all places have been left.

        Logically collective over ``topology.worker_comm``: after calls that differed
        between ranks.
        """
        self._next = 0
        if self._kernel is not None:
            self._kernel.restart()

    def keep(self, key: Any, views: Any, count: int) -> None:
        """Keep views under a key of ``kept``, as long as there are not too many in all.

        ``count`` says how many arrays they are.
        """
        self._num_kept += count
        if self._num_kept > _MOST_KEPT:
            self.kept.clear()
            self._num_kept = count
        self.kept[key] = views

    def close(self) -> None:
        """Let go of the memory.

        Not collective.
        """
        self.kept.clear()
        self._typed.clear()
        self._rows.clear()
        self._bytes = np.empty((0, 0), np.uint8)

    def of(self, dtype: np.dtype[Any]) -> Array:
        """Return the rings as arrays of a type, whose size divides 64 bytes.

        Shared memory, writable, of shape (ranks of the worker, elements of a ring).
        """
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._bytes.view(dtype)
        return typed

    def rows(self, run: Run, place: int) -> list[Array]:
        """Return the memory of a run of a piece, for each rank of the worker.

        ``place`` is the piece's, from `take`.
        """
        key = run.dtype, place, run.start, run.size
        rows = self._rows.get(key)
        if rows is None:
            if len(self._rows) >= _MOST_ROWS:
                self._rows.clear()
            start = place // run.dtype.itemsize + run.start
            rows = list(self.of(run.dtype)[:, start : start + run.size])
            self._rows[key] = rows
        return rows

    def scratch(self, dtype: np.dtype[Any]) -> Array:
        """Return memory of this rank alone, which the next caller overwrites.

        As long as the largest place.
        """
        kept = self._scratch.get(dtype)
        if kept is None:
            kept = np.empty(self.slot_bytes // dtype.itemsize, dtype)
            self._scratch[dtype] = kept
        return kept


def _are_apart(parts: Array, comm: Any) -> bool:
    """Whether it takes much longer to write where another rank has read.

    Collective over ``comm``.
    """
    length = min(_PROBE_BYTES, parts.shape[1])
    # The other ends of all copies lie half a page off: a load that follows a store to
    # the same place of another page takes a copy several times as long.
    memory = np.zeros(3 * length + 3 * mmap.PAGESIZE, np.uint8)
    low = -memory.ctypes.data % mmap.PAGESIZE
    private = memory[low : low + length]
    low += length + -length % mmap.PAGESIZE + mmap.PAGESIZE // 2
    values = memory[low : low + length]
    own = parts[comm.rank, :length]
    other = parts[(comm.rank + 1) % comm.size, :length]
    shared_seconds, private_seconds = math.inf, math.inf
    for _ in range(_PROBES):
        comm.Barrier()
        start = time.perf_counter()
        own[...] = values
        middle = time.perf_counter()
        private[...] = values
        end = time.perf_counter()
        # The least of them: others may want the processor, too.
        shared_seconds = min(shared_seconds, middle - start)
        private_seconds = min(private_seconds, end - middle)
        comm.Barrier()
        private[...] = other
    comm.Barrier()
    return shared_seconds > _APART * private_seconds
