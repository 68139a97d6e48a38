"""A folder of checkpoints: who saves in it, and what dead jobs left there.

Two jobs that save in one folder remove each other's checkpoints, as neither knows those
of the other. So a job locks it: the lock is POSIX's, of fcntl(2), which the system
gives up when the process ends, however that is, also on another host of an NFS.
Children do not inherit it. Where a file system has no locks, nothing is refused.
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

from hpcstrat.checkpoint.disk import flush_folder
from hpcstrat.cluster_resolver import batch_job_from_environment
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
"""Name of the file that is locked."""

# Launchers set one of these, to the same value in all processes of a job only.
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PMI_JOBID")
_ATTEMPTS = 10
# The open file and the number of locks of each folder. The process must open the file
# only once: to close another descriptor of it would give up the lock.
_held: dict[str, tuple[int, int]] = {}
# PF_EXITING of Linux, from include/linux/sched.h.
_EXITING = 0x4
_STALE_SECONDS = 7 * 86400.0
# Errors of a link that leads to no file.
NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)

Identity: TypeAlias = tuple[int, int, int]
"""Identity of a file: device, inode, time of change in ns."""


class Folder:
    """A folder of checkpoints, by its absolute path; the first save makes it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_known = False
        self._lock: weakref.finalize[Any, Any] | None = None

    def prepare(self) -> None:
        """Refuse a path that is no folder, and remove files of dead jobs in it."""
        place = self.path
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
        self._is_known = place == self.path
        if self._is_known:
            remove_abandoned(self.path)

    def make(self) -> None:
        """Make the folder, unless it was there, and lock it; one rank calls it.

        CheckpointError where another job saves there.
        """
        self._make()
        if self._lock is None and _take(self.path):
            self._lock = weakref.finalize(self, _release, self.path)

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
        # Otherwise a loss of power may remove the folder, and all in it.
        for place in missing:
            flush_folder(os.path.dirname(place))
        self._is_known = True


def _take(directory: str) -> bool:
    """Lock a folder for this job; `_release` must be called as often.

    Replica 0 calls it. False where the file system has no locks, or another process of
    this job has it; CheckpointError where another job has it.
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
            # The save itself will raise the error of the folder.
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
        # Its owner has removed it meanwhile.
        os.close(handle)
    return False


def _release(directory: str) -> None:
    """Give up a lock of `_take`."""
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
    """Whether an open file is the one of a path."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def _job() -> str:
    """Return an identifier that all processes of this job share."""
    names = [os.environ[name] for name in _JOB_NAMES if os.environ.get(name)]
    step = os.environ.get("SLURM_STEP_ID", "")
    # If no launcher names the job, the parent process does.
    own = f"{platform.node()}-{os.getppid()}"
    return ".".join([_batch_job(), step, *(names or [own])])


def _batch_job() -> str:
    """Return the scheduler's name of the job; empty outside of one."""
    job = batch_job_from_environment()
    return "" if job is None else job.job_id


def _write(handle: int) -> None:
    record = {
        "job": _job(),
        "batch_job": _batch_job(),
        "host": platform.node(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    # Only the lock decides; the text is for people.
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
    """Whether a lock is of this job, or of a run of it that was queued again.

    Where a host was lost, a server of NFS keeps its locks for some time.
    """
    job = _batch_job()
    again = bool(job) and job == record.get("batch_job")
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
        "checkpoints would be removed as old; give each job a folder of its own, or "
        "end that one"
    )


def temporary_name(name: str) -> str:
    """Return a name under which a checkpoint is written: whose it is; used once."""
    job = os.environ.get("SLURM_JOB_ID", "0")
    owner = f"{platform.node()}-{_namespace()}-{os.getpid()}"
    return f".{name}.{job}.{owner}.{secrets.token_hex(4)}"


def _namespace() -> str:
    """Return a hash of the host's start and the process namespace.

    Containers count their processes from 1, and may all have the same host name.
    """
    words = []
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            words.append(file.read())
        words.append(os.readlink("/proc/self/ns/pid"))
    return xxh3_64_hexdigest("".join(words).encode())


def remove_abandoned(directory: str) -> None:
    """Remove temporary files of processes that have ended.

    One rank calls it. Files of processes that cannot be seen from here go after a week.
    The folder need not exist.
    """
    own = f"{platform.node()}-{_namespace()}"
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        if not name.startswith(".ckpt-"):
            continue
        path = os.path.join(directory, name)
        owner = name.rpartition(".")[0].partition(".h5.")[2].partition(".")[2]
        place, _, pid = owner.rpartition("-")
        # Another job may be removing it.
        with suppress(OSError):
            age = time.time() - os.lstat(path).st_mtime
            stale = place != own and age > _STALE_SECONDS
            if stale or (place == own and pid.isdecimal() and not _lives(int(pid))):
                os.unlink(path)


def _lives(pid: int) -> bool:
    """Whether a process may still write."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        # The process belongs to another user.
        return True
    try:
        _, fields = process_stat(pid)
        # Otherwise this is the /proc of another namespace.
        shown = os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return True
    # A killed process takes some time to give back memory and blocks of files.
    return not shown or (
        fields[STATE] not in "ZX" and not int(fields[FLAGS]) & _EXITING
    )


def identity_of(path: str) -> Identity | None:
    """Return the identity of a file; None where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        found = os.lstat(path)
    # The time, as a new file may get the number of a removed one.
    return found.st_dev, found.st_ino, found.st_mtime_ns
