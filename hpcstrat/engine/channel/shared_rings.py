"""The rings in shared memory into which the ranks of a worker copy their values.

Each rank's part of the segment is a ring: the data of each step is copied into the next
place of the ring. All ranks of a worker, and the compiled kernel, take places of the
same sizes in the same order, so that each rank knows where the other ranks' data are.

While a rank writes the place of step ``n``, other ranks may still read the places of
the two steps before: the values of step ``n - 1``, and the results in the places of
step ``n - 2``. The three places do not overlap: sizes are powers of two, and places
begin at multiples of their size, so that three consecutive places touch at most three
of the four largest places of a ring. No rank reads an earlier place, because a rank
arrives at step ``n - 1`` only after its last look at the place of step ``n - 3``. If
four places of a call in the kernel fit into one of the largest size, the call takes
this one, and uses its four parts in turn, by the same rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.engine.arrays.packing import Run
from hpcstrat.engine.topology.topology import SLOTS_IN_RING, Topology
from hpcstrat.engine.typing import Array

__all__ = ["SharedRings"]

_MOST_ROWS = 512
# Places have at least this size, so that `SharedRings.rows` keeps few different views.
_SMALLEST_PLACE_BYTES = 32 << 10


class SharedRings:
    """The rings of a worker's ranks, in the topology's segment."""

    def __init__(self, topology: Topology, state: Any) -> None:
        segment, comm = topology.segment, topology.worker_comm
        parts = np.frombuffer(segment.buffer, np.uint8, offset=segment.common_bytes)
        parts = parts.reshape(comm.size, segment.part_bytes)
        # Size of the largest place, and of a ring, in bytes.
        self.slot_bytes = topology.slot_bytes
        self.ring_bytes = self.slot_bytes * SLOTS_IN_RING
        self._state = state
        self._bytes = parts[:, : self.ring_bytes]
        self._scratch: dict[np.dtype[Any], Array] = {}
        self._rows: dict[Any, list[Array]] = {}

    @property
    def next(self) -> int:
        """The offset of the next place in bytes; the same on all ranks of a worker."""
        return int(self._state.next)

    def place_bytes(self, nbytes: int) -> int:
        """Return a place's size for ``nbytes``: a power of two <= ``slot_bytes``."""
        wanted = max(_SMALLEST_PLACE_BYTES, 1 << (nbytes - 1).bit_length())
        return min(wanted, self.slot_bytes)

    def take(self, place_bytes: int) -> int:
        """Take the next place, and return its offset in each rank's ring, in bytes.

        Logically collective over ``topology.worker_comm``: sends nothing.
        """
        start = (self.next + place_bytes - 1) // place_bytes * place_bytes
        if start >= self.ring_bytes:
            start = 0
        self._state.next = start + place_bytes
        return start

    def restart(self) -> None:
        """Begin the next place at the start of the rings; no place may be in use.

        Needed after calls that differed between ranks: their next places may differ.
        """
        self._state.next = 0

    def close(self) -> None:
        """Release all views of the shared memory; not collective."""
        self._rows.clear()
        self._bytes = np.empty((0, 0), np.uint8)

    def of(self, dtype: np.dtype[Any]) -> Array:
        """Return the rings as an array of ``dtype``, whose size must divide 64 bytes.

        The array's shape is (ranks of the worker, elements of a ring).
        """
        return self._bytes.view(dtype)

    def rows(self, run: Run, place: int) -> list[Array]:
        """Return each rank's values of ``run`` in the place at offset ``place``."""
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
        """Return private memory of the size of the largest place, for all callers."""
        if dtype not in self._scratch:
            self._scratch[dtype] = np.empty(self.slot_bytes // dtype.itemsize, dtype)
        return self._scratch[dtype]
