"""Measurements of one rank without MPI: its memory, and files in a folder."""

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

from hpcstrat.checkpoint.disk import file_system_name, flush
from hpcstrat.engine.file_bytes import write_all

__all__ = ["FolderFacts", "Locked", "MemoryProbe", "look_at_folder", "within"]

_MIB = 1 << 20
# Sizes of an array: larger than caches, but small if memory is scarce.
_MOST_BYTES, _LEAST_BYTES = 64 * _MIB, 4 * _MIB
# The two arrays of each rank use together at most 2 / _SHARE of a host's free memory.
_SHARE = 16
_COPIES = 5
FILE_BYTES = _MIB
"""Size of the file that is written and flushed."""

_FILES = 3
# Time to wait for a file that another host has just made, because network file systems
# refresh folders at intervals.
_SEEN_SECONDS = 5.0
_NAP_SECONDS = 0.1
_UNLOCKABLE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class MemoryProbe:
    """Measures the memory bandwidth of this rank's core, by copies of a large array.

    ``num_ranks`` is the number of ranks that measure on this host.
    """

    def __init__(self, num_ranks: int) -> None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share = free // (_SHARE * num_ranks)
        nbytes = min(max(share, _LEAST_BYTES), _MOST_BYTES)
        # Write ones, because pages that were never written all map to one page of
        # zeros, which stays in the cache.
        self._from, self._to = np.ones((2, nbytes), np.uint8)

    def bytes_per_second(self, *, busy: bool = False) -> float:
        """Return the bytes read and written per second, counted as in STREAM.

        Uses the median time of several copies. If other ranks are ``busy`` on this
        host, uses the mean, which includes times in which this rank waits for its core.
        """
        seconds = []
        for _ in range(1 + _COPIES):
            start = time.perf_counter()
            np.copyto(self._to, self._from)
            seconds.append(time.perf_counter() - start)
        middle = statistics.fmean if busy else statistics.median
        # Leave out the first copy, which has cold caches.
        return 2 * self._to.nbytes / middle(seconds[1:])


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """The facts that a host reports about a folder.

    ``problem`` is the reason why no file could be written, or empty. ``unlockable`` is
    the reason why no file could be locked, or empty. ``is_seen`` is whether the host
    sees the file that replica 0 made, and ``is_locked`` whether it sees replica 0's
    lock; both are None if unknown.
    """

    kind: str = ""
    write_seconds: float | None = None
    problem: str = ""
    unlockable: str = ""
    is_seen: bool | None = None
    is_locked: bool | None = None


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """Return the result of an action; raise TimeoutError after ``seconds``.

    After a timeout the action continues in its thread.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    # Use a daemon thread, because a call that hangs in a file system would otherwise
    # keep the process from ending.
    thread = threading.Thread(target=run, name="hpcstrat-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:g} seconds")
    return results[0]


class Locked:
    """A file that this process makes, and locks as HDF5 does; `close` removes it."""

    def __init__(self, folder: str, token: str) -> None:
        self.path = _path(folder, token, "lock")
        # Use O_EXCL, which fails if the user has a file of this name.
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
    """Write, flush and lock a file in a folder, and look for rank 0's locked file.

    The names of all files include ``token``. Errors are not raised, but returned in the
    result.
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
        # Rank 0 need not look for its own file.
        if rank:
            is_seen, is_locked = within(limit, lambda: _see(folder, token))
    except OSError as error:
        unlockable = unlockable or _words(error)
    return FolderFacts(kind, seconds, "", unlockable, is_seen, is_locked)


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _write_seconds(folder: str, token: str, rank: int) -> float:
    """Return the time to make a file, write it, and flush it to the disk."""
    # Write random data, because a file system cannot compress them.
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
    """Return why files cannot be locked by flock or by fcntl; empty if they can."""
    path = _path(folder, token, f"{rank}")
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Try both, because HDF5 uses flock if the system has it, else fcntl.
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
    """Return whether this host sees rank 0's file, and whether it sees the lock."""
    end = time.monotonic() + _SEEN_SECONDS
    while True:
        try:
            # For flock, NFS needs a file that is open for writing.
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
