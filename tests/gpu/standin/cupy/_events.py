"""CUDA events: each event has two counters.

A recording increments the first counter, and the stream later stores this number into
the second counter. A wait is for the number of recordings at the moment of the call.
"""

import itertools
import threading
import time

import numpy as np

from cupy import _queues
from cupy._errors import INVALID_HANDLE, INVALID_VALUE, CUDARuntimeError

_numbers = itertools.count(0xE5EA0010, 16)
_events = {}


class EventState:
    """The state of an event, which is found by its pointer."""

    def __init__(self, flags, device):
        self.flags = flags
        self.device = device
        self.ptr = next(_numbers)
        self.time = None
        self.changed = threading.Condition()
        # Recordings that streams have passed, in any order.
        self.passed = set()
        self.counters = np.zeros(2, np.int64)

    def record(self, queue):
        """Record the event in a stream."""
        if queue.device != self.device:
            raise CUDARuntimeError(INVALID_HANDLE)
        number = self._next()
        queue.put(lambda: self._complete(number))

    def _next(self):
        with self.changed:
            self.counters[0] += 1
            return int(self.counters[0])

    def _complete(self, number):
        with self.changed:
            self.time = time.perf_counter()
            self.passed.add(number)
            while int(self.counters[1]) + 1 in self.passed:
                self.counters[1] += 1
                self.passed.discard(int(self.counters[1]))
            self.changed.notify_all()

    def recorded(self):
        """Return the number of recordings of the event."""
        return int(self.counters[0])

    def reached(self, number):
        """Return whether the stream has passed recording ``number``."""
        return int(self.counters[1]) >= number or number in self.passed

    def wait(self, number):
        """Wait until the stream has passed recording ``number``."""
        with self.changed:
            while not self.reached(number) and not _queues.ending():
                self.changed.wait(0.1)


def create(flags):
    """Make an event with the flags of ``cudaEventCreateWithFlags``."""
    if flags & ~3:
        raise CUDARuntimeError(INVALID_VALUE)
    event = EventState(flags, _queues.current_device())
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
    if _events.pop(ptr, None) is None:
        raise CUDARuntimeError(INVALID_HANDLE)
