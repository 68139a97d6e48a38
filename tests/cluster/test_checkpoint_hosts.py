"""Checkpoints of a job on two hosts, in a shared folder."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.testing import launch_command
from hpcstrat.testing.job import wait_until
from tests.cluster.hosts import Hosts
from tests.folders import listed
from tests.mpi.programs.save_jobs import (
    LIMIT_SECONDS,
    acknowledged,
    restored,
    running,
    torn,
)

RANKS = (2, 2)
LARGE = 500_000


def _make(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        large = hs.Variable(np.zeros(LARGE))
        seen = hs.Variable(0, dtype="int64", synchronization="on_read")
        total = hs.Variable(
            0, dtype="int64", synchronization="on_read", aggregation="sum"
        )
    return {"large": large, "seen": seen, "total": total}


def _save(folder: Path, asynchronous: bool) -> str:
    """Save steps 1 to 4 on every rank; return the host's name."""
    with hs.MultiWorkerMirroredStrategy() as strategy:
        assert strategy.topology.num_workers == len(RANKS)
        objects, rank = _make(strategy), strategy.replica_id
        with hs.CheckpointManager(folder, max_to_keep=2, **objects) as manager:
            for step in range(1, 5):
                objects["large"].assign(np.arange(LARGE) * float(step))
                objects["seen"].component[...] = 10 * rank + step
                objects["total"].component[...] = rank + step
                manager.save(step, asynchronous=asynchronous)
            # Overwrite the values; the pending save must not see this.
            objects["large"].assign(np.zeros(LARGE))
        assert len(manager.checkpoints) == 2
    return socket.gethostname()


def _restore(folder: Path, same: bool) -> int:
    """Restore, check the values of each replica, and return the total."""
    with hs.MultiWorkerMirroredStrategy() as strategy:
        objects = _make(strategy)
        manager = hs.CheckpointManager(folder, **objects)
        policy = "error" if same else "cycle"
        assert manager.restore(per_replica=policy) == 4
        wanted = np.arange(LARGE) * 4.0
        np.testing.assert_array_equal(objects["large"].component, wanted)
        rank = strategy.replica_id
        assert objects["seen"].component == 10 * (rank % sum(RANKS)) + 4
        with strategy.scope():
            return int(objects["total"].numpy())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoint_of_two_hosts_is_restored_on_two_and_on_one(
    asynchronous: bool, hosts: Hosts, tmp_path: Path
) -> None:
    names = hosts.run(RANKS, _save, tmp_path, asynchronous, timeout=60)
    assert names == ["node1", "node1", "node2", "node2"]
    assert not [name for name in listed(tmp_path) if name.startswith(".")]
    total = sum(range(4)) + 4 * 4
    for ranks in (RANKS, (1, 2), (2,)):
        found = hosts.run(ranks, _restore, tmp_path, ranks == RANKS, timeout=60)
        assert set(found) == {total}
    assert not hosts.processes()


@pytest.mark.parametrize(
    ("victims", "how"),
    [
        ((0, 1), "wait"),
        ((2, 3), "go"),
        pytest.param((0, 1), "go", marks=pytest.mark.full),
        pytest.param((2, 3), "wait", marks=pytest.mark.full),
    ],
)
def test_loss_of_the_ranks_of_one_host_in_a_save(
    victims: tuple[int, ...], how: str, hosts: Hosts, tmp_path: Path
) -> None:
    launch = launch_command(sum(RANKS), hosts.launcher(RANKS))
    with running(tmp_path, "save_loop.py", 100_000, how, launch=launch) as job:

        def in_a_save() -> bool:
            return bool(acknowledged(tmp_path)) and bool(torn(tmp_path))

        assert wait_until(in_a_save, LIMIT_SECONDS), job
        for rank in victims:
            os.kill(int((tmp_path / "pids" / str(rank)).read_text()), signal.SIGKILL)
        assert job.ends(LIMIT_SECONDS), job
        assert job.job.wait(0), job
        assert wait_until(job.ranks_are_gone, 10), job
    told = max(acknowledged(tmp_path))

    # The restarted job restores and checks the completed saves, and removes leftovers.
    with running(tmp_path, "save_loop.py", 2, how, launch=launch) as again:
        assert again.job.wait(LIMIT_SECONDS) == 0, again
    assert not torn(tmp_path)
    step, wrong = restored(tmp_path)
    assert step >= told + 2
    assert not wrong
    assert not hosts.processes()
