"""Memory of devices, and pointers into it."""

import contextlib
import threading

from cupy import _queues, _store
from cupy.cuda import device as _device
from cupy.cuda import runtime, stream

_local = threading.local()


class BaseMemory:
    """A range of a device's addresses."""

    ptr = 0
    size = 0
    device_id = -1
    _raw = None

    @property
    def device(self):
        """The device of this memory."""
        return _device.Device(self.device_id)

    def __int__(self):
        return self.ptr


def _raw_of(block):
    return _store.foreign(0, 0) if block is None else block.raw


class Memory(BaseMemory):
    """Memory from ``cudaMalloc``, which other processes can open."""

    def __init__(self, size):
        self.size = size
        self.device_id = runtime.getDevice()
        self.ptr = runtime.malloc(size)
        self._raw = _raw_of(_store.find(self.ptr))

    def __del__(self):
        if self.ptr and not _queues.ending():
            runtime.free(self.ptr)


class UnownedMemory(BaseMemory):
    """Memory that another object owns; ``owner`` keeps the memory alive."""

    def __init__(self, ptr, size, owner, device_id=-1):
        if device_id < 0:
            attributes = runtime.pointerGetAttributes(ptr)
            if ptr and size and attributes.type == runtime.memoryTypeUnregistered:
                # CuPy finds no device for such an address, either.
                raise RuntimeError("UnownedMemory: the address is not a device's")
            device_id = max(attributes.device, 0) if ptr else runtime.getDevice()
        self.ptr = ptr
        self.size = size
        self.device_id = device_id
        self._owner = owner
        self._raw = _store.view(ptr, size)[0]


class PooledMemory(BaseMemory):
    """Memory of a pool, which is returned when the last reference is gone."""

    def __init__(self, chunk, pool):
        self.pool = pool
        # The pool assigns returned memory to this stream.
        self._queue = stream._current_queue()
        self._block = chunk
        self._raw = chunk.raw
        self.ptr = chunk.ptr
        self.size = chunk.size
        self.device_id = chunk.device
        pool._used[self.device_id] = pool._used.get(self.device_id, 0) + chunk.size

    def free(self):
        """Return the memory to the pool."""
        block, self._block = self._block, None
        if block is None or _queues.ending():
            return
        self.ptr = 0
        pool = self.pool

        def settle():
            pool._used[block.device] -= block.size
            _store.free(block)

        _queues.give_back(self._queue, block.raw, settle)

    def __del__(self):
        if getattr(self, "_block", None) is not None:
            self.free()


class MemoryPointer:
    """An address in a range of device memory, which the pointer keeps alive."""

    def __init__(self, mem, offset):
        self.mem = mem
        self._offset = offset
        self.ptr = mem.ptr + offset if mem.ptr or offset else 0

    def __int__(self):
        return self.ptr

    def __repr__(self):
        return f"<MemoryPointer {self.ptr:#x} device={self.device_id} mem={self.mem!r}>"

    @property
    def device(self):
        """The device of this memory."""
        return self.mem.device

    @property
    def device_id(self):
        """The number of the device of this memory."""
        return self.mem.device_id

    def __add__(self, offset):
        return MemoryPointer(self.mem, self._offset + offset)

    __radd__ = __add__

    def __iadd__(self, offset):
        self._offset += offset
        self.ptr += offset
        return self

    def __sub__(self, offset):
        return self + -offset

    def __isub__(self, offset):
        return self.__iadd__(-offset)

    def copy_from_device(self, src, size):
        """Copy from another device address, on the default stream."""
        runtime.memcpy(self.ptr, src.ptr, size, runtime.memcpyDeviceToDevice)

    def copy_from_device_async(self, src, size, stream=None):
        """Copy from another device address, on a stream."""
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(self.ptr, src.ptr, size, kind, _stream_ptr(stream))

    def copy_from_host(self, mem, size):
        """Copy from the host, and wait for the copy."""
        runtime.memcpy(self.ptr, _address(mem), size, runtime.memcpyHostToDevice)

    def copy_from_host_async(self, mem, size, stream=None):
        """Copy from the host on a stream."""
        kind = runtime.memcpyHostToDevice
        runtime.memcpyAsync(self.ptr, _address(mem), size, kind, _stream_ptr(stream))

    def copy_from(self, mem, size):
        """Copy from the host or a device, and wait for the copy."""
        if isinstance(mem, MemoryPointer):
            self.copy_from_device(mem, size)
        else:
            self.copy_from_host(mem, size)

    def copy_from_async(self, mem, size, stream=None):
        """Copy from the host or a device on a stream."""
        if isinstance(mem, MemoryPointer):
            self.copy_from_device_async(mem, size, stream)
        else:
            self.copy_from_host_async(mem, size, stream)

    def copy_to_host(self, mem, size):
        """Copy to the host, and wait for the copy."""
        runtime.memcpy(_address(mem), self.ptr, size, runtime.memcpyDeviceToHost)

    def copy_to_host_async(self, mem, size, stream=None):
        """Copy to the host on a stream."""
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(_address(mem), self.ptr, size, kind, _stream_ptr(stream))

    def memset(self, value, size):
        """Fill bytes on the default stream."""
        runtime.memset(self.ptr, value, size)

    def memset_async(self, value, size, stream=None):
        """Fill bytes on a stream."""
        runtime.memsetAsync(self.ptr, value, size, _stream_ptr(stream))


def _stream_ptr(given):
    return stream.get_current_stream().ptr if given is None else given.ptr


def _address(mem):
    return getattr(mem, "value", mem)


class MemoryPool:
    """CuPy's memory pool, which here never reuses memory."""

    def __init__(self, allocator=None):
        self._allocator = allocator
        self._limits = {}
        self._used = {}

    def malloc(self, size):
        """Return memory that belongs to the current stream."""
        if not size:
            return MemoryPointer(BaseMemory(), 0)
        if self._allocator is not None:
            return self._allocator(size)
        limit = self._limits.get(runtime.getDevice(), 0)
        if limit and self.used_bytes() + size > limit:
            raise OutOfMemoryError(size, self.used_bytes(), limit)
        chunk = _store.allocate_pool(size, runtime.getDevice())
        return MemoryPointer(PooledMemory(chunk, self), 0)

    def free_all_blocks(self, stream=None):
        """Return unused memory to the device; there is none here."""

    def n_free_blocks(self):
        """Return the number of unused blocks."""
        return 0

    def used_bytes(self):
        """Return the bytes that arrays of the current device use."""
        _queues.settle_freed()
        return self._used.get(runtime.getDevice(), 0)

    def free_bytes(self):
        """Return the number of unused bytes in the pool."""
        return 0

    def total_bytes(self):
        """Return the number of bytes in the pool."""
        return self.used_bytes() + self.free_bytes()

    def set_limit(self, size=None, fraction=None):
        """Limit the memory that the pool may use on the current device."""
        if fraction is not None:
            size = int(fraction * _store.TOTAL_BYTES)
        self._limits[runtime.getDevice()] = size or 0

    def get_limit(self):
        """Return the current device's limit in bytes; 0 means no limit."""
        return self._limits.get(runtime.getDevice(), 0)


class OutOfMemoryError(MemoryError):
    """An error: the pool's limit, or the device's memory, is too small."""

    def __init__(self, size, total, limit=0):
        self._size, self._total, self._limit = size, total, limit
        text = f"Out of memory allocating {size:,} bytes (allocated so far: {total:,}"
        super().__init__(f"{text} bytes, limit set to: {limit:,} bytes).")

    def __reduce__(self):
        return type(self), (self._size, self._total, self._limit)


def _malloc(size):
    return MemoryPointer(Memory(size), 0)


_default_pool = MemoryPool()
_chosen = [_default_pool.malloc]


def alloc(size):
    """Allocate with the current allocator."""
    return get_allocator()(size)


def set_allocator(allocator=None):
    """Set the allocator of all threads; None means allocation without a pool."""
    if getattr(_local, "allocator", None) is not None:
        raise ValueError("Can't change the global allocator inside `using_allocator`")
    _chosen[0] = _malloc if allocator is None else allocator


def get_allocator():
    """Return the current allocator."""
    return getattr(_local, "allocator", None) or _chosen[0]


@contextlib.contextmanager
def _using_allocator(allocator=None):
    """Use another allocator in this thread, inside of a ``with`` block."""
    before = getattr(_local, "allocator", None)
    _local.allocator = _malloc if allocator is None else allocator
    try:
        yield
    finally:
        _local.allocator = before
