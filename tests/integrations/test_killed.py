"""Jobs of frameworks that are killed repeatedly train like a job without kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcstrat.checkpoint.file.schema import list_checkpoints, step_of
from hpcstrat.testing import launch_command
from hpcstrat.testing.job import Job, wait_until
from tests.mpi.programs.killing import Trial, attempt, kill_at_random, local
from tests.mpi.programs.started import environment, processes_with

PROGRAM = Path(__file__).parent / "programs" / "killed.py"
LIMIT_SECONDS = 100.0


@contextlib.contextmanager
def _running(kind: str, folder: Path, n: int) -> Iterator[tuple[Job, str]]:
    """Start a job that saves in a folder; yield it, and the mark of its processes."""
    mark = secrets.token_hex(8)
    output = folder / f"output-{mark}"
    output.mkdir(parents=True)
    program = [sys.executable, str(PROGRAM), str(folder), json.dumps({"kind": kind})]
    marked = environment({"HPCSTRAT_TEST_KILLED": mark})
    job = Job([*launch_command(n), *program], output, marked)
    try:
        yield job, mark
    finally:
        job.end()


def _trained(kind: str, folder: Path, n: int) -> str:
    """Run a job to its end; return the hash that it prints."""
    with _running(kind, folder, n) as (job, _):
        assert job.wait(LIMIT_SECONDS) == 0, f"{n} ranks: {job.stdout}{job.stderr}"
        return job.stdout.split()[-1]


def _newest(folder: Path) -> int:
    # The first job makes the folder.
    with contextlib.suppress(FileNotFoundError):
        paths = list_checkpoints(str(folder / "checkpoints"))
        return max((step_of(path) or 0 for path in paths), default=0)
    return 0


def _kill(kind: str, folder: Path, n: int, draw: random.Random) -> bool:
    """Run a job, and kill one rank, or all, some time after a few saves.

    Return whether there was a process to kill.
    """
    wanted = _newest(folder) + draw.randrange(1, 4)
    with _running(kind, folder, n) as (job, mark):
        wait_until(
            lambda: _newest(folder) >= wanted or job.wait(0) is not None, LIMIT_SECONDS
        )
        time.sleep(draw.random() * 0.03)
        processes = [one.split(": ", 1) for one in processes_with(mark)]
        ranks = [pid for pid, said in processes if said.startswith(sys.executable)]
        for pid in ranks if draw.random() < 0.3 else ranks[: draw.randrange(1, n + 1)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        assert job.wait(LIMIT_SECONDS) is not None, f"{n} ranks: {job.stderr}"
        return bool(ranks)


def _train_through_kills(kind: str, folder: Path, most: int) -> None:
    """Kill jobs of 1 to 3 ranks, each of which resumes, until the training is done."""
    wanted, seed = _trained(kind, folder / "whole", 1), secrets.randbits(32)
    draw, kills = random.Random(seed), 0
    while kills < most and _kill(kind, folder / "killed", draw.randrange(1, 4), draw):
        kills += 1
    print(f"{kind}, seed {seed}: {kills} kills")
    assert kills > 1, "the jobs ended before they could be killed"
    assert _trained(kind, folder / "killed", draw.randrange(1, 4)) == wanted


@pytest.mark.full
@pytest.mark.framework("torch")
def test_killed_jobs_train_as_one_that_was_not(tmp_path: Path) -> None:
    _train_through_kills("torch", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.framework("torch", "jax", "keras")
@pytest.mark.parametrize("kind", ["torch", "jax", "keras"])
@pytest.mark.parametrize("part", range(5))
def test_many_killed_jobs_train_as_one_that_was_not(
    kind: str, part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _train_through_kills(kind, tmp_path, 20)
    with capsys.disabled():
        print(f"\n{part}: {capsys.readouterr().out}")


def _elastic(kind: str, draw: random.Random, n: int) -> tuple[Trial, bool]:
    """Train on n ranks, one of which is killed; return whether it was killed, too.

    With n of 0, train in one process without a kill.
    """
    run: dict[str, object] = {"logical_replicas": 4}
    killed: list[float] = []
    if n:
        run["replicas_per_worker"] = draw.choice((None, 1, 2))
        run["spare_ranks"] = draw.randrange(2)

    def disturb(folder: Path) -> float | None:
        moment = kill_at_random(draw, n)(folder)
        killed.extend([] if moment is None else [moment])
        return moment

    trial = attempt(
        local(n) if n else [],
        {"kind": kind, "run": run},
        name=str(PROGRAM),
        disturb=disturb if n else None,
        # On few cores, threads of XLA wait for threads of other ranks.
        limit=2 * LIMIT_SECONDS,
    )
    assert trial.returncode == 0, str(trial)
    assert trial.marked, str(trial)
    assert trial.results, str(trial)
    return trial, bool(killed)


def _train_though_ranks_die(kind: str, count: int) -> None:
    """Kill one rank in each of some jobs, whose other ranks continue."""
    seed = secrets.randbits(32)
    draw, kills = random.Random(seed), 0
    wanted = _elastic(kind, draw, 0)[0].results[0]
    while kills < count:
        trial, killed = _elastic(kind, draw, draw.choice((3, 4)))
        kills += killed
        assert set(trial.results) == {wanted}, f"seed {seed}: {trial}"
    print(f"{kind}, seed {seed}: {kills} ranks killed, of elastic jobs")


@pytest.mark.full
@pytest.mark.framework("torch")
def test_ranks_that_are_left_train_as_if_none_had_died() -> None:
    _train_though_ranks_die("torch", 1)


@pytest.mark.slow
@pytest.mark.framework("torch", "jax", "keras")
@pytest.mark.parametrize("kind", ["torch", "jax", "keras"])
@pytest.mark.parametrize("part", range(5))
def test_ranks_that_are_left_train_as_if_none_had_died_each_of_ten_times(
    kind: str, part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _train_though_ranks_die(kind, 10)
    with capsys.disabled():
        print(f"\n{part}: {capsys.readouterr().out}")
