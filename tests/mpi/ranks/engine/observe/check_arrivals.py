"""Reports name late ranks, and timelines show the calls of each rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.observe.arrival_report import BINS
from hpcstrat.engine.observe.timeline import active
from hpcstrat.engine.observe.timeline.last_arrivals import last_arrivals
from hpcstrat.engine.observe.timeline.merging import open_timeline
from hpcstrat.engine.observe.timeline.recorder import DATA, WAIT
from tests.trace_format import check_trace

pytestmark = pytest.mark.calls


LATE_SECONDS = 0.05
NUM_CALLS = 10


@pytest.fixture
def own_strategy(make_strategy: Callable[..., Any], job: Any) -> Iterator[Any]:
    """Yield a strategy whose counters begin at zero, and close it after the test."""
    comm = job.Dup()
    with make_strategy(comm=comm) as strategy:
        yield strategy
    comm.Free()


def _come_late(strategy: Any, late: int) -> None:
    for _ in range(NUM_CALLS):
        if strategy.replica_id == late:
            time.sleep(LATE_SECONDS)
        strategy.reduce("sum", np.ones(2), axis=None)


def test_late_rank_is_found(own_strategy: Any, job: Any) -> None:
    late = job.size - 1
    _come_late(own_strategy, late)
    report = own_strategy.arrivals()
    assert [row.replica for row in report] == list(range(job.size))
    assert {row.calls for row in report} == {report[0].calls}
    if job.size == 1:
        return
    assert report[0].calls >= NUM_CALLS
    assert [row.replica for row in report.slowest()] == [late], str(report)
    # Demand only half of the time, because a busy machine delays the other ranks, too.
    slept = NUM_CALLS * LATE_SECONDS
    assert report.behind_seconds(report[late]) > slept / 2
    assert f"late: replica {late} on {report[late].host}" in str(report)
    for row in report.replicas[:-1]:
        assert row.waited_seconds > slept / 2
        assert row.longest_seconds <= row.waited_seconds <= row.elapsed_seconds
        assert "reduce(SUM) of float64[2]" in row.longest_call
        assert len(row.histogram) == BINS
        assert sum(row.histogram) == row.waits
        # The bins from 15 on count waits of more than 16 ms.
        assert sum(row.histogram[15:]) >= NUM_CALLS / 2


def test_who_came_last_is_seen_in_one_worker(own_strategy: Any, job: Any) -> None:
    if own_strategy.topology.num_workers > 1 or job.size == 1:
        return
    late = job.size - 1
    _come_late(own_strategy, late)
    report = own_strategy.arrivals()
    awaited = report.awaited()
    assert next(iter(awaited)) == late
    assert awaited[late] > sum(awaited.values()) / 2


def test_waits_for_data_are_kept_apart(own_strategy: Any, job: Any) -> None:
    before = own_strategy.arrivals()
    value = np.ones(1 << 20)
    for _ in range(3):
        own_strategy.reduce("sum", value, axis=None)
    after = own_strategy.arrivals()
    for old, new in zip(before, after, strict=True):
        assert new.data_waits >= old.data_waits
        assert new.data_seconds >= new.data_longest_seconds
        # The histogram counts only waits for late ranks.
        assert sum(new.histogram) == new.waits


def test_what_came_while_a_rank_computed_is_not_waited_for(
    own_strategy: Any, job: Any
) -> None:
    context = hs.get_replica_context

    def step() -> Any:
        handle = context().start_all_reduce("sum", np.ones(3))
        if context().replica_id_in_sync_group == job.size - 1:
            time.sleep(0.2)
        # All ranks have arrived long before a rank waits.
        job.Barrier()
        while not handle.test():
            time.sleep(0.001)
        before = _waited(own_strategy)
        total = handle.wait()
        assert _waited(own_strategy) == before
        return total

    own_strategy.run(step)


def _waited(strategy: Any) -> float:
    channel = strategy.collectives.channel
    return 0.0 if channel is None else channel.arrivals.own().waited_seconds


def test_worker_sees_the_numbers_of_all_its_ranks(own_strategy: Any, job: Any) -> None:
    channel = own_strategy.collectives.channel
    if channel is None:
        return
    _come_late(own_strategy, 0)
    channel.arrivals.publish()
    job.Barrier()
    report = channel.arrivals.of_worker()
    assert [r.replica for r in report] == own_strategy.topology.worker_replicas
    assert {row.calls for row in report} == {report[0].calls}
    job.Barrier()


def _use_everything(strategy: Any, folder: str) -> None:
    """Make each kind of call once."""
    with strategy.scope():
        weights = hs.Variable(np.zeros(4), name="weights")
        optimizer = hs.optimizers.SGD(0.1)
    checkpoints = hs.CheckpointManager(folder, weights=weights, optimizer=optimizer)
    dataset = hs.Dataset(np.arange(24.0), batch_size=12)

    def step(batch: Any) -> Any:
        context = hs.get_replica_context()
        with hs.trace("forward", rows=len(batch)):
            gradient = np.full(4, batch.sum())
        optimizer.apply_gradients([(gradient, weights)])
        handle = context.start_all_reduce("sum", np.ones(1 << 17))
        context.all_reduce("sum", np.ones(3))
        context.all_reduce("mean", np.ones(1 << 19))
        return handle.wait()[:3]

    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=(batch,))
    strategy.barrier()
    strategy.broadcast_object({"a": 1})
    strategy.gather(np.ones((2, 2)), axis=0)
    checkpoints.save()
    checkpoints.restore()


def test_timeline_shows_all_calls_of_all_ranks(
    own_strategy: Any, job: Any, tmp_path: Path
) -> None:
    folder = job.bcast(str(tmp_path))
    with own_strategy.timeline(os.path.join(folder, "timeline")):
        _use_everything(own_strategy, os.path.join(folder, "checkpoints"))
    assert active.recorder is None
    job.Barrier()
    timeline = open_timeline(os.path.join(folder, "timeline"))
    assert all(file.whole for file in timeline.files)
    events = [event for _, event in timeline.events()]
    tracks = check_trace(events)
    assert sorted(tid for _, tid in tracks) == list(range(job.size))
    names = {"run", "forward", "apply_gradients", "next", "save", "restore"}
    for track in tracks.values():
        assert names <= {event["name"] for event in track}
        assert sum(event["name"] == "run" for event in track) == 2
    if job.size > 1:
        _check_calls(timeline, events, tracks)
    if job.rank == 0:
        path = tmp_path / "trace.json"
        assert timeline.write(str(path)) == len(events)
        check_trace(json.loads(path.read_text())["traceEvents"])
    job.Barrier()


def _check_calls(timeline: Any, events: Any, tracks: Any) -> None:
    size = len(tracks)
    calls: dict[int, list[Any]] = {}
    for event in events:
        if event["name"] == WAIT and "sequence" in event["args"]:
            calls.setdefault(event["args"]["sequence"], []).append(event)
    texts = [waits[0]["args"]["call"] for waits in calls.values()]
    assert any("barrier" in text for text in texts)
    ways = {
        waits[0]["args"].get("how")
        for waits in calls.values()
        if "reduce(" in waits[0]["args"]["call"]
    }
    assert ways
    assert all(ways), ways
    error = max(s.round_trip_ns for f in timeline.files for s in f.samples) / 1000 + 1
    for waits in calls.values():
        assert len({event["args"]["call"] for event in waits}) == 1
        # No rank leaves the call before the last rank has arrived.
        if len(waits) == size:
            last = max(event["ts"] for event in waits)
            assert all(event["ts"] + event["dur"] > last - error for event in waits)
    sizes = [waits[0]["args"]["bytes"] for waits in calls.values()]
    assert 8 << 19 in sizes
    for track in tracks.values():
        assert sum(event["name"] == DATA for event in track) > 5
        assert any(event["name"] == "all_reduce(MEAN)" for event in track)
    begun = [event for event in events if event["ph"] == "b"]
    assert len(begun) == 2 * size
    assert all(row.calls > 10 for row in last_arrivals(timeline.events()).values())


def test_timeline_finds_the_late_rank(
    own_strategy: Any, job: Any, tmp_path: Path
) -> None:
    folder = job.bcast(str(tmp_path))
    with own_strategy.timeline(folder):
        _come_late(own_strategy, 0)
    job.Barrier()
    rows = last_arrivals(open_timeline(folder).events())
    if job.size > 1:
        assert max(rows.values(), key=lambda row: row.cost_seconds).replica == 0
        assert rows[0].last >= NUM_CALLS / 2
    job.Barrier()


def test_rank_that_cannot_write_is_an_error_on_all(
    own_strategy: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if job.rank == job.size - 1:
        (tmp_path / "timeline").write_text("not a folder")
    with (
        pytest.raises(OSError, match=f"replica {job.size - 1} cannot"),
        own_strategy.timeline("timeline"),
    ):
        pass
    assert active.recorder is None
    own_strategy.barrier()


def test_folder_of_the_settings_that_cannot_be_written_is_an_error_on_all(
    make_strategy: Callable[..., Any], job: Any, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("")
    comm = job.Dup()
    with pytest.raises(OSError, match="replica 0 cannot"):
        make_strategy(comm=comm, settings=hs.Settings(timeline=str(path)))
    assert active.recorder is None
    with make_strategy(comm=comm) as strategy:
        strategy.barrier()
    comm.Free()


def test_timeline_of_the_settings_ends_with_the_strategy(
    make_strategy: Callable[..., Any], job: Any, tmp_path: Path
) -> None:
    folder = job.bcast(str(tmp_path))
    comm = job.Dup()
    with make_strategy(comm=comm, settings=hs.Settings(timeline=folder)) as strategy:
        assert active.recorder is not None
        strategy.run(lambda: None)
    assert active.recorder is None
    comm.Free()
    job.Barrier()
    timeline = open_timeline(folder)
    assert [file.whole for file in timeline.files] == [True] * job.size
    check_trace(event for _, event in timeline.events())
    job.Barrier()


def test_error_in_the_block_ends_the_timeline_without_the_others(
    own_strategy: Any, job: Any, tmp_path: Path
) -> None:
    folder = job.bcast(str(tmp_path))

    def fail() -> None:
        with own_strategy.timeline(folder):
            own_strategy.barrier()
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert active.recorder is None
    job.Barrier()
    check_trace(event for _, event in open_timeline(folder).events())
    job.Barrier()
