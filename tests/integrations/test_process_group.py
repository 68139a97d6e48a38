"""The backend of torch.distributed in separate jobs, and ``hpcstrat torch``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hpcstrat import testing
from hpcstrat.testing import launch_command
from tests.mpi.programs.started import run_command

pytestmark = pytest.mark.framework("torch")

HERE = Path(__file__).parent
CLI = "from hpcstrat.cli import main; main()"
PROGRAM = str(HERE / "programs" / "ddp_on_gloo.py")


def launched(n: int, *words: str, timeout: float = 150) -> Any:
    """Run a Python command on n ranks."""
    command = [sys.executable, *words]
    finished = testing.launch(n, command, timeout=timeout)
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    return finished


@pytest.mark.full
def test_a_program_on_gloo_runs_on_mpi_as_it_is() -> None:
    words = "-c", CLI, "torch", "--replace", "gloo", PROGRAM
    finished = launched(2, *words)
    assert finished.returncode == 0
    assert finished.stdout.split() == ["hpcstrat", "2", "0", "programs"]


def test_an_error_on_one_rank_ends_the_job() -> None:
    words = "-c", CLI, "torch", "--replace", "gloo", PROGRAM, "fail"
    finished = launched(2, *words)
    assert finished.returncode not in (0, None)
    assert "RuntimeError: as meant" in finished.stderr
    assert "rank 0 of 2" in finished.stderr


def test_a_message_of_another_size_is_named_on_both_ranks() -> None:
    finished = launched(2, str(HERE / "programs" / "wrong_message.py"))
    own, other = sorted(finished.stdout.splitlines(), reverse=True)
    for line in (own, other):
        assert "recv(source=0, tag=0) of float32[4]" in line
    assert "found 3 elements of float32 sent at wrong_message.py:13" in own


@pytest.mark.parametrize(
    ("n", "where", "limit", "words"),
    [
        # The waiting rank checks for missing ranks all the time.
        (3, "group", 5, ["in creation of a group on ranks [0, 1] (missing_rank.py:"]),
        (
            2,
            "recv",
            10,
            ["all_reduce(SUM) of float32[3] (missing_rank.py:", "in main "],
        ),
    ],
)
def test_a_rank_that_is_elsewhere_is_named(
    n: int, where: str, limit: int, words: list[str]
) -> None:
    limits = {"HPCSTRAT_WARN_SECONDS": "2", "HPCSTRAT_LIMIT_SECONDS": str(limit)}
    program = [sys.executable, str(HERE / "programs" / "missing_rank.py"), where]
    ended = run_command([*launch_command(n), *program], where, 120, limits)
    assert ended.returncode, str(ended)
    assert not ended.survivors, str(ended)
    for word in [*words, "for rank 1 on "]:
        assert word in ended.stderr, str(ended)
