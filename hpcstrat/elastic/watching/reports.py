"""Calls of a program to the watcher of its node; they do nothing without a watcher."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from hpcstrat.elastic.watching.child_start import tell

__all__ = ["report_progress"]

_PAUSE_SECONDS = 1.0
_last_report = [-_PAUSE_SECONDS]


def report_progress(step: int) -> None:
    """Tell the watcher that the program has finished a step.

    Not collective.

    Without progress, the watchers of ``hpcstrat watch`` end after some starts in a row.
    A call does nothing without a watcher, and sends at most one report per second.

    Parameters
    ----------
    step : int
        Number of the step, from 0. The largest step of all ranks counts.
    """
    path = os.environ.get("HPCSTRAT_WATCH_SOCKET")
    now = time.monotonic()
    if path and now - _last_report[0] >= _PAUSE_SECONDS:
        _last_report[0] = now
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as watcher:
            watcher.settimeout(_PAUSE_SECONDS)
            watcher.connect(path)
            tell(watcher, "progress", step=int(step))
