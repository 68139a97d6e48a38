"""Run the rank-agnostic tests of tests/mpi/ranks inside MPI jobs of 1 to 4 ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat import testing

FILES = sorted(str(path) for path in Path(__file__).parent.glob("ranks/check_*.py"))
# Each part is to end well before pytest's own limit, also on busy cores.
NUM_PARTS = 5


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_rank_tests_pass(n: int, part: int) -> None:
    files = FILES[part::NUM_PARTS]
    assert files
    command = [sys.executable, "-m", "tests.mpi.ranks", "--color=no", *files]
    finished = testing.launch(n, command, timeout=560)
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, "a rank test failed; see the report below"
    assert " passed" in finished.stdout or " skipped" in finished.stdout
