"""Memory of the stand-in: who owns which addresses, on a device or page-locked."""

import bisect
import ctypes
import mmap
import os
import struct
import threading

import numpy as np

from cupy import _queues, _standin
from cupy._errors import (
    ALREADY_REGISTERED,
    INVALID_CONTEXT,
    INVALID_VALUE,
    MEMORY_ALLOCATION,
    NOT_REGISTERED,
    CUDARuntimeError,
)

TOTAL_BYTES = 8 << 30
"""Memory of a device, as memGetInfo reports and allocation enforces it."""

_ALIGNED = 512
_MAGIC = b"hpcsmem1"
_HANDLE = struct.Struct("<8sQQQQ24x")
_lock = threading.RLock()
_starts = []
_blocks = {}
_opened = {}
_used = {}


class Block:
    """A range of addresses with its memory.

    ``kind`` is "cuda" (allocated by the runtime, can be shared), "pool", "ipc" (of
    another process), "pinned" (allocated page-locked) or "registered".
    """

    def __init__(self, kind, raw, device, fd=None):
        self.kind = kind
        self.raw = raw
        self.device = device
        self.fd = fd
        self.ptr = raw.ctypes.data
        self.size = raw.nbytes

    @property
    def on_device(self):
        return self.kind in {"cuda", "pool", "ipc"}


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
    """Return the block that holds the address, or None."""
    with _lock:
        at = bisect.bisect_right(_starts, ptr) - 1
        if at < 0:
            return None
        block = _blocks[_starts[at]]
    return block if ptr < block.ptr + block.size else None


def view(ptr, nbytes):
    """Return the bytes at an address as an array, and their block or None."""
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
    """Return how much of the device's memory this process has allocated."""
    _queues.settle_freed()
    return _used.get(device, 0)


def _plain(nbytes):
    raw = np.empty(nbytes + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    raw = raw[start : start + nbytes]
    raw[:] = _standin.POISON
    return raw


def allocate_pool(nbytes, device):
    """Allocate memory as CuPy's pool does; it cannot be shared."""
    _charge(device, nbytes)
    _standin.count("allocations")
    return _add(Block("pool", _plain(nbytes), device))


def allocate_cuda(nbytes, device):
    """Allocate memory as ``cudaMalloc`` does; other processes can open it."""
    _charge(device, nbytes)
    fd = os.memfd_create("standin")
    os.ftruncate(fd, nbytes)
    raw = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    raw[:] = _standin.POISON
    _standin.count("allocations")
    return _add(Block("cuda", raw, device, fd))


def free(block):
    """Give a device block back; queued work keeps its memory."""
    if _remove(block.ptr, {block.kind}) is None:
        raise CUDARuntimeError(INVALID_VALUE)
    with _lock:
        _used[block.device] -= block.size
    if block.fd is not None:
        os.close(block.fd)


def free_pointer(ptr):
    """Free what ``cudaMalloc`` returned."""
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
    # The memory may be handed out again at once: no stream is waited for.
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


def export(ptr):
    """Return the handle of ``cudaIpcGetMemHandle``: 64 bytes."""
    with _lock:
        block = _blocks.get(ptr)
    if block is None or block.kind != "cuda":
        raise CUDARuntimeError(INVALID_VALUE)
    number = os.fstat(block.fd).st_ino
    physical = _queues.visible()[block.device]
    return _HANDLE.pack(
        _MAGIC, os.getpid(), block.fd << 16 | physical, number, block.size
    )


def attach(handle):
    """Open another process's memory on the current device; return its address."""
    if len(handle) != _HANDLE.size:
        raise CUDARuntimeError(INVALID_VALUE)
    magic, pid, where, number, nbytes = _HANDLE.unpack(bytes(handle))
    if magic != _MAGIC:
        raise CUDARuntimeError(INVALID_VALUE)
    if pid == os.getpid():
        raise CUDARuntimeError(INVALID_CONTEXT)
    with _lock:
        if handle in _opened:
            block = _opened[handle]
            block.openings += 1
            return block.ptr
        raw = _map(pid, where >> 16, number, nbytes)
        block = _add(Block("ipc", raw, _queues.current_device()))
        block.openings = 1
        block.handle = handle
        _opened[handle] = block
    return block.ptr


def _map(pid, fd, number, nbytes):
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as exc:
        raise CUDARuntimeError(INVALID_VALUE) from exc
    try:
        if os.fstat(own).st_ino != number:
            raise CUDARuntimeError(INVALID_VALUE)
        return np.frombuffer(mmap.mmap(own, nbytes), np.uint8)
    finally:
        os.close(own)


def detach(ptr):
    """Close another process's memory."""
    with _lock:
        block = _blocks.get(ptr)
        if block is None or block.kind != "ipc":
            raise CUDARuntimeError(INVALID_VALUE)
        block.openings -= 1
        if not block.openings:
            _remove(ptr, {"ipc"})
            del _opened[block.handle]
