"""Memory of other libraries, kept until the GPU has read it.

CuPy's pool reuses memory in the order of the stream. Other libraries, such as JAX,
reuse it on streams of their own, as soon as nothing holds the array, while work that
was given to the GPU here has still to read it.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from typing import Any

from hpcstrat.engine.typing import Array

__all__ = ["borrow"]

# Released arrays, each with the event after which it may be freed.
_returned: deque[tuple[Any, Array]] = deque()
_giving_back = threading.Lock()
# Released arrays whose event failed with the GPU: they are never freed.
_never_returned: list[Array] = []


class _Borrowed:
    """The owner of memory of another library, to which arrays over it refer."""

    __slots__ = ("_array", "_device", "_event", "_stream")

    def __init__(self, array: Array, cuda: Any) -> None:
        self._array = array
        self._device = cuda.Device()
        self._stream = cuda.get_current_stream()
        self._event = cuda.Event(disable_timing=True)

    def __del__(self) -> None:
        """Note how far the stream is; any thread may collect arrays."""
        try:
            # The null stream is that of the thread's device.
            with self._device:
                self._event.record(self._stream)
        except Exception:
            if not sys.is_finalizing():
                _never_returned.append(self._array)
            return
        _returned.append((self._event, self._array))
        _give_back()


def _give_back() -> None:
    """Let go of the memory that has been read."""
    # Letting go may run other finalizers, and so come here again.
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
    """Return an array over memory of another library, which keeps it as long as needed.

    Does not wait. The memory is given back once nothing refers to the result or a view
    of it, and the stream that was current in this call has come to that point; at the
    earliest then, at the latest at a later call of this kind.
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
