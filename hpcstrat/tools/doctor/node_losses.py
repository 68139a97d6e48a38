"""The answer to whether this allocation can survive the loss of a node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from hpcstrat.cluster_resolver.batch_job import batch_job_from_environment, output_of
from hpcstrat.elastic.watching import claims

__all__ = ["node_loss_words", "stale_folders"]

_ADVICE = "see jobs/survive.sbatch"
_STALE_SECONDS = 86400.0
_LEAST_BYTES = 1 << 20


def node_loss_words(env: Mapping[str, str] | None = None) -> str:
    """Return what happens at the loss of a node; empty outside of a job."""
    env = os.environ if env is None else env
    job = batch_job_from_environment(env)
    if job is None:
        return ""
    if job.scheduler != "Slurm":
        return f"as {job.scheduler} is configured; never tried with {job.scheduler}"
    nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES", "1")
    if nodes == "1":
        return f"ends this job, which has one node; ask for a spare one, {_ADVICE}"
    if not _has_no_kill(job.job_id, env):
        return f"ends this job, whose script has no #SBATCH --no-kill; {_ADVICE}"
    folder = env.get("HPCSTRAT_WATCH_FOLDER", "")
    if not folder:
        return f"ends the program, which has no watchers; {_ADVICE}"
    return f"is survived: {_spare_words(Path(folder))}, {_memory_words()}"


def _has_no_kill(job_id: str, env: Mapping[str, str]) -> bool:
    if "SBATCH_NO_KILL" in env:
        return True
    try:
        script = output_of(["scontrol", "write", "batch_script", job_id, "-"])
    except (OSError, subprocess.SubprocessError):
        # Not known: the user may not see the script, or there is none.
        return True
    options = [line.split() for line in script.splitlines() if line[:7] == "#SBATCH"]
    return any({"--no-kill", "-k"} & set(words) for words in options)


def _spare_words(folder: Path) -> str:
    try:
        claim = claims.read(folder, claims.newest(folder))
    except OSError:
        claim = None
    if claim is None:
        return "unknown spare nodes"
    spare = len(claim.members) - len(claim.nodes)
    return f"{spare} spare node{'' if spare == 1 else 's'}"


def _memory_words() -> str:
    try:
        about = os.statvfs("/dev/shm")
    except OSError:
        return "no /dev/shm for snapshots"
    return f"{about.f_bavail * about.f_frsize >> 20} MiB free in /dev/shm for snapshots"


def stale_folders(root: Path = Path("/dev/shm")) -> tuple[tuple[str, int], ...]:
    """Return this user's folders of snapshots that no program uses, and their bytes.

    They are those of watchers that have ended, and those without a watcher that nobody
    has changed for a day. Folders of less than 1 MiB are left out.
    """
    found = []
    for path in sorted(root.glob("hpcstrat-*")):
        with contextlib.suppress(OSError):
            watched = path.name.startswith(f"hpcstrat-watch-{os.getuid()}-")
            if watched:
                is_stale = not _is_locked(path / "lock")
            elif path.name.startswith(f"hpcstrat-{os.getuid()}-") and path.is_dir():
                newest = max(one.stat().st_mtime for one in (path, *path.iterdir()))
                is_stale = time.time() - newest > _STALE_SECONDS
            else:
                continue
            files = (one.stat() for one in path.rglob("*"))
            nbytes = 512 * sum(one.st_blocks for one in files)
            if is_stale and nbytes >= _LEAST_BYTES:
                found.append((str(path), nbytes))
    return tuple(found)


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
