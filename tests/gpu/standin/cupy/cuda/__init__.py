"""The CUDA runtime; ``cupy.cuda.nccl`` needs its own import, as in CuPy."""

from cupy.cuda import device, memory, nvtx, pinned_memory, runtime, stream
from cupy.cuda.device import Device, get_device_id
from cupy.cuda.memory import (
    BaseMemory,
    Memory,
    MemoryPointer,
    MemoryPool,
    UnownedMemory,
    alloc,
    get_allocator,
    set_allocator,
)
from cupy.cuda.memory import _using_allocator as using_allocator
from cupy.cuda.pinned_memory import (
    PinnedMemory,
    PinnedMemoryPointer,
    PinnedMemoryPool,
    alloc_pinned_memory,
    set_pinned_memory_allocator,
)
from cupy.cuda.stream import (
    Event,
    ExternalStream,
    Stream,
    get_current_stream,
    get_elapsed_time,
)


def is_available():
    """Return whether there is a device."""
    try:
        return runtime.getDeviceCount() > 0
    except runtime.CUDARuntimeError:
        return False


__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "PinnedMemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "device",
    "get_allocator",
    "get_current_stream",
    "get_device_id",
    "get_elapsed_time",
    "is_available",
    "memory",
    "nvtx",
    "pinned_memory",
    "runtime",
    "set_allocator",
    "set_pinned_memory_allocator",
    "stream",
    "using_allocator",
]
