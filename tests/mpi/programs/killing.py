"""Run ``elastic.py``, kill one of its ranks at some moment, and check its result."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcstrat.testing import launch_command
from hpcstrat.testing.job import Job, wait_until
from tests.mpi.programs.started import PROGRAMS, environment

BATCH = 12
_PAUSE_SECONDS = 0.01
_EPOCHS = 5
# Seconds from the start of the first training to about its end.
_SPAN_SECONDS = 0.7


@dataclass
class Trial:
    """The outcome of a job; ``seconds`` is the time from the kill to the next step.

    ``problem`` is empty if the job was right, and ``seconds`` is None if no step came
    after the kill.
    """

    title: str
    problem: str = ""
    seconds: float | None = None
    returncode: int | None = None
    results: list[Any] = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    marked: bool = False

    def __str__(self) -> str:
        """Return the whole outcome as text."""
        return (
            f"*** {self.title}: {self.problem}\nrc {self.returncode}, results "
            f"{self.results}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def program(
    folder: Path, options: dict[str, Any], name: str = "elastic.py"
) -> list[str]:
    """Return the command line of the program."""
    path = str(PROGRAMS / name)
    return [sys.executable, path, str(folder), json.dumps(options)]


def attempt(
    launch: Sequence[str],
    options: dict[str, Any],
    *,
    name: str = "elastic.py",
    limit: float = 100,
    disturb: Callable[[Path], float | None] | None = None,
    **env: str,
) -> Trial:
    """Run the program once; ``disturb(folder)`` kills a rank and returns the time."""
    trial = Trial(f"{' '.join(launch[-2:])} {json.dumps(options)}")
    with tempfile.TemporaryDirectory(prefix="hpcstrat-") as place:
        folder = Path(place)
        output = folder / "output"
        output.mkdir()
        command = [*launch, *program(folder, options, name)]
        job = Job(command, output, environment(env))
        try:
            killed = None if disturb is None else disturb(folder)
            trial.returncode = job.wait(limit)
            if trial.returncode is None:
                job.show_stacks()
                trial.problem = "it did not end"
        finally:
            job.end()
        trial.stdout, trial.stderr = job.stdout, job.stderr
        trial.marked = (folder / "done").exists()
        for path in sorted(folder.glob("*.result")):
            trial.results.append(json.loads(path.read_text()))
        resumed = folder / "resumed"
        if killed is not None and resumed.exists():
            lines = resumed.read_text().splitlines()
            moments = [float(line.split()[0]) for line in lines]
            trial.seconds = min(
                (t - killed for t in moments if t > killed), default=None
            )
    return trial


# Entries that stay equal to the last bit when logical replicas of a lost rank move to
# other ranks.
_TRACELESS = ("bits", "draws", "seen", "first", "mean", "replicas")


def judge(
    trial: Trial,
    expected: dict[str, Any],
    *,
    exact: bool = False,
    traceless: bool = False,
) -> Trial:
    """Record the problems of a trial that should have run to its end."""
    found = [trial.problem] if trial.problem else []
    if trial.returncode:
        found.append(f"returncode {trial.returncode}")
    if not trial.marked:
        found.append("there is no completion marker")
    if not trial.results:
        found.append("there is no result")
    keys = ["step", "ledger", "total", *(_TRACELESS if traceless else ())]
    keys += ["seen"] if exact else []
    for result in trial.results:
        for key in keys:
            if result[key] != expected[key]:
                found.append(f"{key} is {result[key]}, not {expected[key]}")
        if not np.allclose(result["weights"], expected["weights"], rtol=1e-9):
            found.append(f"weights are {result['weights']}")
        if result["bits"] != trial.results[0]["bits"]:
            found.append("weights differ between replicas")
    trial.problem = "; ".join(dict.fromkeys(found))
    return trial


def undisturbed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the same training in one process."""
    alone = {k: v for k, v in options.items() if k not in ("kills", "run", "pause")}
    logical = options.get("run", {}).get("logical_replicas")
    if logical is not None:
        alone["run"] = {"logical_replicas": logical}
    trial = attempt([], alone)
    assert len(trial.results) == 1, str(trial)
    return trial.results[0]


def kill_at_random(chance: random.Random, n: int) -> Callable[[Path], float | None]:
    """Return a function that kills one of n ranks at a random time in the training."""
    rank, delay = chance.randrange(n), chance.uniform(0, _SPAN_SECONDS)

    return partial(kill_rank, rank=rank, delay=delay)


def kill_rank(folder: Path, rank: int, delay: float) -> float | None:
    """Kill a rank some seconds after the training starts, and return the time."""
    if not wait_until((folder / "started").exists, 60):
        return None
    time.sleep(delay)
    pid = int((folder / f"{rank}.process").read_text())
    moment = time.time()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return moment


def campaign(
    count: int,
    seed: int,
    make_launch: Callable[[int], Sequence[str]],
    sizes: Sequence[int] = (3, 4),
    logical: int | None = None,
) -> list[Trial]:
    """Run many jobs, kill one rank of each at random, and return the judged trials."""
    chance = random.Random(seed)
    base: dict[str, Any] = {"epochs": _EPOCHS, "pause": _PAUSE_SECONDS}
    if logical is not None:
        base["run"] = {"logical_replicas": logical}
    expected = undisturbed(base)
    trials = []
    for number in range(count):
        n, spare_ranks = chance.choice(sizes), chance.randrange(2)
        each = chance.choice((None, None, 1, 2))
        copies = chance.random() < 0.5
        run = {"spare_ranks": spare_ranks, "partner_copies": copies}
        run |= base.get("run", {})
        large = chance.choice((0, 0, 40_000))
        options = {**base, "large": large, "run": {**run, "replicas_per_worker": each}}
        disturb = kill_at_random(chance, n)
        trial = attempt(make_launch(n), options, disturb=disturb)
        judge(trial, expected, exact=copies, traceless=logical is not None)
        trial.title = f"seed {seed}, trial {number}: {trial.title}"
        trials.append(trial)
    return trials


def figures(trials: Sequence[Trial]) -> str:
    """Return how many trials were right, and how soon they continued after the kill."""
    right = sum(not trial.problem for trial in trials)
    seconds = sorted(t.seconds for t in trials if t.seconds is not None)
    text = f"{right} of {len(trials)} right; {len(seconds)} went on after the kill"
    if seconds:
        median = statistics.median(seconds)
        text += f", after {median:.3f} s (median), {seconds[-1]:.3f} s (longest)"
    return text


def local(n: int) -> list[str]:
    """Return the launch command for n ranks on this machine."""
    return launch_command(n, fault_tolerant=True)


if __name__ == "__main__":
    count, seed, *rest = map(int, sys.argv[1:])
    done = campaign(count, seed, local, logical=rest[0] if rest else None)
    for one in done:
        if one.problem:
            print(one)
    print(figures(done))
