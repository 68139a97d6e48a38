"""The compiled kernel: its sums are NumPy's, whatever the order of the ranks' steps."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat
from hpcstrat.engine import native
from tests.unit import kernel_sums
from tests.unit.kernel_sums import Worker, check

SOURCE = Path(native.__file__).with_name("kernel.c")
INCLUDE = sysconfig.get_path("include")


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    """Return the kernel's module."""
    found = native.load()
    if found is None:
        pytest.skip("the package was built without its kernel")
    return found


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 6))
def test_sums_have_the_bits_of_numpy(kernel: ModuleType, seed: int, ranks: int) -> None:
    draw, worker = random.Random(seed), Worker(kernel, ranks)
    for _ in range(3):
        check(worker, draw)


def _worker(kernel: ModuleType, *digests: int) -> tuple[Worker, list[Any]]:
    """Return a worker whose ranks have announced sums with some digests."""
    worker = Worker(kernel, len(digests))
    arrays = [[np.ones(40_000, np.float32)] for _ in digests]
    sums = worker.sums(arrays, 65536, 0, False)
    for one, own, rank, digest in zip(
        sums, arrays, worker.kernels, digests, strict=True
    ):
        assert one.start(own, own)
        rank.post(0, digest ^ rank.next, 0)
    return worker, sums


def test_ranks_that_differ_are_told_and_move_nothing(kernel: ModuleType) -> None:
    _, sums = _worker(kernel, 3, 3, 4)
    for one in sums:
        assert one.go_on(3, 10) == kernel_sums.DIFFERS


def test_ranks_agree_once_all_have_come(kernel: ModuleType) -> None:
    worker = Worker(kernel, 3)
    for rank in (0, 2):
        worker.kernels[rank].post(1, 2, 0)
    assert not worker.kernels[0].agreed()
    worker.kernels[1].post(1, 2, 0)
    assert all(k.agreed() for k in worker.kernels)


def test_another_step_is_told_apart(kernel: ModuleType) -> None:
    worker, (first, _) = _worker(kernel, 3, 3)
    assert first.go_on(3, 0) == kernel_sums.STEP_AWAITED
    # In place of the other rank's step.
    worker.kernels[1].post(0, 99, 0)
    assert first.go_on(3, 0) == kernel_sums.STEP_DIFFERS


def test_wrong_arguments_are_refused(kernel: ModuleType) -> None:
    worker = Worker(kernel, 2)
    one, own = worker.kernels[0], np.ones(6, np.float32)
    for codes, likes, piece in (
        (b"", [], 64),
        (b"\0", [own, own], 64),
        (b"\0", [1], 64),
        (b"\xff", [own], 64),
        (b"\0", [own], 63),
        (b"\0", [own], 1 << 30),
    ):
        with pytest.raises(ValueError, match="of known types"):
            kernel.Sum(one, codes, likes, likes, piece, 0, False)
    for wrong in ((object(), b"\0", [own], [own]), (one, b"\0", own, own)):
        with pytest.raises(TypeError):
            kernel.Sum(*wrong, 64, 0, False)
    made = kernel.Sum(one, b"\0", [own], [own], 64, 0, False)
    read_only = own.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(bytearray(25), np.uint8, 24, 1).view(np.float32)
    for value, result in (
        (np.ones(12, np.float32)[::2], own),
        (np.ones(5, np.float32), own),
        (own.astype(np.int32), own),
        (own.reshape(2, 3), own),
        (own, read_only),
        (own, unaligned),
        (own, own.astype(np.float64)),
        ("text", own),
    ):
        assert not made.start([value], [result])
        assert made.reduce(value, result, 0, 0, 1) is None
    assert not made.start([own, own], [own, own])
    assert not made.start(own, [own])
    with pytest.raises(RuntimeError, match="no call"):
        made.go_on(0, 0)
    with pytest.raises(RuntimeError, match="no call"):
        made.take_results()
    # Nothing was taken by what was refused.
    assert one.next == 0
    one.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.start([own], [own])
    for size in (8, 4096):
        with pytest.raises(ValueError, match="holds records"):
            kernel.Kernel(mmap.mmap(-1, size), 4096, 4096, 4096, 0, 2)


@pytest.mark.parametrize("listed", [False, True])
def test_results_are_new_or_those_given(kernel: ModuleType, listed: bool) -> None:
    worker = Worker(kernel, 2)
    own = [np.arange(6.0).reshape(2, 3), np.arange(4, dtype=np.int16)][: 1 + listed]
    sums = worker.sums([own, own], 4096, 2, False)
    wanted = [array.astype(np.float64) for array in own]
    for out in (None, [np.empty(array.shape) for array in own]):
        given = [own, own] if listed else [own[0], own[0]]
        outs = out if out is None or listed else out[0]
        results = [
            one.reduce(value, outs, 0, 5, 1)
            for one, value in zip(sums, given, strict=True)
        ]
        # The one that comes last needs to wait for nobody.
        assert results[0] == kernel_sums.HEADER_AWAITED
        assert sums[0].go_on(5, 10) == kernel_sums.DONE
        results[0] = sums[0].take_results()
        for found in results:
            assert found is outs or outs is None
            for array, right in zip(found if listed else [found], wanted, strict=True):
                assert array.dtype == right.dtype
                np.testing.assert_array_equal(array, right)


def test_results_over_other_values_are_left_to_others(kernel: ModuleType) -> None:
    worker = Worker(kernel, 2)
    memory = np.ones(7, np.float32)
    [one, _] = worker.sums([[memory[1:]]] * 2, 64, 0, False)
    assert one.reduce(memory[1:], memory[:-1], 0, 5, 1) is None
    assert one.start([memory[1:]], [memory[:-1]])


def test_a_kernel_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = ModuleType("hpcstrat.engine.native.kernel")
    stale.VERSION = native.VERSION + 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpcstrat.engine.native.kernel", stale)
    assert native.load() is None


def _compiled(made: Path, *flags: str) -> None:
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None or not Path(INCLUDE, "Python.h").exists():
        pytest.skip("there is no C compiler, or no Python.h")
    command = [compiler, "-std=c11", "-ffp-contract=off", "-fPIC", "-shared", *flags]
    command += [
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{INCLUDE}",
        *("-isystem", np.get_include()),
        str(SOURCE),
        "-o",
        str(made),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    made = tmp_path / "kernel.so"
    probe = subprocess.run(
        ["cc", "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=False,
    )
    library = probe.stdout.strip()
    if probe.returncode or not os.path.isabs(library):
        pytest.skip("the C compiler has no AddressSanitizer")
    sanitizers = "-fsanitize=address,undefined"
    _compiled(made, "-O1", "-g", sanitizers, "-fno-sanitize-recover=all")
    root = Path(hpcstrat.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernel_sums", str(made), "40"],
        env={
            **os.environ,
            "LD_PRELOAD": library,
            # Python keeps memory until it ends.
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONPATH": str(root),
        },
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
