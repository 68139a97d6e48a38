"""The benchmark of calls checks the results of all of them, and compares them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hpcstrat import testing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_calls.py"
CALLS = {
    *("all_gather", "broadcast", "all_to_all", "exchange"),
    *("gather", "scatter", "reduce_scatter", "barrier", "halo"),
}


def test_each_call_is_measured_beside_mpi4py(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    options = ["--sizes", "9KiB", "--seconds", "0.001", "--no-gloo"]
    command = [sys.executable, str(SCRIPT), *options, "--json", str(path)]
    done = testing.launch(2, command, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    ratios = [row for row in rows if "median_over_mpi4py" in row]
    assert {row["what"] for row in ratios} == CALLS
    assert all(row["impl"].startswith("hpcstrat") for row in ratios)
    assert "(" in done.stdout.partition("reduce_scatter, median us")[2]
