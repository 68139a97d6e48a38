"""Memory of other libraries, kept until the GPU has read it.

CuPy's pool reuses memory in the order of the stream. Another library, such as JAX,
reuses memory on its own streams as soon as nothing refers to the array, even if a
kernel of hpcstrat has not read that memory yet.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from typing import Any

from hpcstrat.engine.typing import Array

__all__ = ["borrow"]

# Released arrays, each with the CUDA event after which its memory may be freed.
_returned: deque[tuple[Any, Array]] = deque()
_giving_back = threading.Lock()
# Released arrays whose event could not be recorded (the GPU has failed); never freed.
_never_returned: list[Array] = []


class _Borrowed:
    """The owner object of another library's memory, to which CuPy's arrays refer."""

    __slots__ = ("_array", "_device", "_event", "_stream")

    def __init__(self, array: Array, cuda: Any) -> None:
        self._array = array
        self._device = cuda.Device()
        self._stream = cuda.get_current_stream()
        self._event = cuda.Event(disable_timing=True)

    def __del__(self) -> None:
        """Keep the array until the stream's work so far is done; runs in any thread."""
        try:
            # The null stream belongs to the thread's current device: set the device.
            with self._device:
                self._event.record(self._stream)
        except Exception:
            if not sys.is_finalizing():
                _never_returned.append(self._array)
            return
        _returned.append((self._event, self._array))
        _give_back()


def _give_back() -> None:
    """Drop the released arrays whose memory the GPU has read."""
    # Dropping an array may run finalizers, which may call this function again.
    if not _giving_back.acquire(blocking=False):
        return
    try:
        while _returned and _returned[0][0].done:
            _returned.popleft()
    finally:
        _giving_back.release()


# Drop the arrays while the libraries that own the memory are still loaded.
atexit.register(_returned.clear)


def borrow(array: Array) -> Array:
    """Return an array over another library's memory, which is kept while it is in use.

    Does not wait. The memory can be released when nothing refers to the result or its
    views, and the stream that was current in this call has done its work up to that
    point. The memory is released at that time, or at a later call of `borrow`.
    """
    import cupy

    if not array.size:
        return array
    _give_back()
    pointer: Any = array.data
    low, high = cupy.byte_bounds(array)
    memory = cupy.cuda.UnownedMemory(
        low, high - low, owner=_Borrowed(array, cupy.cuda), device_id=pointer.device_id
    )
    shared: Array = cupy.ndarray(
        array.shape,
        array.dtype,
        cupy.cuda.MemoryPointer(memory, pointer.ptr - low),
        array.strides,
    )
    return shared
