"""Memory of the stand-in: the blocks of addresses on a device or page-locked."""

import bisect
import ctypes
import threading

import numpy as np

from cupy import _queues, _standin
from cupy._errors import (
    ALREADY_REGISTERED,
    INVALID_VALUE,
    MEMORY_ALLOCATION,
    NOT_REGISTERED,
    CUDARuntimeError,
)

TOTAL_BYTES = 8 << 30
"""Memory of a device, as memGetInfo reports and allocation enforces it."""

_ALIGNED = 512
_lock = threading.RLock()
_starts = []
_blocks = {}
_used = {}


class Block:
    """A range of addresses with its memory.

    ``kind`` is "cuda" (allocated by the runtime), "pool", "pinned" (allocated
    page-locked) or "registered".
    """

    def __init__(self, kind, raw, device):
        self.kind = kind
        self.raw = raw
        self.device = device
        self.ptr = raw.ctypes.data
        self.size = raw.nbytes

    @property
    def on_device(self):
        return self.kind in {"cuda", "pool"}


def _add(block):
    with _lock:
        bisect.insort(_starts, block.ptr)
        _blocks[block.ptr] = block
    return block


def _remove(ptr, kinds):
    with _lock:
        block = _blocks.get(ptr)
        if block is None or block.kind not in kinds:
            return None
        del _blocks[ptr]
        _starts.remove(ptr)
    return block


def find(ptr):
    """Return the block that contains the address, or None."""
    with _lock:
        at = bisect.bisect_right(_starts, ptr) - 1
        if at < 0:
            return None
        block = _blocks[_starts[at]]
    return block if ptr < block.ptr + block.size else None


def view(ptr, nbytes):
    """Return the bytes at an address as an array, with their block or None."""
    block = find(ptr)
    if block is None:
        if nbytes and not ptr:
            raise CUDARuntimeError(INVALID_VALUE)
        return foreign(ptr, nbytes), None
    start = ptr - block.ptr
    if start + nbytes > block.size:
        raise CUDARuntimeError(INVALID_VALUE)
    return block.raw[start : start + nbytes], block


def foreign(ptr, nbytes):
    """Return memory that the stand-in does not own, as an array of bytes."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(ptr), np.uint8)


def _charge(device, nbytes):
    _queues.settle_freed()
    with _lock:
        if _used.get(device, 0) + nbytes > TOTAL_BYTES:
            raise CUDARuntimeError(MEMORY_ALLOCATION)
        _used[device] = _used.get(device, 0) + nbytes


def used_bytes(device):
    """Return the number of bytes of the device that this process has allocated."""
    _queues.settle_freed()
    return _used.get(device, 0)


def _plain(nbytes):
    raw = np.empty(nbytes + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    raw = raw[start : start + nbytes]
    raw[:] = _standin.POISON
    return raw


def allocate_pool(nbytes, device):
    """Allocate memory like CuPy's pool."""
    _charge(device, nbytes)
    _standin.count("allocations")
    return _add(Block("pool", _plain(nbytes), device))


def allocate_cuda(nbytes, device):
    """Allocate memory like ``cudaMalloc``."""
    _charge(device, nbytes)
    _standin.count("allocations")
    return _add(Block("cuda", _plain(nbytes), device))


def free(block):
    """Free a device block; queued work keeps its memory."""
    if _remove(block.ptr, {block.kind}) is None:
        raise CUDARuntimeError(INVALID_VALUE)
    with _lock:
        _used[block.device] -= block.size


def free_pointer(ptr):
    """Free memory that ``cudaMalloc`` returned."""
    if not ptr:
        return
    with _lock:
        block = _blocks.get(ptr)
    if block is None or block.kind != "cuda":
        raise CUDARuntimeError(INVALID_VALUE)
    free(block)


def allocate_pinned(nbytes):
    """Allocate page-locked memory."""
    _queues.visible()
    _standin.count("pinned_allocations")
    return _add(Block("pinned", _plain(max(nbytes, 1)), -1))


def free_pinned(ptr):
    """Free page-locked memory."""
    block = _remove(ptr, {"pinned"})
    if block is None:
        raise CUDARuntimeError(INVALID_VALUE)
    # The memory may be allocated again at once, because no stream is waited for.
    block.raw[:] = _standin.POISON


def register(ptr, nbytes):
    """Page-lock existing host memory."""
    if not ptr or nbytes <= 0:
        raise CUDARuntimeError(INVALID_VALUE)
    with _lock:
        for block in list(_blocks.values()):
            if ptr < block.ptr + block.size and block.ptr < ptr + nbytes:
                raise CUDARuntimeError(ALREADY_REGISTERED)
        _add(Block("registered", foreign(ptr, nbytes), -1))


def unregister(ptr):
    """Undo ``register``; the address must be the registered one."""
    if _remove(ptr, {"registered"}) is None:
        raise CUDARuntimeError(NOT_REGISTERED)
