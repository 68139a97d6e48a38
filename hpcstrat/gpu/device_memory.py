"""Memory of the device that is not CuPy's pool's, and memory of the host for copies."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from hpcstrat.typing import Array

__all__ = [
    "Buffers",
    "close_memory",
    "memory_handle",
    "open_memory",
    "pinned_memory",
    "plain_memory",
    "register_host",
    "rounded",
    "shareable_memory",
    "unregister_host",
]

_SMALLEST_BYTES = 64 << 10
_LARGE_BYTES = 8 << 20
# CUDA may make smaller allocations parts of one block, all of which another process
# opens with one of them (CUDA C++ Programming Guide, "Interprocess Communication").
_BLOCK_BYTES = 2 << 20


def plain_memory(nbytes: int) -> Any:
    """Return memory of the current device, straight from ``cudaMalloc``.

    Not collective. CuPy's pool hands out parts of larger blocks, which other processes
    could only open as a whole. Freed with the last array that lies in it; that waits
    for the device.

    Parameters
    ----------
    nbytes : int
        How much; at least 1.

    Returns
    -------
    cupy.ndarray of shape (nbytes,)
        Of bytes, not initialized; begins at a multiple of 256 bytes.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        If there is not as much.
    """
    import cupy

    try:
        memory = cupy.cuda.Memory(nbytes)
    except cupy.cuda.runtime.CUDARuntimeError:
        # The pool may hold what the program has let go of.
        cupy.get_default_memory_pool().free_all_blocks()
        memory = cupy.cuda.Memory(nbytes)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray((nbytes,), np.uint8, memptr=pointer)


def shareable_memory(nbytes: int) -> Any:
    """Return `plain_memory` in which nothing else lies, for other processes to open.

    Not collective.

    Parameters
    ----------
    nbytes : int
        How much is needed; at least 1.

    Returns
    -------
    cupy.ndarray of shape (at least nbytes,)
        Of bytes, not initialized.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        If there is not as much.
    """
    return plain_memory(-(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)


def memory_handle(array: Any) -> bytes:
    """Return what opens memory of `shareable_memory` in another process.

    Not collective.

    Parameters
    ----------
    array : cupy.ndarray
        All of that memory.

    Returns
    -------
    bytes
        64 of them.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        If the system cannot share it.
    """
    from cupy.cuda import runtime

    return bytes(runtime.ipcGetMemHandle(array.data.ptr))


def open_memory(handle: bytes) -> int:
    """Open memory of another process of this node, on whichever of its GPUs.

    Not collective. GPUs that can reach each other do so from here on.

    Parameters
    ----------
    handle : bytes
        From `memory_handle`.

    Returns
    -------
    int
        Its address in this process, until `close_memory`; the other process is not to
        free it before.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        If the GPUs cannot reach each other, or the system cannot share memory.
    """
    from cupy.cuda import runtime

    return int(runtime.ipcOpenMemHandle(handle))


def close_memory(address: int) -> None:
    """Close memory of another process; all work that uses it has been done.

    Not collective.

    Parameters
    ----------
    address : int
        From `open_memory`.
    """
    from cupy.cuda import runtime

    runtime.ipcCloseMemHandle(address)


def pinned_memory(nbytes: int) -> Array:
    """Return page-locked memory of the host, which the device copies at full speed.

    Not collective.

    Parameters
    ----------
    nbytes : int
        How much; at least 1.

    Returns
    -------
    ndarray of shape (nbytes,)
        Of bytes, not initialized; freed with the last array that lies in it.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        If there is not as much.
    """
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(nbytes)
    return np.frombuffer(memory, np.uint8, nbytes)


def register_host(array: Array) -> None:
    """Lock the pages of existing memory of the host, see `pinned_memory`.

    Not collective.

    Parameters
    ----------
    array : ndarray
        Contiguous, not empty, not registered; must be unregistered before it is freed.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        If the system refuses; then nothing has changed.
    """
    from cupy.cuda import runtime

    runtime.hostRegister(array.ctypes.data, array.nbytes, 0)


def unregister_host(array: Array) -> None:
    """Take back `register_host`.

    Not collective. No copy from or to the memory may be under way.

    Parameters
    ----------
    array : ndarray
        As given there.
    """
    from cupy.cuda import runtime

    runtime.hostUnregister(array.ctypes.data)


class Buffers:
    """Memory that is kept under keys, and grows where more is wanted.

    Not collective.

    Parameters
    ----------
    make : callable, optional
        `plain_memory` or `pinned_memory`; default: the former.
    """

    def __init__(self, make: Callable[[int], Any] = plain_memory) -> None:
        self._make = make
        self._kept: dict[Hashable, Any] = {}

    def get(self, key: Hashable, nbytes: int) -> Any:
        """Return the memory of a key.

        Not collective. Where it has to grow, what it held is lost, and the caller has
        seen to it that no work which uses it is under way.

        Parameters
        ----------
        key : hashable
            Which memory.
        nbytes : int
            How much is needed at least.

        Returns
        -------
        array of shape (n,)
            Of bytes, at least ``nbytes``; the same memory each time, until it grows.
        """
        kept = self._kept.get(key)
        if kept is None or kept.nbytes < nbytes:
            # The old goes before the new comes.
            self._kept.pop(key, None)
            del kept
            kept = self._kept[key] = self._make(rounded(nbytes))
        return kept

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(kept.nbytes for kept in self._kept.values())

    def clear(self) -> None:
        """Let go of all memory.

        Not collective. No work that uses it may be under way.
        """
        self._kept.clear()


def rounded(nbytes: int) -> int:
    """Return how much to allocate for some bytes, so that memory seldom has to grow.

    Not collective; the same on every rank.

    Parameters
    ----------
    nbytes : int
        How much is needed.

    Returns
    -------
    int
        A power of two, or a multiple of 8 MiB.
    """
    if nbytes <= _LARGE_BYTES:
        return max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // _LARGE_BYTES) * _LARGE_BYTES
