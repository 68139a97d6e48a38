"""Run the rank-agnostic tests of tests/mpi/ranks inside MPI jobs of 1 to 4 ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpcstrat import testing

FILES = sorted(str(path) for path in Path(__file__).parent.glob("ranks/check_*.py"))
# Each part is to end well before pytest's own limit, also on busy cores.
NUM_PARTS = 3
parts = pytest.mark.parametrize("part", range(NUM_PARTS))
sizes = pytest.mark.parametrize("n", [1, 2, 3, 4])


# Of the ways through shared memory, which are others where there is no kernel.
OF_NUMPY = ("all_reduce", "areas", "arrays", "breaks", "reductions", "repeats")


def _pass(n: int, part: int, *options: str) -> None:
    """Run a part of the tests on n ranks, and demand that none fails."""
    files = FILES[part::NUM_PARTS]
    assert files
    _pass_files(n, files, *options)


def _pass_files(
    n: int, files: list[str], *options: str, env: dict[str, str] | None = None
) -> None:
    command = [sys.executable, "-m", "tests.mpi.ranks", "--color=no", *options, *files]
    finished = testing.launch(n, command, timeout=560, env=env)
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, "a rank test failed; see the report below"
    assert " passed" in finished.stdout or " skipped" in finished.stdout


@parts
@sizes
def test_rank_tests_pass_where_they_can_fail(n: int, part: int) -> None:
    _pass(n, part, "--short")


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 3])
def test_rank_tests_pass_without_the_kernel(n: int) -> None:
    folder = Path(__file__).parent / "ranks"
    files = [str(folder / f"check_{name}.py") for name in OF_NUMPY]
    environment = {**os.environ, "HPCSTRAT_NATIVE": "0"}
    _pass_files(n, files, "--short", env=environment)


@pytest.mark.full
@parts
@sizes
def test_rank_tests_pass_everywhere(n: int, part: int) -> None:
    _pass(n, part)
