"""Records events and ranges of the library and of the program, while recording is on.

While recording is off, the only cost is the test ``active.recorder is None``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from hpcstrat.engine.observe.timeline.alignment import Sample
from hpcstrat.engine.observe.timeline.event_files import EventFile
from hpcstrat.engine.observe.timeline.events import (
    CLOCK_EVENT,
    Track,
    metadata,
    shown_text,
)

__all__ = ["DATA", "WAIT", "Recorder", "active", "recorded_wait", "trace", "traced"]

# Names of the parts of a collective call.
WAIT = "wait for the others"
DATA = "data"

_PLAIN = (bool, float, int, str, type(None))
_NOTHING = contextlib.nullcontext()
_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Active:
    """The recorder of this process; ``recorder`` is None if recording is off."""

    def __init__(self) -> None:
        # The open channels of this process, whose calls the recorder must see.
        self.channels: list[Any] = []
        self.recorder: Recorder | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and make channels notice the change at their next call."""
        super().__setattr__(name, value)
        for channel in list(self.channels):
            channel.state.attention = True

    def forget(self) -> None:
        """Stop recording in a forked child, which does not have the writer thread."""
        self.recorder = None


active = _Active()
os.register_at_fork(after_in_child=active.forget)


class EventSink(Protocol):
    """The interface of objects that receive events, such as `EventFile`."""

    def put(self, event: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Records ranges of time into a file, as NVTX ranges, or both.

    ``nvtx`` has the functions ``RangePush`` and ``RangePop`` of ``cupy.cuda.nvtx``.
    """

    def __init__(self, track: Track, nvtx: Any = None) -> None:
        self.track = track
        self.file: EventSink | None = None
        self._nvtx = nvtx
        self._base_ns = 0
        self._main = threading.get_ident()
        self._threads = {self._main: 0}
        self._lock = threading.Lock()
        # The last call at which all ranks have arrived. Its range ends after its data
        # exchange, or when all ranks arrive at the next call.
        self._call: Any = None
        self._num_started = 0

    def open(self, path: str, zero_ns: int, sample: Sample, most_bytes: int) -> None:
        """Create a new event file; raise OSError if it cannot be created.

        Time zero of the trace is ``zero_ns`` of the reference clock, and ``sample`` has
        the current offset of this clock. Events beyond ``most_bytes`` are not written.
        """
        self._base_ns = zero_ns - sample.offset_ns
        self.file = EventFile(path, self.track, self._base_ns, most_bytes)
        self.add_clock(sample)

    def add_clock(self, sample: Sample) -> None:
        """Write a measured offset of this clock to the event file."""
        args = {
            "base_ns": self._base_ns,
            "local_ns": sample.local_ns,
            "offset_ns": sample.offset_ns,
            "round_trip_ns": sample.round_trip_ns,
        }
        if self.file is not None:
            self.file.put(metadata(self.track, CLOCK_EVENT, args))

    def enter(self, name: str) -> int:
        """Begin a range; return its start time for `leave`. Ranges may be nested."""
        if self._nvtx is not None:
            self._nvtx.RangePush(name)
        return time.perf_counter_ns()

    def leave(self, name: str, category: str, start: int, args: Any = None) -> None:
        """End the innermost range of this thread.

        ``args`` are shown with the range, as ``str`` if JSON cannot encode them.
        """
        end = time.perf_counter_ns()
        if self._nvtx is not None:
            self._nvtx.RangePop()
        # Another thread may close the file and set the attribute to None.
        file = self.file
        if file is not None:
            file.put((name, category, start, end, args, self._thread(file)))

    def around(
        self, function: Callable[..., Any], name: str, category: str, args: Any = None
    ) -> Callable[..., Any]:
        """Return a wrapper of a function that records each call as a range."""

        def _recorded(*values: Any, **named: Any) -> Any:
            start = self.enter(name)
            try:
                return function(*values, **named)
            finally:
                self.leave(name, category, start, args)

        return _recorded

    def agreed(self, text: str, args: dict[str, Any], start: int) -> None:
        """Record that all ranks have arrived at a call, whose wait `enter` began."""
        self.leave(WAIT, "wait", start, args)
        self._finish_call()
        self._call = text, args, start, time.perf_counter_ns()

    def enter_data(self, text: str) -> None:
        """Begin the data exchange of a call."""
        if self._nvtx is not None:
            self._nvtx.RangePush(f"{DATA} of {text}")

    def leave_data(self, text: str) -> None:
        """End the data exchange of a call, which `enter_data` has begun.

        For pending calls, no data exchange is recorded in the file.
        """
        end = time.perf_counter_ns()
        if self._nvtx is not None:
            self._nvtx.RangePop()
        # The progress thread of pending calls runs this method, too.
        if threading.get_ident() == self._main and self._call is not None:
            self._finish_call(end if self._call[0] == text else 0)

    def _finish_call(self, end: int = 0) -> None:
        if self._call is None or self.file is None:
            return
        text, args, start, at = self._call
        self._call = None
        name, thread = _short(text), self._thread(self.file)
        # Extend the call's range by 1 ns, so that no part has the same start or end.
        whole = (name, "collective", start - 1, max(end, at) + 1, args, thread)
        self.file.put(whole)
        if end:
            self.file.put((DATA, "data", at, end, None, thread))

    def started(self, call: Any) -> None:
        """Record the start of a pending call."""
        if self.file is not None:
            self._num_started += 1
            # The mark pairs start and end. A call that was started before the recording
            # has no mark, so its end is not recorded.
            call.mark = str(self._num_started)
            name, args = _short(call.call.text), {"call": call.call.text}
            at = time.perf_counter_ns()
            self.file.put((name, "b", at, call.mark, args))

    def ended(self, call: Any) -> None:
        """Record the end of a pending call."""
        file = self.file
        if file is not None and call.mark:
            name, at = _short(call.call.text), time.perf_counter_ns()
            file.put((name, "e", at, call.mark, None))

    def _thread(self, file: EventSink) -> int:
        """Return the number of the calling thread in the trace."""
        ident = threading.get_ident()
        number = self._threads.get(ident)
        if number is None:
            with self._lock:
                number = self._threads[ident] = len(self._threads)
            name = f"replica {self.track.replica}, {threading.current_thread().name}"
            for line in self.track.thread(number, name):
                file.put(line)
        return number

    def flush(self) -> None:
        """Write all recorded events to the file, before the process ends."""
        if self.file is not None:
            self._finish_call()
            self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self._finish_call()
            file, self.file = self.file, None
            file.close()


def _short(text: str) -> str:
    """Return the name of a call, without the description of its arrays."""
    return text.partition(" of ")[0][:80]


@dataclass(slots=True)
class _Range:
    """A context manager that records a range."""

    recorder: Recorder
    name: str
    args: Any
    category: str = "program"
    start: int = 0

    def __enter__(self) -> None:
        self.start = self.recorder.enter(self.name)

    def __exit__(self, *_: object) -> None:
        self.recorder.leave(self.name, self.category, self.start, self.args)


def trace(name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
    """Record a range of the program under a name, if recording is on.

    Not collective. May be used by any thread.

    Parameters
    ----------
    name : str
        Name of the range.
    **args : object
        Details of the range, shown with it in the timeline.

    Returns
    -------
    context manager
        The recorded range is the ``with`` block. Ranges may be nested.
    """
    recorder = active.recorder
    if recorder is None:
        return _NOTHING
    # Convert to text now: the objects may change before the writer thread runs.
    shown = {key: v if type(v) in _PLAIN else shown_text(v) for key, v in args.items()}
    return _Range(recorder, name, shown or None)


def recorded_wait(text: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that records a wait for a pending call."""
    recorder = active.recorder
    if recorder is None:
        return _NOTHING
    return _Range(recorder, WAIT, {"call": text}, "wait")


def traced(name: str, category: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that records each call of a function as a range."""

    def _decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def _recorded(*values: _P.args, **named: _P.kwargs) -> _R:
            recorder = active.recorder
            if recorder is None:
                return function(*values, **named)
            with _Range(recorder, name, None, category):
                return function(*values, **named)

        return _recorded

    return _decorate
