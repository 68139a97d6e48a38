"""Connections that strategies share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hpcstrat as hs

pytestmark = pytest.mark.rule


def test_replicas_of_several_ranks_leave_other_strategies_connected(job: Any) -> None:
    """Also if only some of the ranks made such replicas."""
    part = job.Split(int(job.rank < 2), job.rank)
    with hs.MultiWorkerMirroredStrategy() as first:
        if job.rank < 2:
            own = {"comm": part, "ranks_per_replica": part.size}
            hs.MultiWorkerMirroredStrategy(**own).close()
        with hs.MultiWorkerMirroredStrategy() as second:
            assert second.topology is first.topology
    part.Free()


def mapped_files() -> set[str]:
    """Return the numbers of the files in shared memory that this rank has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[4] for line in lines if "/dev/shm/hpcstrat-" in line}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory file system")
@pytest.mark.parametrize("per_worker", [None, 2])
def test_replicas_of_several_ranks_share_a_file_on_a_node(
    job: Any, per_worker: int | None
) -> None:
    """One file has the segments of all ranks, one those inside and across replicas."""
    before = mapped_files()
    for count in (n for n in range(2, job.size + 1) if job.size % n == 0):
        with hs.MultiWorkerMirroredStrategy(
            comm=job, ranks_per_replica=count, replicas_per_worker=per_worker
        ) as strategy:
            new = set().union(*job.allgather(mapped_files() - before))
            workers = strategy.all_ranks.topology.num_workers
            assert len(new) == workers + 1
            assert strategy.inside.sum(1) == count
        assert mapped_files() <= before
