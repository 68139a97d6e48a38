"""``hpcstrat chaos`` finds the ranks of real jobs, and disturbs only these ranks."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from hpcstrat.testing import launch_command
from hpcstrat.tools.chaos import disturbing
from tests.mpi.programs.started import PROGRAMS, Ended, run_command, start

LIMIT_SECONDS = 100


def job_of(token: str, num_ranks: int, running: Future[Ended]) -> disturbing.JobRanks:
    """Wait until all ranks of a program have started, and return its job."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline and not running.done():
        for job in disturbing.find_jobs():
            if token in job.ranks[0].command and len(job.ranks) == num_ranks:
                # After this time the strategy exists, or is about to be made.
                time.sleep(2)
                return job
        time.sleep(0.1)
    raise AssertionError(running.result() if running.done() else "no job was found")


def disturbed(
    n: int, seconds: float, disturb: Callable[[disturbing.JobRanks], None]
) -> Ended:
    """Run the steady program, and call a function with its job."""
    token = secrets.token_hex(8)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            start, n, "steady.py", token, seconds, limit=LIMIT_SECONDS
        )
        disturb(job_of(token, n, running))
        return running.result()


def test_stopped_and_slow_ranks_are_waited_for() -> None:
    texts: list[str] = []

    def disturb(job: disturbing.JobRanks) -> None:
        assert [process.rank for process in job.ranks] == [0, 1, 2]
        acts = [disturbing.Act(0.1, "stop", 1), disturbing.Act(0.1, "delay", 0)]
        acts.append(disturbing.Act(0.1, "stop", 2))
        strength = disturbing.Strength(stop_seconds=0.5, delay_seconds=1.0)
        done = disturbing.disturb(
            job, acts, strength, lambda *act: texts.append(act[2])
        )
        assert done == 3

    ended = disturbed(3, 8, disturb)
    assert ended.returncode == 0, str(ended)
    assert "steps True wrong 0" in ended.stdout
    assert texts == ["stopped", "goes on", "slowed down", "goes on", *texts[:2]]


def test_job_of_a_killed_rank_ends_and_others_are_left_alone() -> None:
    said: list[subprocess.CompletedProcess[str]] = []

    def disturb(job: disturbing.JobRanks) -> None:
        command = [sys.executable, "-c", "from hpcstrat.cli import main; main()"]
        words = ["chaos", "run", "--kill", "--every", "0.2", "--ranks", "1", "--job"]
        said.append(
            subprocess.run(
                [*command, *words, job.name],
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_SECONDS,
            )
        )

    bystander = subprocess.Popen(["sleep", "300"], env={"PMIX_RANK": "1"})
    try:
        ended = disturbed(2, 60, disturb)
        assert ended.returncode, str(ended)
        assert ended.survivors == []
        assert said[0].returncode == 0, said
        assert "killed" in said[0].stdout
        assert "rank 1 (process" in said[0].stdout
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_ranks_behind_a_shell_are_the_python_processes() -> None:
    token = secrets.token_hex(8)
    script = f'"{sys.executable}" "{PROGRAMS / "steady.py"}" {token} 4; exit $?'
    command = [*launch_command(2), "bash", "-c", script]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_command, command, "shell", LIMIT_SECONDS, {})
        deadline, found = time.monotonic() + LIMIT_SECONDS, set()
        while time.monotonic() < deadline and not running.done():
            for job in disturbing.find_jobs():
                if token in job.ranks[0].command:
                    found |= {process.command.split()[0] for process in job.ranks}
            if any("python" in word for word in found):
                break
            time.sleep(0.05)
        ended = running.result()
    assert any("python" in word for word in found), found
    assert ended.returncode == 0, str(ended)
