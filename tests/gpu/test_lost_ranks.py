"""Training on GPUs continues after the loss of a rank, with every transport.

Each case is a whole program, launched with a hard time limit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat.testing import launch_command
from tests.gpu.jobs import TRANSPORTS, environment, require
from tests.mpi.programs.started import run_command, ulfm

PROGRAM = Path(__file__).parent / "programs/lost_rank.py"
# NCCL, host copies and MPI messages; in one worker, and in several workers.
LAYOUTS = [
    ("nccl", 3, 0),
    ("host", 3, 0),
    ("mpi", 4, 2),
    ("mpi", 3, 1),
    ("host", 3, 1),
]
# With these, the other ranks' GPUs have work that needs the lost rank.
DEEP = ("inside", "behind")


def _lose(transport: str, n: int, each: int, where: str, spare: int = 0) -> None:
    require(transport, n)
    # The streams are slow, so that the lost rank's part is not computed yet.
    late = {"HPCSTRAT_DEVICE": "gpu", "HPCSTRAT_STANDIN_DELAY": "0.005"}
    command = [*launch_command(n, fault_tolerant=True), sys.executable, str(PROGRAM)]
    title = f"{transport}, {n} ranks, {each} each, {spare} spare, {where}"
    env = environment(late | TRANSPORTS[transport])
    ended = run_command([*command, where, str(each), str(spare)], title, 150, env)
    assert ended.returncode == 0, str(ended)
    assert not ended.survivors, str(ended)
    assert ended.stdout.count("right") == n - 1, str(ended)


@ulfm
@pytest.mark.parametrize(
    ("transport", "n", "each", "where"),
    [
        ("nccl", 3, 0, "inside"),
        ("host", 3, 0, "behind"),
        pytest.param("mpi", 4, 2, "inside", marks=pytest.mark.full),
    ],
)
def test_training_goes_on(transport: str, n: int, each: int, where: str) -> None:
    _lose(transport, n, each, where)


@ulfm
def test_spare_rank_takes_the_place_of_a_lost_one() -> None:
    _lose("nccl", 4, 0, "behind", spare=1)


@ulfm
@pytest.mark.slow
@pytest.mark.parametrize(("transport", "n", "each"), LAYOUTS)
@pytest.mark.parametrize("where", ["between", "commit", *DEEP])
def test_training_goes_on_wherever_a_rank_dies(
    transport: str, n: int, each: int, where: str
) -> None:
    _lose(transport, n, each, where)
