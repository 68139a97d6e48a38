"""Measurements of one rank by itself: its memory, and files of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.checkpoint.disk import file_system_name, flush, write_all

__all__ = ["FolderFacts", "Locked", "MemoryProbe", "look_at_folder", "within"]

_MIB = 1 << 20
# Twice the size of a core's caches, or more; less if memory is scarce.
_MOST_BYTES, _LEAST_BYTES = 64 * _MIB, 4 * _MIB
# Each array uses 1 / _SHARE of the free memory; a rank has two of them.
_SHARE = 16
_COPIES = 5
FILE_BYTES = _MIB
"""Size of the file that is written and flushed."""

_FILES = 3
# For a file that another host has just made: network file systems refresh at intervals.
_SEEN_SECONDS = 5.0
_NAP_SECONDS = 0.1
_UNLOCKABLE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class MemoryProbe:
    """Copies an array that no cache holds, to measure the memory of this rank's core.

    ``num_ranks`` do so on this host.
    """

    def __init__(self, num_ranks: int) -> None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share = free // (_SHARE * num_ranks)
        nbytes = min(max(share, _LEAST_BYTES), _MOST_BYTES)
        # Written, because pages that were never written all map to one page of zeros.
        self._from, self._to = np.ones((2, nbytes), np.uint8)

    def bytes_per_second(self, *, busy: bool = False) -> float:
        """Return bytes read and written per second, as STREAM counts them.

        The median of some copies; their mean, where others are ``busy`` on this host,
        for a rank that waits for its core copies nothing.
        """
        seconds = []
        for _ in range(1 + _COPIES):
            start = time.perf_counter()
            np.copyto(self._to, self._from)
            seconds.append(time.perf_counter() - start)
        middle = statistics.fmean if busy else statistics.median
        # Without the first copy, which meets cold caches.
        return 2 * self._to.nbytes / middle(seconds[1:])


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A host's view of a folder.

    ``problem`` says why no file could be written; ``unlockable`` why none could be
    locked, or that the lock did not return. ``is_seen`` says whether the host sees
    what replica 0 has made there, ``is_locked`` whether it sees replica 0's lock; None
    where that is not known.
    """

    kind: str = ""
    write_seconds: float | None = None
    problem: str = ""
    unlockable: str = ""
    is_seen: bool | None = None
    is_locked: bool | None = None


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """Return an action's result; TimeoutError if it takes longer, or never ends.

    In that case it continues in a thread.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    # A daemon: a call that hangs in a file system would keep the process from ending.
    thread = threading.Thread(target=run, name="hpcstrat-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:g} seconds")
    return results[0]


class Locked:
    """A file that this process makes, and locks as HDF5 does; removed at the end."""

    def __init__(self, folder: str, token: str) -> None:
        self.path = _path(folder, token, "lock")
        # Exclusively: never open a user's file for writing.
        self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Release the lock, and remove the file."""
        os.close(self._file)
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _path(folder: str, token: str, what: str) -> str:
    return os.path.join(folder, f".hpcstrat-doctor-{token}-{what}")


def look_at_folder(folder: str, token: str, rank: int, limit: float) -> FolderFacts:
    """Write, flush and lock a file in a folder; look for rank 0's file, and its lock.

    The ``token`` is in the names of all files. Nothing is raised.
    """
    kind = seconds = None
    try:
        kind = within(limit, lambda: file_system_name(folder))
        seconds = within(limit, lambda: _write_seconds(folder, token, rank))
    except OSError as error:
        return FolderFacts(kind or "", problem=_words(error))
    unlockable, is_seen, is_locked = "", None, None
    try:
        unlockable = within(limit, lambda: _unlockable(folder, token, rank))
        # The host of rank 0 sees its own file in any case.
        if rank:
            is_seen, is_locked = within(limit, lambda: _see(folder, token))
    except OSError as error:
        unlockable = unlockable or _words(error)
    return FolderFacts(kind, seconds, "", unlockable, is_seen, is_locked)


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _write_seconds(folder: str, token: str, rank: int) -> float:
    """Return how long it takes to make a file and have it on the disk."""
    # Random data, which a file system cannot compress.
    path, data = _path(folder, token, f"{rank}"), memoryview(os.urandom(FILE_BYTES))
    seconds = []
    for _ in range(_FILES):
        start = time.perf_counter()
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            try:
                write_all(file, data, 0)
                flush(file)
            finally:
                os.close(file)
            seconds.append(time.perf_counter() - start)
        finally:
            os.unlink(path)
    return statistics.median(seconds)


def _unlockable(folder: str, token: str, rank: int) -> str:
    """Return why files cannot be locked, by HDF5's way and by POSIX's; or nothing."""
    path = _path(folder, token, f"{rank}")
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # HDF5 takes the first where the system has it, else the second.
        for name, call in (("flock", fcntl.flock), ("fcntl", fcntl.lockf)):
            try:
                call(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                call(file, fcntl.LOCK_UN)
            except OSError as error:
                return f"{name}: {_words(error)}"
    finally:
        os.close(file)
        os.unlink(path)
    return ""


def _see(folder: str, token: str) -> tuple[bool, bool | None]:
    """Return whether rank 0's file is visible, and its lock."""
    end = time.monotonic() + _SEEN_SECONDS
    while True:
        try:
            # For writing: NFS turns flock into fcntl, which requires that.
            file = os.open(_path(folder, token, "lock"), os.O_RDWR)
            break
        except FileNotFoundError:
            if time.monotonic() > end:
                return False, None
            time.sleep(_NAP_SECONDS)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True, True
    except OSError as error:
        return True, None if error.errno in _UNLOCKABLE else False
    finally:
        os.close(file)
    return True, False
