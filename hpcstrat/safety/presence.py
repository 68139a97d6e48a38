"""A file in shared memory, with a page for the state of each rank of a host.

At ``import hpcstrat``, each process that a launcher started writes its state to its own
page of the job's file in ``/dev/shm``. This needs no MPI, so that the watchdog can name
the ranks that are missing when MPI starts. A process holds a lock on its page, which
the kernel releases when the process ends in any way. The last rank that opens the file
unlinks it. If some ranks never open the file, a later job unlinks it, after the locks
of all ranks are released.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import platform
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from hpcstrat._launchers import LAUNCHER_PROGRAMS, RUN_NAMES
from hpcstrat.cluster_resolver.launch import (
    Launch,
    launch_from_environment,
    run_name,
)
from hpcstrat.engine.topology.process_stat import (
    PARENT,
    START,
    pid_namespace,
    process_stat,
)

__all__ = [
    "CREATES",
    "FAILED",
    "IMPORTED",
    "LEFT",
    "MADE",
    "STARTS",
    "LaunchRegistry",
    "own_registry",
]

IMPORTED = "imported"
STARTS = "starts MPI"
CREATES = "creates"
MADE = "made"
FAILED = "failed"
LEFT = "left"
"""Stages that a rank shows in its page: it has imported the library; it waits for MPI
to start; it waits in the creation of a strategy; it has created the strategy; the
creation has failed; the rank has ended."""

_FOLDER = "/dev/shm"
_NAME = "hpcstrat-start-"
_PAGE_BYTES = 4096
_MOST_TEXT = 400
_SHARED_OFFSET = 512
_CHECK = struct.Struct("=IH")
# Layout of ``struct flock`` on 64-bit Linux.
_LOCK = struct.Struct("@hhqqi4x")
_ANCESTORS = 8
_ATTEMPTS = 3
_GATE_SECONDS = 2.0
_OLD_SECONDS = 60.0
_NAP_SECONDS = 0.001


class LaunchRegistry:
    """The file of a job on this host, with a page for each rank."""

    def __init__(self, launch: Launch, path: str) -> None:
        self.launch = launch
        self.num_local = launch.local_size
        self.process = os.getpid()
        self.page: dict[str, Any] = {}
        self._path = path
        self._handle = -1

    @property
    def is_open(self) -> bool:
        """True if this process has a page; False in a forked child process."""
        return self._handle >= 0 and self.process == os.getpid()

    def open(self) -> bool:
        """Lock this rank's page, and return whether that succeeded.

        Returns False if another process has the page, such as a parent of this process.
        """
        for _ in range(_ATTEMPTS):
            handle = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            # Once the page is locked, keep the handle open: closing any descriptor of a
            # file releases all locks of this process on the file, see fcntl(2).
            with _gate(handle):
                status = os.fstat(handle)
                usable = status.st_nlink > 0 and status.st_uid == os.getuid()
                if usable and self._take(handle):
                    return True
            os.close(handle)
            if usable:
                break
            # Another process has just unlinked the file: try again with a new file.
        return False

    def _take(self, handle: int) -> bool:
        place = self._place(self.launch.rank)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, _PAGE_BYTES, place)
        except OSError:
            return False
        self.page = {"stage": IMPORTED, "since": time.monotonic(), "text": ""}
        self.page |= {"host": platform.node(), "pid": os.getpid(), "mpi": False}
        self.page["pids"] = pid_namespace()
        self.page["own"] = _daemon()[1]
        self._write(handle)
        self._handle = handle
        present = sum(self.read(rank) is not None for rank in self.present())
        if present == self.num_local:
            # All ranks of the host have opened the file: it needs no name any more.
            os.unlink(self._path)
        return True

    def show(self, **changes: Any) -> None:
        """Change fields of this rank's state, and write the state to its page."""
        if "stage" in changes:
            changes["since"] = time.monotonic()
        for name, value in changes.items():
            self.page[name] = value[:_MOST_TEXT] if isinstance(value, str) else value
        if self.is_open:
            self._write(self._handle)

    def _write(self, handle: int) -> None:
        # Write a checksum, too, because another rank may read the page meanwhile.
        data = _encoded(self.page)
        if len(data) > _PAGE_BYTES - _CHECK.size:
            data = _encoded({**self.page, "text": "", "reason": ""})
        block = _CHECK.pack(zlib.crc32(data), len(data)) + data
        with contextlib.suppress(OSError):
            os.pwrite(handle, block, self._place(self.launch.rank))

    def read(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's state; field ``"ended"`` is whether its process has ended.

        Returns None for a rank that has not started, or is on another host.
        """
        if not self.is_open:
            return None
        place = self._place(rank)
        for _ in range(_ATTEMPTS):
            block = os.pread(self._handle, _PAGE_BYTES, place)
            if len(block) < _CHECK.size:
                return None
            check, length = _CHECK.unpack_from(block)
            data = block[_CHECK.size : _CHECK.size + length]
            if length and zlib.crc32(data) == check:
                found: dict[str, Any] = json.loads(data)
                own = rank == self.launch.rank
                found["ended"] = not own and not _is_locked(
                    self._handle, place, _PAGE_BYTES
                )
                return found
        return None

    def present(self) -> Iterator[int]:
        """Yield, in order, the ranks for whose pages the file has data."""
        place = _PAGE_BYTES
        while self.is_open:
            try:
                place = os.lseek(self._handle, place, os.SEEK_DATA)
            except OSError:
                # No more data: the end of the file.
                return
            yield place // _PAGE_BYTES - 1
            place += _PAGE_BYTES - place % _PAGE_BYTES

    def claims(self, text: str) -> bool:
        """Claim to report a text; return False if another rank here has claimed it."""
        if not self.is_open:
            return True
        mark = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        with contextlib.suppress(OSError), _gate(self._handle):
            if os.pread(self._handle, len(mark), _CHECK.size) == mark:
                return False
            os.pwrite(self._handle, mark, _CHECK.size)
        return True

    def shared_memory(self) -> memoryview | None:
        """Return memory that the ranks of this host share; None if there is none."""
        if not self.is_open:
            return None
        try:
            page = mmap.mmap(self._handle, _PAGE_BYTES)
        except (OSError, ValueError):
            return None
        return memoryview(page)[_SHARED_OFFSET:]

    @staticmethod
    def _place(rank: int) -> int:
        # The first page is for the lock of ``_gate``, the hash of `claims`, and
        # `shared_memory`.
        return (1 + rank) * _PAGE_BYTES

    def close(self) -> None:
        """Release the page; other ranks can still read the last state in it.

        If the number of ranks is unknown, the last rank that closes unlinks the file.
        """
        if not self.is_open:
            return
        handle, self._handle = self._handle, -1
        with contextlib.suppress(OSError), _gate(handle):
            last = self.num_local is None and not _is_locked(handle, _PAGE_BYTES, 0)
            if last and os.fstat(handle).st_nlink:
                os.unlink(self._path)
        os.close(handle)


class _OwnRegistry:
    """The registry of this process, once it is open."""

    registry: LaunchRegistry | None = None


def own_registry() -> LaunchRegistry | None:
    """Return this process's registry; None without a launcher, or in a rank's child.

    The first call locks this process's page.
    """
    own = _OwnRegistry.registry
    if own is None:
        launch = launch_from_environment()
        name = _job_name(os.environ) if launch.size > 1 else ""
        if not name:
            return None
        path = os.path.join(_FOLDER, f"{_NAME}{os.getuid()}-{name}")
        own = LaunchRegistry(launch, path)
        try:
            _sweep(path)
            if not own.open():
                return None
        except OSError:
            return None
        _OwnRegistry.registry = own
        atexit.register(_leave, own)
    return own if own.is_open else None


def _encoded(page: dict[str, Any]) -> bytes:
    return json.dumps(page, ensure_ascii=False).encode(errors="replace")


def _leave(own: LaunchRegistry) -> None:
    if own.is_open:
        if own.page["stage"] not in (FAILED, LEFT):
            mpi: Any = sys.modules.get("mpi4py.MPI")
            own.show(stage=LEFT, mpi=bool(mpi and mpi.Is_initialized()))
        own.close()


@contextlib.contextmanager
def _gate(handle: int) -> Iterator[None]:
    """Hold the first page's lock: one process at a time opens or removes the file."""
    deadline = time.monotonic() + _GATE_SECONDS
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, _PAGE_BYTES, 0)
            break
        except OSError:
            # Limit the wait: a process may be stopped while it holds the lock.
            if time.monotonic() > deadline:
                raise
            time.sleep(_NAP_SECONDS)
    try:
        yield
    finally:
        fcntl.lockf(handle, fcntl.LOCK_UN, _PAGE_BYTES, 0)


def _is_locked(handle: int, start: int, length: int) -> bool:
    """Return whether another process has locked a range; length 0 is up to the end."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    answer = fcntl.fcntl(handle, fcntl.F_GETLK, asked)
    return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _sweep(own: str) -> None:
    """Remove the files that ended jobs of this user have left in ``/dev/shm``."""
    prefix = f"{_NAME}{os.getuid()}-"
    for entry in list(os.scandir(_FOLDER)):
        if not entry.name.startswith(prefix) or entry.path == own:
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime > time.time() - _OLD_SECONDS:
                # Keep a recent file: other ranks of its job may not have started yet.
                continue
            handle = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                with _gate(handle):
                    if not _is_locked(handle, _PAGE_BYTES, 0):
                        os.unlink(entry.path)
            finally:
                os.close(handle)


def _job_name(env: Mapping[str, str]) -> str:
    """Return a text that identifies this job on this host; empty without a launcher."""
    # A requeued job has its old name, and process numbers are reused. Therefore add the
    # number and start time of the launcher's process, which together are unique.
    key = [run_name(env), _daemon()[0]]
    if not (key[-1] or any(env.get(name) for name in RUN_NAMES)):
        return ""
    return hashlib.blake2b("\n".join(key).encode(), digest_size=8).hexdigest()


def _daemon() -> tuple[str, bool]:
    """Return a text that identifies the launcher's process on this host, and a bool.

    The text is empty if no ancestor of this process is a known launcher. The bool is
    True if the launcher is the direct parent, so that the end of this process is the
    end of its rank. If not, only one command of the rank's script may have ended.
    """
    parent = pid = os.getppid()
    for _ in range(_ANCESTORS):
        try:
            name, fields = process_stat(pid)
        except OSError:
            break
        if name in LAUNCHER_PROGRAMS:
            place = f"{name} {pid} {fields[START]} {pid_namespace()}"
            return place, pid == parent
        pid = int(fields[PARENT])
        if pid <= 1:
            break
    return "", False
