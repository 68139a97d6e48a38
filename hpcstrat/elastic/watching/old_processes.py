"""The end of all processes of older generations on this node."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

__all__ = ["end_generations_before", "generations"]

_LIMIT_SECONDS = 10.0
_NAP_SECONDS = 0.01


def generations(run: str) -> Iterator[tuple[int, int]]:
    """Yield process id and generation of each process of a run on this node."""
    # Test hosts of one machine share /proc, but not the network.
    network = os.readlink("/proc/self/ns/net")
    mark = f"HPCSTRAT_WATCH_RUN={run}".encode()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        # A process may end at any moment, and those of other users cannot be read.
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(f"/proc/{pid}/ns/net") != network:
                continue
            with open(f"/proc/{pid}/environ", "rb") as file:
                words = file.read().split(b"\0")
            if mark in words and int(pid) != os.getpid():
                for word in words:
                    if word.startswith(b"HPCSTRAT_WATCH_GENERATION="):
                        yield int(pid), int(word.partition(b"=")[2])


def _is_dead(pid: int) -> bool:
    """Return whether a process has ended, and only waits for its parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def end_generations_before(run: str, number: int) -> int:
    """Kill every process of generations below ``number``, and return how many remain.

    Processes that they start meanwhile are killed, too.
    """
    end = time.monotonic() + _LIMIT_SECONDS
    while True:
        old = [pid for pid, own in generations(run) if own < number]
        old = [pid for pid in old if not _is_dead(pid)]
        if not old or time.monotonic() > end:
            return len(old)
        for pid in old:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_NAP_SECONDS)
