"""Two runs are compared bit by bit, and the first difference is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

import hpcstrat as hs
from hpcstrat.cli.main import main
from hpcstrat.safety.divergence.step_digests import SLICE_BYTES, StepDigests


def verify(*paths: Any) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["verify-bits", *map(str, paths)])
    return done.exit_code, done.output


def saved(folder: Path, value: Any, step: int = 1) -> Path:
    manager = hs.CheckpointManager(
        folder, w=hs.Variable(value, name="w"), independent=True
    )
    manager.save(step)
    [path] = folder.glob("*.h5")
    return path


def logged(folder: Path, values: list[Any], larger: int = 0) -> Path:
    weights = hs.Variable(np.zeros(3), name="w")
    other = hs.Variable(np.zeros(larger), name="other")
    digests = StepDigests(str(folder))
    digests.add(weights)
    digests.add(other)
    for value in values:
        digests.record()
        weights.assign(np.full(3, value))
    digests.close()
    return digests.path


def test_checkpoints(tmp_path: Path) -> None:
    value = np.array([1.0, -2.0, np.nan, 0.0], np.float32)
    one, same = saved(tmp_path / "a", value), saved(tmp_path / "b", value.copy())
    assert verify(one, same) == (0, "no difference\n")
    changed = value.copy()
    changed[1] = np.nextafter(np.nextafter(changed[1], np.float32(0)), np.float32(0))
    changed[3] = -0.0
    status, text = verify(one, saved(tmp_path / "c", changed))
    assert status == 1
    assert "variables/w: 2 of 4 elements, first at [1]: -2.0 and -1.99999" in text
    assert "2 units in the last place" in text
    status, text = verify(one, saved(tmp_path / "d", np.zeros(2)))
    assert status == 1
    assert "float32[4] and float64[2]" in text


def test_scalars(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "a", 1.0), saved(tmp_path / "b", 1.5)
    status, text = verify(one, other)
    assert status == 1
    assert "1 of 1 elements, first at []: 1.0 and 1.5" in text


def test_a_damaged_checkpoint_is_not_compared(tmp_path: Path) -> None:
    value = np.arange(4096.0)
    one, other = saved(tmp_path / "a", value), saved(tmp_path / "b", value)
    raw = bytearray(other.read_bytes())
    raw[raw.index(value[1000:1010].tobytes())] ^= 1
    other.write_bytes(raw)
    status, text = verify(one, other)
    assert status == 1
    assert text.startswith("Error: ")
    assert str(other) in text


def test_logs(tmp_path: Path) -> None:
    one = logged(tmp_path / "a", [1.0, 2.0, 3.0])
    assert verify(one, logged(tmp_path / "b", [1.0, 2.0, 3.0])) == (
        0,
        "no difference\n",
    )
    status, text = verify(one, logged(tmp_path / "c", [1.0, 2.5, 3.0]))
    assert status == 1
    assert text.startswith("step 2: different bits in w at the beginning")
    # A truncated file is compared up to its end.
    shorter = tmp_path / "cut.txt"
    shorter.write_text(one.read_text()[:-20])
    assert verify(one, shorter)[0] == 0


def test_large_variables_are_logged_in_turn(tmp_path: Path) -> None:
    larger = 3 * SLICE_BYTES // 8
    path = logged(tmp_path / "a", [1.0] * 9, larger)
    numbers = {line.split()[1] for line in path.read_text().splitlines()[1:]}
    assert numbers >= {"0", "1", "2"}
    assert verify(path, logged(tmp_path / "b", [1.0] * 9, larger))[0] == 0


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("something\n")
    status, text = verify(path, path)
    assert status == 1
    assert "step_digests" in text
