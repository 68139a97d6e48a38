"""Timelines: aligned clocks, files that are readable at any time, a valid trace."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.cli import main
from hpcstrat.engine.observe.timeline import Recorder, active, traced
from hpcstrat.engine.observe.timeline.alignment import Alignment, Sample, best_sample
from hpcstrat.engine.observe.timeline.events import Track
from hpcstrat.engine.observe.timeline.merging import open_timeline
from hpcstrat.engine.observe.timeline.rank_files import (
    file_name,
    find_runs,
    read_events,
)
from tests.trace_format import check_trace

_MIB = 1 << 20
_NS = st.integers(-(10**15), 10**15)


def _reference(local: int, offset: int, millionths: int) -> int:
    """Return the exact reference time: an offset, and a drift in parts per million."""
    return local + offset + local * millionths // 10**6


@given(
    offset=_NS,
    millionths=st.integers(-200, 200),
    start=st.integers(0, 10**15),
    delays=st.lists(
        st.tuples(st.integers(100, 10**6), st.integers(100, 10**6)), min_size=1
    ),
)
def test_offset_is_right_within_half_a_round_trip(
    offset: int, millionths: int, start: int, delays: list[tuple[int, int]]
) -> None:
    trips, now = [], start
    for there, back in delays:
        answer = _reference(now + there, offset, millionths)
        trips.append((now, answer, now + there + back))
        now += there + back + 50
    sample = best_sample(trips)
    assert sample.round_trip_ns == min(there + back for there, back in delays)
    error = sample.local_ns + sample.offset_ns
    error -= _reference(sample.local_ns, offset, millionths)
    assert abs(error) <= sample.round_trip_ns / 2 * (1 + 2e-4) + 2


@given(
    offset=_NS,
    millionths=st.integers(-200, 200),
    gaps=st.lists(st.integers(10**6, 10**13), min_size=2, max_size=5),
    errors=st.lists(st.integers(-5000, 5000), min_size=6, max_size=6),
    at=st.floats(0, 1),
)
def test_times_between_measurements_are_as_good_as_these(
    offset: int, millionths: int, gaps: list[int], errors: list[int], at: float
) -> None:
    times = [sum(gaps[:n]) for n in range(len(gaps) + 1)]
    samples = [
        Sample(t, _reference(t, offset, millionths) - t + error, 10_000)
        for t, error in zip(times, errors, strict=False)
    ]
    alignment = Alignment(reversed(samples))
    inside = round(times[-1] * at)
    found = alignment.reference_ns(inside)
    bound = max(map(abs, errors)) + 2
    assert abs(found - _reference(inside, offset, millionths)) <= bound
    # Extrapolate as far beyond the last sample as the samples span: thrice the error.
    after = times[-1] * 2
    bound = 3 * bound + 2
    found = alignment.reference_ns(after)
    assert abs(found - _reference(after, offset, millionths)) <= bound


@given(st.lists(st.tuples(_NS, _NS, st.integers(0, 10**6)), max_size=6), _NS, _NS)
def test_any_measurements_give_a_time(
    numbers: list[tuple[int, int, int]], first: int, second: int
) -> None:
    alignment = Alignment(Sample(*n) for n in numbers)
    if not numbers:
        assert alignment.reference_ns(first) == first
    if len(numbers) == 1:
        assert alignment.offset_ns(first) == alignment.offset_ns(second)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """Yield a recorder that writes into the folder; the test's end closes it."""
    made = _recorder(tmp_path)
    active.recorder = made
    yield made
    active.recorder = None
    made.close()


def _recorder(
    folder: Path, track: Track | None = None, sample: Sample | None = None
) -> Recorder:
    track = track or Track(host="here")
    made = Recorder(track)
    path = str(folder / file_name("R1", track.replica))
    sample = sample or Sample(time.perf_counter_ns(), 0, 0)
    made.open(path, sample.local_ns + sample.offset_ns, sample, _MIB)
    return made


def _events(folder: Path) -> list[dict[str, Any]]:
    [paths] = find_runs(str(folder)).values()
    return list(read_events(paths[0]))


def test_ranges_nest_and_name_their_track(recorder: Recorder, tmp_path: Path) -> None:
    with hs.trace("outer", batch=3, what={1}):
        for _ in range(3):
            with hs.trace("inner"):
                pass
    recorder.close()
    text = Path(find_runs(str(tmp_path))["R1"][0]).read_text()
    # A file that was closed properly must be strict JSON.
    events = json.loads(text)
    [track] = check_trace(events).values()
    assert [event["name"] for event in track] == ["outer", "inner", "inner", "inner"]
    assert track[0]["args"] == {"batch": 3, "what": "{1}"}


def test_threads_have_tracks_of_their_own(recorder: Recorder, tmp_path: Path) -> None:
    def work() -> None:
        with hs.trace("in a thread"):
            time.sleep(0.01)

    with hs.trace("main"):
        threads = [threading.Thread(target=work, name=f"t{n}") for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    recorder.close()
    events = _events(tmp_path)
    tracks = check_trace(events)
    assert sorted(len(found) for found in tracks.values()) == [1, 1, 1, 1]
    assert any(e["args"].get("name") == "replica 0, t1" for e in events if "args" in e)


class _Faulty:
    def __str__(self) -> str:
        raise RuntimeError


def test_anything_can_be_an_argument(recorder: Recorder, tmp_path: Path) -> None:
    values: Any = {"nan": float("nan"), "keys": {(1, 2): 3}, "faulty": _Faulty()}
    for name, value in values.items():
        with hs.trace(name, value=value):
            pass
    recorder.close()
    text = Path(find_runs(str(tmp_path))["R1"][0]).read_text()
    assert "NaN" not in text
    [track] = check_trace(json.loads(text)).values()
    shown = [event["args"]["value"] for event in track]
    assert shown == ["nan", "{(1, 2): 3}", "cannot be shown: RuntimeError"]


def test_an_error_ends_its_ranges(recorder: Recorder, tmp_path: Path) -> None:
    @traced("decorated", "program")
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError), hs.trace("outer"):
        fail()
    recorder.close()
    [track] = check_trace(_events(tmp_path)).values()
    assert [event["name"] for event in track] == ["outer", "decorated"]


def test_off_means_nothing_is_recorded() -> None:
    assert active.recorder is None
    # All inactive traces are the same object.
    assert hs.trace("a") is hs.trace("b", x=1)


def test_events_of_other_threads_do_not_wait_for_the_file(
    recorder: Recorder, tmp_path: Path
) -> None:
    for number in range(10_000):
        with hs.trace(f"range {number % 7}"):
            pass
    recorder.close()
    assert len(_events(tmp_path)) == 10_000 + 5


def test_full_file_says_so_once_and_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    logger = SimpleNamespace(
        warning=lambda *a: said.append(a), info=lambda *a: said.append(a)
    )
    monkeypatch.setattr(
        "hpcstrat.engine.observe.timeline.event_files.get_logger", lambda name: logger
    )
    made = Recorder(Track(host="here"))
    now = time.perf_counter_ns()
    path = tmp_path / file_name("R1", 0)
    made.open(str(path), now, Sample(now, 0, 0), 2000)
    for _ in range(5):
        for _ in range(100):
            made.leave("a", "b", made.enter("a"))
        made.flush()
    made.add_clock(Sample(now + 1, 0, 0))
    made.close()
    events = json.loads(path.read_text())
    # After the limit, only events that were already queued are written.
    assert len(events) < 200
    assert events[-1]["name"] == "hpcstrat_clock"
    assert "timeline_megabytes" in said[0][2]
    assert len(said) == 2


def test_disk_that_is_full_does_not_end_the_program(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    made = _recorder(tmp_path, Track(replica=1, num_replicas=2))
    assert made.file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, made.file._handle)
    os.close(full)
    made.leave("a", "b", made.enter("a"))
    made.flush()
    assert made.file.accepts is False
    made.leave("a", "b", made.enter("a"))
    made.close()


def test_file_system_that_hangs_does_not_hold_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hpcstrat.engine.observe.timeline.event_files._END_SECONDS", 0.2
    )
    made = _recorder(tmp_path)
    assert made.file is not None
    made.flush()
    # An unread pipe accepts 64 KiB, and then blocks.
    reading, writing = os.pipe()
    os.dup2(writing, made.file._handle)
    for _ in range(3000):
        made.leave("a" * 50, "b", made.enter("a"))
    file = made.file
    file.flush(limit_seconds=0.2)
    made.close()
    assert file._thread.is_alive()
    os.close(reading)
    os.close(writing)
    file._thread.join(10)
    assert not file._thread.is_alive()


def test_forked_child_does_not_record(recorder: Recorder, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with hs.trace("child"):
            os._exit(0 if active.recorder is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    recorder.close()
    assert all(event["name"] != "child" for event in _events(tmp_path))


class _Ranges:
    """A stand-in for cupy.cuda.nvtx, which needs a GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def RangePush(self, name: str) -> None:  # noqa: N802
        self.calls.append(f"+{name}")

    def RangePop(self) -> None:  # noqa: N802
        self.calls.append("-")


def test_ranges_reach_nvtx_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = _Ranges()
    monkeypatch.setattr(active, "recorder", Recorder(Track(), ranges))
    recorder: Any = active.recorder
    with hs.trace("outer"):
        start = recorder.enter("reduce")
        recorder.agreed("reduce", {}, start)
        recorder.enter_data("reduce")
        recorder.leave_data("reduce")
    assert ranges.calls == ["+outer", "+reduce", "-", "+data of reduce", "-", "-"]
    recorder.flush()
    recorder.close()


def _write_two(folder: Path) -> None:
    """Record five calls on two workers, of which the second arrives ever later."""
    now = time.perf_counter_ns()
    # The second worker's clock is an hour behind, and loses 1 ms per second.
    offset = 3600 * 10**9
    first = _recorder(folder, Track(0, 0, 2, "node1"), Sample(now, 0, 0))
    second = _recorder(
        folder, Track(1, 1, 2, "node2"), Sample(now - offset, offset, 10)
    )
    for number in range(5):
        args = {"sequence": number, "channel": 1}
        for recorder, late in ((first, 0), (second, 3_000_000 - offset)):
            start = now + number * 10**9 + late
            recorder.file.put(  # type: ignore[union-attr]
                ("wait for the others", "wait", start, start + 5_000_000, args, 0)
            )
    end = now + 4 * 10**9
    first.add_clock(Sample(end, 0, 0))
    second.add_clock(Sample(end - offset, offset + 4_000_000, 20))
    first.close()
    second.close()


def test_merge_puts_all_clocks_on_one_axis(tmp_path: Path) -> None:
    _write_two(tmp_path)
    output = tmp_path / "all.json"
    result = CliRunner().invoke(
        main, ["timeline", "merge", str(tmp_path), "-o", str(output)]
    )
    assert result.exit_code == 0, result.output
    trace = json.loads(output.read_text())
    tracks = check_trace(trace["traceEvents"])
    starts = [[e["ts"] for e in tracks[rank, rank]] for rank in (0, 1)]
    delays = [b - a for a, b in zip(*starts, strict=True)]
    # The delays are 3 ms plus the drift of the second clock.
    assert delays == pytest.approx([3000 + 1000 * n for n in range(5)], abs=10)
    clocks = trace["otherData"]["clocks"]
    assert clocks[1]["drift"] == pytest.approx(1e-3)
    assert clocks[1]["error_ns"] == 10


def test_summary_names_who_was_waited_for(tmp_path: Path) -> None:
    _write_two(tmp_path)
    result = CliRunner().invoke(main, ["timeline", "summary", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "node" in line]
    # The sum of the delays is 3 + 4 + 5 + 6 + 7 ms.
    assert "5 (100%)" in rows[0]
    assert "0.025" in rows[0]
    assert "node2" in rows[0]


def test_compressed_trace_is_the_same(tmp_path: Path) -> None:
    _write_two(tmp_path)
    plain, packed = tmp_path / "all.json", tmp_path / "all.json.gz"
    open_timeline(str(tmp_path)).write(str(plain))
    open_timeline(str(tmp_path)).write(str(packed))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


@pytest.mark.parametrize("keep", [1.0, 0.999, 0.9, 0.6])
def test_file_that_was_cut_off_is_read_as_far_as_it_goes(
    tmp_path: Path, keep: float
) -> None:
    _write_two(tmp_path)
    path = Path(find_runs(str(tmp_path))["R1"][1])
    data = path.read_bytes().removesuffix(b"\n]\n")
    path.write_bytes(data[: int(len(data) * keep)])
    found = open_timeline(str(tmp_path))
    assert [file.whole for file in found.files] == [True, False]
    tracks = check_trace(event for _, event in found.events())
    assert len(tracks[0, 0]) == 5
    assert len(tracks.get((1, 1), [])) <= 5


def test_damaged_line_is_an_error(tmp_path: Path) -> None:
    _write_two(tmp_path)
    path = Path(find_runs(str(tmp_path))["R1"][0])
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:20]
    path.write_text("\n".join(lines))
    result = CliRunner().invoke(main, ["timeline", "summary", str(tmp_path)])
    assert result.exit_code == 1
    assert "found line 5, which is none" in result.output


BROKEN = ["1", "null", "[]", "{}", '{"ph": 1}', '{"ph": "X", "name": "a"}']
BROKEN += ['{"ph": "M", "name": "x", "pid": 0, "tid": 0, "args": 3}']
BROKEN += ['{"ph": "b", "pid": 0, "tid": 0, "ts": NaN}', "[" * 10**5]
BROKEN += ['{"ph": "X", "name": "a", "pid": 0, "tid": 0, "ts": 1e300, "dur": 1}']


@pytest.mark.parametrize("command", ["summary", "merge"])
@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_line_that_is_no_event_is_named(
    tmp_path: Path, command: str, text: str
) -> None:
    _write_two(tmp_path)
    path = Path(find_runs(str(tmp_path))["R1"][0])
    lines = path.read_text().splitlines()
    lines[4] = text + ","
    path.write_text("\n".join(lines))
    words = ["-o", str(tmp_path / "x.json")] if command == "merge" else []
    result = CliRunner().invoke(main, ["timeline", command, str(tmp_path), *words])
    assert result.exit_code == 1
    assert f"{path}, found line 5, which is none" in result.output, result.exception
    assert not list(tmp_path.glob("x.json*"))


@pytest.mark.parametrize("field", ["ts", "dur", "args", "ph", "name", "pid", "tid"])
@pytest.mark.parametrize(
    "value", [None, "x", {}, 10**400], ids=["null", "text", "object", "huge"]
)
def test_damaged_field_is_no_traceback(
    tmp_path: Path, field: str, value: object
) -> None:
    _write_two(tmp_path)
    path = Path(find_runs(str(tmp_path))["R1"][0])
    for number, line in enumerate(whole := path.read_text().splitlines()):
        if not line.startswith("{"):
            continue
        event = {**json.loads(line.removesuffix(",")), field: value}
        lines = [*whole[:number], json.dumps(event) + ",", *whole[number + 1 :]]
        path.write_text("\n".join(lines))
        result = CliRunner().invoke(main, ["timeline", "summary", str(tmp_path)])
        assert isinstance(result.exception, SystemExit | None), (line, result.exception)


def test_folder_without_timelines_and_unknown_run_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none"):
        open_timeline(str(tmp_path))
    _write_two(tmp_path)
    with pytest.raises(ValueError, match="one of the runs R1"):
        open_timeline(str(tmp_path), "R2")


def test_single_replica_records_its_steps(tmp_path: Path) -> None:
    strategy = hs.OneDeviceStrategy("CPU:0")
    for _ in range(2):
        with strategy.timeline(tmp_path):
            strategy.run(lambda: None)
            with strategy.trace("validation"):
                pass
            with (
                pytest.raises(RuntimeError, match="no timeline around"),
                strategy.timeline(tmp_path),
            ):
                pass
    assert active.recorder is None
    runs = find_runs(str(tmp_path))
    assert len(runs) == 2
    for run in runs:
        found = open_timeline(str(tmp_path), run)
        tracks = check_trace(event for _, event in found.events())
        assert [event["name"] for event in tracks[0, 0]] == ["run", "validation"]
    assert len(strategy.arrivals()) == 1


def test_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    strategy = hs.OneDeviceStrategy("CPU:0")
    with (
        pytest.raises(OSError, match="replica 0 cannot"),
        strategy.timeline(tmp_path / "file"),
    ):
        pass
    assert active.recorder is None
