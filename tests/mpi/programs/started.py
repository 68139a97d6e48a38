"""Helpers that launch a program and find the processes left afterwards."""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpcstrat.testing import launch_command
from hpcstrat.testing.job import Job
from hpcstrat.testing.launcher import clean_environment

PROGRAMS = Path(__file__).parent
IS_OPEN_MPI = "--oversubscribe" in launch_command(1)
OF_OPEN_MPI = "only mpirun of Open MPI lets a job live on when a rank dies"
ulfm = pytest.mark.skipif(not IS_OPEN_MPI, reason=OF_OPEN_MPI)
_MARK = "HPCSTRAT_TEST_PROGRAM"
_SURVIVAL_SECONDS = 10.0
_NAP_SECONDS = 0.02


@dataclass
class Ended:
    """The end of a program; ``returncode`` is None if it exceeded its time limit."""

    command: str
    returncode: int | None
    stdout: str
    stderr: str
    seconds: float
    survivors: list[str] = field(default_factory=list)

    @property
    def tracebacks(self) -> list[str]:
        """The tracebacks in standard error, in order; each ends with its error."""
        pattern = r"^Traceback \(most recent call last\):\n(?:[ ].*\n)+.*\n?"
        return re.findall(pattern, self.said, re.MULTILINE)

    @property
    def said(self) -> str:
        """Standard error without the lines of launchers and loggers."""
        text = re.sub(r"(?s)-{70,}\n.*?-{70,}\n\0?", "", self.stderr)
        return re.sub(r"\[hpcstrat \d+/\d+ .*\n", "", text)

    @property
    def late_reports(self) -> list[str]:
        """The reports of late ranks in standard error, with their stacks."""
        pattern = (
            r"^\[hpcstrat [^\n]* have waited .*?(?=^\[hpcstrat|^Trace|^hpcstrat|\Z)"
        )
        text = self.stderr.replace(" has waited ", " have waited ")
        found = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
        # Ignore late starts: on a busy machine, processes may start seconds apart.
        return [report for report in found if " s in creation of " not in report]

    def __str__(self) -> str:
        """Return the whole outcome as text."""
        return (
            f"{self.command}: rc {self.returncode} after {self.seconds:.1f} s, "
            f"survivors {self.survivors}\n--- stdout\n{self.stdout}\n"
            f"--- stderr\n{self.stderr}"
        )


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which Python finds the package of this checkout."""
    paths = [str(PROGRAMS.parents[2]), os.environ.get("PYTHONPATH", "")]
    joined = os.pathsep.join(filter(None, paths))
    # The fault handler prints stacks when SIGABRT ends a process.
    fixed = {"PYTHONPATH": joined, "PYTHONFAULTHANDLER": "1"}
    return clean_environment({**fixed, **(changes or {})})


def processes_with(mark: str) -> list[str]:
    """Return the live processes whose environment contains a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                command = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append(f"{path.parent.name}: {command.decode(errors='replace')}")
        except OSError:
            continue
    return found


def start(
    n: int, name: str, *arguments: object, limit: float = 30, **env: str
) -> Ended:
    """Run a program of this folder on n ranks, and return how it ended."""
    words = list(map(str, arguments))
    program = [sys.executable, str(PROGRAMS / name), *words]
    command = [*launch_command(n), *program]
    return run_command(command, f"-n {n} {name} {' '.join(words)}", limit, env)


def run_command(
    command: Sequence[str], title: str, limit: float, env: Mapping[str, str]
) -> Ended:
    """Run a command; list the processes that it leaves, then kill them."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="hpcstrat-") as folder:
        begin = time.monotonic()
        job = Job(command, Path(folder), environment({_MARK: mark, **env}))
        try:
            returncode = job.wait(limit)
            seconds = time.monotonic() - begin
            if returncode is None:
                job.show_stacks()
            ended = Ended(title, returncode, job.stdout, job.stderr, seconds)
            if returncode is not None:
                ended.survivors = _survivors(mark)
            return ended
        finally:
            job.end()


def _survivors(mark: str) -> list[str]:
    """Return the processes that are still alive after some seconds."""
    deadline = time.monotonic() + _SURVIVAL_SECONDS
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(_NAP_SECONDS)
    return left
