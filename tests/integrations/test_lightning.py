"""Lightning's Trainer, killed and continued on another number of ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcstrat import testing
from tests.mpi.rank_files import RankFiles, rank_files

__all__ = ["rank_files"]

RANKS = Path(__file__).parent / "ranks"
PROGRAM = "tests.integrations.programs.lightning_job"


@pytest.mark.framework("torch", "lightning")
@pytest.mark.parametrize(("n", "file"), [(3, "check_lightning")])
def test_rank_tests_pass(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    rank_files.num_passed(request, RANKS, "-m", "not slow and not full")


@pytest.mark.framework("torch", "lightning")
def test_a_killed_training_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """In the middle of an epoch: each row is seen once, with the same final weights."""
    rows, epochs = 23, 2
    options = {"rows": rows, "batch": 5, "epochs": epochs}
    weights = []
    for folder, jobs in (("alone", [(1, 0)]), ("killed", [(2, 7), (3, 0)])):
        seen = []
        for ranks, stop in jobs:
            where = tmp_path / folder / str(ranks)
            where.mkdir(parents=True)
            words = json.dumps({**options, "stop": stop})
            finished = testing.launch(
                ranks,
                [sys.executable, "-m", PROGRAM, str(where.parent), words, str(where)],
                timeout=180,
            )
            assert finished.returncode == (42 if stop else 0), finished.stderr
            for path in where.iterdir():
                seen += map(json.loads, path.read_text().splitlines())
        for epoch in range(epochs):
            found = [
                row for one in seen if one["epoch"] == epoch for row in one["rows"]
            ]
            assert sorted(found) == list(range(rows))
        weights.append(np.load(tmp_path / folder / "weights.npy"))
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-12)
