"""Copies between host memory and a GPU that overlap with the program's computation.

Only copies from and to page-locked host memory are asynchronous, see `lock_pages`. CUDA
copies other host memory through its own buffers while the caller waits.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.gpu.device_memory import register_host, unregister_host
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array

__all__ = ["Arrival", "Downloads", "Uploads", "address_of", "lock_pages", "store"]


def address_of(array: Array) -> int:
    """Return the address of an array in host or GPU memory."""
    if is_device(array):
        device: Any = array
        return int(device.data.ptr)
    return int(array.__array_interface__["data"][0])


def _copy(target: Array, source: Array, lane: Lane) -> None:
    """Copy bytes from or to the GPU on a lane.

    If the host memory is not page-locked, a copy to the GPU returns after the bytes
    have been read, and a copy from the GPU returns after the bytes have been written
    (CUDA Runtime API, "API synchronization behavior").
    """
    from cupy.cuda import runtime

    kind = (
        runtime.memcpyHostToDevice if is_device(target) else runtime.memcpyDeviceToHost
    )
    runtime.memcpyAsync(
        address_of(target), address_of(source), source.nbytes, kind, lane.stream.ptr
    )


class _RefusalTold:
    """Whether it has been logged that the system refuses to lock pages."""

    refusal = False


def lock_pages(owner: Any, memory: Array) -> Callable[[], Any] | None:
    """Lock the pages of host memory, so that a GPU can copy it asynchronously.

    Returns a function that unlocks the pages; the deletion of ``owner`` unlocks them,
    too. Before the pages are unlocked, the memory must not be freed or passed on to
    another user. Returns None if the system refuses, which is logged once.
    """
    try:
        register_host(memory)
    except (MemoryError, OSError, RuntimeError) as error:
        if not _RefusalTold.refusal:
            _RefusalTold.refusal = True
            get_logger("device").info(
                "expected %d bytes of host memory that can be page-locked, found: %s; "
                "saves in the background wait for copies from the GPU: give the job "
                "more memory",
                memory.nbytes,
                error,
            )
        return None
    # Memory must be unregistered before it is freed (CUDA, cudaHostUnregister).
    unlock = weakref.finalize(owner, _unlock, memory)
    # Do not unlock at exit, when threads may still copy; the system unlocks the pages.
    unlock.atexit = False
    return unlock


def _unlock(memory: Array) -> None:
    # Unregistering fails in a forked child and after a GPU error: ignore the failure.
    with contextlib.suppress(MemoryError, OSError, RuntimeError):
        unregister_host(memory)


class Arrival:
    """Copies that are complete after a CUDA event (None: they are complete already)."""

    def __init__(self, event: Any = None, device: Any = None) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Wait for the copies, not for other GPU work; may run in any thread."""
        event, self._event = self._event, None
        if event is not None:
            self._device.use()
            event.synchronize()


class Downloads:
    """Copies from GPU memory to host memory, on their own stream.

    The GPU is the current GPU of the thread that creates this object; methods make it
    current in the threads that call them. Only the program's thread may call `begin`
    and `end`.
    """

    def __init__(self) -> None:
        import cupy

        # Each thread makes this device current, because CUDA's default is GPU 0, on
        # which each process would allocate a context.
        self._device = cupy.cuda.Device()
        self._lane = Lane()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Make later copies wait for the work of the program's stream so far."""
        self._lane.enter()

    def end(self) -> None:
        """Make the program's stream, but not the host, wait for the copies."""
        self._lane.leave()

    def fetch(
        self, pairs: Sequence[tuple[Array, Array]], locked: bool = False
    ) -> Arrival:
        """Copy contiguous bytes from the first array of each pair to the second array.

        ``locked`` is True if the second arrays are page-locked. If not, this method
        waits for the copies.
        """
        import cupy

        with self._lock:
            self._device.use()
            for source, target in pairs:
                _copy(target, source, self._lane)
            if not locked:
                return Arrival()
            # With block=True, a waiting thread sleeps instead of using a core.
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._lane.stream)
            return Arrival(event, self._device)

    def wait(self) -> None:
        """Wait for all copies, including the copies of a failed call."""
        self._device.use()
        self._lane.synchronize()


class Uploads:
    """Copies from host memory to GPU memory, on their own stream.

    The GPU is this thread's current GPU. The copies run after the work that the
    program's stream has when this object is created.
    """

    def __init__(self) -> None:
        self._lane = Lane()
        self._lane.enter()

    def put(self, source: Array, target: Array) -> None:
        """Copy bytes from host memory, page-locked or not, and wait for the copy."""
        _copy(target, source, self._lane)
        self._lane.synchronize()

    def end(self) -> None:
        """Make later work of the program's stream wait for the copies."""
        self._lane.leave()


def store(component: Array, value: Array) -> None:
    """Copy and cast a host array to a GPU array, in the program's current stream."""
    import cupy

    host = np.ascontiguousarray(value.astype(component.dtype, copy=False))
    component[...] = cupy.asarray(host.reshape(component.shape))
