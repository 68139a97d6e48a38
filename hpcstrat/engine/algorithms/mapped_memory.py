"""Sums of arrays in memory that all ranks of a worker have mapped, without copies.

Each rank sums one segment of all ranks' arrays, and writes the sums into all arrays.
The result has the same bits as the sum through shared memory, which takes three times
as long for large arrays, because that sum copies the arrays into places and out of
places. Because only a rank itself knows whether its array lies in an area, each rank
describes its area in the shared segment before the header, and all ranks read these
descriptions. All ranks then map the new areas; if an array is in no area, or a rank
cannot map one, all ranks use the sum through shared memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.plan import Plan, is_plain
from hpcstrat.engine.algorithms.work import add_in_order, divide, segment_of
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.typing import Array

__all__ = ["LEAST_MAPPED_BYTES", "MappedMemory", "MappedSum"]

LEAST_MAPPED_BYTES = 512 << 10
"""Least size of a call for which it saves time to look for areas."""

# State of an array: in no area, in an area that all ranks have mapped, or in an area
# that its rank offers for mapping.
_NONE, _MAPPED, _OFFERED = range(3)
# Columns of the row of integers that describes a rank's array: state, number of its
# area, lowest area number of the rank, then the area's process, file descriptor, size,
# device and inode.
_STATE, _NUMBER, _FIRST, _PROCESS, _DESCRIPTOR, _NBYTES, _DEVICE, _INODE = range(8)
# A rank sums this many bytes, in its cache, before it writes them to all arrays.
_PIECE_BYTES = 256 << 10


@dataclass(slots=True)
class _Area:
    """Memory of this rank in an unnamed file, with the file's descriptor."""

    number: int
    descriptor: int
    nbytes: int
    # Returns False once the memory has been freed.
    lives: Callable[[], bool]
    mapped: bool = False


class MappedMemory:
    """Areas that this rank offers to its worker, and other ranks' areas that it mapped.

    The methods are not collective; the collective `MappedSum.steps` uses them.
    """

    def __init__(self) -> None:
        # Areas of this rank, by address.
        self._own: dict[int, _Area] = {}
        self._number = 0
        # Mapped areas of the other ranks, by rank and number.
        self._others: dict[tuple[int, int], Array] = {}
        # True once mapping an area has failed, as between containers: no area is used.
        self.off = False

    def offer(
        self, address: int, nbytes: int, descriptor: int, lives: Callable[[], bool]
    ) -> None:
        """Let other ranks map memory of this rank, as long as ``lives()`` is true."""
        self._own = {a: area for a, area in self._own.items() if area.lives()}
        self._number += 1
        self._own[address] = _Area(self._number, descriptor, nbytes, lives)

    def offers(self, address: int) -> bool:
        """Return whether the memory at an address is offered already."""
        area = self._own.get(address)
        return area is not None and area.lives()

    def describe(self, array: Array, row: Array) -> None:
        """Describe in ``row`` the area in which an array lies, if it is in an area."""
        area = self._own.get(array.ctypes.data)
        if self.off or area is None or area.nbytes < array.nbytes or not area.lives():
            return
        file = os.fstat(area.descriptor)
        row[:] = (
            _MAPPED if area.mapped else _OFFERED,
            area.number,
            min(other.number for other in self._own.values()),
            os.getpid(),
            area.descriptor,
            area.nbytes,
            file.st_dev,
            file.st_ino,
        )

    def map(self, rows: Array, me: int) -> bool:
        """Map the memory that other ranks offer; return whether this succeeded."""
        for rank, number in list(self._others):
            if number < rows[rank, _FIRST]:
                del self._others[rank, number]
        for rank, row in enumerate(rows.tolist()):
            if rank == me or row[_STATE] != _OFFERED:
                continue
            try:
                self._others[rank, row[_NUMBER]] = _mapped(row)
            except (OSError, ValueError):
                return False
        return True

    def conclude(self, array: Array, *, all_mapped: bool) -> None:
        """Mark this rank's area as mapped by all ranks, or stop using all areas."""
        if all_mapped:
            self._own[array.ctypes.data].mapped = True
        else:
            self.off = True
            self._own.clear()
            self._others.clear()

    def views(self, rows: Array, own: Array, me: int) -> list[Array]:
        """Return the arrays of all ranks, as views of the mapped areas."""
        arrays = []
        for rank, number in enumerate(rows[:, _NUMBER].tolist()):
            memory = own if rank == me else self._others[rank, number]
            arrays.append(memory.view(np.uint8)[: own.nbytes].view(own.dtype))
        return arrays


def _mapped(row: Sequence[int]) -> Array:
    """Map the memory of another process that ``row`` describes."""
    path = f"/proc/{row[_PROCESS]}/fd/{row[_DESCRIPTOR]}"
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        file = os.fstat(handle)
        if (file.st_dev, file.st_ino) != (row[_DEVICE], row[_INODE]):
            # In this container, the process ID belongs to another process.
            raise FileNotFoundError(path)
        memory: Array = np.frombuffer(mmap.mmap(handle, row[_NBYTES]), np.uint8)
    finally:
        os.close(handle)
    return memory


class MappedSum(Plan):
    """The plan of a sum in place, of one array of each rank of a worker.

    If an array lies in no area, or the caller does not wait for the end, ``inner`` sums
    the arrays. `run` and `steps` are collective over ``topology.worker_comm``.
    """

    def __init__(self, inner: Plan, divisor: int, areas: MappedMemory) -> None:
        super().__init__(inner.call, inner.results, inner.channel, inner.allocate)
        self._inner, self._divisor, self._areas = inner, divisor, areas

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Reduce arrays step by step; see `Plan.steps`."""
        channel = self.channel
        if not waits:
            yield from self._inner.steps(arrays, results)
            return
        areas, me = self._areas, channel.topology.worker_comm.rank
        own: Any = arrays[0].reshape(-1) if is_plain(arrays[0]) else None
        rows = _rows(channel)
        rows[me, _STATE] = _NONE
        if own is not None and own.ctypes.data == results[0].ctypes.data:
            areas.describe(own, rows[me])
        yield HEADER
        found = rows.copy()
        states = found[:, _STATE]
        shared = bool((states != _NONE).all())
        if shared and (states == _OFFERED).any():
            rows = _rows(channel)
            rows[me, 0] = areas.map(found, me)
            yield channel.step(self.call)
            shared = bool(rows[:, 0].all())
            areas.conclude(own, all_mapped=shared)
        if shared:
            _sum_segment(areas.views(found, own, me), me, self._divisor, channel)
            # No rank continues before all ranks have written their sums.
            yield channel.step(self.call)
            return
        for awaited in self._inner.steps(arrays, results, waits=True):
            # The header of this call was posted above. Replace the header of `inner` by
            # a step, which orders memory as a header does.
            yield channel.step(self.call) if awaited is HEADER else awaited


def _rows(channel: Channel) -> Array:
    """Return shared memory with a row of integers for each rank of the worker."""
    places = channel.rings
    start = places.take(places.place_bytes(1)) // 8
    return places.of(np.dtype(np.int64))[:, start : start + _INODE + 1]


def _sum_segment(
    arrays: Sequence[Array], me: int, divisor: int, channel: Channel
) -> None:
    """Sum this rank's segment over all arrays, and write the sums into all arrays."""
    size, dtype = len(arrays[me]), arrays[me].dtype
    low, high = segment_of(size, dtype, me, len(arrays))
    scratch = channel.rings.scratch(dtype)
    step = min(_PIECE_BYTES // dtype.itemsize, len(scratch))
    for start in range(low, high, step):
        piece = slice(start, min(start + step, high))
        terms = [array[piece] for array in arrays]
        total = terms[me]
        add_in_order(terms, total, scratch)
        divide(total, divisor)
        for rank, part in enumerate(terms):
            if rank != me:
                part[...] = total
