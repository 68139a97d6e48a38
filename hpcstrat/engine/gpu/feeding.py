"""Batches onto the GPU: copied while the GPU still computes with those before.

A batch lies in one piece of the GPU's memory, which is used again when the program has
dropped all of its arrays. CuPy's pool would hand out such memory at once, in the order
of one stream; here, the copy waits only for the work that this stream had then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_half
from hpcstrat.engine.gpu.device_memory import pinned_memory, plain_memory, rounded
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transfers import address_of
from hpcstrat.engine.typing import Array

__all__ = ["Feeder", "fits_device"]

# As CuPy's own memory is aligned.
_ALIGNED_BYTES = 512
# Most copies that wait in page-locked memory before `put` waits for one.
_MOST_STAGED = 4
# Most pieces of memory that are kept without a batch.
_MOST_READY = 4


def fits_device(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of a type can lie in the memory of a GPU.

    Bools, integers, floats and complex numbers, but not those of more than 64 bits a
    part, of which GPUs know nothing.
    """
    return is_half(dtype) or (dtype.kind in "biufc" and dtype.char not in "gG")


@dataclass(slots=True)
class _BatchMemory:
    """Memory of the GPU, or page-locked, for a batch; it is free after an event."""

    memory: Array
    free: Any = None


@dataclass(slots=True)
class _BatchLoan:
    """An object that the arrays of a batch hold; its end gives their memory back."""

    piece: _BatchMemory
    returned: deque[_BatchMemory] = field(repr=False)

    def __del__(self) -> None:
        """Give the memory back; runs in the thread that frees the last array."""
        self.returned.append(self.piece)


class Feeder:
    """Copies batches to this thread's current GPU, on a stream of their own.

    Arrays are for the program's current stream, as those from CuPy's pool are: a
    program that uses one on another stream must keep it until that stream has done so.
    """

    def __init__(self) -> None:
        self._lane = Lane()
        self._staged: deque[_BatchMemory] = deque()
        self._ready: list[_BatchMemory] = []
        # Any thread may fill it, by dropping the last array of a batch.
        self._returned: deque[_BatchMemory] = deque()

    def __del__(self) -> None:
        """Wait for the copies under way, before the page-locked memory is freed."""
        # The program learns elsewhere of errors of the GPU.
        with contextlib.suppress(Exception):
            for staged in self._staged:
                staged.free.synchronize()

    def put(self, arrays: Sequence[Array]) -> list[Array]:
        """Copy arrays of the host, of types that fit; they may change on return.

        Only the program's current stream waits for the copy. Returns contiguous arrays
        of the same shapes and types, in native byte order.
        """
        import cupy

        starts, nbytes = _layout(arrays)
        dtypes = [array.dtype.newbyteorder("=") for array in arrays]
        if not nbytes:
            kinds = zip(arrays, dtypes, strict=True)
            return [cupy.empty(array.shape, dtype) for array, dtype in kinds]
        staged = self._stage(nbytes)
        for start, array, dtype in zip(starts, arrays, dtypes, strict=True):
            place = staged.memory[start : start + array.nbytes]
            np.copyto(place.view(dtype).reshape(array.shape), array)
        piece = self._take(nbytes)
        cupy.cuda.runtime.memcpyAsync(
            address_of(piece.memory),
            address_of(staged.memory),
            nbytes,
            cupy.cuda.runtime.memcpyHostToDevice,
            self._lane.stream.ptr,
        )
        staged.free.record(self._lane.stream)
        self._lane.leave()
        self._staged.append(staged)
        base = address_of(piece.memory)
        memory = cupy.cuda.UnownedMemory(
            base,
            piece.memory.size,
            _BatchLoan(piece, self._returned),
            cupy.cuda.runtime.getDevice(),
        )
        return [
            cupy.ndarray(
                array.shape,
                dtype,
                memptr=cupy.cuda.MemoryPointer(memory, start if array.size else 0),
            )
            for start, array, dtype in zip(starts, arrays, dtypes, strict=True)
        ]

    def _stage(self, nbytes: int) -> _BatchMemory:
        """Return page-locked memory from which no copy is under way."""
        import cupy

        full = len(self._staged) >= _MOST_STAGED
        if full:
            # The copies are far ahead of the program, which can wait.
            self._staged[0].free.synchronize()
        if self._staged and (full or self._staged[0].free.done):
            staged = self._staged.popleft()
            if staged.memory.size >= nbytes:
                return staged
        event = cupy.cuda.Event(block=True, disable_timing=True)
        return _BatchMemory(pinned_memory(nbytes), event)

    def _take(self, nbytes: int) -> _BatchMemory:
        """Return memory of the GPU; the lane waits until it is free."""
        import cupy

        fitting = [piece for piece in self._ready if piece.memory.size >= nbytes]
        while self._ready and (not fitting or len(self._ready) > _MOST_READY):
            # Too small, or from a time when the program kept more batches.
            self._ready.pop().free.synchronize()
        if self._returned:
            # The program's work so far may use the returned memory. It is for the next
            # batch but one, whose copy then runs beside the work from here on.
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(cupy.cuda.get_current_stream())
            while self._returned:
                piece = self._returned.popleft()
                piece.free = event
                self._ready.append(piece)
        if not fitting:
            return _BatchMemory(plain_memory(rounded(nbytes)))
        piece = fitting[0]
        self._ready = [each for each in self._ready if each is not piece]
        self._lane.stream.wait_event(piece.free)
        return piece


def _layout(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Return where each array begins in the memory of a batch, and its size."""
    starts, nbytes = [], 0
    for array in arrays:
        starts.append(nbytes)
        nbytes += -(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return starts, nbytes
