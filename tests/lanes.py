"""Lanes of tests: jobs that wait run concurrently with jobs that compute.

Most jobs of rank tests keep two cores busy, but a job in which ranks wait for a timeout
leaves the cores idle. Therefore the whole suite runs in processes of pytest-xdist, one
for each lane: tests that compute, jobs that wait and compute, and tests that hardly
compute. When a process of the first two lanes has finished its tests, it runs tests of
other lanes. A third lane of computing jobs made all jobs slower, because ranks waited
for each other's cores. In each lane, the slowest tests by ``durations.json`` run first,
so that all lanes end at about the same time. Each test is reported separately, and a
timeout prints stacks.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.durations import KEPT

NUM_LANES = 3
# Test files of lanes 1 and 2, whose jobs are idle some or nearly all of the time.
OF_LANE = {
    1: (
        "tests/cluster/test_checkpoint_hosts.py",
        "tests/cluster/test_hosts.py",
        "tests/gpu/test_lost_ranks.py",
        "tests/gpu/test_probe.py",
        "tests/mpi/test_chaos.py",
        "tests/mpi/test_elastic.py",
        "tests/mpi/test_exits.py",
        "tests/mpi/test_failing_disk.py",
        "tests/mpi/test_resume.py",
        "tests/mpi/test_watchdog.py",
    ),
    2: (
        "tests/cluster/",
        "tests/conformance/",
        "tests/fuzz/",
        "tests/gpu/test_ends.py",
        "tests/integrations/test_horovod.py::test_a_call",
        "tests/integrations/test_process_group.py::test_a_rank",
        "tests/mpi/test_lateness.py",
        "tests/mpi/test_marked_tests.py",
        "tests/mpi/test_starting.py",
        "tests/mpi/test_testing.py",
        "tests/unit/engine/gpu/probe/test_probe.py",
    ),
}
# Files of long jobs without a shared fixture, whose tests may run in several lanes.
LONG = (
    "tests/gpu/test_ranks_on_gpu.py",
    "tests/integrations/",
    "tests/mpi/test_ranks.py",
)


def num_lanes(config: pytest.Config) -> int:
    """Return the number of worker processes; 0 runs the tests in pytest's own process.

    The number is 0 if tests were selected, and for slow tests of several GiB each.
    """
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    whole = not named and not config.option.modules
    one_by_one = config.option.markexpr == "slow" or os.cpu_count() == 1
    return NUM_LANES if whole and not one_by_one else 0


def lane_of(unit: str) -> int:
    """Return the lane of a file, or of a test."""
    lanes = (lane for lane, files in OF_LANE.items() if unit.startswith(files))
    return next(lanes, 0)


def job_of(nodeid: str) -> str:
    """Return the common part of the ids of tests that share a job of ranks.

    Such an id ends with a file of rank tests; see tests/mpi/rank_files.py.
    """
    return re.sub(r"-[\w/]*check_\w+\]$", "]", nodeid)


class LaneScheduling(LoadScopeScheduling):
    """Assigns each process the files of its own lane, then files of other lanes."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._kept: dict[str, float] = json.loads(KEPT.read_text())

    def _split_scope(self, nodeid: str) -> str:
        return job_of(nodeid) if nodeid.startswith(LONG) else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        # A process that replaces a crashed one has a higher number, and joins lane 0.
        lane = {"gw1": 1, "gw2": 2}.get(node.gateway.id, 0)
        while self.workqueue:
            own = [unit for unit in self.workqueue if lane_of(unit) == lane]
            if not own and lane == NUM_LANES - 1:
                break
            unit = max(own or self.workqueue, key=self._seconds)
            # The base class assigns the first unit of the queue.
            self.workqueue.move_to_end(unit, last=False)
            super()._assign_work_unit(node)
            # A process runs a test only when it knows the next test, or that it is the
            # last.
            if self._pending_of(self.assigned_work[node]) > 1:
                return
        node.shutdown()

    def _seconds(self, unit: str) -> float:
        """Return the kept duration of a unit of the queue."""
        return sum(self._kept.get(name, 0.0) for name in self.workqueue[unit])

    def _reschedule(self, node: Any) -> None:
        # The base class already reschedules with two tests left, which may be long.
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Requeue the tests of a crashed process, except the one that crashed."""
        units = self.assigned_work.pop(node)
        left = [
            name for unit in units.values() for name, done in unit.items() if not done
        ]
        for name in left[1:]:
            self.workqueue.setdefault(self._split_scope(name), {})[name] = False
        for other in self.nodes:
            self._reschedule(other)
        return left[0] if left else None
