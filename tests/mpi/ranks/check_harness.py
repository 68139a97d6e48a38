"""The test harness itself: the job has the ranks and workers that tests assume."""

from __future__ import annotations

from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment


def test_job_has_the_ranks_that_were_asked_for(job: Any) -> None:
    launch = launch_from_environment()
    assert (job.rank, job.size) == (launch.rank, launch.size)
    assert job.allreduce(1) == job.size


def test_layouts_share_the_ranks_among_workers(
    topology: Any, job: Any, topology_layout: Any
) -> None:
    per_worker = topology_layout.replicas_per_worker or job.size
    assert topology.num_replicas == job.size
    assert topology.num_workers == -(-job.size // per_worker)
    assert topology.worker_comm.size == min(
        per_worker, job.size - topology.worker_id * per_worker
    )


def test_strategy_has_a_replica_on_each_rank(strategy: Any, job: Any) -> None:
    assert strategy.num_replicas_in_sync == job.size
    assert strategy.reduce("sum", job.rank + 1, axis=None) == sum(range(job.size + 1))
