"""The compiled reader of rows, and its replacement in Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.data.files import columns
from hpcstrat.engine import native

SOURCE = Path(native.__file__).with_name("reader.c")


def _readers() -> list[Any]:
    built = native.load_reader()
    missing = pytest.mark.skipif(built is None, reason="it was not built")
    compiled = getattr(built, "read_rows", None)
    return [
        pytest.param(compiled, id="compiled", marks=missing),
        pytest.param(columns._read_rows, id="python"),
    ]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Any]:
    """Return an open file, and its bytes."""
    path = tmp_path_factory.mktemp("rows") / "rows.bin"
    data = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    path.write_bytes(data.tobytes())
    return os.open(path, os.O_RDONLY), data


@pytest.mark.parametrize("read", _readers())
@given(
    row_bytes=st.sampled_from([1, 7, 64, 1000, 5000]),
    start=st.integers(0, 50),
    seed=st.integers(0, 10_000),
    has_places=st.booleans(),
    announces=st.booleans(),
    most_gap=st.sampled_from([-1, 0, 1, 500, 4096, 1 << 40]),
)
def test_rows_come_to_their_places(
    file: tuple[int, Any],
    read: Callable[..., int],
    row_bytes: int,
    start: int,
    seed: int,
    has_places: bool,
    announces: bool,
    most_gap: int,
) -> None:
    fd, data = file
    rng = np.random.default_rng(seed)
    most = (len(data) - start) // row_bytes
    count = int(rng.integers(1, min(most, 1500) + 1))
    # Draw runs of rows, small gaps and large gaps.
    steps = rng.choice([1, 1, 1, 2, 9], count)
    rows = np.cumsum(steps) - 1
    rows = rows[rows < most]
    room = len(rows) + 3
    places = rng.permutation(room)[: len(rows)] if has_places else None
    out = np.full((room, row_bytes), 7, np.uint8)
    offsets = rows * row_bytes + start
    found = read(fd, offsets, row_bytes, out, places, announces, most_gap)
    assert found == len(rows)
    expected = np.full((room, row_bytes), 7, np.uint8)
    inside = np.arange(len(rows)) if places is None else places
    expected[inside] = data[offsets[:, None] + np.arange(row_bytes)]
    np.testing.assert_array_equal(out, expected)


@given(size=st.integers(1, 17), count=st.integers(0, 300))
def test_shuffled_bytes_come_back_in_order(size: int, count: int) -> None:
    built = native.load_reader()
    if built is None:
        pytest.skip("it was not built")
    numbers = np.random.default_rng(count).integers(0, 256, (count, size), np.uint8)
    out = np.zeros_like(numbers)
    built.unshuffle(np.ascontiguousarray(numbers.T), out, size)
    np.testing.assert_array_equal(out, numbers)
    for planes, wrong in ((bytes(count * size + 1), size), (bytes(count * size), 0)):
        with pytest.raises(ValueError, match="expected as many bytes"):
            built.unshuffle(planes, out, wrong)


@pytest.mark.parametrize("read", _readers())
def test_the_end_of_the_file_and_errors_are_told(
    file: tuple[int, Any], read: Callable[..., int]
) -> None:
    fd, data = file
    out = np.zeros((4, 1000), np.uint8)
    offsets = np.array([0, 1000, len(data) - 500, len(data) + 9000])
    assert read(fd, offsets, 1000, out, None, False) == 2
    np.testing.assert_array_equal(out[:2].reshape(-1), data[:2000])
    with pytest.raises(OSError, match="Bad file descriptor"):
        read(-1, offsets, 1000, out, None, False)


def test_requests_that_would_leave_their_memory_are_refused(
    file: tuple[int, Any],
) -> None:
    built = native.load_reader()
    if built is None:
        pytest.skip("it was not built")
    out = np.zeros((2, 10), np.uint8)
    good = np.array([0, 10])
    for offsets, places in (
        (np.array([10, 0]), None),
        (np.array([0, 5]), None),
        (np.array([-10, 0]), None),
        (good, np.array([0, 2])),
        (good, np.array([-1, 0])),
        (good, np.array([0])),
        (np.array([0, 10, 20]), None),
    ):
        with pytest.raises(ValueError, match="expected"):
            built.read_rows(file[0], offsets, 10, out, places, False)
    with pytest.raises(ValueError, match="expected"):
        built.read_rows(file[0], good, 0, out, None, False)
    read_only = out.view()
    read_only.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        built.read_rows(file[0], good, 10, read_only, None, False)


_PROGRAM = """
import os, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import reader
data = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
path = os.path.join(sys.argv[1], "rows.bin")
open(path, "wb").write(data.tobytes())
fd = os.open(path, os.O_RDONLY)
for seed in range(200):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 3000))
    rows = np.flatnonzero(rng.random(100_000 // size) < rng.random())
    out = np.empty((len(rows), size), np.uint8)
    places = rng.permutation(len(rows))
    assert reader.read_rows(fd, rows * size, size, out, places, True) == len(rows)
    lines = data[: 100_000 // size * size].reshape(-1, size)
    assert (out[places] == lines[rows]).all()
    numbers = data[: 97 * (size % 33 + 1)].reshape(97, -1)
    planes, back = np.ascontiguousarray(numbers.T), np.empty_like(numbers)
    reader.unshuffle(planes, back, numbers.shape[1])
    assert (back == numbers).all()
"""


def test_it_builds_without_warnings_and_runs_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc")
    include = sysconfig.get_path("include")
    flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover", f"-I{include}"]
    made = str(tmp_path / "reader.abi3.so")
    subprocess.run([compiler, *flags, str(SOURCE), "-o", made], check=True)
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
