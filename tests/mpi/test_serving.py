"""Servers and workers end when the coordinator does, and name who is lost."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hpcstrat import testing
from tests.mpi.programs.started import IS_OPEN_MPI, start

ENDS = ("busy", "exit", "raise", "interrupt", "worker")
CODES = {"busy": 0, "exit": 3}


@pytest.mark.parametrize("way", ENDS)
def test_all_ranks_end_with_the_coordinator(way: str) -> None:
    ended = start(3, "serving.py", way)
    assert "value 2.0" in ended.stdout, str(ended)
    assert not ended.survivors, str(ended)
    assert ended.returncode is not None, str(ended)
    if way in CODES:
        assert ended.returncode == CODES[way], str(ended)
        assert not ended.tracebacks, str(ended)
    else:
        assert ended.returncode, str(ended)
    if way == "raise":
        assert "ValueError: the cause" in ended.tracebacks[0], str(ended)
    if way == "worker" and IS_OPEN_MPI:
        # The launcher, or a rank that has seen it before.
        assert re.search(r"rank 2|ranks \[2\]", ended.stderr), str(ended)


def test_the_program_of_the_guide_trains() -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / "embeddings_served.py"
    command = [sys.executable, str(path), "--servers", "2"]
    finished = testing.launch(4, command, timeout=100)
    assert finished.returncode == 0, finished.stderr
    assert "8 shards" in finished.stdout
