"""GPU memory outside of CuPy's pool, and page-locked host memory for copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = [
    "Buffers",
    "memory_at",
    "pinned_memory",
    "plain_memory",
    "register_host",
    "rounded",
    "unregister_host",
]

_SMALLEST_BYTES = 64 << 10
_LARGE_BYTES = 8 << 20

# Memory that is never freed: after a rank's death, MPI or a kernel may still use it.
_abandoned: list[Any] = []


def memory_at(address: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array over GPU memory that another library has allocated.

    The array is in C order, and does not own the memory. The caller must not use the
    array after the other library frees the memory.
    """
    import cupy

    nbytes, pointer = math.prod(shape) * np.dtype(dtype).itemsize, None
    if nbytes:
        # Not for an empty array: UnownedMemory asks CUDA for the GPU of the address.
        memory = cupy.cuda.UnownedMemory(address, nbytes, None)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
    array: Array = cupy.ndarray(shape, dtype, memptr=pointer)
    return array


def plain_memory(nbytes: int) -> Any:
    """Return uninitialized bytes of the current GPU, allocated by ``cudaMalloc``.

    ``nbytes`` is at least 1. The address is a multiple of 256. The memory is freed when
    the last array that uses it is deleted; freeing waits for the GPU.
    """
    import cupy

    # CuPy's pool returns parts of blocks; another process could only map whole blocks.
    try:
        memory = cupy.cuda.Memory(nbytes)
    except cupy.cuda.runtime.CUDARuntimeError:
        # CuPy's pool may hold memory that the program does not use any longer.
        cupy.get_default_memory_pool().free_all_blocks()
        memory = cupy.cuda.Memory(nbytes)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray((nbytes,), np.uint8, memptr=pointer)


def pinned_memory(nbytes: int) -> Array:
    """Return uninitialized page-locked bytes of host memory.

    The GPU copies page-locked memory by DMA, at full speed. ``nbytes`` is at least 1.
    The memory is freed when the last array that uses it is deleted.
    """
    import cupy

    # CuPy keeps a pool of page-locked memory, because allocating it is slow.
    memory = cupy.cuda.alloc_pinned_memory(nbytes)
    return np.frombuffer(memory, np.uint8, nbytes)


def register_host(array: Array) -> None:
    """Lock the pages of existing host memory; unregister the memory before it is freed.

    The array must be contiguous, not empty, and not registered. If the system refuses,
    an exception is raised, and nothing is changed.
    """
    from cupy.cuda import runtime

    runtime.hostRegister(array.ctypes.data, array.nbytes, 0)


def unregister_host(array: Array) -> None:
    """Undo `register_host`; no copy from or to the memory may be in progress."""
    from cupy.cuda import runtime

    runtime.hostUnregister(array.ctypes.data)


class Buffers:
    """Buffers that are kept by key, and are replaced if a larger size is requested."""

    def __init__(self, make: Callable[[int], Any] = plain_memory) -> None:
        self._make = make
        self._kept: dict[Hashable, Any] = {}

    def get(self, key: Hashable, nbytes: int) -> Any:
        """Return the buffer of ``key``, or a new one if it has less than ``nbytes``.

        The smaller buffer is freed, so no work may be using it.
        """
        kept = self._kept.get(key)
        if kept is None or kept.nbytes < nbytes:
            # Free the old buffer before the new one is allocated.
            self._kept.pop(key, None)
            del kept
            kept = self._kept[key] = self._make(rounded(nbytes))
        return kept

    def clear(self) -> None:
        """Free all buffers; no work that uses a buffer may be in progress."""
        self._kept.clear()

    def abandon(self) -> None:
        """Keep the buffers until the process ends, because a rank has died."""
        _abandoned.append(self._kept)


def rounded(nbytes: int) -> int:
    """Round a size up to a power of two, or above 8 MiB to a multiple of 8 MiB.

    Because of the rounding, buffers seldom have to be replaced by larger buffers, and
    have the same size on every rank.
    """
    if nbytes <= _LARGE_BYTES:
        return max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // _LARGE_BYTES) * _LARGE_BYTES
