"""Run the rank tests that need PyTorch in jobs of 1 to 3 ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from hpcstrat.engine.call_sites import is_of_program
from hpcstrat.integrations.frameworks import require
from tests.integrations.going_on import assert_goes_on
from tests.mpi.programs.started import ulfm
from tests.mpi.rank_files import RankFiles, names_in, rank_files

__all__ = ["rank_files"]

RANKS = Path(__file__).parent / "ranks"
# Replicas of 2 ranks need 4 ranks, if there are to be several.
SIZES = {"check_torch_divided": 4, "check_torch_mesh": 4}
# Logical replicas come last, because XLA has threads after them. One job runs all
# files, because importing PyTorch on each rank takes most of a short job.
NAMES = "process_group", "built_on_groups", "fsdp", "horovod", "torch_*", "logical_*"
FILES = [file for name in NAMES for file in names_in(RANKS, f"check_{name}.py")]
CHOSEN = "-m", "not slow and not full"
# On 3 ranks, a worker of two replicas and one of a single replica: the layout changes
# the strategy's code, which tests/mpi tests, but little of the integration's.
UNEVEN = "--layout=two_replicas_per_worker"


@pytest.mark.framework("torch")
@pytest.mark.parametrize(("n", "file"), [(SIZES.get(name, 3), name) for name in FILES])
def test_rank_tests_pass(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, RANKS, *CHOSEN, UNEVEN)


@pytest.mark.full
@pytest.mark.framework("torch")
@pytest.mark.parametrize("file", SIZES)
@pytest.mark.parametrize("n", [9])
def test_three_replicas_of_three_ranks(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, RANKS, *CHOSEN)


@pytest.mark.full
@pytest.mark.framework("torch")
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_rank_tests_pass_in_all_layouts(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, RANKS, *CHOSEN)


@pytest.mark.full
@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    "file", ["check_fsdp", "check_horovod", "check_torch_programs"]
)
@pytest.mark.parametrize("n", [2, 3])
def test_cases_that_others_leave_out_pass(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, RANKS, "-m", "full")


@pytest.mark.framework("torch")
@ulfm
def test_training_goes_on_when_a_rank_is_killed() -> None:
    assert_goes_on("torch_elastic.py")


@pytest.mark.framework("torch")
def test_the_library_loads_pytorch_only_when_asked() -> None:
    program = (
        "import sys, hpcstrat as hs; hs.ReduceOp; assert 'torch' not in sys.modules; "
        "import hpcstrat.integrations.torch; assert 'mpi4py.MPI' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_framework_that_is_missing_or_too_old_is_one_sentence() -> None:
    require("numpy", "2.0")
    with pytest.raises(ImportError, match=r"expected numpy 99\.1 .*found \d+\.\d+.*;"):
        require("numpy", "99.1")
    with pytest.raises(ImportError, match=r"found none; .*'no_such_library>=1\.0'"):
        require("no_such_library", "1.0")


def test_messages_name_no_line_of_a_framework() -> None:
    require("click", "8.0")
    assert not is_of_program(click.__file__)
    assert is_of_program(__file__)
