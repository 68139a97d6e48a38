"""A folder of checkpoints: one job locks it, and removes files that dead jobs left.

If two jobs saved in one folder, each would remove the other's checkpoints as old.
Therefore a job locks the folder by a POSIX lock, fcntl(2). The kernel releases the lock
when the process ends for any reason; with NFS, the lock also excludes other hosts.
Child processes do not inherit it. If the file system has no locks, any job may save.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import secrets
import time
import weakref
from contextlib import suppress
from typing import Any, TypeAlias

from xxhash import xxh3_64_hexdigest

from hpcstrat._launchers import RUN_NAMES, SCHEDULERS
from hpcstrat.checkpoint.disk import flush_folder
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.cluster_resolver import batch_job_from_environment
from hpcstrat.cluster_resolver.launch import run_name
from hpcstrat.engine.topology.process_stat import FLAGS, STATE, process_stat
from hpcstrat.errors import CheckpointError

__all__ = [
    "NO_FILE",
    "OWNER",
    "Folder",
    "Identity",
    "identity_of",
    "remove_abandoned",
    "temporary_name",
]

OWNER = ".owner"
"""Name of the file that the process that owns a folder has locked."""

_ATTEMPTS = 10
# Descriptor of the lock file, and number of `_take` calls, by folder. A process opens
# the file only once, because closing a second descriptor would release the lock.
_held: dict[str, tuple[int, int]] = {}
# PF_EXITING of Linux, from include/linux/sched.h.
_EXITING = 0x4
_STALE_SECONDS = 7 * 86400.0
# Errors of opening a symbolic link that cannot lead to a file.
NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)

Identity: TypeAlias = tuple[int, int, int]
"""Identity of a file: device, inode, time of change in ns."""


class Folder:
    """A folder of checkpoints at an absolute path; the first save makes the folder."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_known = False
        self._lock: weakref.finalize[Any, Any] | None = None

    def prepare(self) -> None:
        """Check that the path can be a folder, and remove files of dead jobs in it."""
        place = self.path
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
        self._is_known = place == self.path
        if self._is_known:
            remove_abandoned(self.path)

    def make(self) -> None:
        """Make the folder if it is missing, and lock it; call this on one rank.

        Raises CheckpointError if another job saves in the folder.
        """
        self._make()
        if self._lock is None and _take(self.path):
            self._lock = weakref.finalize(self, _release, self.path)

    def require_no_other_job(self) -> None:
        """Raise CheckpointError if another job saves in the folder; call on one rank.

        The folder need not exist.
        """
        if self._lock is None and _take(self.path):
            _release(self.path)

    def release(self) -> None:
        """Unlock the folder for other jobs; the next save locks it again."""
        if self._lock is not None:
            self._lock()
            self._lock = None

    def _make(self) -> None:
        if self._is_known:
            # If a known folder is missing, its file system may be unmounted: making it
            # again would put checkpoints on the disk below the mount point.
            return
        missing = [self.path]
        while not os.path.isdir(above := os.path.dirname(missing[-1])):
            missing.append(above)
        os.makedirs(self.path, exist_ok=True)
        # Without this flush, a power failure may remove the folder and all its files.
        for place in missing:
            flush_folder(os.path.dirname(place))
        self._is_known = True


def _take(directory: str) -> bool:
    """Lock a folder for this job; return True if a call of `_release` must follow.

    Call this on replica 0. Returns False if the file system has no locks, or another
    process of this job has the lock. Raises CheckpointError if another job has it.
    """
    directory = os.path.realpath(directory)
    if directory in _held:
        handle, count = _held[directory]
        _held[directory] = handle, count + 1
        return True
    path = os.path.join(directory, OWNER)
    for _ in range(_ATTEMPTS):
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            # The save will raise the same error when it makes its file in the folder.
            return False
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            record = _record(handle)
            os.close(handle)
            if _is_ours(record):
                return False
            raise _refusal(directory, record) from None
        except OSError:
            os.close(handle)
            return False
        if _is_at(handle, path):
            _held[directory] = handle, 1
            _write(handle)
            return True
        # Meanwhile the last owner has removed this file: open a new one.
        os.close(handle)
    return False


def _release(directory: str) -> None:
    """Undo one successful `_take`; the last call unlocks the folder."""
    directory = os.path.realpath(directory)
    if directory not in _held:
        return
    handle, count = _held[directory]
    if count > 1:
        _held[directory] = handle, count - 1
        return
    del _held[directory]
    path = os.path.join(directory, OWNER)
    with suppress(OSError):
        if _is_at(handle, path):
            os.unlink(path)
    os.close(handle)


def _is_at(handle: int, path: str) -> bool:
    """Return whether an open file is still the file at ``path``."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def _job() -> str:
    """Return an identifier of this job that is the same in all its processes."""
    if any(os.environ.get(name) for name in RUN_NAMES):
        return run_name()
    # Without a launcher, each process is a job of its own, also in one batch job.
    return f"{run_name()}-{platform.node()}-{os.getpid()}"


def _batch_job() -> str:
    """Return the scheduler's name of the job, or an empty string if there is none."""
    job = batch_job_from_environment()
    return "" if job is None else job.job_id


def _restarts() -> str:
    """Return how often the scheduler has requeued the job; "" if it does not say."""
    names = [one.restarts for one in SCHEDULERS.values()]
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _place() -> tuple[str, str]:
    return platform.node(), _restarts()


def _write(handle: int) -> None:
    record = {
        "job": _job(),
        "batch_job": _batch_job(),
        "restarts": _restarts(),
        "watched_run": watcher().run,
        "generation": watcher().generation,
        "host": platform.node(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    # Ignore errors: the record is only for messages, and for `_is_ours`.
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(record).encode(), 0)


def _record(handle: int) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(os.pread(handle, 1 << 12, 0))
        if isinstance(found, dict):
            return found
    return {}


def _is_ours(record: dict[str, Any]) -> bool:
    """Return whether a lock's record names this job, or an earlier run of it.

    The lock of a run on a lost host may still exist, because NFS servers keep locks of
    crashed hosts for a time. After a requeue, ranks of the earlier run may still end.
    """
    run = watcher().run
    if run and run == record.get("watched_run"):
        # Saves of an older generation are refused: see `require_newest_generation`.
        return True
    job = _batch_job()
    earlier = (record.get("host"), record.get("restarts")) != _place()
    again = bool(job) and job == record.get("batch_job") and earlier
    return again or record.get("job") == _job()


def _refusal(directory: str, record: dict[str, Any]) -> CheckpointError:
    who = "another job"
    if record:
        job = f"job {record['batch_job']}, " if record.get("batch_job") else ""
        who += (
            f" ({job}process {record.get('pid')} on {record.get('host')}, since "
            f"{record.get('since')})"
        )
    return CheckpointError(
        f"expected to be the only job that saves in {directory}, found {who}, whose "
        "checkpoints this job would remove as old; give each job its own folder, or "
        "end the other job"
    )


def temporary_name(name: str, *, outlives: bool = False) -> str:
    """Return a unique name for a temporary file, with the job, host and process ID.

    The file of a save that ``outlives`` its process has no process ID.
    """
    job = os.environ.get("SLURM_JOB_ID", "0")
    owner = f"{platform.node()}-{_namespace()}-{'watched' if outlives else os.getpid()}"
    return f".{name}.{job}.{owner}.{secrets.token_hex(4)}"


def _namespace() -> str:
    """Return a hash of boot ID and process namespace, which differs for containers."""
    words = []
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            words.append(file.read())
        words.append(os.readlink("/proc/self/ns/pid"))
    return xxh3_64_hexdigest("".join(words).encode())


def remove_abandoned(directory: str) -> None:
    """Remove the temporary files of ended processes from a folder.

    Call this on one rank. Files of processes on other hosts or in other containers, and
    of saves by watchers, are removed after a week. The folder need not exist.
    """
    own = f"{platform.node()}-{_namespace()}"
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        if not name.startswith(".ckpt-"):
            continue
        path = os.path.join(directory, name)
        owner = name.rpartition(".")[0].partition(".h5.")[2].partition(".")[2]
        place, _, pid = owner.rpartition("-")
        # Another job may remove the same file.
        with suppress(OSError):
            age = time.time() - os.lstat(path).st_mtime
            is_own = place == own and pid.isdecimal()
            if not _lives(int(pid)) if is_own else age > _STALE_SECONDS:
                os.unlink(path)


def _lives(pid: int) -> bool:
    """Return whether the process ``pid`` of this host may still write files."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        # The process exists, but belongs to another user.
        return True
    try:
        _, fields = process_stat(pid)
        # ``shown`` is False if /proc shows another namespace of process IDs.
        shown = os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return True
    # An exiting process cannot write any more, although freeing its memory takes long.
    return not shown or (
        fields[STATE] not in "ZX" and not int(fields[FLAGS]) & _EXITING
    )


def identity_of(path: str) -> Identity | None:
    """Return the identity of a file, or None if the file does not exist."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        found = os.lstat(path)
    # Include the time of change: a new file may have the inode of a removed file.
    return found.st_dev, found.st_ino, found.st_mtime_ns
