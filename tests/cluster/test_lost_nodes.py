"""Loss of nodes and of the launcher in a run with watchers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.cluster.watched import WatchedRun


def test_the_run_goes_on_after_the_loss_of_the_leaders_node(
    make_hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    hosts = make_hosts(3)
    run = WatchedRun(hosts, tmp_path / "run", use=2, steps=300, nap=0.01)
    try:
        run.wait(lambda: run.first_step_after(0))
        # node1 has the leader, mpirun, and one of the two ranks.
        lost = time.time()
        hosts.switch_off("node1")
        run.wait(lambda: run.first_step_after(lost))
        statuses = {node: run.watchers[node].wait(60) for node in ("node2", "node3")}
        assert statuses == {"node2": 0, "node3": 0}, run.logs()
        assert [claim["leader"] for claim in run.claims()] == ["node1", "node2"]
        assert run.claims()[1]["nodes"] == ["node2", "node3"]
        assert run.problems() == []
        run.check_result()
        assert not hosts.processes()
    finally:
        run.end()


def test_a_newer_job_in_the_same_folder_ends_the_older_one(
    hosts: Hosts, tmp_path: Path
) -> None:
    """A requeued job may start while a node of the former one was cut off."""
    folder = tmp_path / "run"
    older = WatchedRun(hosts, folder, use=1, nodes=["node1"])
    try:
        older.wait(lambda: older.first_step_after(0))
        newer = WatchedRun(hosts, folder, use=1, nodes=["node2"], steps=30, nap=0.01)
        try:
            assert newer.watchers["node2"].wait(60) == 0, newer.logs()
            assert older.watchers["node1"].wait(60) == 76, older.logs()
            assert [claim["job"][-5:] for claim in newer.claims()] == ["node1", "node2"]
            assert newer.problems() == []
            assert not hosts.processes()
        finally:
            newer.end()
    finally:
        older.end()
