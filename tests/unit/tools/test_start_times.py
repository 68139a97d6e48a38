"""``hpcstrat info --start`` reads the starts of processes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from hpcstrat.tools.start_times import launcher_started_at, started_at


def test_starts_of_processes_are_between_the_clock_s_times() -> None:
    before = time.time()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        after = time.time()
        # The kernel counts in ticks of a hundredth of a second.
        assert before - 0.02 <= started_at(process.pid) <= after + 0.02
        assert launcher_started_at(process.pid) <= started_at(process.pid) + 0.02


def test_launchers_above_a_process_are_found(tmp_path: Path) -> None:
    tree = {40: ("python", 30, 900), 30: ("sh", 20, 800), 20: ("prted", 10, 700)}
    tree |= {10: ("srun", 5, 600), 5: ("bash", 1, 100)}
    for pid, (name, parent, ticks) in tree.items():
        fields = ["S", str(parent), *["0"] * 17, str(ticks), "0"]
        (tmp_path / f"{pid}").mkdir()
        text = f"{pid} ({name}) {' '.join(fields)}\n"
        (tmp_path / f"{pid}" / "stat").write_text(text)
    between = started_at(40, str(tmp_path)) - launcher_started_at(40, str(tmp_path))
    assert abs(between - 300 / os.sysconf("SC_CLK_TCK")) < 0.01
