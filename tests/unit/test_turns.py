"""Turns of long tests: each test has exactly one, and short tests run in all."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests import turns
from tests.durations import KEPT
from tests.lanes import job_of


def _ids() -> list[str]:
    files = [f"tests/mpi/test_x.py::test_job[3-data/check_{name}]" for name in "abcd"]
    return [*json.loads(KEPT.read_text()), "tests/unit/test_short.py::test_it", *files]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_long_test_has_one_turn_and_each_short_one_has_all(count: int) -> None:
    ids, kept = _ids(), json.loads(KEPT.read_text())
    of_job = Counter[str]()
    for name in ids:
        of_job[job_of(name)] += kept.get(name, 0.0)
    runs = [set(ids) - turns.unwanted(ids, k + 1, count) for k in range(count)]
    for name in ids:
        always = of_job[job_of(name)] < turns.LEAST_SECONDS
        always |= name.startswith(turns.IN_EACH_TURN)
        assert sum(name in run for run in runs) == (count if always else 1), name
    seconds = [sum(kept.get(name, 0.0) for name in run) for run in runs]
    assert max(seconds) - min(seconds) < 0.1 * max(seconds)


def test_a_long_job_is_divided_by_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = [f"tests/mpi/test_x.py::test_job[4-data/check_{name}]" for name in "abcd"]
    kept = tmp_path / "durations.json"
    kept.write_text(json.dumps({job[0]: 80.0}))
    monkeypatch.setattr(turns, "KEPT", kept)
    assert [len(turns.unwanted(job, k, 2)) for k in (1, 2)] == [2, 2]


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/", "-1/2"])
def test_a_wrong_turn_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(turns.VARIABLE, text)
    with pytest.raises(ValueError, match="expected K/N"):
        turns.turn_of_environment()
