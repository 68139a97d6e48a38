"""``hpcstrat bench scaling`` under a launcher, and its reports of real runs."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.testing import launch_command
from hpcstrat.tools.bench.analysis import analyze, read_runs
from hpcstrat.tools.bench.run_file import BenchError, MeasuredRun, write_run
from hpcstrat.tools.bench.web_page import page
from tests.mpi.programs.bench_steps import ROW_SECONDS
from tests.mpi.programs.started import Ended, run_command

PROGRAM = "from hpcstrat.cli import main; main()"
STEPS = "tests.mpi.programs.bench_steps"
REPEATS = 6
SMALL = ("--parts", "all_reduce,step", "--sizes", "4B,64KiB", "--batch-size", 4)


def _scaling(n: int, output: object, *words: object, **env: str) -> Ended:
    options = ("--output", output, "--repeats", REPEATS, "--warm-up", 1, *words)
    command = [sys.executable, "-c", PROGRAM, "bench", "scaling", *map(str, options)]
    return run_command([*launch_command(n), *command], f"-n {n} {words}", 100, env)


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _times(path: Path, name: str, scaling: str) -> list[float]:
    [found] = [
        part["seconds"]
        for part in _load(path)["parts"]
        if (part["name"], part["scaling"]) == (name, scaling)
    ]
    return found


def test_report_of_one_to_three_ranks_is_right(tmp_path: Path) -> None:
    sizes = (1, 2, 3)
    for n in sizes:
        words = (*SMALL, "--step", f"{STEPS}:make_step")
        ended = _scaling(n, tmp_path / "run-{n}.json", *words)
        assert ended.returncode == 0, str(ended)
        assert ended.stderr.count("] step tests.mpi") == 2
    paths = [tmp_path / f"run-{n}.json" for n in sizes]
    assert sorted(tmp_path.iterdir()) == paths
    report = analyze(read_runs([str(path) for path in paths]))
    for series, first_over in zip(report.of("step"), ("n", "1"), strict=True):
        base = statistics.median(_times(paths[0], "step", series.scaling))
        for n, path, point in zip(sizes, paths, series.points, strict=True):
            times = _times(path, "step", series.scaling)
            assert len(times) == REPEATS
            ratio = base / statistics.median(times)
            speed_up = ratio * n if first_over == "n" else ratio
            assert point.speed_up == pytest.approx(speed_up, rel=1e-12)
            assert point.efficiency == pytest.approx(speed_up / n, rel=1e-12)
            assert point.low <= point.efficiency * (1 + 1e-9)
            assert point.high >= point.efficiency * (1 - 1e-9)
            # The slowest replica needs at least this time for its rows.
            rows = 4 if series.scaling == "weak" else 4 // n
            assert min(times) >= 2 * ROW_SECONDS * rows
            shares = (point.late, point.communication, point.input)
            assert all(share is not None and 0 <= share < 1 for share in shares)
            assert sum(filter(None, shares)) < 1
            if n > 1 and series.scaling == "weak":
                # The last replica sleeps twice as long, and the other replicas wait for
                # it.
                assert point.slowest_host is not None
                assert point.slowest_host.endswith(f"(replica {n - 1})")
                waited = 4 * ROW_SECONDS * (n - 1) / n * REPEATS
                [part] = [
                    p
                    for p in _load(path)["parts"]
                    if (p["name"], p["scaling"]) == ("step", "weak")
                ]
                assert sum(part["late_seconds"]) > 0.8 * waited
                assert part["reduced_bytes"] == 4000
                assert part["num_calls"] == 1
    assert [s.parameters["nbytes"] for s in report.of("all_reduce")] == [4, 65536]
    links = [_load(path)["links"] for path in (paths[0], paths[-1])]
    assert [link["between"] for link in links] == [None, None]
    assert links[0]["inside"] is None
    assert links[1]["inside"]["bytes_per_second"] > 1e6
    assert links[1]["inside"]["num_measured"] == 1


def test_replicas_of_two_ranks_are_named_and_measured(tmp_path: Path) -> None:
    words = ("--parts", "all_reduce,step,input", "--sizes", "64KiB")
    words += ("--compute-ms", 2, "--batch-size", 2, "--ranks-per-replica", 2)
    for n in (2, 4):
        ended = _scaling(n, tmp_path / "run-{n}.json", *words, "--repeats", 2)
        assert ended.returncode == 0, str(ended)
        assert ended.stderr.count("] step resnet50") == 2
    paths = [tmp_path / "run-1.json", tmp_path / "run-2.json"]
    assert sorted(tmp_path.iterdir()) == paths
    topology = _load(paths[1])["topology"]
    assert (topology["num_replicas"], topology["ranks_per_replica"]) == (2, 2)
    assert topology["replicas_per_worker"] == [2]
    parts = _load(paths[1])["parts"]
    assert [part["batch_size"] for part in parts if part["name"] == "step"] == [4, 2]
    assert all(len(values) == 2 for p in parts for values in p["replicas"].values())
    runs = read_runs([str(path) for path in paths])
    assert [run.num_replicas for run in runs] == [1, 2]
    found = page(analyze(runs), {})
    assert "1, 2 replicas of 2 ranks each on 1 host" in found
    ended = _scaling(1, tmp_path / "other-{n}.json", *words)
    assert "expected a number of ranks that is a multiple of 2" in ended.stderr
    ended = _scaling(2, paths[1], *words[:-2])
    assert "found ranks_per_replica 1 instead of 2" in ended.stderr, str(ended)
    other = read_runs([str(paths[0])])[0]
    other.topology["ranks_per_replica"] = 1
    write_run(other, str(paths[0]))
    with pytest.raises(BenchError, match="make a report of each"):
        read_runs([str(path) for path in paths])


def test_built_in_parts_are_measured_and_nothing_is_left_behind(
    tmp_path: Path,
) -> None:
    output = tmp_path / "run.json"
    words = ("--parts", "gradients,step,checkpoint,input", "--gradients", "resnet50")
    words += ("--compute-ms", 4, "--batch-size", 2)
    ended = _scaling(2, output, *words, "--repeats", 2, "--warm-up", 0)
    assert ended.returncode == 0, str(ended)
    assert list(tmp_path.iterdir()) == [output]
    content = _load(output)
    assert [(p["name"], p["scaling"], p["batch_size"]) for p in content["parts"]] == [
        ("gradients", "same", 0),
        ("step", "weak", 4),
        ("step", "strong", 2),
        ("save", "strong", 0),
        ("restore", "strong", 0),
        ("input", "weak", 4),
        ("input", "strong", 2),
    ]
    step = content["parts"][1]
    # One call reduces the gradients, the other one a loss.
    assert step["num_calls"] == 2
    assert step["reduced_bytes"] == 4 * 25_557_032 + 4
    assert min(step["seconds"]) > 4e-3
    assert step["algorithm"] == "reduce_in_memory"
    again = _scaling(2, output, *words, "--repeats", 2, "--warm-up", 0)
    assert again.returncode == 0, str(again)
    assert "6 of 6 parts are measured already" in again.stderr
    assert _load(output) == content


def test_killed_run_keeps_its_parts_and_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    words = (*SMALL, "--step", f"{STEPS}:killed")
    ended = _scaling(2, output, *words)
    assert ended.returncode not in (0, None), str(ended)
    before = _load(output)
    names = [(part["name"], part["scaling"]) for part in before["parts"]]
    assert names == [("all_reduce", "same")] * 2 + [("step", "weak")]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    again = _scaling(2, output, *words, BENCH_SURVIVES="1")
    assert again.returncode == 0, str(again)
    assert "3 of 4 parts are measured already" in again.stderr
    after = _load(output)
    assert after["parts"][:3] == before["parts"]
    assert [part["session"] for part in after["parts"]] == [0, 0, 0, 1]
    assert len(after["sessions"]) == 2


def test_error_in_a_step_of_one_rank_ends_all(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    ended = _scaling(2, output, *SMALL, "--step", f"{STEPS}:raising")
    assert ended.returncode not in (0, None), str(ended)
    assert ended.survivors == []
    assert len(ended.tracebacks) == 1, str(ended)
    assert "ValueError: expected a step, found a fault" in ended.tracebacks[0]
    assert len(_load(output)["parts"]) == 3


def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    counts = {"replicas_per_worker": [1], "cores_per_worker": [1]}
    topology = {"num_replicas": 1, "device": "CPU", "worker_of_replica": [0], **counts}
    write_run(MeasuredRun(topology), str(output))
    ended = _scaling(2, output)
    assert ended.returncode == 1, str(ended)
    assert ended.stderr.count("Error: ") == 1, str(ended)
    assert "to continue that run, found num_replicas 2 instead of 1" in ended.stderr
    assert ended.tracebacks == []
    step = ("--step", f"{STEPS}:make_step")
    few = _scaling(2, tmp_path / "few.json", "--parts", "input", "--batch-size", 1)
    assert few.returncode == 1, str(few)
    assert few.stderr.count("expected an example for each of 2 replicas") == 1
    short = _scaling(1, output.with_name("short.json"), *SMALL, "--warm-up", 20, *step)
    assert short.returncode == 1, str(short)
    assert short.stderr.count("data for 26 steps, found that they ended after 20") == 1
    none = _scaling(1, tmp_path / "none.json", "--step", f"{STEPS}:nothing")
    assert none.returncode == 1, str(none)
    assert none.stderr.count("has no attribute 'nothing'") == 1
