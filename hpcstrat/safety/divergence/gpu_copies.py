"""Hashing of mirrored variables on a GPU, to check that replicas' copies are equal.

Each call of ``run`` starts to copy the next slice of the variables to page-locked host
memory, in the program's current stream, and does not wait for the copy. It hashes the
slice whose copy was started `LAG` calls before. That copy is complete, unless the host
is `LAG` calls ahead of the GPU; then the call waits. Because of the fixed `LAG`, all
ranks hash the same slice in a call, with values from the same point of the program.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from hpcstrat.engine.arrays.kinds import is_half, to_host
from hpcstrat.engine.gpu.device_memory import pinned_memory
from hpcstrat.engine.gpu.streams import Mark
from hpcstrat.engine.typing import Array
from hpcstrat.variables import MirroredVariable

__all__ = ["LAG", "DeviceCopies", "NotFinite"]

LAG = 8
"""Number of calls of ``run`` from the copy of a slice to its hashing."""

_SHARE = 1000
_MOST_BYTES = 1 << 20
_LEAST_BYTES = 64 << 10
# Fixed cost of a copy, as the number of bytes that are copied in that time.
_PIECE_BYTES = 32 << 10
_LOOKS_EVERY = 32

NotFinite = tuple[MirroredVariable, int, Any]
"""A variable, the index of its first NaN or infinite element, and this element."""


class _HashedPiece(NamedTuple):
    """A piece of a slice: adjacent elements of a variable, from element ``start``."""

    variable: weakref.ref[MirroredVariable]
    start: int
    array: Any


# Elements to search for NaN: variable, index of the first element, copy on the host.
_Look = tuple[weakref.ref[MirroredVariable], int, Array]


class _CopyToHost(NamedTuple):
    """A slice that is being copied to the host; without data if there is no slice."""

    data: Array | None = None
    mark: Mark | None = None
    looks: Sequence[_Look] = ()


class DeviceCopies:
    """Copies slices of the mirrored variables on a GPU to the host, and hashes them.

    The arrays in ``slices`` keep the variables' memory alive.
    """

    def __init__(self) -> None:
        self.slices: list[list[_HashedPiece]] = []
        self._variables: list[weakref.ref[MirroredVariable]] = []
        self._slots: list[Array] = []
        self._marks: list[Mark] = []
        self._under_way: deque[_CopyToHost] = deque()
        self._turn = 0

    @property
    def num_slices(self) -> int:
        """Number of calls of ``run`` after which all bytes have been hashed."""
        return LAG + len(self.slices) if self.slices else 0

    def plan(self, variables: Sequence[MirroredVariable]) -> None:
        """Divide the bytes of variables into slices."""
        total = sum(v.component.nbytes + _PIECE_BYTES for v in variables)
        share = max(total // _SHARE + _PIECE_BYTES, _LEAST_BYTES)
        budget = min(share, _MOST_BYTES)
        slices: list[list[_HashedPiece]] = []
        left = 0
        for variable in variables:
            flat: Any = variable.component.reshape(-1)
            start, width = 0, flat.itemsize
            while start < flat.size:
                if left < _PIECE_BYTES + width:
                    slices.append([])
                    left = budget
                count = max(1, (left - _PIECE_BYTES) // width)
                array = flat[start : start + count]
                piece = _HashedPiece(weakref.ref(variable), start, array)
                slices[-1].append(piece)
                left -= piece.array.nbytes + _PIECE_BYTES
                start += count
        self.slices = slices
        self._variables = [weakref.ref(variable) for variable in variables]
        largest = max((_nbytes(part) for part in slices), default=0)
        if largest and (not self._slots or self._slots[0].nbytes < largest):
            # The old host memory stays alive, because copies in progress refer to it.
            block = pinned_memory((LAG + 1) * budget)
            self._slots = list(block.reshape(LAG + 1, budget))
            self._marks = [Mark() for _ in self._slots]

    def roll(self, run_index: int, mark: int) -> tuple[int, NotFinite | None]:
        """Start copying the next slice, and hash the slice of `LAG` calls before.

        Returns two values: the new mark (``mark`` itself if there was nothing to hash),
        and, if this slice was searched, its first element that is not finite. Waits for
        the GPU if it is `LAG` calls of ``run`` behind.
        """
        self._under_way.append(self._copied(run_index))
        if len(self._under_way) <= LAG:
            return mark, None
        copied = self._under_way.popleft()
        if copied.data is None or copied.mark is None:
            return mark, None
        if not copied.mark.passed():
            copied.mark.event.synchronize()
        found = _first_not_finite(copied.looks)
        data: Any = copied.data
        return xxh3_64_intdigest(data, mark) >> 1, found

    def _copied(self, run_index: int) -> _CopyToHost:
        # The garbage collector may replace ``self.slices`` at any time.
        slices = self.slices
        if not slices:
            return _CopyToHost()
        turn, index = divmod(run_index, len(slices))
        looking = not (turn + index) % _LOOKS_EVERY
        number = self._turn = (self._turn + 1) % len(self._slots)
        looks: list[_Look] = []
        slot, at = self._slots[number], 0
        for piece in slices[index]:
            nbytes = piece.array.nbytes
            part = slot[at : at + nbytes]
            piece.array.data.copy_to_host_async(part.ctypes.data, nbytes)
            at += nbytes
            variable = piece.variable()
            if looking and variable is not None and _is_looked_at(variable):
                looks.append((piece.variable, piece.start, part.view(variable.dtype)))
        return _CopyToHost(slot[:at], self._marks[number].record(), looks)

    def forget_copies(self) -> None:
        """Discard the copies in progress, because they may differ between ranks.

        Logically collective over the replicas. Waits until the copies are complete,
        because they would overwrite the page-locked memory after its next owner has
        filled it.
        """
        self.finish()
        self._under_way = deque(_CopyToHost() for _ in self._under_way)

    def finish(self) -> None:
        """Wait for the copies that are in progress."""
        for copied in self._under_way:
            if copied.mark is not None:
                copied.mark.event.synchronize()

    def hashed(self, mark: int) -> int:
        """Wait for the GPU, and return a hash of all bytes of the variables."""
        for reference in self._variables:
            variable = reference()
            if variable is not None:
                flat: Any = to_host(variable.component).reshape(-1)
                mark = xxh3_64_intdigest(flat.view(np.uint8), mark)
        return mark >> 1


def _nbytes(part: Sequence[_HashedPiece]) -> int:
    return sum(piece.array.nbytes for piece in part)


def _is_looked_at(variable: MirroredVariable) -> bool:
    dtype = variable.dtype
    return variable.trainable and (dtype.kind in "fc" or is_half(dtype))


def _first_not_finite(looks: Sequence[_Look]) -> NotFinite | None:
    for reference, start, values in looks:
        variable = reference()
        finite = np.isfinite(values)
        if variable is not None and not finite.all():
            place = int(np.argmin(finite))
            return variable, start + place, values[place]
    return None
