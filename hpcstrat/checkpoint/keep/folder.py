"""The names in a folder of checkpoints: what is there, and what dead jobs left."""

from __future__ import annotations

import errno
import os
import platform
import secrets
import time
import weakref
from contextlib import suppress
from typing import Any, TypeAlias

from hpcstrat.checkpoint.disk.file_names import flush_folder
from hpcstrat.checkpoint.file.hashing import block_hash
from hpcstrat.checkpoint.keep.owner import release, take
from hpcstrat.engine.topology.process_stat import FLAGS, STATE, process_stat

__all__ = [
    "NO_FILE",
    "Folder",
    "Identity",
    "identity_of",
    "remove_abandoned",
    "temporary_name",
]

# PF_EXITING of Linux, from include/linux/sched.h.
_EXITING = 0x4
_STALE_SECONDS = 7 * 86400.0
# A name whose links lead to nothing: what is there is the link.
NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)

Identity: TypeAlias = tuple[int, int, int]
"""What tells a file from another of its name: device, inode, time of change in ns."""


class Folder:
    """A folder of checkpoints, by its absolute path; the first save makes it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_known = False
        self._lock: weakref.finalize[Any, Any] | None = None

    def prepare(self) -> None:
        """Refuse what can be no folder, and remove what dead jobs left in it.

        One rank calls it.
        """
        place = self.path
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
        self._is_known = place == self.path
        if self._is_known:
            remove_abandoned(self.path)

    def make(self) -> None:
        """Make it, unless it was there, and lock it for this job; one rank calls it.

        CheckpointError where another job saves there.
        """
        self._make()
        if self._lock is None and take(self.path):
            self._lock = weakref.finalize(self, release, self.path)

    def release(self) -> None:
        """Let other jobs save there; the next save locks it again."""
        if self._lock is not None:
            self._lock()
            self._lock = None

    def _make(self) -> None:
        if self._is_known:
            # A folder that has vanished is not made again: its file system may be away,
            # and the files would go to the disk below its mount point.
            return
        missing = [self.path]
        while not os.path.isdir(above := os.path.dirname(missing[-1])):
            missing.append(above)
        os.makedirs(self.path, exist_ok=True)
        # Else a folder may be gone after a loss of power, with what is durable in it.
        for place in missing:
            flush_folder(os.path.dirname(place))
        self._is_known = True


def temporary_name(name: str) -> str:
    """Return a name under which a checkpoint is written: whose it is; used once."""
    job = os.environ.get("SLURM_JOB_ID", "0")
    owner = f"{platform.node()}-{_namespace()}-{os.getpid()}"
    return f".{name}.{job}.{owner}.{secrets.token_hex(4)}"


def _namespace() -> str:
    """Return what says to which of the processes of a name a number belongs.

    Containers count their processes from 1, and may all have the same host name.
    """
    words = []
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            words.append(file.read())
        words.append(os.readlink("/proc/self/ns/pid"))
    return f"{block_hash(memoryview(''.join(words).encode())):016x}"


def remove_abandoned(directory: str) -> None:
    """Remove temporary files of processes that have ended, as far as one can know.

    One rank calls it. Those are the processes that this one can see; of others, what
    was written a week ago. The folder need not exist.
    """
    own = f"{platform.node()}-{_namespace()}"
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        if not name.startswith(".ckpt-"):
            continue
        path = os.path.join(directory, name)
        owner = name.rpartition(".")[0].partition(".h5.")[2].partition(".")[2]
        place, _, pid = owner.rpartition("-")
        # Another job removes it, or may not be disturbed.
        with suppress(OSError):
            stale = place != own and _age(path) > _STALE_SECONDS
            if stale or (place == own and pid.isdecimal() and not _lives(int(pid))):
                os.unlink(path)


def _age(path: str) -> float:
    return time.time() - os.lstat(path).st_mtime


def _lives(pid: int) -> bool:
    """Whether a process may still write."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        # Another user's.
        return True
    try:
        _, fields = process_stat(pid)
        # Or it is another namespace's /proc.
        shown = os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return True
    # To give back memory and blocks of files, a killed process takes some time.
    return not shown or (
        fields[STATE] not in "ZX" and not int(fields[FLAGS]) & _EXITING
    )


def identity_of(path: str) -> Identity | None:
    """Return what tells a file from another of its name; None where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        found = os.lstat(path)
    # With the time: file systems give the number of a file that is gone to a new one.
    return found.st_dev, found.st_ino, found.st_mtime_ns
