"""Functions that find the ranks of running MPI jobs on this machine in ``/proc``.

A launcher passes the rank to each process in an environment variable. Only processes of
the same user are examined. Child processes of a rank inherit the variable, but are not
counted as ranks. This module does not need MPI.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcstrat._launchers import LAUNCHER_PROGRAMS, LAUNCHERS
from hpcstrat.engine.topology.process_stat import PARENT, START, STATE, process_stat
from hpcstrat.errors import HpcstratError

__all__ = [
    "JobRanks",
    "NoSuchRankError",
    "ProcessHandle",
    "RankProcess",
    "choose",
    "find_jobs",
]


class NoSuchRankError(HpcstratError, LookupError):
    """Raised if a job or rank is not running on this machine."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of one rank.

    Parameters
    ----------
    rank : int
        Number of the rank in the job.
    pid : int
        Number of the process.
    started : str
        Start time of the process. It distinguishes processes with the same, reused
        number.
    command : str
        Command line of the process.
    """

    rank: int
    pid: int
    started: str
    command: str


@dataclass(frozen=True, slots=True)
class JobRanks:
    """The ranks of one job on this machine.

    Parameters
    ----------
    name : str
        The launcher's name of the job.
    slurm_job : str
        Number of the Slurm job that includes this job; empty outside of Slurm.
    ranks : tuple of RankProcess
        The ranks in ascending order.
    """

    name: str
    slurm_job: str
    ranks: tuple[RankProcess, ...]


@dataclass(frozen=True, slots=True)
class _LaunchedProcess:
    """A process with a rank in its environment."""

    pid: int
    parent: int
    started: str
    name: str
    environment: Mapping[str, str]


def _stat(pid: int, proc: Path) -> tuple[str, list[str]]:
    """Return a process's name and other stat fields; OSError if it has ended."""
    name, fields = process_stat(pid, str(proc))
    # A zombie process has ended, although its number is still in use.
    if fields[STATE] in "ZX":
        raise ProcessLookupError(pid)
    return name, fields


def _look(pid: int, uid: int, proc: Path) -> _LaunchedProcess | None:
    """Return a process if it belongs to this user and has a rank, else None."""
    # Ignore errors: the process may end at any moment, and the environment of other
    # users' processes cannot be read.
    with contextlib.suppress(OSError):
        folder = proc / str(pid)
        if folder.stat().st_uid != uid:
            return None
        pairs = (folder / "environ").read_bytes().split(b"\0")
        environment = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs)
        name, fields = _stat(pid, proc)
        if name not in LAUNCHER_PROGRAMS and _rank(environment) is not None:
            return _LaunchedProcess(
                pid, int(fields[PARENT]), fields[START], name, environment
            )
    return None


def _rank(environment: Mapping[str, str]) -> int | None:
    for launcher in LAUNCHERS:
        text = environment.get(launcher.rank, "")
        # A batch script also has SLURM_PROCID, but is no rank of a job step.
        in_step = launcher.name != "srun" or environment.get("SLURM_STEP_ID")
        if text.isdecimal() and in_step:
            return int(text)
    return None


def _above(pid: int, proc: Path) -> Iterator[tuple[int, str]]:
    """Yield number and name of a process, then of its parent, and so on."""
    while pid > 0:
        try:
            name, fields = _stat(pid, proc)
        except OSError:
            return
        yield pid, name
        pid = int(fields[PARENT])


def _job_name(top: _LaunchedProcess, proc: Path) -> str:
    environment = top.environment
    if environment.get("PMIX_NAMESPACE"):
        return environment["PMIX_NAMESPACE"]
    if environment.get("SLURM_STEP_ID"):
        return f"slurm-{environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}"
    launcher = top.parent, "launcher"
    for number, (pid, name) in enumerate(_above(top.parent, proc)):
        if number and name not in LAUNCHER_PROGRAMS:
            break
        launcher = pid, name
    return f"{launcher[1]}-{launcher[0]}"


def _uses_mpi(pid: int, proc: Path) -> bool:
    try:
        # A wrapper, such as a shell script, does not load MPI.
        return "libmpi" in (proc / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return False


def find_jobs(*, uid: int | None = None, proc: Path = Path("/proc")) -> list[JobRanks]:
    """Return the MPI jobs that have ranks on this machine.

    Not collective.

    Parameters
    ----------
    uid : int, optional
        Number of the user whose jobs are returned. Default: this user.
    proc : path
        Folder of the process file system.

    Returns
    -------
    list of JobRanks
        The jobs, sorted by name. This process and its ancestors are not included.
    """
    uid = os.geteuid() if uid is None else uid
    # Never disturb this process and its ancestors, even if this is a rank.
    own = {pid for pid, _ in _above(os.getpid(), Path("/proc"))}
    pids = [int(path.name) for path in proc.glob("[0-9]*")]
    looked = (_look(pid, uid, proc) for pid in pids if pid not in own)
    processes = {process.pid: process for process in looked if process is not None}
    jobs: dict[str, dict[int, list[_LaunchedProcess]]] = {}
    slurm: dict[str, str] = {}
    for process in processes.values():
        top = process
        # A rank's child processes inherit its environment: go up to the rank's process,
        # whose parent is the launcher.
        while top.parent in processes:
            top = processes[top.parent]
        name = _job_name(top, proc)
        rank = _rank(process.environment)
        assert rank is not None
        jobs.setdefault(name, {}).setdefault(rank, []).append(process)
        slurm[name] = process.environment.get("SLURM_JOB_ID", "")
    return [
        JobRanks(
            name,
            slurm[name],
            tuple(_chosen(rank, jobs[name][rank], proc) for rank in sorted(jobs[name])),
        )
        for name in sorted(jobs)
    ]


def _chosen(
    rank: int, processes: Sequence[_LaunchedProcess], proc: Path
) -> RankProcess:
    """Return the process of a rank: one that has loaded MPI, or else the topmost."""
    pids = {process.pid for process in processes}
    order = sorted(processes, key=lambda p: (p.parent in pids, int(p.started), p.pid))
    users = [process for process in order if _uses_mpi(process.pid, proc)]
    chosen = (users or order)[0]
    try:
        words = (proc / str(chosen.pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    command = " ".join(os.fsdecode(word) for word in words).strip()
    return RankProcess(rank, chosen.pid, chosen.started, command)


def choose(jobs: Sequence[JobRanks], name: str) -> JobRanks:
    """Return the job with a given name.

    Not collective.

    Parameters
    ----------
    jobs : sequence of JobRanks
        The jobs from `find_jobs`.
    name : str
        The job's name, or the number of the Slurm job that includes it.

    Returns
    -------
    JobRanks
        The only job with this name.

    Raises
    ------
    NoSuchRankError
        If no job or several jobs have this name.
    """
    found = [job for job in jobs if job.name == name]
    found = found or [job for job in jobs if name and job.slurm_job == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(job.name for job in found or jobs) or "none"
    raise NoSuchRankError(
        f"expected one job {name!r} with ranks of this user on this machine, found "
        f"{names}; see hpcstrat chaos list"
    )


class ProcessHandle:
    """A handle by which signals reach only this process, even if its number is reused.

    Raises NoSuchRankError if the process has ended, or belongs to another user. The
    handle has a pidfd, which is open until `close`.
    """

    def __init__(self, process: RankProcess) -> None:
        self.process = process
        # Use a pidfd, because the number of an ended process may be reused.
        try:
            self.fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            raise self._gone() from None
        # The number may have been reused before the pidfd was opened: compare the start
        # time and the user of its process.
        found = None
        with contextlib.suppress(OSError):
            found = _stat(process.pid, Path("/proc"))[1][START]
        uid = -1
        with contextlib.suppress(OSError):
            uid = os.stat(f"/proc/{process.pid}").st_uid
        if found != process.started or uid != os.geteuid():
            os.close(self.fd)
            raise self._gone()

    def _gone(self) -> NoSuchRankError:
        return NoSuchRankError(
            f"expected the process {self.process.pid} of rank {self.process.rank}, "
            "found that it has ended; see hpcstrat chaos list"
        )

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return False if the process has ended."""
        if self.ended():
            return False
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            return False
        return True

    def ended(self, seconds: float = 0.0) -> bool:
        """Wait up to ``seconds`` for the process to end; return whether it has."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self.fd)
