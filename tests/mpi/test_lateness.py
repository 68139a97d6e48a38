"""Late ranks are named at the end and on a signal; killed jobs leave timelines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpcstrat.cli import main
from hpcstrat.engine.observe.timeline.last_arrivals import last_arrivals
from hpcstrat.engine.observe.timeline.merging import open_timeline
from hpcstrat.engine.observe.timeline.recorder import WAIT
from hpcstrat.testing import launch_command
from tests.mpi.programs.started import PROGRAMS, Ended, run_command, start
from tests.trace_format import check_trace

LIMIT_SECONDS = 90
NUM_RANKS = 3


def _run(end: str, folder: Path, *more: str, **env: str) -> Ended:
    return start(NUM_RANKS, "late.py", end, folder, *more, limit=LIMIT_SECONDS, **env)


@pytest.mark.parametrize(
    "more",
    [pytest.param((), marks=pytest.mark.full), ("each",)],
    ids=["one_worker", "worker_each"],
)
def test_summary_at_the_end_names_the_late_rank(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    ended = _run("return", tmp_path, *more, HPCSTRAT_SUMMARY="on")
    assert ended.returncode == 0, str(ended)
    said = re.findall(r"\[hpcstrat\.arrivals (\d).*late: replica (\d)", ended.stderr)
    assert said == [("0", "2")], str(ended)
    rows = re.findall(r"^ +(\d)  \S+ +(\d+)", ended.stderr, re.MULTILINE)
    assert next(replica for replica, _ in rows) == "2"
    assert sorted(replica for replica, _ in rows) == ["0", "1", "2"]
    assert len({calls for _, calls in rows}) == 1


@pytest.mark.parametrize("mode", ["auto", pytest.param("off", marks=pytest.mark.full)])
def test_nothing_is_said_where_little_was_lost(tmp_path: Path, mode: str) -> None:
    ended = _run("return", tmp_path, HPCSTRAT_SUMMARY=mode)
    assert ended.returncode == 0, str(ended)
    assert "hpcstrat" not in ended.stderr, str(ended)


def _signalled(folder: Path, number: int) -> None:
    """Send a signal to all ranks, and let them end some time later."""
    pids = folder / "pids"
    deadline = time.monotonic() + LIMIT_SECONDS
    while not pids.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)
    for pid in map(int, pids.read_text().split()):
        os.kill(pid, number)
    time.sleep(2)
    (folder / "go").write_text("")


@pytest.mark.parametrize(
    "more",
    [(), pytest.param(("each",), marks=pytest.mark.full)],
    ids=["one_worker", "worker_each"],
)
def test_each_worker_says_who_is_late_on_a_signal(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(_signalled, tmp_path, signal.SIGUSR2)
        ended = _run("wait", tmp_path, *more)
        sent.result()
    assert ended.returncode == 0, str(ended)
    workers = re.findall(r"^.*hpcstrat: worker (\d): .*$", ended.stderr, re.MULTILINE)
    assert sorted(workers) == (["0", "1", "2"] if more else ["0"]), str(ended)
    if not more:
        assert "late: replica 2" in ended.stderr
        # The report also counts the wait that has not ended yet.
        longest = re.search(r"longest wait: (\S+) s", ended.stderr)
        assert longest is not None
        assert float(longest[1]) > 1
        assert len(re.findall(r"^ +\d  ", ended.stderr, re.MULTILINE)) == NUM_RANKS


def _check_timeline(folder: Path, *, cut: bool) -> Any:
    """Merge the recorded files with the command; return the timeline."""
    output = folder / "trace.json"
    command = ["timeline", "merge", str(folder), "-o", str(output)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert ("incomplete files, of replicas" in result.output) is cut
    timeline = open_timeline(str(folder))
    tracks = check_trace(event for _, event in timeline.events())
    assert len(tracks) == NUM_RANKS
    for track in tracks.values():
        assert sum(event["name"] == WAIT for event in track) >= 30
    rows = last_arrivals(timeline.events())
    assert max(rows.values(), key=lambda row: row.last).replica == 2
    return timeline


def test_whole_program_is_recorded_by_a_setting(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    ended = _run("return", tmp_path, HPCSTRAT_TIMELINE=str(folder))
    assert ended.returncode == 0, str(ended)
    timeline = _check_timeline(folder, cut=False)
    assert all(file.whole for file in timeline.files)
    # There is one sample at the beginning, and one at the end.
    assert len(timeline.files[0].samples) == 2


def test_killed_job_leaves_a_timeline(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    ended = _run("kill", tmp_path, "each", HPCSTRAT_TIMELINE=str(folder))
    assert ended.returncode != 0, str(ended)
    timeline = _check_timeline(folder, cut=True)
    assert not timeline.files[2].whole


def test_uncaught_error_leaves_a_timeline_up_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    ended = _run("error", tmp_path, HPCSTRAT_TIMELINE=str(folder))
    assert ended.returncode != 0, str(ended)
    assert "the cause" in ended.stderr
    timeline = _check_timeline(folder, cut=True)
    names = [event["name"] for file, event in timeline.events() if file.tid == 2]
    assert "the last one" in names


def _shifted_launch(folder: Path, seconds: int) -> list[str]:
    """Return a command for two workers whose clocks differ by some seconds.

    A time namespace shifts CLOCK_MONOTONIC, as if the second host had started earlier.
    """
    program = [sys.executable, str(PROGRAMS / "late.py"), "return", str(folder), "each"]
    one = launch_command(1)
    assert one[-2] in ("-n", "-np"), one
    shift = ["unshare", "--time", "--monotonic", str(seconds)]
    return [*one, *program, ":", one[-2], "1", *shift, *program]


def test_clocks_of_hosts_that_were_started_at_other_times_are_aligned(
    tmp_path: Path,
) -> None:
    unshare = shutil.which("unshare")
    probe = ["unshare", "--time", "--monotonic", "5", "true"]
    if unshare is None or subprocess.run(probe, check=False, timeout=20).returncode:
        pytest.skip("no time namespaces here: they need root, and Linux 5.6")
    folder, shift = tmp_path / "timeline", 7200
    env = {"HPCSTRAT_TIMELINE": str(folder), "HPCSTRAT_SUMMARY": "off"}
    command = _shifted_launch(tmp_path, shift)
    ended = run_command(command, "shifted", LIMIT_SECONDS, env)
    assert ended.returncode == 0, str(ended)
    timeline = open_timeline(str(folder))
    assert [file.pid for file in timeline.files] == [0, 1]
    for sample in timeline.files[1].samples:
        error = sample.offset_ns + shift * 10**9
        assert abs(error) <= sample.round_trip_ns / 2 + 1
    check_trace(event for _, event in timeline.events())
    rows = last_arrivals(timeline.events())
    assert rows[1].last > rows[0].last
