"""Runs many programs in jobs, and returns the ranks' results of each program."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcstrat.testing import launch_command
from hpcstrat.testing.job import Job
from hpcstrat.testing.launcher import clean_environment
from tests.fuzz.program import Program

__all__ = ["LIMIT_SECONDS", "Outcome", "run_programs"]

LIMIT_SECONDS = 30.0
"""How long one program may take, whatever else the machine does."""

_NAP_SECONDS = 0.02
_START_SECONDS = 60.0
_ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """The result of a program: the values that each rank saw, or an error."""

    seen: list[list[Any]] = field(default_factory=list)
    failure: str = ""


class _Ranks:
    """Reads the result files of a job's ranks."""

    def __init__(self, folder: Path, n: int) -> None:
        self._paths = [folder / f"{rank}.seen" for rank in range(n)]
        self.begun: dict[int, dict[int, int]] = {}
        self.ended: dict[int, dict[int, Any]] = {}
        self._places = [0] * n

    def read(self) -> bool:
        """Read new entries; return whether there were any."""
        news = False
        for rank, path in enumerate(self._paths):
            if not path.exists() or path.stat().st_size == self._places[rank]:
                continue
            with path.open("rb") as file:
                file.seek(self._places[rank])
                while True:
                    try:
                        entry = pickle.load(file)
                    except (EOFError, pickle.UnpicklingError):
                        break  # Incomplete yet.
                    self._places[rank] = file.tell()
                    news = True
                    if entry[0] == "begin":
                        self.begun.setdefault(entry[1], {})[rank] = entry[2]
                    else:
                        self.ended.setdefault(entry[1], {})[rank] = entry[2]
        return news


def run_programs(
    programs: Sequence[Program],
    n: int,
    *,
    limit_seconds: float = LIMIT_SECONDS,
    env: dict[str, str] | None = None,
) -> list[Outcome]:
    """Run programs on n ranks, with a new job only after a program ended one."""
    outcomes: dict[int, Outcome] = {}
    left = list(enumerate(map(str, programs)))
    while left:
        found = _run_job(left, n, limit_seconds, env or {})
        outcomes |= found
        left = [one for one in left if one[0] not in outcomes]
    return [outcomes[number] for number in range(len(programs))]


def _run_job(
    left: list[tuple[int, str]], n: int, limit_seconds: float, env: dict[str, str]
) -> dict[int, Outcome]:
    """Run a job until it ends, or one of its programs hangs."""
    outcomes: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="hpcstrat-fuzz-") as name:
        folder = Path(name)
        (folder / "programs").write_bytes(pickle.dumps(left))
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        changes = {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **env}
        command = [*launch_command(n), sys.executable, "-m", "tests.fuzz.job", name]
        job = Job(command, folder, clean_environment(changes))
        ranks = _Ranks(folder, n)
        try:
            returncode = _follow(job, ranks, limit_seconds)
            if returncode is None:
                job.show_stacks()
            ranks.read()
            said = f"{job.stdout}\n{job.stderr}"
        finally:
            job.end()
    for number, _ in left:
        seen = ranks.ended.get(number, {})
        if len(seen) == n:
            outcomes[number] = Outcome([seen[rank] for rank in range(n)])
            continue
        how = f"no end within {limit_seconds:.0f} s" if returncode is None else "ended"
        if number in ranks.begun or not outcomes:
            outcomes[number] = Outcome(
                [seen.get(rank, []) for rank in range(n)],
                f"the job {how} ({returncode=}), when ranks were at operations "
                f"{ranks.begun.get(number)}: {said[-12000:]}",
            )
        break
    return outcomes


def _follow(job: Job, ranks: _Ranks, limit_seconds: float) -> int | None:
    """Wait for the end of a job; return None if the job hangs."""
    until = time.monotonic() + limit_seconds + _START_SECONDS
    while (returncode := job.wait(_NAP_SECONDS)) is None:
        if ranks.read():
            until = time.monotonic() + limit_seconds
        elif time.monotonic() > until:
            return None
    return returncode
