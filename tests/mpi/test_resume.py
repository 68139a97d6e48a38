"""Training that was killed and resumed ends with the same bits as without a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.programs.resume import BATCH, ROWS, SAVED, STEPS
from tests.mpi.programs.started import start

FULL = pytest.mark.full


def _run(n: int, how: str, folder: Path) -> list[dict[str, Any]]:
    """Run a job; return the results that its ranks have written."""
    ended = start(n, "resume.py", folder, how, limit=120)
    assert (ended.returncode != 0) == (how in SAVED), ended
    assert not ended.survivors, ended
    found = [json.loads((folder / f"{how}-{rank}").read_text()) for rank in range(n)]
    assert all(("result" in one) == (how not in SAVED) for one in found), ended
    return found


# By default a job with a first, a middle and a last rank.
@pytest.mark.parametrize(
    "n",
    [*[pytest.param(n, marks=FULL) for n in (1, 2)], 3, pytest.param(4, marks=FULL)],
)
def test_killed_jobs_that_go_on_end_with_the_same_bits(n: int, tmp_path: Path) -> None:
    wanted = _run(n, "plain", tmp_path)
    assert [one["began"] for one in wanted] == [None] * n
    # Kill after a save, then after a save in the background, then run to the end.
    for how, began in (("wait", None), ("go", SAVED["wait"]), ("end", SAVED["go"])):
        found = _run(n, how, tmp_path)
        assert [one["began"] for one in found] == [began] * n
    for one, other in zip(found, wanted, strict=True):
        for name, value in other["result"].items():
            assert one["result"][name] == value, name
        assert one["result"].keys() == other["result"].keys()
    # Every row occurs exactly once in the epochs that were interrupted.
    rows = found[0]["result"]["rows"]
    steps = -(-ROWS // BATCH)
    assert len(rows) > 2 * ROWS
    assert 2 * steps < STEPS
    for epoch in range(2):
        assert sorted(rows[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(ROWS))
