"""The compiled kernel's sums equal NumPy's, for any order of the ranks' steps."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
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
    """Return the module of the compiled kernel."""
    found = native.load()
    if found is None:
        pytest.skip("the package was built without its kernel")
    return found


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 6))
def test_sums_have_the_bits_of_numpy(kernel: ModuleType, seed: int, ranks: int) -> None:
    draw = random.Random(seed)
    # In the larger ring, the pieces of a call of two ranks have four places.
    ring_bytes = draw.choice([256 << 10, 1 << 20])
    check(Worker(kernel, ranks, ring_bytes), draw, num_calls=3)


def _worker(kernel: ModuleType, *digests: int) -> tuple[Worker, list[Any]]:
    """Return a worker whose ranks have announced sums with these digests."""
    worker = Worker(kernel, len(digests))
    arrays = [[np.ones(40_000, np.float32)] for _ in digests]
    sums = worker.sums(arrays, 65536, "SUM", False, digest=3)
    for one, own, rank, digest in zip(
        sums, arrays, worker.kernels, digests, strict=True
    ):
        assert one.start(own, own)
        rank.post(0, digest ^ rank.next, 0)
    return worker, sums


def test_ranks_that_differ_are_told_and_move_nothing(kernel: ModuleType) -> None:
    _, sums = _worker(kernel, 3, 3, 4)
    for one in sums:
        assert one.go_on(10) == kernel_sums.DIFFERS


def test_ranks_agree_once_all_have_come(kernel: ModuleType) -> None:
    worker = Worker(kernel, 3)
    for rank in (0, 2):
        worker.kernels[rank].post(1, 2, 0)
    assert not worker.kernels[0].agreed()
    worker.kernels[1].post(1, 2, 0)
    assert all(k.agreed() for k in worker.kernels)


def test_another_step_is_told_apart(kernel: ModuleType) -> None:
    worker, (first, _) = _worker(kernel, 3, 3)
    assert first.go_on(0) == kernel_sums.STEP_AWAITED
    # Post another digest instead of the other rank's step.
    worker.kernels[1].post(0, 99, 0)
    assert first.go_on(0) == kernel_sums.STEP_DIFFERS


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
            kernel.Sum(one, codes, likes, likes, piece, 0, False, "call", 5, None)
    for wrong in ((object(), b"\0", [own], [own]), (one, b"\0", own, own)):
        with pytest.raises(TypeError):
            kernel.Sum(*wrong, 64, 0, False, "call", 5, None)
    made = kernel.Sum(one, b"\0", [own], [own], 64, 0, False, "call", 5, None)
    repeat = one.repeater()
    made.keep(repeat, "reduce", ("sum",), False, None, None, (), False)
    one.attention = False
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
        assert made.reduce(value, result) is None
        assert repeat("reduce", "sum", value, result) is None
    # A call in the middle of a call of this thread must be a part of that call.
    one.thread = threading.get_ident()
    assert repeat("reduce", "sum", own, own) is None
    one.thread = 0
    assert not made.start([own, own], [own, own])
    assert not made.start(own, [own])
    with pytest.raises(RuntimeError, match="no call"):
        made.go_on(0)
    with pytest.raises(RuntimeError, match="no call"):
        made.take_results()
    with pytest.raises(TypeError, match="4 arguments"):
        repeat("reduce", "sum", own)
    # The refused call consumed no tick and announced nothing.
    assert (one.next, one.tick, one.num_calls) == (0, 0, 0)
    one.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.start([own], [own])
    assert repeat("reduce", "sum", own, own) is None
    for size in (8, 4096):
        with pytest.raises(ValueError, match="holds records"):
            kernel.Kernel(mmap.mmap(-1, size), 4096, 4096, 4096, 1024, 0, 2)


@pytest.mark.parametrize("listed", [False, True])
def test_results_are_new_or_those_given(kernel: ModuleType, listed: bool) -> None:
    worker = Worker(kernel, 2)
    own = [np.arange(6.0).reshape(2, 3), np.arange(4, dtype=np.int16)][: 1 + listed]
    sums = worker.sums([own, own], 4096, "MEAN", False)
    for one in worker.kernels:
        one.attention, one.looks = False, 1
    wanted = [array.astype(np.float64) for array in own]
    for out in (None, [np.empty(array.shape) for array in own]):
        given = [own, own] if listed else [own[0], own[0]]
        outs = out if out is None or listed else out[0]
        results = [
            one.reduce(value, outs) for one, value in zip(sums, given, strict=True)
        ]
        # The rank that arrives last does not wait.
        assert results[0] == kernel_sums.HEADER_AWAITED
        assert sums[0].go_on(10) == kernel_sums.DONE
        results[0] = sums[0].take_results()
        for found in results:
            assert found is outs or outs is None
            for array, right in zip(found if listed else [found], wanted, strict=True):
                assert array.dtype == right.dtype
                np.testing.assert_array_equal(array, right)


def test_results_over_other_values_are_left_to_others(kernel: ModuleType) -> None:
    worker = Worker(kernel, 2)
    memory = np.ones(7, np.float32)
    [one, _] = worker.sums([[memory[1:]]] * 2, 64, "SUM", False)
    worker.kernels[0].attention = False
    assert one.reduce(memory[1:], memory[:-1]) is None
    assert one.start([memory[1:]], [memory[:-1]])


class _Repeating:
    """Two ranks; the second repeats a kept sum when the first has arrived."""

    def __init__(self, kernel: ModuleType, own: Any, **options: Any) -> None:
        worker = Worker(kernel, 2)
        self.first, self.second = worker.kernels
        self.second.attention = False
        self.sums = worker.sums([[own], [own]], 65536, "SUM", False, **options)
        self.waited: list[Any] = []
        self.error: BaseException | None = None
        self.left: list[Any] = []
        kept = self.waits, lambda *left: self.left.append(left), (), False
        self.repeat = self.second.repeater()
        self.sums[1].keep(self.repeat, "reduce", ("sum", "SUM"), False, *kept)

    def waits(self, one: Any, awaited: int) -> Any:
        assert self.second.thread == threading.get_ident()
        self.waited.append(awaited)
        if self.error is not None:
            raise self.error
        return "waited"

    def come(self, own: Any) -> None:
        """Let the first rank announce its call."""
        assert self.sums[0].start([own], [own.copy()])
        self.first.post(0, 11 ^ self.first.next, 0)


@pytest.mark.parametrize("size", [1, 6, 7, 5000])
def test_a_call_is_repeated_unless_something_is_out_of_the_ordinary(
    kernel: ModuleType, size: int
) -> None:
    own = np.arange(size, dtype=np.float32)
    ranks = _Repeating(kernel, own)
    second, call = ranks.second, ("reduce", "SUM", own, None)
    for count in range(1, 6):
        ranks.come(own)
        for name, value in (("attention", True), ("thread", 1)):
            usual = getattr(second, name)
            setattr(second, name, value)
            assert ranks.repeat(*call) is None
            setattr(second, name, usual)
        for other in (
            ("all_reduce", *call[1:]),
            ("reduce", "mean", own, None),
            ("reduce", "SUM", [own], None),
            ("reduce", "SUM", np.append(own, 1), None),
        ):
            assert ranks.repeat(*other) is None
        # Sums are kept for one repeater; another repeater may have other algorithms.
        assert second.repeater()(*call) is None
        assert second.num_calls == count - 1
        np.testing.assert_array_equal(ranks.repeat(*call), own + own)
        assert second.num_calls == count
        assert second.last_call == "call"
        # The first rank may finish its sum later than the second rank.
        assert ranks.sums[0].go_on(10) == kernel_sums.DONE
        ranks.sums[0].take_results()
    assert not ranks.waited


def test_python_waits_for_what_is_late(kernel: ModuleType) -> None:
    own = np.ones(3)
    ranks = _Repeating(kernel, own)
    assert ranks.repeat("reduce", "sum", own, own) == "waited"
    assert ranks.waited == [kernel_sums.HEADER_AWAITED]
    assert ranks.second.thread == 0
    assert ranks.second.num_calls == 1


def test_an_error_after_the_header_leaves_the_call(kernel: ModuleType) -> None:
    own = np.ones(3)
    ranks = _Repeating(kernel, own)
    ranks.error = KeyboardInterrupt("planted")
    with pytest.raises(KeyboardInterrupt):
        ranks.repeat("reduce", "sum", own, own)
    assert ranks.left == [("reduce", ranks.error, 0)]
    assert ranks.second.thread == 0


def test_results_without_memory_leave_the_call_to_the_usual_way(
    kernel: ModuleType,
) -> None:
    own = np.ones(3)

    def fails(error: type[BaseException]) -> Any:
        raise error("planted")

    for error in (MemoryError, KeyboardInterrupt):
        ranks = _Repeating(kernel, own, allocate=functools.partial(fails, error))
        ranks.come(own)
        if error is MemoryError:
            assert ranks.repeat("reduce", "sum", own, None) is None
        else:
            with pytest.raises(KeyboardInterrupt):
                ranks.repeat("reduce", "sum", own, None)
        assert ranks.second.num_calls == ranks.second.tick == 0


@pytest.mark.parametrize("change", ["thread", "attention", "start"])
def test_what_comes_while_results_are_made_is_seen(
    kernel: ModuleType, change: str
) -> None:
    own = np.ones(3)

    def allocate() -> list[Any]:
        if change == "thread":
            ranks.second.thread = 1
        elif change == "attention":
            ranks.second.attention = True
        else:
            # Start a call of the same sum, as another thread might.
            assert ranks.sums[1].start([own + 1], [own + 1])
        return [own.copy()]

    ranks = _Repeating(kernel, own, allocate=allocate)
    ranks.come(own)
    assert ranks.repeat("reduce", "sum", own, None) is None
    assert ranks.second.num_calls == 0


def test_forgotten_sums_are_not_found(kernel: ModuleType) -> None:
    own = np.ones(3)
    ranks = _Repeating(kernel, own)
    ranks.come(own)
    ranks.sums.pop()
    assert ranks.repeat("reduce", "sum", own, None) is None


def test_a_kernel_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = ModuleType("hpcstrat.engine.native.kernel")
    stale.VERSION = native.VERSION + 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpcstrat.engine.native.kernel", stale)
    assert native.load.__wrapped__() is None


def _compiled(made: Path, *flags: str, source: Path = SOURCE) -> None:
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
        str(source),
        "-o",
        str(made),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _forms(tmp_path: Path, before: list[float], after: list[float]) -> list[int]:
    """Return the forms of 600 calls, whose times change after the first 300."""
    source = tmp_path / "forms.c"
    source.write_text(f"""
        #include "{SOURCE}"
        __attribute__((visibility("default")))
        void choose(const double *before, const double *after, int *forms) {{
            trials of = {{0}};
            for (int i = 0; i < 600; i++) {{
                forms[i] = next_form(&of, 0);
                learn(&of, forms[i], (i < 300 ? before : after)[forms[i]], 0);
            }}
        }}""")
    _compiled(tmp_path / "forms.so", "-O1", source=source)
    forms = (ctypes.c_int * 600)()
    times = [(ctypes.c_double * 4)(*each) for each in (before, after)]
    ctypes.CDLL(str(tmp_path / "forms.so")).choose(*times, forms)
    return list(forms)


def test_the_form_of_copies_follows_the_cores(tmp_path: Path) -> None:
    """The times of the form in use hardly change; those of another one fall."""
    forms = _forms(tmp_path, [1.9, 1.3, 2.3, 1.6], [0.9, 1.25, 1.4, 1.6])
    assert forms[200:300].count(1) > 90
    assert forms[500:].count(0) > 90


@pytest.mark.parametrize(("past_cache", "best"), [(0.97, 0), (0.9, 2)])
def test_results_stay_in_the_cache_unless_that_is_slow(
    tmp_path: Path, past_cache: float, best: int
) -> None:
    times = [1.0, 2.0, past_cache, 2.0]
    assert _forms(tmp_path, times, times)[200:].count(best) > 370


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
            # Disable leak detection, because Python does not free all memory at exit.
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
