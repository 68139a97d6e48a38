"""The lock of the job that saves in a folder; it ends with its process.

Two jobs that save in one folder remove each other's checkpoints, as neither knows those
of the other. The lock is POSIX's, of fcntl(2): the system gives it up when the process
ends, however that is, also on another host of an NFS. Children do not inherit it. Where
a file system has no locks, nothing is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from contextlib import suppress
from typing import Any

from hpcstrat.cluster_resolver import batch_job_from_environment
from hpcstrat.errors import CheckpointError

__all__ = ["OWNER", "release", "take"]

OWNER = ".owner"
"""Name of the file."""

# Launchers set one of these alike in all processes of a job, and other ones in others.
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PMI_JOBID")
_ATTEMPTS = 10
# By the folder: the open file, and how many hold it. To close any other one of the file
# would give up the lock.
_held: dict[str, tuple[int, int]] = {}


def take(directory: str) -> bool:
    """Lock a folder for this job, which may do so several times; see `release`.

    Not collective; replica 0 calls it. Returns whether it is locked: not where the file
    system has no locks, or another process of this job has it. CheckpointError where
    another job has it.
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
            # The save finds out what is wrong with the folder.
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


def release(directory: str) -> None:
    """Give up what `take` has locked, once as often as it was; not collective."""
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
    """Return what all processes of this job, and no others, have."""
    names = [os.environ[name] for name in _JOB_NAMES if os.environ.get(name)]
    step = os.environ.get("SLURM_STEP_ID", "")
    # Without a launcher that names its jobs: the process that started this one.
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
    # The lock counts: what the file says is for people.
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
