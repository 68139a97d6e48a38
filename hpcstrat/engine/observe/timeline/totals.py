"""Totals of one rank's time, added up while the program runs; no file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from hpcstrat.engine.observe.timeline.events import Track
from hpcstrat.engine.observe.timeline.recorder import DATA, Recorder, active

__all__ = ["Totals", "totals"]


class Totals:
    """Takes a recorder's events in place of a file, and keeps sums.

    Counts the thread that made it. ``late_ns`` is time spent waiting in calls until all
    ranks have come; ``communication_ns`` is time in exchanges of data after that, and
    waiting for calls that were started before; ``input_ns`` is time in ``next()`` of a
    data set, without calls in it. ``num_calls`` and ``nbytes`` are of calls.
    """

    def __init__(self) -> None:
        self.late_ns = self.communication_ns = self.input_ns = 0
        self.num_calls = self.nbytes = 0
        # Start and duration of waits and data transfers, some of which lie within a
        # next().
        self._inner: list[tuple[int, int]] = []
        self._thread = threading.get_ident()

    def put(self, event: Any) -> None:
        """Add an event, as `EventFile.put` does."""
        if type(event) is str or len(event) != 6:
            return
        name, category, start, end, args, _ = event
        if threading.get_ident() != self._thread:
            return
        took = end - start
        if category == "wait":
            # Calls that were started earlier have no number: the wait for them is
            # mostly a wait for data.
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
        """Return late, communication, input, calls and bytes; begin anew."""
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
    """Record this process into `Totals`; RuntimeError where a timeline is recorded."""
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
