"""Files that are damaged or no checkpoints: the same error or warning on all ranks."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.reader import open_checkpoint
from hpcstrat.checkpoint.file.schema import FORMAT_VERSION
from hpcstrat.engine.file_bytes import PAGE_BYTES
from hpcstrat.errors import CheckpointError, CorruptCheckpointError
from tests.faults.fuzzing import seal
from tests.mpi.ranks.saved import warnings_of_checkpoints

pytestmark = pytest.mark.files


_SECTOR_BYTES = 512


def _text(path: Path) -> None:
    path.write_text("no checkpoint at all\n" * 500)


def _newer(path: Path) -> None:
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        file.attrs["hpcstrat_format_version"] = np.int64(FORMAT_VERSION + 1)
    content = bytearray(path.read_bytes())
    seal(content, root=True)
    path.write_bytes(content)


def _foreign(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["weights"] = np.arange(3.0)


def _forbidden(path: Path) -> None:
    path.chmod(0)


def _missing(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


# Expected error texts: each names the file's content and a remedy.
BAD = (
    (_text, "checkpoint, found a text file at .*; give a file that Checkpoint"),
    (
        _newer,
        f"version {FORMAT_VERSION} or lower, found version {FORMAT_VERSION + 1}"
        ".*; use a newer hpcstrat",
    ),
    (_foreign, "an HDF5 file of another program, which holds weights at .*; give a"),
    (_forbidden, "cannot be read:.*Permission denied.*; change its permissions, or"),
    (_missing, "found no such file; check the path, or leave it out"),
    (_folder, "cannot be read: it is a folder; restore an older one, or remove"),
    (_pipe, "cannot be read: it is no regular file; restore an older one, or remove"),
    (_empty, "cannot be read: it is empty; restore an older one, or remove"),
)

_VERSION_3, _ALL = 0x20080522, 2**32 - 1


@contextmanager
def _without_rights() -> Iterator[None]:
    """Make file permissions apply to this thread, even for root (see capset(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("<Ii", _VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data):
        pytest.skip("the rights of this process are not known")
    words = list(struct.unpack("<6I", data.raw[:24]))
    before = ctypes.create_string_buffer(struct.pack("<6I", *words))
    # Drop CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH from the effective capabilities.
    words[0] &= ~0b110
    if libc.capset(header, ctypes.create_string_buffer(struct.pack("<6I", *words))):
        pytest.skip("rights cannot be given up")
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@pytest.mark.parametrize(("spoil", "words"), BAD)
def test_bad_files_are_one_error_and_one_warning(
    spoil: Callable[[Path], None],
    words: str,
    strategies: dict[int, Any],
    folder: Path,
    job: Any,
) -> None:
    strategy = strategies[job.size]
    with strategy.scope():
        x = hs.Variable(np.zeros(3))
    manager = hs.CheckpointManager(folder, x=x)
    for step in (1, 2):
        x.assign(np.full(3, float(step)))
        path = Path(manager.save(step))
    if job.rank == 0:
        spoil(path)
    job.Barrier()
    x.assign(np.full(3, 9.0))
    with _without_rights():
        with pytest.raises(CheckpointError, match=rf"expected .*{words}") as caught:
            manager.restore(path)
        assert len(set(job.allgather((type(caught.value), str(caught.value))))) == 1
        assert path.name in str(caught.value)
        assert str(caught.value).count("expected") == 1
        np.testing.assert_array_equal(x.component, 9.0)
        with warnings_of_checkpoints() as said:
            if spoil is _newer:
                # Do not continue from an older checkpoint, which would replace the
                # newer file.
                with pytest.raises(CheckpointError, match=words):
                    manager.restore()
                wanted = 9.0
            else:
                assert manager.restore() == 1
                wanted = 1.0
    np.testing.assert_array_equal(x.component, wanted)
    said = [text for texts in job.allgather(said) for text in texts]
    assert len(said) == (spoil not in (_newer, _missing)), said
    assert all(path.name in text for text in said)


def _stale(content: bytearray, plan: FileLayout, older: bytes) -> None:
    start, stop = plan.span(plan.num_blocks - 1)
    content[start:stop] = older[start:stop]


def _swapped(content: bytearray, plan: FileLayout, older: bytes) -> None:
    first, middle = plan.span(0)
    last = 2 * middle - first
    content[first:last] = content[middle:last] + content[first:middle]


def _zeroed(content: bytearray, plan: FileLayout, older: bytes) -> None:
    start = plan.span(1)[0] + 3 * PAGE_BYTES
    content[start : start + PAGE_BYTES] = bytes(PAGE_BYTES)


def _torn(content: bytearray, plan: FileLayout, older: bytes) -> None:
    start = plan.span(plan.num_blocks - 1)[0] + 5 * _SECTOR_BYTES
    content[start : start + _SECTOR_BYTES] = older[start : start + _SECTOR_BYTES]


def _torn_table(content: bytearray, plan: FileLayout, older: bytes) -> None:
    start = plan.table_start
    content[start : start + _SECTOR_BYTES] = older[start : start + _SECTOR_BYTES]


@pytest.mark.parametrize("damage", [_stale, _swapped, _zeroed, _torn, _torn_table])
def test_old_and_misplaced_parts_are_found_by_all_ranks(
    damage: Any, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    # Every rank has a block to read, and two of the blocks are whole.
    count = (job.size + 1) << 18
    draw = np.random.default_rng(3)
    with strategy.scope():
        x = hs.Variable(np.zeros(count))
    manager = hs.CheckpointManager(folder, x=x)
    values = draw.standard_normal((2, count))
    for step, value in enumerate(values, 1):
        x.assign(value)
        path = Path(manager.save(step))
    vouched = open_checkpoint(str(path)).vouched
    assert vouched is not None
    job.Barrier()
    if job.rank == 0:
        content = bytearray(path.read_bytes())
        damage(content, vouched.plan, (folder / "ckpt-0000000001.h5").read_bytes())
        assert content != path.read_bytes()
        path.write_bytes(content)
    job.Barrier()
    x.assign(np.full(count, 9.0))
    with pytest.raises(CorruptCheckpointError, match=path.name) as caught:
        manager.restore(path)
    assert len(set(job.allgather(str(caught.value)))) == 1
    np.testing.assert_array_equal(x.component, 9.0)
    with warnings_of_checkpoints() as said:
        assert manager.restore() == 1
    assert sum(job.allgather(len(said))) == 1
    np.testing.assert_array_equal(x.component, values[0])
