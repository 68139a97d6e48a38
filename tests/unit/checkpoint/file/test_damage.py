"""Restores of damaged checkpoints, in processes that may crash or hang."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

import hpcstrat as hs
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.reader import CheckpointFile, open_checkpoint
from hpcstrat.checkpoint.file.schema import FORMAT_VERSION
from hpcstrat.cli.main import main
from hpcstrat.engine.file_bytes import PAGE_BYTES
from hpcstrat.errors import CheckpointError, CorruptCheckpointError
from tests.faults import forging, fuzzing

_SECTOR_BYTES = 512
KINDS = ("damaged", "forged", "record", "version_1", "index")


def _environment() -> dict[str, str]:
    paths = [str(Path(fuzzing.__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _fuzz(kind: str, count: int, folder: Path) -> None:
    """Try cases in another process; record cases that crash it, and continue."""
    wrong: list[str] = []
    first = 0
    while first < count and len(wrong) < 20:
        words = [sys.executable, fuzzing.__file__, kind, str(first), str(count - first)]
        done = subprocess.run(
            [*words, str(folder)],
            capture_output=True,
            text=True,
            check=False,
            env=_environment(),
        )
        *lines, last = done.stdout.splitlines() or [""]
        if done.returncode == 0 and last.startswith("done"):
            wrong += lines
            break
        case = int((folder / "case").read_text())
        end = f"ended with {done.returncode}: {done.stderr[-2000:]}"
        wrong += [*lines, last, f"{kind} case {case} {end}"]
        first = case + 1
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    ("kind", "count"), list(zip(KINDS, (450, 200, 250, 100, 200), strict=True))
)
def test_damaged_structures_are_refused_or_come_back_equal(
    kind: str, count: int, tmp_path: Path
) -> None:
    _fuzz(kind, count, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_damaged_structures(kind: str, tmp_path: Path) -> None:
    _fuzz(kind, 10_000, tmp_path)


def test_forged_files_take_neither_memory_nor_time_and_lead_nowhere(
    tmp_path: Path,
) -> None:
    """The older checkpoint is restored."""
    words = [sys.executable, forging.__file__, str(tmp_path)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=_environment()
    )
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert wrong == []
    end = done.stdout[-500:] + done.stderr[-2000:]
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), end


SMALL = {"w": np.arange(5.0), "flag": True, "half": np.ones(3, np.float16)}


def _objects(value: float = 0.0, large: int = 0) -> dict[str, hs.Variable]:
    found = {name: hs.Variable(np.asarray(one)) for name, one in SMALL.items()}
    if value:
        found["w"].assign(np.full(5, value))
    if large:
        data = np.random.default_rng(int(value)).standard_normal(large)
        found["large"] = hs.Variable(data)
    return found


def _bytes(objects: dict[str, hs.Variable]) -> dict[str, bytes]:
    return {name: one.numpy().tobytes() for name, one in objects.items()}


def _opened(path: Path) -> tuple[CheckpointFile, FileLayout]:
    found = open_checkpoint(str(path))
    assert found.vouched is not None
    return found, found.vouched.plan


def _flip_all(path: Path, places: list[int], large: int) -> int:
    """Flip a bit at each offset; return the number of flips without effect on reads."""
    wanted = _bytes(_objects(large=large))
    extents = _opened(path)[0].extents.values()
    draw = np.random.default_rng(31)
    objects = _objects(large=large)
    manager = hs.CheckpointManager(path.parent, **objects)
    padding = 0
    file = os.open(path, os.O_RDWR)
    for place in places:
        byte = os.pread(file, 1, place)
        os.pwrite(file, bytes([byte[0] ^ 1 << int(draw.integers(8))]), place)
        for one in objects.values():
            one.assign(np.ones_like(one.numpy()))
        try:
            manager.restore(path)
        except CorruptCheckpointError:
            untouched = {(one.numpy() == 1).all() for one in objects.values()}
            assert untouched == {True}, place
        else:
            assert _bytes(objects) == wanted, place
            assert place >= _opened(path)[1].data_start
            assert not any(e.offset <= place < e.stop for e in extents), place
            padding += 1
        os.pwrite(file, byte, place)
    os.close(file)
    manager.restore(path)
    return padding


@pytest.mark.parametrize("large", [0, 300_000])
def test_flipped_bits_are_found_by_restores_or_are_in_padding(
    large: int, tmp_path: Path
) -> None:
    objects = _objects(large=large)
    path = Path(hs.CheckpointManager(tmp_path, **objects).save(1))
    plan, size = _opened(path)[1], path.stat().st_size
    draw = np.random.default_rng(29)
    edges = (0, plan.data_start, plan.data_end, size)
    places = draw.integers(0, size, 100).tolist()
    for start, stop in itertools.pairwise(edges):
        places += [start, stop - 1, *draw.integers(start, stop, 31).tolist()]
    _flip_all(path, places, large)


@pytest.mark.slow
def test_flipped_bits_of_every_byte_are_found(tmp_path: Path) -> None:
    path = Path(hs.CheckpointManager(tmp_path, **_objects()).save(1))
    _flip_all(path, list(range(path.stat().st_size)), 0)


def _stale(content: bytearray, plan: FileLayout, older: bytes) -> None:
    start, stop = plan.span(1)
    content[start:stop] = older[start:stop]


def _swapped(content: bytearray, plan: FileLayout, older: bytes) -> None:
    (first, middle), (_, last) = plan.span(0), plan.span(1)
    assert last - middle == middle - first
    content[first:last] = content[middle:last] + content[first:middle]


def _zeroed(content: bytearray, plan: FileLayout, older: bytes) -> None:
    start = plan.span(1)[0] + 3 * PAGE_BYTES
    content[start : start + PAGE_BYTES] = bytes(PAGE_BYTES)


def _torn(content: bytearray, plan: FileLayout, older: bytes) -> None:
    start = plan.span(2)[0] + 5 * _SECTOR_BYTES
    content[start : start + _SECTOR_BYTES] = older[start : start + _SECTOR_BYTES]


def _torn_record(content: bytearray, plan: FileLayout, older: bytes) -> None:
    start = plan.data_end
    content[start : start + _SECTOR_BYTES] = older[start : start + _SECTOR_BYTES]


DAMAGES = (_stale, _swapped, _zeroed, _torn, _torn_record)


@pytest.mark.parametrize("damage", DAMAGES)
def test_old_and_misplaced_parts_are_found_by_restore_and_verify(
    damage: object, tmp_path: Path
) -> None:
    count = 400_000
    for step in (1, 2):
        manager = hs.CheckpointManager(tmp_path, **_objects(float(step), count))
        path = Path(manager.save(step))
    older = (tmp_path / "ckpt-0000000001.h5").read_bytes()
    content, plan = bytearray(path.read_bytes()), _opened(path)[1]
    assert len(content) == len(older)
    assert callable(damage)
    damage(content, plan, older)
    path.write_bytes(content)
    objects = _objects(3.0, count)
    manager, before = hs.CheckpointManager(tmp_path, **objects), _bytes(objects)
    with pytest.raises(CorruptCheckpointError, match=path.name):
        manager.restore(path)
    assert _bytes(objects) == before
    assert manager.restore() == 1
    assert _bytes(objects) == _bytes(_objects(1.0, count))
    verified = CliRunner().invoke(main, ["ckpt", "verify", str(tmp_path)])
    assert verified.exit_code == 1
    assert f"{path}: DAMAGED: " in verified.output
    assert verified.output.count(": good, ") == 1


def test_file_of_a_newer_format_is_refused_by_its_version(tmp_path: Path) -> None:
    path = Path(hs.CheckpointManager(tmp_path, **_objects()).save(1))
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        file.attrs["hpcstrat_format_version"] = np.int64(FORMAT_VERSION + 1)
    content = bytearray(path.read_bytes())
    fuzzing.seal(content, root=True)
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=f"found version {FORMAT_VERSION + 1}"
    ) as caught:
        open_checkpoint(str(path))
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert "use a newer hpcstrat" in str(caught.value)
