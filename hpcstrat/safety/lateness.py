"""Reports of the time that ranks waited for late ranks: at the end, or on a signal."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.observe.arrivals import Arrivals
from hpcstrat.engine.settings import Settings

__all__ = ["conclude", "forget", "watch"]

_NOTABLE_SHARE = 0.1
_NOTABLE_SECONDS = 10.0
# Time to wait until the other ranks of a worker have published their statistics.
_ANSWER_SECONDS = 0.3

# Arrival statistics of open channels, and the ``summary`` setting of each channel.
_watched: dict[Arrivals, str] = {}


def watch(arrivals: Arrivals, settings: Settings) -> None:
    """Include a channel's arrival statistics in reports, until `forget`."""
    _watched[arrivals] = settings.summary or "off"
    if settings.summary_signal not in (None, "none"):
        _listen(getattr(signal, f"SIG{str(settings.summary_signal).upper()}"))


def forget(arrivals: Arrivals) -> None:
    """Exclude a channel's statistics from reports; a second call has no effect."""
    _watched.pop(arrivals, None)


def conclude(arrivals: Arrivals) -> None:
    """Report late ranks at the end of a channel, if the settings ask for it.

    Collective over ``topology.replica_comm``.
    """
    mode = _watched.pop(arrivals, "off")
    report = None if mode == "off" else arrivals.at_end()
    if report is None:
        return
    costs = report.share > _NOTABLE_SHARE and report.waited_seconds > _NOTABLE_SECONDS
    logger = get_logger("arrivals")
    if mode == "on":
        # Log at the level of warnings, because lower levels are hidden by default.
        logger.warning("%s", report)
    elif costs:
        logger.warning("%s", report.sentence())


class _Listening:
    """The process for which the signal handler was installed."""

    process = 0


def _listen(number: int) -> None:
    """Print statistics on a signal from now on, unless the program handles it."""
    if threading.current_thread() is not threading.main_thread():
        return
    _Listening.process = os.getpid()
    if signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Publish this rank's statistics; the worker's first rank prints them later."""
    del number, frame
    if os.getpid() != _Listening.process:
        # This is a forked child process: the statistics belong to its parent.
        return
    for arrivals in list(_watched):
        arrivals.publish()
    if any(arrivals.leads for arrivals in _watched):
        # Avoid `threading`, whose locks the interrupted code may hold: a deadlock.
        _thread.start_new_thread(_print, (os.getpid(),))


def _print(process: Any) -> None:
    """Print the statistics of this worker's ranks from shared memory, without MPI."""
    time.sleep(_ANSWER_SECONDS)
    for arrivals in list(_watched):
        report = arrivals.of_worker()
        if arrivals.leads and len(report) and os.getpid() == process:
            title = f"hpcstrat: worker {arrivals.topology.worker_id}"
            # Avoid sys.stderr: Python crashes if it ends while a thread holds its lock.
            os.write(2, f"{title}: {report}\n".encode())
