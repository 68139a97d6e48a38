"""``hpcstrat info --start`` prints the phases of a start, and the slowest rank."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import h5py
import numpy as np

from hpcstrat import testing

INFO = (sys.executable, "-c", "from hpcstrat.cli import main; main()", "info")
# Rank 1 needs half a second longer, by work and not by waiting.
SLOW_MODULE = """
import os, time
end = time.process_time() + 0.5
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
while rank == "1" and time.process_time() < end:
    pass
if os.environ.get("BROKEN") == rank:
    raise ImportError("no such library")
"""


def phases(output: str) -> dict[str, list[str]]:
    rows = [line.strip("│ ").split("│") for line in output.splitlines() if "│" in line]
    return {row[0].strip(): [word.strip() for word in row[1:]] for row in rows}


def test_a_job_prints_the_phases_of_its_slowest_rank(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros(100)
    options = ["--start", "--import", "slow_module", "--data", str(tmp_path / "x.h5")]
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    began = time.time()
    done = testing.launch(2, [*INFO, *options], timeout=60, env={**os.environ, **env})
    passed = time.time() - began
    assert done.returncode == 0, done
    assert re.search(r"slowest: rank 1 on \S+", done.stdout), done
    found = phases(done.stdout)
    order = ["launcher", "interpreter", "imports", "MPI", "first plan", "data", "all"]
    assert [name for name in found if name in order] == order
    slowest = {name: float(found[name][0]) for name in order}
    assert slowest["imports"] >= 0.5
    assert 0.5 <= slowest["all"] <= passed
    parts = sum(slowest[name] for name in order[:-1])
    assert abs(parts - slowest["all"]) < 0.1
    # Both ranks end an error of one rank.
    env["BROKEN"] = "1"
    done = testing.launch(2, [*INFO, *options], timeout=60, env={**os.environ, **env})
    assert done.returncode != 0
    assert "no such library" in done.stderr
