"""``hpcstrat ckpt bench`` under a launcher: all ranks write, and rank 0 reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpcstrat.testing import launch_command
from tests.mpi.programs.started import Ended, run_command

PROGRAM = "from hpcstrat.cli import main; main()"


def _bench(n: int, *words: object) -> Ended:
    command = [sys.executable, "-c", PROGRAM, "ckpt", "bench", *map(str, words)]
    return run_command([*launch_command(n), *command], f"-n {n} {words}", 100, {})


@pytest.mark.parametrize("n", [1, 3])
def test_all_ranks_write(n: int, tmp_path: Path) -> None:
    folder, report = tmp_path / "there", tmp_path / "report.json"
    folder.mkdir()
    words = (folder, "--size", "7MiB", "--rounds", "1", "--json", report)
    ended = _bench(n, *words)
    assert ended.returncode == 0, str(ended)
    assert ended.survivors == []
    assert f"written by {n} ranks (mp" in ended.stdout
    assert ended.stdout.count("direct_io: ") == 1
    assert json.loads(report.read_text())["num_writers"] == n
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("n", "words", "said"),
    [
        (2, ("{}/missing",), "found none at"),
        (2, ("{}", "--size", "many"), "found 'many'"),
        (3, ("{}", "--size", "2MiB"), "for each of 3 writers"),
        (2, ("{}", "--size", "1000000TiB"), "expected room for"),
        (2, ("{}", "--json", "{}/missing/x"), "that can be written"),
    ],
)
def test_error_is_said_once_and_ends_all(
    tmp_path: Path, n: int, words: tuple[str, ...], said: str
) -> None:
    ended = _bench(n, *(word.format(tmp_path) for word in words))
    assert ended.returncode == 1, str(ended)
    assert ended.stderr.count("Error: ") == 1, str(ended)
    assert said in ended.stderr
    assert ended.tracebacks == []
    assert ended.survivors == []
    assert list(tmp_path.iterdir()) == []
