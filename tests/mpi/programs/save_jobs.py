"""Helpers that start saving jobs, disturb them, and check the files in their folder."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hpcstrat as hs
from hpcstrat.checkpoint.file.schema import step_of
from hpcstrat.testing import launch_command
from hpcstrat.testing.job import Job, wait_until
from tests.mpi.programs import save_loop
from tests.mpi.programs.started import PROGRAMS, environment, processes_with

_MARK = "HPCSTRAT_TEST_FAULTS"
LIMIT_SECONDS = 60.0
_NAP_SECONDS = 0.001
# Which processes to kill, with the weight of each choice.
_WHOM = {"one": 5, "all": 3, "launcher": 2}
# When to kill: the longest delay in seconds after the job starts, after the first save,
# or after a later save starts.
_MOMENTS = {"started": 0.1, "saved": 0.1, "saving": 0.02}
_WEIGHTS = (1, 2, 4)


@dataclass
class Running:
    """A running job, with the mark in the environment of its processes."""

    job: Job
    mark: str
    # Processes of the job that still ran after its time limit.
    left: list[str] = field(default_factory=list)

    def kill_launcher(self) -> None:
        """Kill only the launcher; the ranks may live on."""
        self.job._process.kill()

    def ends(self, seconds: float) -> bool:
        """Return whether the job ends in time; if not, make it write its stacks."""
        if self.job.wait(seconds) is not None:
            return True
        self.left = [f"{one} {_state(one)}" for one in processes_with(self.mark)]
        self.job.show_stacks()
        return False

    def ranks_are_gone(self) -> bool:
        """Return whether no process of the job is left."""
        return not processes_with(self.mark)

    def __repr__(self) -> str:
        """Return the job's output, stacks and leftover processes as text."""
        stacks = "\n".join(self.job.stacks().values())
        left = "\n".join(self.left)
        return (
            f"--- stdout\n{self.job.stdout}\n--- stderr\n{self.job.stderr}\n"
            f"--- processes\n{left}\n--- stacks\n{stacks}"
        )


def _state(process: str) -> str:
    """Return the state of a process, with the kernel function it sleeps in."""
    place = Path("/proc") / process.partition(":")[0]
    try:
        state = (place / "status").read_text().split("\n")[2]
        return f"{state} {(place / 'wchan').read_text()}"
    except OSError as error:
        return str(error)


@contextmanager
def running(
    folder: Path,
    name: str,
    *arguments: object,
    n: int = 2,
    launch: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Run a program of this folder; at the end, kill the processes that are left."""
    mark = secrets.token_hex(8)
    output = folder / f"output-{mark}"
    for path in (folder / "pids", output):
        path.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, str(PROGRAMS / name), str(folder), *map(str, arguments)]
    command = [*(launch or launch_command(n)), *program]
    job = Job(command, output, environment({_MARK: mark, **(env or {})}))
    try:
        yield Running(job, mark)
    finally:
        job.end()


def acknowledged(folder: Path, name: str = "acknowledged") -> list[int]:
    """Return the steps whose saves had returned, from a file of the job."""
    try:
        return list(map(int, (folder / name).read_text().split()))
    except FileNotFoundError:
        return []


def torn(folder: Path) -> list[str]:
    """Return the temporary files of saves that a kill interrupted."""
    # The folder of checkpoints does not exist if the job was killed early.
    return [path.name for path in (folder / "checkpoints").glob(".ckpt-*")]


def restored(folder: Path) -> tuple[int, str]:
    """Restore in this process; return the step, and the problems as text."""
    objects = save_loop.make_objects()
    manager = hs.CheckpointManager(folder / "checkpoints", **objects)
    left = torn(folder)
    newest = max((step_of(path) or 0 for path in manager.checkpoints), default=0)
    step = manager.restore_or_initialize() or 0
    found = [f"left behind: {left}"] if left else []
    if step != newest:
        found.append(f"{newest} was published, but is not whole")
    if step:
        seen = int(objects["seen"].numpy())
        found += save_loop.problems(objects, step, seen)
    return step, "; ".join(found)


@dataclass(frozen=True)
class Kill:
    """A planned kill: the victims, and a ``delay`` after a ``moment``."""

    number: int
    n: int
    ranks_per_replica: int
    how: str
    whom: str
    victims: tuple[int, ...]
    moment: str
    delay: float

    @classmethod
    def draw(cls, number: int, seed: int) -> Kill:
        """Return a random kill; jobs with even numbers save synchronously."""
        draw = random.Random(f"{seed} {number}")
        n = draw.choice([1, 2, 2, 3, 4])
        divisors = [count for count in range(1, n + 1) if n % count == 0]
        (whom,) = draw.choices([*_WHOM], [*_WHOM.values()])
        (moment,) = draw.choices([*_MOMENTS], _WEIGHTS)
        victims = {"one": (draw.randrange(n),), "all": (*range(n),), "launcher": ()}
        return cls(
            *(number, n, draw.choice(divisors), ["wait", "go"][number % 2]),
            *(whom, victims[whom]),
            moment,
            draw.random() * _MOMENTS[moment],
        )


@dataclass
class Tally:
    """Counts of kills and their effects."""

    kills: int = 0
    torn: int = 0
    saves: int = 0
    outlived: int = 0
    divided: int = 0

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)

    def __str__(self) -> str:
        """Return the counts as text."""
        return (
            f"{self.kills} kills, {self.saves} saves acknowledged, {self.torn} files "
            f"torn, {self.outlived} jobs whose ranks outlived the launcher, "
            f"{self.divided} jobs with replicas of several ranks"
        )


def _when(folder: Path, kill: Kill, before: int, running: Running) -> bool:
    """Wait for the moment of the kill; return whether it came before the job ended."""

    def come() -> bool:
        if kill.moment == "started":
            return (folder / "started").exists()
        return max(acknowledged(folder), default=0) > before

    def ended() -> bool:
        return running.job.wait(0) is not None

    wait_until(lambda: come() or ended(), LIMIT_SECONDS)
    if not come() or ended():
        return False
    deadline = time.monotonic() + LIMIT_SECONDS
    while kill.moment == "saving" and not torn(folder):
        if ended() or time.monotonic() > deadline:
            return False
        time.sleep(_NAP_SECONDS)
    time.sleep(kill.delay)
    return True


def _strike(folder: Path, kill: Kill, running: Running, tally: Tally) -> str:
    """Kill the victims, and wait for the end of the job; return the problem as text."""
    if kill.whom == "launcher":
        running.kill_launcher()
        if not wait_until(running.ranks_are_gone, 1):
            tally.outlived += 1
            running.job.end()
        return ""
    for rank in kill.victims:
        # The launcher may already have killed this rank, because another one is dead.
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / "pids" / str(rank)).read_text()), signal.SIGKILL)
    code = running.job.wait(LIMIT_SECONDS)
    if code is None:
        running.job.show_stacks()
        return "the job did not end"
    if not wait_until(running.ranks_are_gone, 5):
        return "processes survived"
    return "" if code else "the job's exit code is 0"


def attempt(folder: Path, kill: Kill, tally: Tally) -> str:
    """Start a job, kill it while it saves; return the problems as text."""
    (folder / "started").unlink(missing_ok=True)
    before = max(acknowledged(folder), default=0)
    words = 100_000, kill.how, kill.ranks_per_replica
    with running(folder, "save_loop.py", *words, n=kill.n) as job:
        if not _when(folder, kill, before, job):
            return f"{kill}: the job did not save\n{job}"
        wrong = [_strike(folder, kill, job, tally)]
        said = str(job)
    told = acknowledged(folder)
    tally.kills += 1
    tally.divided += kill.ranks_per_replica > 1
    tally.torn += len(torn(folder)) if (folder / "checkpoints").exists() else 0
    step, text = restored(folder)
    wrong.append(text)
    if step < max(told, default=0):
        wrong.append(f"step {max(told)} was acknowledged, {step} is restored")
    tally.saves = len(told)
    return f"{kill}: {'; '.join(filter(None, wrong))}\n{said}" if any(wrong) else ""
