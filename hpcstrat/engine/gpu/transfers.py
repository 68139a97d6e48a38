"""Copies between host memory and a GPU that run beside what the program computes.

Copies that are to run by themselves need page-locked host memory: either the memory
itself, see `lock_pages`, or a small buffer through which the bytes go.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.gpu.device_memory import (
    pinned_memory,
    register_host,
    unregister_host,
)
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array

__all__ = ["Arrival", "Downloads", "Uploads", "address_of", "lock_pages", "store"]

# Size of each of the two halves of a page-locked buffer: one fills, one empties.
_HALF_BYTES = 8 << 20


def address_of(array: Array) -> int:
    """Return where an array begins, in the memory of the host or of the GPU."""
    if is_device(array):
        device: Any = array
        return int(device.data.ptr)
    return int(array.__array_interface__["data"][0])


def _event() -> Any:
    """Return an event on which threads sleep, as a thread that spins takes a core."""
    import cupy

    return cupy.cuda.Event(block=True, disable_timing=True)


def _copy(target: Array, source: Array, lane: Lane) -> None:
    """Have bytes copied on a lane; one side is on the GPU, the other page-locked."""
    from cupy.cuda import runtime

    kind = (
        runtime.memcpyHostToDevice if is_device(target) else runtime.memcpyDeviceToHost
    )
    runtime.memcpyAsync(
        address_of(target), address_of(source), source.nbytes, kind, lane.stream.ptr
    )


class _RefusalTold:
    """Whether it was said that the system refuses to lock pages."""

    refusal = False


def lock_pages(owner: Any, memory: Array) -> Callable[[], Any] | None:
    """Lock pages of host memory, which a GPU then reads and writes by itself.

    Returns a function that unlocks them, as the end of their owner does; until then
    they must neither be given back to the system nor lent. None where the system
    refuses, which is told once.
    """

    try:
        register_host(memory)
    except (MemoryError, OSError, RuntimeError) as error:
        if not _RefusalTold.refusal:
            _RefusalTold.refusal = True
            get_logger("device").info(
                "expected %d bytes of host memory that can be page-locked, found: %s; "
                "copies from the GPU go through a small buffer, and saves in the "
                "background wait for them: give the job more memory",
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
    # In a child, which has no GPU, and after an error of the GPU, there is nothing
    # that could be done about it.
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

    Made for this thread's current GPU, which other threads that call its methods then
    have, too. All but `begin` and `end` may be called by any thread.
    """

    def __init__(self) -> None:
        import cupy

        # Threads would otherwise use CUDA's default GPU, number 0, and each process
        # would take memory of it.
        self._device = cupy.cuda.Device()
        self._lane = Lane()
        self._lock = threading.Lock()
        self._halves: list[Array] = []

    def begin(self) -> None:
        """Let the copies that follow see what the program's stream has been given.

        For the program's thread.
        """
        self._lane.enter()

    def end(self) -> None:
        """Let what the program's stream is given from here on wait for the copies.

        For the program's thread, which does not wait.
        """
        self._lane.leave()

    def fetch(
        self, pairs: Sequence[tuple[Array, Array]], locked: bool = False
    ) -> Arrival:
        """Copy contiguous bytes from the first of each pair to the second.

        Into memory that is not page-locked, the caller waits for it.
        """
        with self._lock:
            self._device.use()
            if not locked:
                self._fetch_in_halves(pairs)
                return Arrival()
            for source, target in pairs:
                _copy(target, source, self._lane)
            event = _event()
            event.record(self._lane.stream)
            return Arrival(event, self._device)

    def _fetch_in_halves(self, pairs: Iterable[tuple[Array, Array]]) -> None:
        """Copy by a page-locked buffer: while one half fills, the other empties."""
        if not self._halves:
            self._halves = [pinned_memory(_HALF_BYTES) for _ in range(2)]
        flying: list[tuple[Array, list[Array], Any]] = []
        try:
            for number, group in enumerate(_groups(pairs)):
                half, done = self._halves[number % 2], 0
                for source, _ in group:
                    _copy(half[done : done + source.size], source, self._lane)
                    done += source.size
                event = _event()
                event.record(self._lane.stream)
                flying.append((half, [target for _, target in group], event))
                if len(flying) == len(self._halves):
                    _empty(flying.pop(0))
            while flying:
                _empty(flying.pop(0))
        except BaseException:
            # A failure leaves no copy under way, as the halves may then be used again.
            self._lane.synchronize()
            raise

    def wait(self) -> None:
        """Wait for all copies, also those of a call that failed."""
        self._device.use()
        self._lane.synchronize()


def _groups(
    pairs: Iterable[tuple[Array, Array]],
) -> Iterator[list[tuple[Array, Array]]]:
    """Yield pieces that together fit one half, in order."""
    group: list[tuple[Array, Array]] = []
    room = _HALF_BYTES
    for source, target in pairs:
        done = 0
        while done < source.size:
            count = min(room, source.size - done)
            part = slice(done, done + count)
            group.append((source[part], target[part]))
            done, room = done + count, room - count
            if not room:
                yield group
                group, room = [], _HALF_BYTES
    if group:
        yield group


def _empty(flying: tuple[Array, list[Array], Any]) -> None:
    half, targets, event = flying
    event.synchronize()
    done = 0
    for target in targets:
        target[:] = half[done : done + target.size]
        done += target.size


class Uploads:
    """Copies from host memory to the memory of a GPU, on a stream of their own.

    Made for this thread's current GPU, and for what the program's stream has been given
    until then.
    """

    def __init__(self) -> None:
        self._lane = Lane()
        self._lane.enter()
        self._halves = [pinned_memory(_HALF_BYTES) for _ in range(2)]
        # The copy from each half has ended when the GPU has come to its event.
        self._events: list[Any] = [None, None]
        self._turn = self._used = 0

    def put(self, source: Array, target: Array) -> None:
        """Copy bytes of any host memory, which may change on return."""

        done = 0
        while done < source.size:
            if self._used == _HALF_BYTES:
                self._switch()
            count = min(_HALF_BYTES - self._used, source.size - done)
            place = self._halves[self._turn][self._used : self._used + count]
            place[:] = source[done : done + count]
            _copy(target[done : done + count], place, self._lane)
            done += count
            self._used += count

    def _switch(self) -> None:
        event = self._events[self._turn] = self._events[self._turn] or _event()
        event.record(self._lane.stream)
        self._turn, self._used = 1 - self._turn, 0
        if self._events[self._turn] is not None:
            self._events[self._turn].synchronize()

    def end(self) -> None:
        """Let the program's stream wait for the copies, and wait for them here, too.

        The page-locked memory is given back then.
        """
        self._lane.leave()
        self._lane.synchronize()
        self._halves = []


def store(component: Array, value: Array) -> None:
    """Put a value of the host into an array on the GPU of the same shape, and any type.

    In the order of the program's current stream.
    """
    import cupy

    host = np.ascontiguousarray(value.astype(component.dtype, copy=False))
    component[...] = cupy.asarray(host.reshape(component.shape))
