"""The batch job of this process: its ID, its end, and a request to queue it again."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from hpcstrat._launchers import SCHEDULERS, own_environment

__all__ = ["BatchJob", "batch_job_from_environment"]

_SECONDS = 60.0
# `flux job timeleft` prints this number for a job without a time limit.
_FLUX_UNLIMITED = (1 << 32) - 1
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
# A date as ctime(3) writes it, in local time, such as Thu Nov 26 17:31:02 2026.
_CTIME = re.compile(r"\w{3} (\w{3}) +(\d+) (\d+):(\d+):(\d+) (\d{4})")


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job of a scheduler.

    Parameters
    ----------
    scheduler : str
        ``Slurm``, ``PBS``, ``Flux``, ``LSF`` or ``SGE``.
    job_id : str
        The scheduler's ID of the job, which is the same after the job is queued again.
    """

    scheduler: str
    job_id: str

    def end(self) -> float | None:
        """Return the time at which the scheduler will end the job.

        Not collective. This method may run a scheduler's command, for up to a minute.

        Returns
        -------
        float or None
            Time in seconds since the epoch (1970). None if there is no time limit, or
            if the command fails, such as in a container without the command.
        """
        try:
            return _COMMANDS[self.scheduler].end(self.job_id)
        except (OSError, subprocess.SubprocessError, ValueError, KeyError):
            return None

    def requeue(self) -> None:
        """Ask the scheduler to end this job and to queue it again.

        Not collective.

        Raises
        ------
        RuntimeError
            If the scheduler refuses; the error has its message. If the job of Slurm was
            cancelled. PBS lets only operators requeue jobs, and Flux nobody; there, a
            script must submit itself again.
        """
        command = _COMMANDS[self.scheduler].requeue
        if not command:
            raise RuntimeError(
                f"expected a scheduler that users can ask to requeue a job, found "
                f"{self.scheduler}; submit the script again when it ends with status "
                f"42, as jobs/{self.scheduler.lower()}/ shows"
            )
        if self.scheduler == "Slurm" and _slurm_has_cancelled(self.job_id):
            raise RuntimeError(
                f"expected job {self.job_id} to run until it is requeued, found that "
                "it was cancelled; submit it again if it is to continue"
            )
        try:
            output_of([*command, self.job_id])
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", "") or getattr(error, "stdout", "") or error
            raise RuntimeError(
                f"expected {command[0]} to requeue job {self.job_id}, found: "
                f"{str(said).strip()}; requeue it by hand"
            ) from error


def batch_job_from_environment(
    environment: Mapping[str, str] | None = None,
) -> BatchJob | None:
    """Return the batch job in which this process runs.

    Not collective.

    Parameters
    ----------
    environment : mapping of str to str, optional
        Default: this process's environment.

    Returns
    -------
    BatchJob or None
        The innermost job, if they are nested; None outside of a job.
    """
    env = own_environment() if environment is None else environment
    for name, scheduler in SCHEDULERS.items():
        if job_id := scheduler.job_id(env):
            # The ID has the task's number in a job array: each task is a job.
            return BatchJob(name, job_id + _COMMANDS[name].task(env))
    return None


def output_of(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return the output of a scheduler's command, in English, as date parsing needs.

    Raises OSError or subprocess.SubprocessError if it fails, or takes over a minute.
    """
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=True,
        env={**(os.environ if env is None else env), "LC_ALL": "C"},
    ).stdout


def _seconds(text: str) -> float:
    """Return the seconds of a duration of PBS or SGE, such as 01:30:00 or 5400."""
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def _slurm_end(job: str) -> float | None:
    # Without a limit, SLURM_JOB_END_TIME is no number; Slurm before 23 does not set it.
    said = own_environment().get("SLURM_JOB_END_TIME", "")
    if not said.isdecimal():
        words = ["squeue", "--noheader", "--jobs", job, "--format=%e"]
        said = output_of(words, {**os.environ, "SLURM_TIME_FORMAT": "%s"}).strip()
    return float(said) if said.isdecimal() and int(said) else None


def _slurm_has_cancelled(job: str) -> bool:
    # Slurm would requeue a job that its user has just cancelled. Only such a job is
    # completing without a reason while its ranks still run.
    words = ["squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T %r"]
    try:
        return output_of(words).strip() == "COMPLETING None"
    except (OSError, subprocess.SubprocessError):
        return False


def _pbs_end(job: str) -> float | None:
    said = output_of(["qstat", "-f", job])
    fields = dict(re.findall(r"^\s+(\S+) = (.*)$", said, re.MULTILINE))
    # Torque reports the remaining time; PBS Pro and OpenPBS report the start time.
    left = fields.get("Walltime.Remaining", "")
    if left.isdecimal():
        return time.time() + float(left)
    limit = fields.get("Resource_List.walltime")
    began = _CTIME.search(fields.get("stime") or fields.get("start_time") or "")
    if limit is None or began is None:
        return None
    month, *numbers = began.groups()
    day, hour, minute, second, year = map(int, numbers)
    when = year, _MONTHS.index(month) // 3 + 1, day, hour, minute, second, 0, 0, -1
    return time.mktime(when) + _seconds(limit)


def _flux_end(job: str) -> float | None:
    del job
    # `flux job timeleft` itself finds the job in which it runs, also in batch scripts.
    left = int(output_of(["flux", "job", "timeleft"]))
    return None if left == _FLUX_UNLIMITED else time.time() + left


def _lsf_end(job: str) -> float | None:
    # LSF prints, for example, 1:58 L: hours and minutes until the limit. With E or X
    # instead of L, the time is an estimate.
    said = output_of(["bjobs", "-noheader", "-o", "time_left", job])
    found = re.match(r"\s*(\d+):(\d+) L\b", said)
    return time.time() + 60 * _seconds(f"{found[1]}:{found[2]}") if found else None


def _sge_end(job: str) -> float | None:
    number, _, task = job.partition(".")
    said = output_of(["qstat", "-xml", "-r", "-s", "r", "-u", "*"])
    tree = ElementTree.fromstring(said)
    for entry in tree.iter("job_list"):
        of_task = not task or entry.findtext("tasks") in (None, task)
        if entry.findtext("JB_job_number") != number or not of_task:
            continue
        limits = [
            float(request.text or 0)
            for request in entry.findall("hard_request")
            if request.get("name") == "h_rt"
        ]
        began = entry.findtext("JAT_start_time")
        if limits and began:
            when = time.strptime(began.partition(".")[0], "%Y-%m-%dT%H:%M:%S")
            return time.mktime(when) + min(limits)
    return None


def _lsf_task(env: Mapping[str, str]) -> str:
    index = env.get("LSB_JOBINDEX", "0")
    return f"[{index}]" if index != "0" else ""


def _sge_task(env: Mapping[str, str]) -> str:
    task = env.get("SGE_TASK_ID", "undefined")
    return f".{task}" if task.isdecimal() else ""


@dataclass(frozen=True, slots=True)
class _Commands:
    """A scheduler's commands about a job, and the number of a task of a job array."""

    end: Callable[[str], float | None]
    requeue: tuple[str, ...] = ()
    task: Callable[[Mapping[str, str]], str] = lambda _: ""


_COMMANDS = {
    "Flux": _Commands(_flux_end),
    "Slurm": _Commands(_slurm_end, ("scontrol", "requeue")),
    "PBS": _Commands(_pbs_end),
    "LSF": _Commands(_lsf_end, ("brequeue",), _lsf_task),
    "SGE": _Commands(_sge_end, ("qmod", "-rj"), _sge_task),
}
