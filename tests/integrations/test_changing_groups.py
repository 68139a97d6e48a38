"""Process groups whose ranks change, also when ranks die, in separate jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mpi.programs.killing import local
from tests.mpi.programs.started import Ended, run_command, ulfm

pytestmark = [ulfm, pytest.mark.framework("torch")]

PROGRAM = Path(__file__).parent / "programs" / "changing_group.py"


def run(n: int, *words: str) -> Ended:
    command = [*local(n), sys.executable, str(PROGRAM), *words]
    ended = run_command(command, f"{n} {words}", 120, {})
    assert ended.returncode == 0, str(ended)
    assert not ended.survivors, str(ended)
    return ended


def starting(ended: Ended, words: str) -> list[str]:
    return sorted(x for x in ended.stdout.splitlines() if words in x)


@pytest.mark.parametrize("dying", [[1], pytest.param([0, 2], marks=pytest.mark.full)])
def test_training_goes_on_without_ranks_that_die(dying: list[int]) -> None:
    n = 2 + len(dying)
    ended = run(n, "lose", *map(str, dying))
    living = sorted(set(range(n)).difference(dying))
    for rank in dying:
        assert len(starting(ended, f"lost [{rank}]")) >= len(living), str(ended)
    expected = [f"rank {rank} is {i} of 2: True" for i, rank in enumerate(living)]
    assert starting(ended, " is ") == expected


def test_a_group_that_cannot_be_formed_is_an_error_on_all_its_ranks() -> None:
    ended = run(3, "meet")
    counts = {
        "alone: expected a process group that has ranks": 3,
        "again: expected another uuid": 3,
        "wrong: expected different handles": 9,
        "rank 2 did not come in time": 2,
        "rank 2 gives other ranks": 3,
        "of 3 together: [3.0, 3.0, 3.0]": 3,
    }
    for words, count in counts.items():
        assert len(starting(ended, words)) == count, f"{words}\n{ended}"


@pytest.mark.full
def test_after_a_loss_all_living_ranks_must_take_part() -> None:
    ended = run(4, "left_out")
    expected = [f"rank {rank} is {rank % 2} of 2" for rank in range(4)]
    assert starting(ended, " is ") == expected
    assert len(starting(ended, "and rank 3 lives; after a loss")) == 2, str(ended)
    assert len(starting(ended, "together: ")) == 3, str(ended)
