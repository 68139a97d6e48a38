"""Ranks that are killed in a snapshot, and runs that are started again from memory."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpcstrat import testing

_PROGRAM = Path(__file__).parent / "programs" / "snapshot_steps.py"
_STEPS = 4


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def lose_and_restart(folder: Path, memory: Path, seed: int, num_losses: int) -> int:
    """Kill a rank in a snapshot, and start again, many times; return the kills.

    The oracle: the restored step is the last one whose snapshot has ended on rank 0, or
    a later one. If a node is lost, too, its copies may be of the step before.
    """
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 5))
    nodes = int(random.integers(1, size + 1))
    kept, slack, num_killed = 0, 0, 0
    for turn in range(num_losses + 1):
        victim = int(random.integers(size)) if turn < num_losses else -1
        share = float(random.choice([random.random(), 1.0, 2.0], p=[0.8, 0.1, 0.1]))
        death = int(random.integers(_STEPS))
        given = folder, memory, nodes, _STEPS, victim, death, share
        command = [sys.executable, str(_PROGRAM), *map(str, given)]
        done = testing.launch(size, command, timeout=60)
        said = [line.split() for line in done.stdout.splitlines()]
        restored = [int(line[1]) for line in said if line[:1] == ["restored"]]
        assert len(restored) == 1, done.stderr
        assert kept - slack <= restored[0] <= kept + 1, (seed, turn, restored, kept)
        assert "AssertionError" not in done.stderr
        ended = [int(line[1]) for line in said if line[:1] == ["kept"]]
        if victim < 0:
            assert done.returncode == 0, done.stderr
        # A rank that copies fewer bytes than its share is not killed.
        num_killed += done.returncode != 0
        kept, slack = max([*restored, *ended]), 0
        if nodes > 1 and random.random() < 0.3:
            shutil.rmtree(memory / f"node-{random.integers(nodes)}")
            slack = 1
    return num_killed


@pytest.mark.parametrize("seed", [3])
def test_ranks_killed_in_snapshots(tmp_path: Path, memory: Path, seed: int) -> None:
    assert lose_and_restart(tmp_path, memory, seed, num_losses=1) == 1
