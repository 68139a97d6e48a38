"""Events of a watcher's main thread: from other threads, and ends of processes."""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
from typing import Any

__all__ = ["EventInbox"]


class EventInbox:
    """A queue of events, each a tuple of its kind and its values.

    Any thread may put events; only the main thread waits and watches processes.
    """

    def __init__(self) -> None:
        self._events: collections.deque[tuple[Any, ...]] = collections.deque()
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def __repr__(self) -> str:
        return f"EventInbox({len(self._events)} events)"

    def put(self, *event: Any) -> None:
        """Add an event; a signal handler may do that, too."""
        self._events.append(event)
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"x")

    def watch(self, pid: int, *event: Any) -> None:
        """Put an event at the end of a process."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            self.put(*event)
        else:
            self._selector.register(handle, selectors.EVENT_READ, event)

    def wait(self, seconds: float) -> list[tuple[Any, ...]]:
        """Return the events so far, after at most a time without any."""
        for key, _ in self._selector.select(0 if self._events else seconds):
            if key.fileobj == self._wakeup:
                os.read(self._wakeup, 4096)
            else:
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
                self._events.append(key.data)
        return [self._events.popleft() for _ in range(len(self._events))]
