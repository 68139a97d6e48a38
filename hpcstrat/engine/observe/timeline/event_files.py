"""The file of one rank's events, written by a thread while the program runs.

The program only appends tuples to a queue. The writer thread converts the tuples to
text, a few at a time, so that it never holds the interpreter lock for long, and writes
the text without the lock. The thread makes no MPI call.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.observe.timeline.events import Track, asynchronous, complete

__all__ = ["EventFile"]

_PAUSE_SECONDS = 1.0
_MOST_WAITING = 4096
_MOST_QUEUED = 1 << 18
# Number of events that are converted to text at a time, in about 100 microseconds.
_AT_A_TIME = 48
_END_SECONDS = 10.0
_NAP_SECONDS = 0.002


class EventFile:
    """A new file for one rank's events; raises OSError if it cannot be created.

    Time zero of the trace is ``base_ns`` of this clock. After ``most_bytes``, or after
    a write error, no more events are written, and ``accepts`` is False.
    """

    def __init__(self, path: str, track: Track, base_ns: int, most_bytes: int) -> None:
        self.path = path
        self.accepts = True
        self._track = track
        self._base_ns = base_ns
        self._most_bytes = most_bytes
        self._written = 0
        self._dropped = 0
        self._queue: deque[Any] = deque()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._ended = False
        # O_CLOEXEC, so that child processes do not inherit the open file.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._handle = os.open(path, flags, 0o666)
        # The first line opens the JSON array; a comma precedes each later event.
        first, *others = track.header()
        self._write("[\n" + first)
        for line in others:
            self._write(",\n" + line)
        self._thread = threading.Thread(
            target=self._loop, name="hpcstrat-timeline", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._handle)
            raise

    def put(self, event: Any) -> None:
        """Queue an event for the writer thread; any thread may call this method.

        ``event`` is an argument of `events.complete` or `events.asynchronous`, or a
        line of JSON. Lines of JSON are written even if the file has reached
        ``most_bytes``.
        """
        waiting = len(self._queue)
        if waiting > _MOST_QUEUED or (not self.accepts and type(event) is not str):
            # Drop the event: queued events must not fill the memory.
            self._dropped += 1
            return
        self._queue.append(event)
        if waiting == _MOST_WAITING:
            self._work.set()

    def flush(self, limit_seconds: float = 2.0) -> None:
        """Wait up to ``limit_seconds`` until the queued events have been written."""
        deadline = time.monotonic() + limit_seconds
        while self._queue or self._lock.locked():
            if not self._thread.is_alive() or time.monotonic() > deadline:
                return
            self._work.set()
            time.sleep(_NAP_SECONDS)

    def close(self) -> None:
        """Write all queued events, and close the file; repeated calls do nothing."""
        self._ended = True
        self._work.set()
        self._thread.join(_END_SECONDS)

    def _loop(self) -> None:
        while not self._ended:
            self._work.wait(_PAUSE_SECONDS)
            self._work.clear()
            with self._lock:
                self._drain()
        self._drain()
        if self._dropped:
            get_logger("timeline").info(
                "%d events were left out of %s", self._dropped, self.path
            )
        self._write("\n]\n")
        os.close(self._handle)

    def _drain(self) -> None:
        queue = self._queue
        while queue:
            lines: list[str] = []
            while queue and len(lines) < _AT_A_TIME:
                lines.append(self._line(queue.popleft()))
            self._write(",\n" + ",\n".join(lines))

    def _line(self, event: Any) -> str:
        if type(event) is str:
            return event
        form: Any = complete if len(event) == 6 else asynchronous
        line: str = form(self._track, self._base_ns, event)
        return line

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            while data:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            self._stop(f"it cannot be written: {error}")
            return
        self._written += len(text)
        if self._written > self._most_bytes:
            self._stop(
                f"it has reached {self._most_bytes >> 20} MiB; raise "
                "timeline_megabytes, or record a part of the program by "
                "strategy.timeline()"
            )

    def _stop(self, why: str) -> None:
        if self.accepts:
            self.accepts = False
            # Only replica 0 warns, because all ranks' files fill up at the same time.
            if self._track.replica == 0:
                get_logger("timeline").warning("%s ends here: %s", self.path, why)
