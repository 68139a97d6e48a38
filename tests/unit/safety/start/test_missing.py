"""Detection of ranks that will never arrive at the start."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from hpcstrat.safety.presence import IMPORTED
from hpcstrat.safety.start.missing import missing_ranks


def _found(pid: int) -> Any:
    """Look for rank 1, whose process has released its page."""
    space = os.stat("/proc/self/ns/pid").st_ino
    page = {"stage": IMPORTED, "ended": True, "own": True, "mpi": False}
    page |= {"host": "here", "pid": pid, "pids": space}
    launch = SimpleNamespace(rank=0, size=2)
    board: Any = SimpleNamespace(
        launch=launch, num_local=2, present=lambda: [1], read=lambda rank: page
    )
    (one,) = missing_ranks(board, range(2), "", 0, seen_only=True)
    return one


def test_a_process_that_runs_another_program_is_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        # A process without a page may still run, after exec or after closing all files.
        assert not _found(process.pid).gone
        process.communicate(b"\n")
    assert _found(process.pid).gone
