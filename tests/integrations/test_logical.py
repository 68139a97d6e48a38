"""Frameworks on logical replicas, in jobs of 1 to 3 ranks, which load all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.rank_files import RankFiles, rank_files

__all__ = ["rank_files"]

RANKS = Path(__file__).parent / "ranks"


@pytest.mark.framework("torch", "jax")
@pytest.mark.parametrize("file", ["check_logical_training"])
@pytest.mark.parametrize(
    "n", [*[pytest.param(n, marks=pytest.mark.full) for n in (1, 2)], 3]
)
def test_rank_tests_pass(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, RANKS)
