"""Run the rank tests of tests/mpi/ranks inside MPI jobs of 1 to 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.rank_files import RankFiles, names_in, rank_files, sizes_of

__all__ = ["rank_files"]

FOLDER = Path(__file__).parent / "ranks"
FILES = names_in(FOLDER)
# Tests of shared memory code, which differs if there is no compiled kernel.
OF_NUMPY = (
    *("all_reduce", "areas", "arrays", "breaks"),
    *("random_calls", "reductions", "repeats"),
)
FILES_OF_NUMPY = [name for name in FILES if name.partition("check_")[2] in OF_NUMPY]


@pytest.mark.parametrize(
    ("n", "file"),
    [(n, file) for n in range(1, 5) for file in FILES if n in sizes_of(FOLDER, file)],
)
def test_rank_tests_pass_where_they_can_fail(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, FOLDER, "--short")


@pytest.mark.parametrize("file", FILES_OF_NUMPY)
@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 3])
def test_rank_tests_pass_without_the_kernel(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    # Run several replicas of one worker, at the sizes that can fail: between workers
    # the kernel sums nothing.
    options = "--short", "--layout=one_worker"
    rank_files.num_passed(request, FOLDER, *options, env={"HPCSTRAT_NATIVE": "0"})


@pytest.mark.full
@pytest.mark.parametrize(
    "file", ["strategies/check_heat_fit", "strategies/check_inside"]
)
@pytest.mark.parametrize("n", [8, 9])
def test_replicas_of_several_ranks_on_more_ranks(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, FOLDER)


@pytest.mark.full
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_rank_tests_pass_everywhere(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, FOLDER)
