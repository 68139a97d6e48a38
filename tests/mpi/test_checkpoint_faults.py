"""A job that is killed at any moment loses no checkpoint that it was told it has."""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.testing import launch_command
from hpcstrat.testing.job import Job, wait_until
from tests.mpi.programs import save_loop
from tests.mpi.programs.started import (
    PROGRAMS,
    environment,
    processes_with,
    start,
)

_MARK = "HPCSTRAT_TEST_FAULTS"
_LIMIT_SECONDS = 30.0


def _acknowledged(folder: Path) -> int:
    """Return the newest step whose save had returned."""
    try:
        text = (folder / "acknowledged").read_text()
    except FileNotFoundError:
        return 0
    return max(map(int, text.split()), default=0)


def _check(folder: Path) -> str:
    """Restore in this process, and say what is wrong."""
    wanted = _acknowledged(folder)
    objects = save_loop.make_objects()
    manager = hs.CheckpointManager(folder / "checkpoints", **objects)
    step = manager.restore_or_initialize() or 0
    if step < wanted:
        return f"step {wanted} was acknowledged, {step} is restored"
    return "; ".join(save_loop.problems(objects, step, int(objects["seen"].numpy())))


def _torn(folder: Path) -> list[str]:
    """Return the files that were being written when their job was killed."""
    names = (path.name for path in (folder / "checkpoints").iterdir())
    return [name for name in names if name.startswith(".")]


def _kill(
    folder: Path, how: str, n: int, victims: list[int], delay: float, torn: list[str]
) -> str:
    """Start a job, kill ranks of it while it saves; return what is wrong then."""
    mark = secrets.token_hex(8)
    pids, output = folder / "pids", folder / "output"
    for path in (pids, output):
        path.mkdir(exist_ok=True)
    for path in pids.iterdir():
        path.unlink()
    before = _acknowledged(folder)
    program = [
        sys.executable,
        str(PROGRAMS / "save_loop.py"),
        str(folder),
        "100000",
        how,
    ]
    env = environment({_MARK: mark})
    job = Job([*launch_command(n), *program], output, env)
    try:
        started = wait_until(
            lambda: _acknowledged(folder) > before or job.wait(0) is not None,
            _LIMIT_SECONDS,
        )
        if not started or job.wait(0) is not None:
            return f"the job did not save\n{job.stdout}\n{job.stderr}"
        time.sleep(delay)
        for rank in victims:
            os.kill(int((pids / str(rank)).read_text()), signal.SIGKILL)
        code = job.wait(_LIMIT_SECONDS)
        if code is None:
            job.show_stacks()
            return f"the job did not end\n{job.stdout}\n{job.stderr}"
        gone = wait_until(lambda: not processes_with(mark), 5)
        wrong = [] if gone else ["processes survived"]
        if code == 0:
            wrong.append("the job's exit code is 0")
        torn += _torn(folder)
        if text := _check(folder):
            wrong.append(text)
        return f"{'; '.join(wrong)}\n{job.stderr}" if wrong else ""
    finally:
        job.end()


def _kills(folder: Path, count: int, seed: int) -> tuple[list[str], int]:
    """Kill jobs in the same folder one after the other; also count torn files."""
    folder.mkdir()
    draw = random.Random(seed)
    found: list[str] = []
    torn: list[str] = []
    for number in range(count):
        n = draw.choice([1, 2, 2, 3])
        victims = draw.sample(range(n), n if number % 2 else 1)
        delay = draw.random() * 0.1
        how = draw.choice(["wait", "go"])
        if wrong := _kill(folder, how, n, victims, delay, torn):
            found.append(f"kill {number} ({how}) of ranks {victims} of {n}: {wrong}")
    # Each manager removes what dead jobs left, also that of the last check.
    if _torn(folder):
        found.append(f"left behind: {_torn(folder)}")
    return found, len(torn)


def _kill_many(folder: Path, count: int) -> int:
    """Kill in two folders at the same time; return how many files were torn."""
    with ThreadPoolExecutor(2) as pool:
        parts = [
            pool.submit(_kills, folder / f"part{part}", count // 2, part)
            for part in range(2)
        ]
        found = [text for part in parts for text in part.result()[0]]
    assert not found, "\n\n".join(found)
    return sum(part.result()[1] for part in parts)


def test_killed_jobs_lose_no_acknowledged_checkpoint(tmp_path: Path) -> None:
    _kill_many(tmp_path, 10)


@pytest.mark.slow
def test_many_killed_jobs_lose_no_acknowledged_checkpoint(tmp_path: Path) -> None:
    # Without torn files the kills would have missed what they are for.
    assert _kill_many(tmp_path, 100) > 10


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("end", ["plain", "exit", "raise"])
def test_save_under_way_at_the_end_is_finished_or_dropped(
    end: str, n: int, tmp_path: Path
) -> None:
    ended = start(n, "save_and_leave.py", tmp_path, end, limit=90)
    assert ended.returncode == {"plain": 0, "exit": 3, "raise": 1}[end], ended
    assert not ended.survivors, ended
    names = sorted(path.name for path in tmp_path.iterdir())
    if end == "raise":
        # The job is ended at once, with an older checkpoint and perhaps a torn file.
        assert "ckpt-0000000001.h5" in names, ended
    else:
        assert names == [f"ckpt-{step:010d}.h5" for step in (1, 2)], ended
    x = hs.Variable(np.zeros(1 << 20))
    step = hs.CheckpointManager(tmp_path, x=x).restore()
    assert (x.numpy() == step).all()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
