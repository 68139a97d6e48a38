"""Page-locked host memory."""

import ctypes

from cupy import _queues, _store
from cupy.cuda import runtime


class PinnedMemory:
    """A block of page-locked memory."""

    def __init__(self, size, flags=0):
        self.size = size
        self.ptr = 0
        if size > 0:
            self.ptr = runtime.hostAlloc(size, flags)
            self._raw = _store.find(self.ptr).raw

    def __del__(self):
        if self.ptr and not _queues.ending():
            runtime.freeHost(self.ptr)


class PinnedMemoryPointer:
    """An address in page-locked memory, which ``numpy.frombuffer`` accepts.

    Before Python 3.12, only C classes can export buffers, so each pointer is also an
    array of ``ctypes``.
    """

    def __new__(cls, mem, offset):
        size = mem.size - offset
        kind = type(
            "PinnedMemoryPointer",
            (PinnedMemoryPointer, ctypes.Array),
            {"_type_": ctypes.c_ubyte, "_length_": size},
        )
        self = kind.from_buffer(mem._raw, offset)
        self.mem = mem
        self.ptr = mem.ptr + offset
        return self

    def __init__(self, *args):
        pass

    def __int__(self):
        return self.ptr

    def size(self):
        """Return the number of bytes from here to the end of the block."""
        return len(self)


class PinnedMemoryPool:
    """A pool of page-locked memory, which here never reuses memory."""

    def __init__(self, allocator=None):
        self._allocator = allocator or _malloc

    def malloc(self, size):
        """Return page-locked memory."""
        return self._allocator(max(size, 1))

    def free_all_blocks(self):
        """Free unused memory; there is none here."""

    def n_free_blocks(self):
        """Return the number of unused blocks."""
        return 0


def _malloc(size):
    return PinnedMemoryPointer(PinnedMemory(size), 0)


_chosen = [_malloc]


def alloc_pinned_memory(size):
    """Allocate page-locked memory with the current allocator."""
    return _chosen[0](size)


def set_pinned_memory_allocator(allocator=None):
    """Set the allocator of page-locked memory; None means allocation without a pool."""
    _chosen[0] = _malloc if allocator is None else allocator
