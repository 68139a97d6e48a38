"""Memory of the device that is not CuPy's pool's, and memory of the host for copies."""

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

# Memory that MPI, or a kernel, may still use after the death of a rank.
_abandoned: list[Any] = []


def memory_at(address: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array over memory of a GPU that another library has allocated.

    In C order. That library keeps the memory, and the caller knows until when.
    """
    import cupy

    nbytes, pointer = math.prod(shape) * np.dtype(dtype).itemsize, None
    if nbytes:
        # CuPy asks CUDA which GPU the address belongs to.
        memory = cupy.cuda.UnownedMemory(address, nbytes, None)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
    array: Array = cupy.ndarray(shape, dtype, memptr=pointer)
    return array


def plain_memory(nbytes: int) -> Any:
    """Return bytes of the current device straight from ``cudaMalloc``, not initialized.

    At least 1; they begin at a multiple of 256. Freed with the last array that lies in
    them, which waits for the device.
    """
    import cupy

    # CuPy's pool hands out parts of larger blocks, which other processes could only
    # open as a whole.
    try:
        memory = cupy.cuda.Memory(nbytes)
    except cupy.cuda.runtime.CUDARuntimeError:
        # The pool may hold memory that the program does not use any more.
        cupy.get_default_memory_pool().free_all_blocks()
        memory = cupy.cuda.Memory(nbytes)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray((nbytes,), np.uint8, memptr=pointer)


def pinned_memory(nbytes: int) -> Array:
    """Return page-locked bytes of the host, not initialized.

    The device copies them by itself, at full speed. At least 1; freed with the last
    array that lies in them.
    """
    import cupy

    # From a pool of such memory that CuPy keeps: it is dear to make.
    memory = cupy.cuda.alloc_pinned_memory(nbytes)
    return np.frombuffer(memory, np.uint8, nbytes)


def register_host(array: Array) -> None:
    """Lock the pages of existing memory; to be unregistered before it is freed.

    Contiguous, not empty, not registered. Where the system refuses, nothing has
    changed.
    """
    from cupy.cuda import runtime

    runtime.hostRegister(array.ctypes.data, array.nbytes, 0)


def unregister_host(array: Array) -> None:
    """Take back `register_host`; no copy from or to the memory may be under way."""
    from cupy.cuda import runtime

    runtime.hostUnregister(array.ctypes.data)


class Buffers:
    """Memory that is kept under keys, and grows where more is wanted."""

    def __init__(self, make: Callable[[int], Any] = plain_memory) -> None:
        self._make = make
        self._kept: dict[Hashable, Any] = {}

    def get(self, key: Hashable, nbytes: int) -> Any:
        """Return at least ``nbytes`` of memory, the same each time until it grows.

        Where it has to grow, its content is lost, and no work may be using it.
        """
        kept = self._kept.get(key)
        if kept is None or kept.nbytes < nbytes:
            # The old goes before the new comes.
            self._kept.pop(key, None)
            del kept
            kept = self._kept[key] = self._make(rounded(nbytes))
        return kept

    def clear(self) -> None:
        """Free all memory; no work that uses it may be under way."""
        self._kept.clear()

    def abandon(self) -> None:
        """Leave the memory to the end of the process: a rank has died."""
        _abandoned.append(self._kept)


def rounded(nbytes: int) -> int:
    """Round a size up to a power of two, or to a multiple of 8 MiB.

    So memory seldom has to grow, and has the same size on every rank.
    """
    if nbytes <= _LARGE_BYTES:
        return max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // _LARGE_BYTES) * _LARGE_BYTES
