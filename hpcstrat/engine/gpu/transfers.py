"""Copies between host memory and a GPU that run beside what the program computes.

Only copies from and to page-locked host memory run by themselves, see `lock_pages`.
Other host memory CUDA copies through buffers of its own while the caller waits.
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
    """Return where an array begins, in the memory of the host or of the GPU."""
    if is_device(array):
        device: Any = array
        return int(device.data.ptr)
    return int(array.__array_interface__["data"][0])


def _copy(target: Array, source: Array, lane: Lane) -> None:
    """Copy bytes on a lane, from the GPU or to it.

    From memory of the host that is not page-locked this returns when the bytes have
    been read; to such memory, when they are there (CUDA Runtime API, "API
    synchronization behavior").
    """
    from cupy.cuda import runtime

    kind = (
        runtime.memcpyHostToDevice if is_device(target) else runtime.memcpyDeviceToHost
    )
    runtime.memcpyAsync(
        address_of(target), address_of(source), source.nbytes, kind, lane.stream.ptr
    )


class _RefusalTold:
    """Whether the log says that the system refuses to lock pages."""

    refusal = False


def lock_pages(owner: Any, memory: Array) -> Callable[[], Any] | None:
    """Lock pages of host memory, which a GPU then reads and writes by itself.

    Returns a function that unlocks them, as the end of their owner does; until then the
    memory must neither be given back to the system nor lent. None where the system
    refuses, which is logged once.
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
    # Memory must be unregistered before it is freed (CUDA Runtime API,
    # cudaHostUnregister).
    unlock = weakref.finalize(owner, _unlock, memory)
    # Threads may still copy while a program ends; the system unlocks all then.
    unlock.atexit = False
    return unlock


def _unlock(memory: Array) -> None:
    # It fails in a child process, which has no GPU, and after an error of the GPU:
    # nothing can be done there.
    with contextlib.suppress(MemoryError, OSError, RuntimeError):
        unregister_host(memory)


class Arrival:
    """Copies that are there when the GPU has come to an event; at once without one."""

    def __init__(self, event: Any = None, device: Any = None) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Wait for the copies; the GPU goes on with all else. For any thread."""
        event, self._event = self._event, None
        if event is not None:
            self._device.use()
            event.synchronize()


class Downloads:
    """Copies from the memory of a GPU into host memory, on a stream of their own.

    For the GPU that is this thread's when it is made; other threads that call its
    methods compute on that GPU, too. All but `begin` and `end` may be called by any
    thread.
    """

    def __init__(self) -> None:
        import cupy

        # Threads would otherwise use CUDA's default GPU, number 0, and each process
        # would take memory of it.
        self._device = cupy.cuda.Device()
        self._lane = Lane()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Let the copies that follow see the work of the program's stream so far.

        For the program's thread.
        """
        self._lane.enter()

    def end(self) -> None:
        """Let the work of the program's stream from here on wait for the copies.

        For the program's thread, which does not wait.
        """
        self._lane.leave()

    def fetch(
        self, pairs: Sequence[tuple[Array, Array]], locked: bool = False
    ) -> Arrival:
        """Copy contiguous bytes from the first of each pair to the second.

        ``locked`` says that the second are page-locked; otherwise the bytes are there
        on return.
        """
        import cupy

        with self._lock:
            self._device.use()
            for source, target in pairs:
                _copy(target, source, self._lane)
            if not locked:
                return Arrival()
            # Threads sleep on this event; one that spins would take a core.
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._lane.stream)
            return Arrival(event, self._device)

    def wait(self) -> None:
        """Wait for all copies, also those of a call that failed."""
        self._device.use()
        self._lane.synchronize()


class Uploads:
    """Copies from host memory to the memory of a GPU, on a stream of their own.

    Made for this thread's current GPU; they follow the work of the program's stream so
    far.
    """

    def __init__(self) -> None:
        self._lane = Lane()
        self._lane.enter()

    def put(self, source: Array, target: Array) -> None:
        """Copy bytes of any host memory, which may change on return."""
        _copy(target, source, self._lane)
        self._lane.synchronize()

    def end(self) -> None:
        """Let the program's stream follow the copies."""
        self._lane.leave()


def store(component: Array, value: Array) -> None:
    """Put a value of the host into an array on the GPU of the same shape, and any type.

    In the order of the program's current stream.
    """
    import cupy

    host = np.ascontiguousarray(value.astype(component.dtype, copy=False))
    component[...] = cupy.asarray(host.reshape(component.shape))
