"""Reads ``/proc/PID/stat`` on Linux."""

from __future__ import annotations

import os

__all__ = ["FLAGS", "PARENT", "START", "STATE", "pid_namespace", "process_stat"]

# Indices of the fields after the name: the field numbers of proc_pid_stat(5) minus 3.
STATE, PARENT, FLAGS, START = 0, 1, 6, 19


def process_stat(pid: int | str, proc: str = "/proc") -> tuple[str, list[str]]:
    """Return a process's name, truncated by the kernel, and the fields after the name.

    Raises OSError if the process does not exist. State Z or X means that the process
    has ended. The start time, in clock ticks, distinguishes processes that have had the
    same ID.
    """
    with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The name may contain spaces and parentheses.
        front, _, rest = file.read().rpartition(")")
    return front.partition("(")[2], rest.split()


def pid_namespace() -> int:
    """Return the inode number of this process's PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino
