"""Frameworks on logical replicas, in jobs of 1 to 3 ranks, which load all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat import testing

FILES = [str(Path(__file__).parent / "ranks" / "check_logical_training.py")]


@pytest.mark.framework("torch", "jax")
@pytest.mark.parametrize(
    "n", [*[pytest.param(n, marks=pytest.mark.full) for n in (1, 2)], 3]
)
def test_rank_tests_pass(n: int) -> None:
    command = [sys.executable, "-m", "tests.mpi.ranks", "--color=no", *FILES]
    finished = testing.launch(n, command, timeout=300)
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, "a rank test failed; see the report below"
