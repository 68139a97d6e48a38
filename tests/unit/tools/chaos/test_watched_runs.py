"""A watched run loses its launcher, and its node."""

from __future__ import annotations

import signal
from pathlib import Path

from click.testing import CliRunner

from hpcstrat.cli.main import main
from hpcstrat.elastic.watching.old_processes import generations
from hpcstrat.tools.chaos.watched_runs import find_watched_runs
from tests.unit.elastic.watching.local_watcher import (
    SECONDS,
    open_mpi,
    own_run,
    wait_for,
    watched,
)


def _lose(*words: str) -> str:
    done = CliRunner().invoke(main, ["chaos", "lose", *words])
    return f"{done.exit_code} {done.output}"


@open_mpi
def test_a_run_loses_its_launcher_and_its_node(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, time\n"
        "number = os.environ['HPCSTRAT_WATCH_GENERATION']\n"
        f"pathlib.Path({str(tmp_path)!r}, number).write_text(str(os.getpid()))\n"
        "time.sleep(100)"
    )
    with watched(tmp_path, program) as watcher:
        wait_for(tmp_path / "1")
        run = own_run(tmp_path)
        assert find_watched_runs()[run] == watcher.pid
        assert _lose("launcher", "--run", run).startswith("0 run")
        wait_for(tmp_path / "2")
        assert _lose("node", "--run", run).startswith("0 run")
        assert watcher.wait(SECONDS) == -signal.SIGKILL
    assert run not in find_watched_runs()
    assert list(generations(run)) == []


def test_an_unknown_run_is_an_error() -> None:
    said = _lose("node", "--run", "0123")
    assert said.startswith("1 Error: expected the watched run 0123 of this user")
