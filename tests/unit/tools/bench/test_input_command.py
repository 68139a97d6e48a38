"""`hpcstrat bench input`: measurements of a user's files, and its advice."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from hpcstrat.cli.main import main


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["bench", "input", *words, "--seconds", "0.02"])
    return done.exit_code, done.output


def test_each_order_is_measured(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(2000, 64)))
    status, output = run(str(tmp_path / "*.npy"), "--cold", "--batch-size", "32")
    assert status == 0, output
    assert "2000 rows of 1 files (x.npy)" in output
    assert "array: contiguous, read by preadv" in output
    rows = [line for line in output.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in rows] == [
        name for name in ("in order", "by blocks", "shuffled") for _ in "ab"
    ]
    assert all(int(line.split("│")[3].replace(",", "")) > 0 for line in rows)
    assert "try --batch-size 256" in output


def test_packed_files_are_told_of_libdeflate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        values = np.zeros((500, 8))
        file.create_dataset("x", data=values, chunks=(50, 8), compression="gzip")
        file.create_dataset("y", data=values, chunks=(50, 8), compression="lzf")
    monkeypatch.setitem(sys.modules, "deflate", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, output = run(str(tmp_path / "x.h5"), "--columns", "x, y")
    assert status == 0, output
    assert "x: chunks of 50 rows, unpacked by zlib" in output
    assert "- x: pip install deflate" in output
    assert "- y: h5py reads one thread at a time" in output


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    status, output = run(str(tmp_path / "none.h5"))
    assert status == 2
    assert "hpcstrat bench input: expected a file" in output
