"""The shared memory in which the ranks of a worker lay out their values.

Each rank's part of the segment is a ring: the data of each step takes the next place in
it. All ranks of a worker take places of equal sizes in equal order, and so know where
the others' data lies. The compiled kernel takes places by the same rule.

A place is written while others may still look at those of the two steps before: values
for step ``n - 1``, and results in the places of step ``n - 2``. Sizes are powers of
two, and places begin at multiples of their size, so that three places in a row never
reach over more than three of the four largest places of a ring. Nobody looks at earlier
places: a rank comes to step ``n - 1`` only after its last look at the place of step
``n - 3``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.engine.arrays.packing import Run
from hpcstrat.engine.topology.topology import SLOTS_IN_RING, Topology
from hpcstrat.engine.typing import Array

__all__ = ["SharedRings"]

_MOST_ROWS = 512
# Views of places are kept, see `SharedRings.rows`: there are to be few.
_SMALLEST_PLACE_BYTES = 32 << 10


class SharedRings:
    """The rings of a worker's ranks, in the topology's segment.

    ``state`` knows where the next place begins.
    """

    def __init__(self, topology: Topology, state: Any) -> None:
        segment, comm = topology.segment, topology.worker_comm
        parts = np.frombuffer(segment.buffer, np.uint8, offset=segment.common_bytes)
        parts = parts.reshape(comm.size, segment.part_bytes)
        # Size of the largest place, and of a ring.
        self.slot_bytes = topology.slot_bytes
        self.ring_bytes = topology.slot_bytes * SLOTS_IN_RING
        self._state = state
        self._bytes = parts[:, : self.ring_bytes]
        self._typed: dict[np.dtype[Any], Array] = {}
        self._scratch: dict[np.dtype[Any], Array] = {}
        self._rows: dict[Any, list[Array]] = {}

    @property
    def next(self) -> int:
        """The offset of the next place; the same on all ranks of a worker."""
        return int(self._state.next)

    def place_bytes(self, nbytes: int) -> int:
        """Return the size of a place for at most ``slot_bytes``: a power of two."""
        wanted = max(_SMALLEST_PLACE_BYTES, 1 << (nbytes - 1).bit_length())
        return min(wanted, self.slot_bytes)

    def take(self, place_bytes: int) -> int:
        """Return where the next place begins in each rank's ring, in bytes.

        Logically collective over ``topology.worker_comm``.
        """
        start = (self.next + place_bytes - 1) // place_bytes * place_bytes
        if start >= self.ring_bytes:
            start = 0
        self._state.next = start + place_bytes
        return start

    def restart(self) -> None:
        """Begin at the start of the rings again, when all places have been left.

        Logically collective over ``topology.worker_comm``: after calls that differed
        between ranks.
        """
        self._state.next = 0

    def close(self) -> None:
        """Let go of the memory; not collective."""
        self._typed.clear()
        self._rows.clear()
        self._bytes = np.empty((0, 0), np.uint8)

    def of(self, dtype: np.dtype[Any]) -> Array:
        """Return the rings as an array of a type whose size divides 64 bytes.

        Its shape is (ranks of the worker, elements of a ring).
        """
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._bytes.view(dtype)
        return typed

    def rows(self, run: Run, place: int) -> list[Array]:
        """Return each rank's shared memory for the values of a `Run`, in a place."""
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
        """Return memory of this rank alone, as long as the largest place.

        The next caller overwrites it.
        """
        kept = self._scratch.get(dtype)
        if kept is None:
            kept = np.empty(self.slot_bytes // dtype.itemsize, dtype)
            self._scratch[dtype] = kept
        return kept
