"""Totals of one rank's time by category, without an event file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from hpcstrat.engine.observe.timeline.events import Track
from hpcstrat.engine.observe.timeline.recorder import DATA, Recorder, active

__all__ = ["Totals", "totals"]


class Totals:
    """Replaces a recorder's event file: receives the events, and adds their times.

    Only events of the thread that created this object count. ``late_ns`` is the time
    spent waiting in calls until all ranks have arrived. ``communication_ns`` is the
    time of data exchanges, and of waits for pending calls. ``input_ns`` is the time in
    ``next()`` of a dataset, without collective calls inside of ``next()``.
    ``num_calls`` is the number of collective calls, and ``nbytes`` their bytes.
    """

    def __init__(self) -> None:
        self.late_ns = self.communication_ns = self.input_ns = 0
        self.num_calls = self.nbytes = 0
        # Start and duration of waits and data exchanges, some inside of a next().
        self._inner: list[tuple[int, int]] = []
        self._thread = threading.get_ident()

    def put(self, event: Any) -> None:
        """Add an event to the totals; accepts the same events as `EventFile.put`."""
        if type(event) is str or len(event) != 6:
            return
        name, category, start, end, args, _ = event
        if threading.get_ident() != self._thread:
            return
        took = end - start
        if category == "wait":
            # A pending call has no sequence number; its wait is mostly a wait for data.
            if "sequence" in args:
                self.late_ns += took
                self.num_calls += 1
                self.nbytes += args["bytes"]
            else:
                self.communication_ns += took
        elif name == DATA:
            self.communication_ns += took
        elif name == "next":
            inner = sum(took for began, took in self._inner if began >= start)
            self.input_ns += took - inner
            return
        else:
            return
        self._inner.append((start, took))

    def take(self) -> tuple[int, int, int, int, int]:
        """Return all totals, in the order of the attributes, and reset them to zero."""
        taken = (
            self.late_ns,
            self.communication_ns,
            self.input_ns,
            self.num_calls,
            self.nbytes,
        )
        self.late_ns = self.communication_ns = self.input_ns = 0
        self.num_calls = self.nbytes = 0
        self._inner.clear()
        return taken

    def flush(self) -> None:
        """Do nothing: there is no file."""

    close = flush


@contextlib.contextmanager
def totals() -> Iterator[Totals]:
    """Record this process in `Totals`; raise RuntimeError if a timeline is active."""
    if active.recorder is not None:
        raise RuntimeError(
            "expected no timeline around a measurement, found that one is being "
            "recorded; unset HPCSTRAT_TIMELINE and HPCSTRAT_NVTX"
        )
    recorder = Recorder(Track())
    recorder.file = found = Totals()
    active.recorder = recorder
    try:
        yield found
    finally:
        active.recorder = None
