"""The slots of a worker's ranks in its shared segment, as arrays of any type.

Each rank has three, used in turn: what a rank writes for step ``n`` goes into slot
``n mod 3``. It has then seen that all ranks have come to step ``n - 1``, which they do
after their last look at what was written for step ``n - 3``, and at results that lie in
the slots of step ``n - 3`` and are copied out after step ``n - 2``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.topology import NUM_SLOTS, Topology
from hpcstrat.typing import Array

__all__ = ["Slots"]


class Slots:
    """Arrays over the slots.

    Parameters
    ----------
    topology : Topology
        Whose segment.

    Attributes
    ----------
    slot_bytes : int
        Size of a slot.
    """

    def __init__(self, topology: Topology) -> None:
        segment, size = topology.segment, topology.worker_comm.size
        parts = np.frombuffer(segment.buffer, np.uint8, offset=segment.common_bytes)
        parts = parts.reshape(size, segment.part_bytes)
        self.slot_bytes = topology.slot_bytes
        used = parts[:, : NUM_SLOTS * self.slot_bytes]
        self._bytes = used.reshape(size, NUM_SLOTS, self.slot_bytes).transpose(1, 0, 2)
        self._typed: dict[np.dtype[Any], Array] = {}
        self._scratch: dict[np.dtype[Any], Array] = {}

    def of(self, dtype: np.dtype[Any]) -> Array:
        """Return all slots as arrays of a type.

        Not collective.

        Parameters
        ----------
        dtype : dtype
            Whose size divides 64 bytes.

        Returns
        -------
        ndarray of shape (3, ranks of the worker, slot_bytes // itemsize)
            Shared memory, writable.
        """
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._bytes.view(dtype)
        return typed

    def scratch(self, dtype: np.dtype[Any]) -> Array:
        """Return memory of this rank alone, which the next caller overwrites.

        Not collective.

        Parameters
        ----------
        dtype : dtype
            Of any size.

        Returns
        -------
        ndarray of shape (slot_bytes // itemsize,)
            Kept between calls.
        """
        kept = self._scratch.get(dtype)
        if kept is None:
            kept = np.empty(self.slot_bytes // dtype.itemsize, dtype)
            self._scratch[dtype] = kept
        return kept
