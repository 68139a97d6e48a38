"""Losses of a node and of a launcher, in runs that ``hpcstrat watch`` watches."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from pathlib import Path

from hpcstrat._launchers import LAUNCHER_PROGRAMS
from hpcstrat.elastic.watching.child_start import FOLDERS
from hpcstrat.elastic.watching.old_processes import end_generations_before, generations
from hpcstrat.engine.topology.process_stat import process_stat
from hpcstrat.tools.chaos.processes import NoSuchRankError

__all__ = ["find_watched_runs", "lose"]

_EVER = 1 << 62


def find_watched_runs() -> dict[str, int]:
    """Return the watchers' process ids on this machine, by the name of their run.

    Not collective. Only runs of this user are found.
    """
    found = {}
    for path in Path(FOLDERS).parent.glob(f"{Path(FOLDERS).name}{os.geteuid()}-*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(path / "socket"))
            told = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            # Names of runs are hexadecimal numbers.
            found[path.name.split("-")[3]] = int(struct.unpack("3i", told)[0])
    return found


def lose(part: str, run: str | None = None) -> str:
    """Kill the part of a watched run that is on this machine, as if it was lost.

    Not collective. ``part`` is ``node``, for the watcher and all that it has started,
    or ``launcher``, or its daemon. Without ``run``, there must be one run only. Returns
    the name of the run; raises NoSuchRankError if there is none.
    """
    runs = find_watched_runs()
    if run is None and len(runs) == 1:
        run = next(iter(runs))
    if run not in runs:
        wanted = "one watched run" if run is None else f"the watched run {run}"
        raise NoSuchRankError(
            f"expected {wanted} of this user on this machine, found "
            f"{', '.join(runs) or 'none'}; start it by hpcstrat watch, or use --run"
        )
    if part == "node":
        # The watcher first: it would notice the end of its ranks.
        os.kill(runs[run], signal.SIGKILL)
        end_generations_before(run, _EVER)
        return run
    launchers = [pid for pid, _ in generations(run) if _is_launcher(pid)]
    for pid in launchers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not launchers:
        raise NoSuchRankError(
            f"expected the launcher of run {run} on this machine, found none; use the "
            "node of the leading watcher, which the watchers' logs name"
        )
    return run


def _is_launcher(pid: int) -> bool:
    """Return whether a process is a launcher, or its daemon."""
    with contextlib.suppress(OSError):
        return process_stat(pid)[0] in LAUNCHER_PROGRAMS
    return False
