"""Linux's figures of a process."""

from __future__ import annotations

import os

__all__ = ["FLAGS", "PARENT", "START", "STATE", "pid_namespace", "process_stat"]

# Places of fields behind the name: the numbers of proc_pid_stat(5) less three.
STATE, PARENT, FLAGS, START = 0, 1, 6, 19


def process_stat(pid: int, proc: str = "/proc") -> tuple[str, list[str]]:
    """Return a process's name, as the kernel cuts it, and the fields behind it.

    OSError where there is no such process. A state of Z or X means that it has ended;
    its start, in ticks of the machine, tells a reused number apart.
    """
    with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The name may hold blanks and brackets.
        front, _, rest = file.read().rpartition(")")
    return front.partition("(")[2], rest.split()


def pid_namespace() -> int:
    """Return the number of this process's namespace of process numbers."""
    return os.stat("/proc/self/ns/pid").st_ino
