"""The commands that look into checkpoints, on files of one replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result

import hpcstrat as hs
from hpcstrat.cli.main import main

VERSION_1 = Path(__file__).parent / "data" / "version-1.h5"


def _run(*words: Any) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of steps 1 and 2."""
    variables = {
        "w": hs.Variable(np.arange(6.0).reshape(2, 3), name="w"),
        "count": hs.Variable(3, dtype="int64", name="count"),
        "half": hs.Variable(np.ones(5), dtype="float16", name="half"),
    }
    manager = hs.CheckpointManager(tmp_path / "checkpoints", **variables)
    manager.save(1)
    variables["w"].assign([[0.0, 1.0, 2.0], [3.0, 4.5, 5.0]])
    manager.save(2)
    manager.close()
    return tmp_path / "checkpoints"


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("ckpt-*.h5"))


def test_verify_finds_a_flipped_bit(folder: Path) -> None:
    first, second = _paths(folder)
    found = _run("verify", folder)
    assert found.exit_code == 0, found.output
    assert found.output.count("good, ") == 2
    data = bytearray(second.read_bytes())
    with h5py.File(second) as file:
        data[file["variables/w"].id.get_offset() + 3] ^= 16
    second.write_bytes(data)
    found = _run("verify", first, second)
    assert found.exit_code == 1
    assert f"{second}: DAMAGED: " in found.output
    assert f"{first}: good" in found.output
    assert _run("export", second, folder / "x.npz").exit_code == 1
    assert not (folder / "x.npz").exists()


def test_verify_does_not_vouch_for_what_has_no_hashes(tmp_path: Path) -> None:
    found = _run("verify", VERSION_1)
    assert found.exit_code == 1
    assert "not verified" in found.output
    assert _run("verify", tmp_path).exit_code == 1


def test_diff_names_what_differs(folder: Path) -> None:
    first, second = _paths(folder)
    found = _run("diff", first, second)
    assert found.exit_code == 1
    assert "steps 1 and 2" in found.output
    assert "1 of 6 elements by at most 0.5" in found.output
    assert "[1, 1]: 4.0 and 4.5" in found.output.replace("\n", " ")
    assert "count" not in found.output
    same = _run("diff", first, first)
    assert same.exit_code == 0
    assert "no difference" in same.output


@pytest.mark.parametrize("name", ["plain.npz", "plain.h5"])
def test_export_is_read_by_others(folder: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    found = _run("export", _paths(folder)[0], output)
    assert found.exit_code == 0, found.output
    opened: Any = np.load(output) if name.endswith("z") else h5py.File(output)
    with opened as file:
        assert np.array_equal(file["variables/w"][...], np.arange(6.0).reshape(2, 3))
        assert file["variables/count"][...] == 3
        assert file["variables/half"].dtype == np.float16
    again = _run("export", _paths(folder)[0], output)
    assert again.exit_code == 1
    assert "found the file" in again.output
    assert _run("export", _paths(folder)[0], tmp_path / "x.txt").exit_code == 1


def test_list_and_show(folder: Path) -> None:
    found = _run("ls", folder)
    assert found.exit_code == 0
    assert "ckpt-0000000002.h5" in found.output
    shown = _run("show", _paths(folder)[0])
    assert "2 x 3" in shown.output
