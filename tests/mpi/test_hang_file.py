"""The file that a job leaves after a hang or an error explains the cause."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcstrat.cli.main import main
from hpcstrat.testing import Finished, launch

HEAD = """
import os, signal, sys, time
import hpcstrat as hs
settings = hs.Settings(warn_seconds=1, limit_seconds=5)
strategy = hs.MirroredStrategy(settings=settings)
for _ in range(3):
    strategy.reduce("sum", 1.0)
rank = strategy.replica_id
"""
LATE = """
def evaluate():
    time.sleep(600)

if rank == 1:
    evaluate()
strategy.reduce("sum", 2.0)
"""
STOPPED = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
strategy.reduce("sum", 2.0)
"""
ERROR = """
if rank == 1:
    raise ValueError("a broken rank")
strategy.reduce("sum", 2.0)
"""


def _run(folder: Path, program: str, **env: str) -> Finished:
    path = folder / "train.py"
    path.write_text(HEAD + program)
    env = {"HPCSTRAT_HANG_FOLDER": str(folder / "kept"), **env}
    (folder / "kept").mkdir(exist_ok=True)
    return launch(3, [sys.executable, path], timeout=90, env=env)


def _explained(folder: Path, *options: str) -> str:
    [file] = (folder / "kept").iterdir()
    assert file.name.startswith("hpcstrat-hang-")
    done = CliRunner().invoke(main, ["hang", str(file), *options])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_late_rank_is_explained(tmp_path: Path) -> None:
    finished = _run(tmp_path, LATE)
    assert finished.returncode != 0
    text = _explained(tmp_path)
    assert "3 ranks, " in text
    assert "ranks [0, 2] have waited" in text
    assert "in evaluate (train.py:" in text
    # The table lists the calls of each rank, and its current activity.
    assert "in the program" in text
    assert "waits in a call" in text
    assert "What to look at: - rank 1 on" in text
    assert "it is not in a collective call" in text
    assert "time.sleep" not in text
    shown = _explained(tmp_path, "--stacks")
    assert "stack of rank 1:" in shown
    [file] = (tmp_path / "kept").iterdir()
    assert f"`hpcstrat hang {file}` explains what happened" in finished.stderr


def test_a_stopped_process_is_explained(tmp_path: Path) -> None:
    _run(tmp_path, STOPPED)
    assert "kill -CONT" in _explained(tmp_path)


def test_the_first_error_is_explained(tmp_path: Path) -> None:
    finished = _run(tmp_path, ERROR)
    [file] = (tmp_path / "kept").iterdir()
    # One rank names the file, and the command that explains it.
    assert finished.stderr.count(f"`hpcstrat hang {file}` explains") == 1
    text = _explained(tmp_path, "--stacks")
    assert "- rank 1 was the first to fail, with ValueError at train.py:" in text
    assert 'raise ValueError("a broken rank")' in text


def test_a_good_end_and_an_empty_folder_leave_no_file(tmp_path: Path) -> None:
    assert _run(tmp_path, "").returncode == 0
    assert not any((tmp_path / "kept").iterdir())
    before = set(Path.cwd().iterdir())
    _run(tmp_path, ERROR, HPCSTRAT_HANG_FOLDER="")
    assert set(Path.cwd().iterdir()) == before


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    finished = _run(tmp_path, ERROR, HPCSTRAT_HANG_FOLDER=str(tmp_path / "train.py"))
    assert finished.returncode != 0
    assert finished.stderr.count("ValueError: a broken rank") == 1


@pytest.mark.parametrize("content", ["", "no events\n{}\n"])
def test_a_file_without_events_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / f"x{os.getpid()}.jsonl"
    file.write_text(content)
    done = CliRunner().invoke(main, ["hang", str(file)])
    assert done.exit_code == 1
    assert "expected events of a job" in done.output
