"""``hpcstrat bench survive`` on pretend hosts, and in a job of Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcstrat.testing import launch_command
from hpcstrat.tools.bench.prediction.inputs import read_given
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm

pytestmark = pytest.mark.skipif(
    "--oversubscribe" not in launch_command(1),
    reason="the options of mpirun are those of Open MPI",
)
PROGRAM = Path(__file__).parents[2] / "benchmarks/bench_survive.py"


@pytest.mark.slow
def test_the_effective_time_is_measured(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "survive.json"
    words = ["--use", "2", "--losses", "3", "--every", "2", "--calm-seconds", "4"]
    words += ["--queue-seconds", "1", "--step-ms", "10"]
    words += ["--seed", "3", "--state-mib", "1", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--hosts", "4", "--", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    runs = {run["name"]: run for run in found["runs"]}
    assert [run["losses"] for run in runs.values()] == [0, 3, 3]
    assert found["wrong_restores"] == 0
    for run in runs.values():
        assert 0 < run["effective_time"] < 1.01
        assert 0 < run["predicted"] <= 1
    # A queue of a second and the watchers' start come after each loss.
    starts = runs["by requeue alone"]["starts"]
    assert all(seconds > 1 for _, seconds in starts)
    known = read_given(str(path))
    assert known.steps is not None
    assert known.steps.median >= 0.01
    assert known.num_nodes == 2
    assert "with watchers" in done.stdout


@pytest.mark.slow
def test_the_effective_time_is_measured_in_a_job_of_slurm(
    make_slurm: Callable[[int], Slurm], tmp_path: Path
) -> None:
    path, folder = tmp_path / "survive.json", tmp_path / "survive"
    make_slurm(4).shell(
        "salloc --nodes=4 --ntasks-per-node=1 --no-kill hpcstrat bench survive --use 2 "
        "--losses 3 --every 2 --calm-seconds 4 --step-ms 10 --state-mib 1 "
        f"--folder {folder} --json {path}"
    )
    found = json.loads(path.read_text())
    assert [run["losses"] for run in found["runs"]] == [0, 3]
    assert found["wrong_restores"] == 0
    assert all(run["steps"] > 0 for run in found["runs"])
