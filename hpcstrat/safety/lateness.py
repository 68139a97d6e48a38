"""Reports late ranks in words: at the end of the program, and on a signal."""

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
# Time in which the other ranks of a worker show their newest numbers.
_ANSWER_SECONDS = 0.3

# Statistics of open strategies, each with the name in its final summary.
_watched: dict[Arrivals, str] = {}


def watch(arrivals: Arrivals, settings: Settings) -> None:
    """Add a channel's arrivals to those that are reported."""
    _watched[arrivals] = settings.summary or "off"
    if settings.summary_signal not in (None, "none"):
        _listen(getattr(signal, f"SIG{str(settings.summary_signal).upper()}"))


def forget(arrivals: Arrivals) -> None:
    """Take a channel's arrivals out again; a second call does nothing."""
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
        # A warning, as lower levels are hidden unless the program asks for them.
        logger.warning("%s", report)
    elif costs:
        logger.warning("%s", report.sentence())
    else:
        logger.info("%s", report.sentence())


class _Listening:
    """The process that serves the signal."""

    process = 0


def _listen(number: int) -> None:
    """Serve a signal, unless the program does: by default it would end the process."""
    if threading.current_thread() is not threading.main_thread():
        return
    _Listening.process = os.getpid()
    if signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Show this rank's numbers; the first of a worker prints them a moment later."""
    del number, frame
    if os.getpid() != _Listening.process:
        # A forked child, to which these numbers and their memory do not belong.
        return
    for arrivals in list(_watched):
        arrivals.publish()
    if any(arrivals.leads for arrivals in _watched):
        # The module threading takes locks, which the interrupted code may hold.
        _thread.start_new_thread(_print, (os.getpid(),))


def _print(process: Any) -> None:
    """Print the numbers of this worker's ranks; makes no MPI call."""
    time.sleep(_ANSWER_SECONDS)
    for arrivals in list(_watched):
        report = arrivals.of_worker()
        if arrivals.leads and len(report) and os.getpid() == process:
            title = f"hpcstrat: worker {arrivals.topology.worker_id}"
            # Not through sys.stderr: this thread could hold its lock as Python ends.
            os.write(2, f"{title}: {report}\n".encode())
