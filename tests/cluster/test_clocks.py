"""Timelines and summaries of a job on several hosts."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcstrat import testing
from hpcstrat.engine.observe.timeline.last_arrivals import last_arrivals
from hpcstrat.engine.observe.timeline.merging import open_timeline
from tests.cluster.hosts import Hosts
from tests.mpi.programs.started import PROGRAMS, run_command
from tests.trace_format import check_trace

NUM_RANKS = 4


def test_late_rank_on_another_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    launch = testing.launch_command(NUM_RANKS, hosts.launcher((2, 2)))
    program = [sys.executable, str(PROGRAMS / "late.py"), "return", str(tmp_path)]
    env = {"HPCSTRAT_TIMELINE": str(folder), "HPCSTRAT_SUMMARY": "on"}
    ended = run_command([*launch, *program], "late.py", 90, env)
    assert ended.returncode == 0, str(ended)
    assert ended.stderr.count("the replicas waited for late ones") == 1, str(ended)
    assert "late: replica 3 on node2" in ended.stderr
    timeline = open_timeline(str(folder))
    assert [file.pid for file in timeline.files] == [0, 0, 1, 1]
    samples = timeline.files[2].samples
    assert len(samples) == 2
    # The hosts share this machine's clock, so that each measured offset is an error.
    for sample in samples:
        assert sample.round_trip_ns > 0
        assert abs(sample.offset_ns) <= sample.round_trip_ns / 2 + 1
    tracks = check_trace(event for _, event in timeline.events())
    assert sorted(tracks) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    rows = last_arrivals(timeline.events())
    assert max(rows.values(), key=lambda row: row.last).replica == 3
    assert not hosts.processes()
