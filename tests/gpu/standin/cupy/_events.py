"""Events, also those that other processes open: two counters each.

An event that may be shared keeps its counters in a file in memory. Recording adds one
to the first; the stream then stores that number into the second. A wait is for the
number of recordings at the moment of the call.
"""

import fcntl
import itertools
import mmap
import os
import struct
import threading
import time

import numpy as np

from cupy import _queues
from cupy._errors import INVALID_HANDLE, INVALID_VALUE, CUDARuntimeError

_MAGIC = b"hpcsevt1"
_HANDLE = struct.Struct("<8sQQQ32x")
_numbers = itertools.count(0xE5EA0010, 16)
_events = {}


class EventState:
    """What an event is, given by its pointer."""

    def __init__(self, flags, device, fd=None):
        self.flags = flags
        self.device = device
        self.ptr = next(_numbers)
        self.fd = fd
        self.time = None
        self.changed = threading.Condition()
        self.shared = fd is not None
        # Recordings that were passed, in whatever order their streams came there.
        self.passed = set()
        if fd is None:
            self.counters = np.zeros(2, np.int64)
        else:
            self.counters = np.frombuffer(mmap.mmap(fd, 16), np.int64)

    def record(self, queue):
        """Put the event into a stream."""
        if queue.device != self.device:
            raise CUDARuntimeError(INVALID_HANDLE)
        number = self._next()
        queue.put(lambda: self._complete(number))

    def _next(self):
        with self.changed:
            if self.fd is not None:
                fcntl.lockf(self.fd, fcntl.LOCK_EX)
            try:
                self.counters[0] += 1
                return int(self.counters[0])
            finally:
                if self.fd is not None:
                    fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def _complete(self, number):
        with self.changed:
            self.time = time.perf_counter()
            if self.shared:
                # Others see the counter only; it is recorded on one stream.
                self.counters[1] = max(number, int(self.counters[1]))
            else:
                self.passed.add(number)
            while int(self.counters[1]) + 1 in self.passed:
                self.counters[1] += 1
                self.passed.discard(int(self.counters[1]))
            self.changed.notify_all()

    def recorded(self):
        """Return how often the event has been recorded."""
        return int(self.counters[0])

    def reached(self, number):
        """Tell whether recording ``number`` has been passed."""
        return int(self.counters[1]) >= number or number in self.passed

    def wait(self, number):
        """Wait until recording ``number`` has been passed."""
        with self.changed:
            while not self.reached(number) and not _queues.ending():
                # Another process cannot notify this one.
                self.changed.wait(0.0002 if self.shared else 0.1)

    def handle(self):
        """Return the handle for other processes: 64 bytes."""
        if self.fd is None:
            raise CUDARuntimeError(INVALID_VALUE)
        return _HANDLE.pack(_MAGIC, os.getpid(), self.fd, os.fstat(self.fd).st_ino)


def create(flags):
    """Make an event with the flags of ``cudaEventCreateWithFlags``."""
    if flags & ~7:
        raise CUDARuntimeError(INVALID_VALUE)
    fd = None
    if flags & 4:
        if not flags & 2:
            # CUDA shares only events that measure no time.
            raise CUDARuntimeError(INVALID_VALUE)
        fd = os.memfd_create("standin-event")
        os.ftruncate(fd, 16)
    event = EventState(flags, _queues.current_device(), fd)
    _events[event.ptr] = event
    return event


def attach(handle):
    """Open another process's event."""
    if len(handle) != _HANDLE.size:
        raise CUDARuntimeError(INVALID_VALUE)
    magic, pid, fd, number = _HANDLE.unpack(bytes(handle))
    if magic != _MAGIC or pid == os.getpid():
        raise CUDARuntimeError(INVALID_VALUE)
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as exc:
        raise CUDARuntimeError(INVALID_VALUE) from exc
    if os.fstat(own).st_ino != number:
        os.close(own)
        raise CUDARuntimeError(INVALID_VALUE)
    event = EventState(6, _queues.current_device(), own)
    _events[event.ptr] = event
    return event


def find(ptr):
    """Return the event with this pointer."""
    event = _events.get(ptr)
    if event is None:
        raise CUDARuntimeError(INVALID_HANDLE)
    return event


def destroy(ptr):
    """Destroy an event."""
    event = _events.pop(ptr, None)
    if event is None:
        raise CUDARuntimeError(INVALID_HANDLE)
    if event.fd is not None:
        os.close(event.fd)
        event.fd = None
