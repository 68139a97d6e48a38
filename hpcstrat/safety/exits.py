"""No way of leaving on one rank leaves the others waiting.

An uncaught exception ends the job through ``sys.excepthook``, after its traceback. A
rank that ends in any other way, by a plain return or ``sys.exit``, announces that on
every open channel before ``MPI_Finalize``, and waits there for the others: a rank that
makes a call instead raises a CollectiveError that names who has left.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

from hpcstrat.collectives.header import Channel
from hpcstrat.errors import ReplicaError
from hpcstrat.safety import lateness, recording, watchdog
from hpcstrat.topology import start_mpi
from hpcstrat.tracing import get_logger, place

__all__ = ["install", "register", "unregister"]

_LONGEST_NAP_SECONDS = 0.01
# How long a rank lets others print first.
_STAGGER_SECONDS = 0.03
_SECONDARY_SECONDS = 0.5
_FORWARD_SECONDS = 0.1
_ABORT_SECONDS = 10
_CLOCKS_SECONDS = 5.0

_channels: list[Channel] = []


class _Hooks:
    """What was there before, so that a program's own hook still runs."""

    installed = False
    process = 0
    left = False
    excepthook: Any = None


def register(channel: Channel) -> None:
    """Watch a channel until the process ends.

    Not collective.

    Parameters
    ----------
    channel : Channel
        Open.
    """
    _channels.append(channel)
    install()


def install() -> None:
    """Let an uncaught exception of this process end the job, from now on.

    Not collective.
    """
    if not _Hooks.installed:
        _Hooks.installed = True
        _Hooks.process = os.getpid()
        _Hooks.excepthook = sys.excepthook
        sys.excepthook = _end_job
        # Registered after MPI's own end, and therefore run before it.
        atexit.register(_leave)
        # A program may call MPI.Finalize itself: it first runs this (MPI-4.1 11.2.4).
        mpi = start_mpi()
        mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_at_finalize), 0)


def unregister(channel: Channel) -> None:
    """Forget a channel that is being closed by all ranks.

    Not collective.

    Parameters
    ----------
    channel : Channel
        Registered before.
    """
    if channel in _channels:
        _channels.remove(channel)


def _end_job(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the error as before, then end all ranks."""
    # The same error often ends all ranks: the first of them prints it and ends the job
    # before the others mix in their lines. What another rank caused comes last.
    mpi = _running_mpi()
    if mpi is None or os.getpid() != _Hooks.process:
        # MPI has ended, or this is a forked child: no other rank waits for it.
        _Hooks.excepthook(kind, error, trace)
        return
    rank = mpi.COMM_WORLD.rank
    time.sleep(min(rank * _STAGGER_SECONDS, _SECONDARY_SECONDS))
    if isinstance(error, ReplicaError):
        time.sleep(_SECONDARY_SECONDS)
    try:
        _Hooks.excepthook(kind, error, trace)
    finally:
        _abort(
            f"hpcstrat: {place()} ends the job: uncaught {kind.__name__} (see above)",
            130 if issubclass(kind, KeyboardInterrupt) else 1,
        )


def _abort(message: str, code: int) -> None:
    recording.flush()
    sys.stdout.flush()
    os.write(2, f"{message}\n".encode())
    sys.stderr.flush()
    # The launcher must have passed on the lines before it ends all ranks.
    time.sleep(_FORWARD_SECONDS)
    if threading.current_thread() is threading.main_thread():
        # Where the launcher lets others live, it may not answer a second rank's call.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_ABORT_SECONDS)
    start_mpi().COMM_WORLD.Abort(code)
    # MPICH's MPI_Abort returns.
    os._exit(code)


def _at_finalize(*_: Any) -> None:
    _leave()


def _leave() -> None:
    """Announce the end of this rank, and wait for the others."""
    mpi = _running_mpi()
    if mpi is None or _Hooks.left or os.getpid() != _Hooks.process:
        return
    _Hooks.left = True
    waiting = []
    for channel in _channels:
        if channel.broken:
            _give_up(channel)
        elif not channel.closed:
            channel.post_leave()
            waiting.append(channel)
    nap, look_at = 0.0, time.monotonic() + 1
    while waiting := _still_waiting(waiting):
        now = time.monotonic()
        if now > look_at:
            look_at = now + 1
            _check_alive(waiting)
        time.sleep(nap)
        nap = min(nap + 1e-4, _LONGEST_NAP_SECONDS)
    _sum_up()
    watchdog.stop()


def _sum_up() -> None:
    """Say who was late, and end the timeline, where all ranks have left together."""
    left = [c for c in _channels if not c.broken and not c.closed]
    for channel in left:
        lateness.conclude(channel.arrivals)
    together = len(left) == len(_channels)
    recording.stop(together=together, limit_seconds=_CLOCKS_SECONDS)


def _still_waiting(channels: list[Channel]) -> list[Channel]:
    """Return the channels on which ranks are missing; say what others did instead."""
    missing = []
    for channel in channels:
        try:
            outcome = channel.poll_leave()
        except Exception as error:
            # Under a launcher that lets the others live, this is how a death shows.
            _abort(f"hpcstrat: {place()} ends the job: {error}", 1)
            raise
        if outcome is None:
            missing.append(channel)
        elif outcome:
            # The others say so, too, and end the job; let them print first.
            time.sleep(_SECONDARY_SECONDS)
            get_logger().warning("%s: %s", place(), outcome)
    return missing


def _running_mpi() -> Any:
    """Return ``mpi4py.MPI`` where MPI is initialized and not finalized, or None."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi


def _give_up(channel: Channel) -> None:
    """End the job where this rank has left a call half-made."""
    if "left the program" in channel.broken:
        return
    _abort(
        f"hpcstrat: {place()} ends the job: its strategy is broken, because "
        f"{channel.broken}",
        1,
    )


def _check_alive(waiting: list[Channel]) -> None:
    for channel in waiting:
        dead = channel.dead()
        # A rank that has answered every channel may be gone already.
        missing = set(channel.missing())
        if missing.intersection(dead):
            _abort(
                f"hpcstrat: {place()} ends the job: the processes of ranks {dead} have "
                "died; look for their last output",
                1,
            )
