"""The status pages of a job's ranks on one host; each rank is a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.safety import presence

# Program of a rank: acquires a page, prints that, and runs until its input ends.
RANK = """
import json, os, sys
from hpcstrat.safety import presence
presence._FOLDER = sys.argv[1]
os.environ |= json.loads(sys.argv[2])
board = presence.own_registry()
print(board is not None, flush=True)
sys.stdin.read()
"""


def _environment(job: str, rank: int, size: int = 3, local: int = 3) -> dict[str, str]:
    return {
        "PMIX_NAMESPACE": job,
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local) if local > 0 else "",
    }


class Rank:
    """A process of a rank, with or without its page."""

    def __init__(self, folder: Path, job: str, rank: int, **more: int) -> None:
        told = _environment(job, rank, **more)
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The job's variables are missing when hpcstrat is imported.
            env={k: v for k, v in os.environ.items() if k not in told},
        )
        assert self.process.stdout is not None
        self.came = self.process.stdout.readline().strip() == "True"

    def end(self, kill: bool = False) -> None:
        """End the process, by closing its input, or by SIGKILL."""
        if kill:
            self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def ranks(tmp_path: Path) -> Any:
    """Yield a function that starts ranks; they end with the test."""
    made: list[Rank] = []

    def start(job: str, rank: int, **more: int) -> Rank:
        made.append(Rank(tmp_path, job, rank, **more))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.end(kill=True)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this process be rank 0 of a job."""
    boards: list[presence.LaunchRegistry] = []

    def take(job: str, **more: int) -> presence.LaunchRegistry:
        for name, value in _environment(job, 0, **more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(presence, "_FOLDER", str(tmp_path))
        monkeypatch.setattr(presence._OwnRegistry, "registry", None)
        board = presence.own_registry()
        assert board is not None
        boards.append(board)
        return board

    yield take
    for board in boards:
        board.close()


def test_file_is_gone_once_all_have_come_and_pages_stay_readable(
    tmp_path: Path, ranks: Any, own: Any
) -> None:
    board = own("job")
    first = ranks("job", 1)
    assert len(list(tmp_path.iterdir())) == 1
    second = ranks("job", 2)
    assert list(tmp_path.iterdir()) == []
    assert list(board.present()) == [0, 1, 2]
    assert [board.read(rank)["ended"] for rank in range(3)] == [False] * 3
    first.end()
    second.end(kill=True)
    assert (board.read(1)["stage"], board.read(1)["ended"]) == (presence.LEFT, True)
    assert (board.read(2)["stage"], board.read(2)["ended"]) == (presence.IMPORTED, True)
    long = "\U0001f600" * 5000
    board.show(stage=presence.STARTS, text=long, reason=long, host=long)
    assert board.read(0)["stage"] == presence.STARTS
    assert board.read(1)["stage"] == presence.LEFT


def test_rank_that_has_ended_is_seen_by_those_that_come_later(
    ranks: Any, own: Any
) -> None:
    ranks("job", 1).end(kill=True)
    board = own("job")
    assert board.read(1)["ended"]
    assert board.read(2) is None


def test_child_of_a_rank_does_not_take_its_page(ranks: Any, own: Any) -> None:
    board = own("job")
    assert not ranks("job", 0).came
    assert not board.read(0)["ended"]
    child = os.fork()
    if child == 0:
        os._exit(int(board.is_open or presence.own_registry() is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ranks("job", 1).came
    assert not board.read(0)["ended"]


def test_jobs_do_not_see_each_other_and_remove_what_the_dead_have_left(
    tmp_path: Path, ranks: Any, own: Any
) -> None:
    ranks("dead", 1).end(kill=True)
    living = ranks("living", 1)
    assert living.came
    left = sorted(tmp_path.iterdir())
    assert len(left) == 2
    board = own("new")
    assert board.read(1) is None
    # New pages stay, because further ranks of their jobs may still start.
    assert len(list(tmp_path.iterdir())) == 3
    for path in left:
        os.utime(path, (time.time() - 3600,) * 2)
    ranks("newer", 1)
    assert len(list(tmp_path.iterdir())) == 3
    assert len(set(left).intersection(tmp_path.iterdir())) == 1
    assert ranks("living", 2).came
    assert ranks("living", 0).came
    assert set(left).isdisjoint(tmp_path.iterdir())


def test_one_rank_of_a_host_says_what_all_would_say(own: Any, tmp_path: Path) -> None:
    board = own("job")
    assert board.claims("ValueError: the cause")
    assert not board.claims("ValueError: the cause")
    assert board.claims("another")


def test_where_the_number_of_ranks_is_unknown_the_last_one_removes_the_file(
    tmp_path: Path, ranks: Any
) -> None:
    # The value -1 stands for a launcher that does not count the ranks of a host.
    first = ranks("job", 0, local=-1)
    second = ranks("job", 1, local=-1)
    first.end()
    assert len(list(tmp_path.iterdir())) == 1
    second.end()
    assert list(tmp_path.iterdir()) == []
