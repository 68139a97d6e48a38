"""Connections that strategies share."""

from __future__ import annotations

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
