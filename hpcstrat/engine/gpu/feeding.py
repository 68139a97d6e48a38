"""Copies batches to the GPU while the GPU still computes with earlier batches.

All arrays of a batch share one piece of GPU memory, which is reused when the program
has deleted all of these arrays. With memory from CuPy's pool, which reuses memory only
in the order of one stream, a copy would wait for all earlier work of the program. In
this module, a copy waits only for the work that was in the program's stream at the
first `put` after the memory was returned.
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

# The same alignment as CuPy's own memory.
_ALIGNED_BYTES = 512
# Maximum number of copies in progress from page-locked memory; beyond it, `put` waits.
_MOST_STAGED = 4
# Maximum number of unused pieces of GPU memory that are kept.
_MOST_READY = 4


def fits_device(dtype: np.dtype[Any]) -> bool:
    """Return whether a GPU supports arrays of a dtype.

    Bools and numbers are supported, except real and complex long doubles.
    """
    return is_half(dtype) or (dtype.kind in "biufc" and dtype.char not in "gG")


@dataclass(slots=True)
class _BatchMemory:
    """GPU or page-locked memory for a batch, reusable after the event ``free``."""

    memory: Array
    free: Any = None


@dataclass(slots=True)
class _BatchLoan:
    """The owner of the memory of a batch's arrays; its deletion returns the memory."""

    piece: _BatchMemory
    returned: deque[_BatchMemory] = field(repr=False)

    def __del__(self) -> None:
        """Return the memory for reuse; runs in the thread that frees the last array."""
        self.returned.append(self.piece)


class Feeder:
    """Copies batches to this thread's current GPU, on its own stream.

    Like arrays from CuPy's pool, the returned arrays are for use on the program's
    current stream. If a program uses an array on another stream, the program must keep
    the array until that stream has finished with it.
    """

    def __init__(self) -> None:
        self._lane = Lane()
        self._staged: deque[_BatchMemory] = deque()
        self._ready: list[_BatchMemory] = []
        # Memory of deleted batches, appended by any thread that deletes the last array.
        self._returned: deque[_BatchMemory] = deque()

    def __del__(self) -> None:
        """Wait for the copies in progress before the page-locked memory is freed."""
        # Ignore errors of the GPU, because other calls report them.
        with contextlib.suppress(Exception):
            for staged in self._staged:
                staged.free.synchronize()

    def put(self, arrays: Sequence[Array]) -> list[Array]:
        """Copy host arrays to the GPU; the host arrays may be changed after the return.

        The dtypes must pass `fits_device`. The program's current stream waits for the
        copy, but the host does not. Returns contiguous arrays of the same shapes and
        dtypes, in native byte order.
        """
        import cupy

        starts, nbytes = _layout(arrays)
        dtypes = [array.dtype.newbyteorder("=") for array in arrays]
        if not nbytes:
            kinds = zip(arrays, dtypes, strict=True)
            return [cupy.empty(array.shape, dtype) for array, dtype in kinds]
        staged = self._stage(nbytes)
        for start, array, dtype in zip(starts, arrays, dtypes, strict=True):
            target = staged.memory[start : start + array.nbytes]
            np.copyto(target.view(dtype).reshape(array.shape), array)
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
        """Return page-locked memory for a batch; no copy from it is in progress."""
        import cupy

        full = len(self._staged) >= _MOST_STAGED
        if full:
            # Several batches are ahead of the program, so the host can afford to wait.
            self._staged[0].free.synchronize()
        if self._staged and (full or self._staged[0].free.done):
            staged = self._staged.popleft()
            if staged.memory.size >= nbytes:
                return staged
        event = cupy.cuda.Event(block=True, disable_timing=True)
        return _BatchMemory(pinned_memory(nbytes), event)

    def _take(self, nbytes: int) -> _BatchMemory:
        """Return GPU memory for a batch; the lane waits until the memory is free."""
        import cupy

        fitting = [piece for piece in self._ready if piece.memory.size >= nbytes]
        while self._ready and (not fitting or len(self._ready) > _MOST_READY):
            # Free a piece of GPU memory that is too small, or no longer needed.
            self._ready.pop().free.synchronize()
        if self._returned:
            # The program's work so far may use the returned memory. Use the memory for
            # the next batch, so that the copy of this batch does not wait.
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
    """Return the offset of each array in a batch's memory, and the total size."""
    starts, nbytes = [], 0
    for array in arrays:
        starts.append(nbytes)
        nbytes += -(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return starts, nbytes
