"""Damaged checkpoints, full disks and other faults, on every rank."""

from __future__ import annotations

import errno
import gc
import itertools
import operator
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.file import image
from hpcstrat.checkpoint.file.commit_record import Blocks
from hpcstrat.checkpoint.keep.folder import temporary_name
from hpcstrat.checkpoint.save import part_writer, pending_save, saver
from hpcstrat.errors import CheckpointError, CorruptCheckpointError, ReplicaError
from tests.folders import listed
from tests.mpi.programs.save_trace import around_calls
from tests.mpi.ranks.saved import (
    Counter,
    make_variable,
    warnings_of_checkpoints,
)

pytestmark = pytest.mark.once


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _truncate_to_header(path: Path) -> None:
    os.truncate(path, 100)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _garbage(path: Path) -> None:
    path.write_bytes(np.random.default_rng(2).bytes(5000))


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = (_truncate, _truncate_to_header, _empty, _garbage, _zeros, _folder, _dangling)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("method", ["restore", "restore_or_initialize"])
def test_damaged_newest_checkpoint_is_passed_over(
    damage: Any, method: str, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    with strategy.scope():
        x = hs.Variable(np.zeros(3))
    manager = hs.CheckpointManager(folder, x=x)
    for step in (1, 2, 3):
        x.assign(np.full(3, float(step)))
        path = Path(manager.save(step))
    if job.rank == 0:
        damage(path)
    job.Barrier()
    with warnings_of_checkpoints() as said:
        assert getattr(manager, method)() == 2
    np.testing.assert_array_equal(x.component, np.full(3, 2.0))
    counts = job.allgather(len(said))
    wanted = 0 if damage is _dangling else 1
    assert sum(counts) == wanted, said
    assert all(path.name in text for text in said)
    with pytest.raises(CheckpointError, match=path.name):
        manager.restore(path)
    np.testing.assert_array_equal(x.component, np.full(3, 2.0))
    # The damaged file does not prevent further saves.
    assert manager.save(4).endswith("ckpt-0000000004.h5")
    narrow = hs.CheckpointManager(folder, max_to_keep=1, x=x)
    narrow.save(5)
    assert narrow.latest() == narrow.checkpoints[-1]


def test_file_that_one_rank_cannot_read_is_passed_over_by_all(
    strategy: Any, folder: Path, job: Any
) -> None:
    # Large enough that every rank reads a part.
    with strategy.scope():
        x = hs.Variable(np.zeros(job.size << 18))
    checkpoints = hs.CheckpointManager(folder, x=x)
    for step in (1, 2):
        x.assign(np.full(job.size << 18, float(step)))
        checkpoints.save(step)
    read = Blocks.read

    def fail(self: Any, *args: Any) -> Any:
        if self.path.endswith("2.h5") and job.rank == job.size - 1:
            raise CorruptCheckpointError("a stale handle")
        return read(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blocks, "read", fail)
        assert checkpoints.restore() == 1
        np.testing.assert_array_equal(x.component, np.ones(job.size << 18))
        with pytest.raises(CorruptCheckpointError, match="a stale handle"):
            checkpoints.restore(folder / "ckpt-0000000002.h5")
        np.testing.assert_array_equal(x.component, np.ones(job.size << 18))


def test_missing_checkpoints_are_told(strategy: Any, folder: Path) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder / "new" / "deep", x=x)
    assert manager.latest() is None
    assert manager.restore_or_initialize() is None
    with pytest.raises(CheckpointError, match="found no such folder"):
        manager.restore()
    with pytest.raises(CheckpointError, match="ckpt-0000000009"):
        manager.restore(folder / "ckpt-0000000009.h5")


def test_file_in_place_of_the_folder_is_an_error_everywhere(
    strategy: Any, folder: Path, job: Any
) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    if job.rank == 0:
        (folder / "taken").write_text("not a folder")
    job.Barrier()
    for name in ("taken", "taken/below"):
        with pytest.raises(CheckpointError, match="taken") as caught:
            hs.CheckpointManager(folder / name, x=x)
        assert "overwrite" not in str(caught.value)


def test_vanished_folder_is_an_error_and_a_later_save_works(
    strategy: Any, folder: Path, job: Any
) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder / "gone", x=x)
    manager.save(1)
    job.Barrier()
    if job.rank == 0:
        shutil.rmtree(folder / "gone")
    job.Barrier()
    with pytest.raises(CheckpointError, match="gone"):
        manager.save(2)
    # The manager does not make the folder again: its file system may be unmounted.
    assert not (folder / "gone").exists()
    hs.CheckpointManager(folder / "other", x=x).save(1)


@contextmanager
def _mounted(job: Any, folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Mount a small memory file system; yield a function that remounts it."""

    def call(*words: str) -> str:
        done = None
        if job.rank == 0:
            try:
                run = subprocess.run(
                    [*words, str(folder)], capture_output=True, text=True, check=False
                )
                done = run.stderr if run.returncode else ""
            except OSError as error:
                done = str(error)
        return str(job.bcast(done))

    reason = call("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs")
    if reason:
        pytest.skip(f"tmpfs cannot be mounted: {reason.strip()}")
    try:
        yield (
            lambda options: (
                pytest.fail(text)
                # type: ignore[misc]
                if (text := call("mount", "-o", f"remount,{options}"))
                else None
            )
        )
    finally:
        job.Barrier()
        call("umount", "-l")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_is_an_error_everywhere_and_leaves_no_trace(
    asynchronous: bool, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    with strategy.scope():
        x = hs.Variable(np.arange(20_000.0))
        seen = make_variable("sum", np.int64(0))
    small, other = folder / "small", folder / "other"
    if job.rank == 0:
        small.mkdir()
    job.Barrier()
    with _mounted(job, small, "1m"):
        manager = hs.CheckpointManager(small, max_to_keep=None, x=x, seen=seen)
        saved: list[int] = []

        def fill() -> None:
            for step in range(20):
                x.assign(np.full(20_000, float(step)))
                manager.save(step, asynchronous=asynchronous)
                manager.wait()
                saved.append(step)

        with pytest.raises(CheckpointError, match="No space left on device"):
            fill()
        job.Barrier()
        assert 1 <= len(saved) < 10
        assert len(listed(small)) == len(saved)
        assert manager.restore() == saved[-1]
        np.testing.assert_array_equal(x.component, np.full(20_000, float(saved[-1])))
        hs.CheckpointManager(other, x=x, seen=seen).save(1)
        # The space that the failed save released suffices for a small checkpoint.
        hs.CheckpointManager(small, max_to_keep=None, seen=seen).save(100)


def test_read_only_folder_is_an_error_everywhere(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    with strategy.scope():
        x = hs.Variable(np.arange(3.0))
    fixed, other = folder / "fixed", folder / "other"
    if job.rank == 0:
        fixed.mkdir()
    job.Barrier()
    with _mounted(job, fixed, "1m") as remount:
        manager = hs.CheckpointManager(fixed, x=x)
        manager.save(1)
        # Close the file that locks the folder; otherwise it stays open for writing.
        manager.close()
        remount("ro")
        x.assign(np.zeros(3))
        with pytest.raises(CheckpointError, match="Read-only"):
            manager.save(2)
        again = hs.CheckpointManager(fixed, x=x)
        assert again.restore_or_initialize() == 1
        np.testing.assert_array_equal(x.component, np.arange(3.0))
        hs.CheckpointManager(other, x=x).save(1)


PLACES = (
    (saver, "create"),
    (image, "_pages"),
    (part_writer, "open_to_write"),
    (part_writer, "fill"),
    (part_writer, "block_hash"),
    (part_writer, "write_all"),
    (part_writer, "flush"),
    (pending_save, "open_to_write"),
    (pending_save, "pack_record"),
    (pending_save, "write_all"),
    (pending_save, "flush"),
    (pending_save, "publish"),
    (pending_save, "flush_folder"),
)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["everywhere", "last"])
@pytest.mark.parametrize(
    "place", PLACES, ids=lambda place: f"{place[0].__name__[20:]}.{place[1]}"
)
def test_error_at_any_point_of_a_save_leaves_the_older_ones(
    place: Any,
    where: str,
    asynchronous: bool,
    strategies: dict[int, Any],
    folder: Path,
    job: Any,
) -> None:
    only_first = place[0] is pending_save or place[1] == "create"
    if where == "last" and only_first:
        pytest.skip("done by replica 0 alone")
    strategy = strategies[job.size]
    count = job.size << 18
    with strategy.scope():
        x = hs.Variable(np.ones(count))
    manager = hs.CheckpointManager(folder, x=x)
    manager.save(1)
    manager.close()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if where == "everywhere" or job.rank == job.size - 1:
            patch.setattr(*place, fail)
        x.assign(np.zeros(count))
        with pytest.raises(CheckpointError, match="Input/output error") as caught:  # noqa: PT012
            manager.save(2, asynchronous=asynchronous)
            manager.wait()
        if where == "last" and job.size > 1:
            assert f"rank {job.size - 1}" in str(caught.value)
    job.Barrier()
    assert listed(folder) == ["ckpt-0000000001.h5"]
    manager.wait()
    assert manager.restore() == 1
    np.testing.assert_array_equal(x.component, np.ones(count))
    manager.save(2, asynchronous=asynchronous)
    manager.close()
    assert len(manager.checkpoints) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_thread_that_cannot_start_is_an_error_everywhere(
    strategy: Any,
    folder: Path,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    asynchronous: bool,
    error: type[Exception],
) -> None:
    with strategy.scope():
        # Large enough that each replica writes some blocks.
        variable = hs.Variable(np.ones(1 << 20), name="v")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == f"hpcstrat-save-{number}" and job.rank == job.size - 1:
            raise error("can't start new thread")
        start(thread)

    with hs.CheckpointManager(folder, v=variable) as manager:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        save: Callable[[], Any] = partial(manager.save, 1)
        if asynchronous:
            manager.save(1, asynchronous=True)
            save = manager.wait
        with pytest.raises(CheckpointError, match="can't start new thread"):
            save()
        monkeypatch.undo()
        assert listed(folder) == []
        manager.save(2)
        assert manager.restore() == 2


def test_state_that_would_change_is_an_error_everywhere(
    strategy: Any, folder: Path, job: Any
) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    counter = Counter()
    manager = hs.CheckpointManager(folder, x=x, counter=counter)
    words = r"ndarray at state\['array'\]"
    last = job.size - 1
    for guilty in (range(job.size), [last]):
        bad = job.rank in guilty
        counter.state = {"array": np.zeros(3)} if bad else {"number": 1}
        error = ValueError if bad else ReplicaError
        with pytest.raises(error, match=words):
            manager.save(1)
        assert manager.checkpoints == []
    counter.state = {1: "one", "1": ("a", b"b"), "best": np.float32(0.1)}
    manager.save(1)
    state, counter.state = counter.state, {}
    manager.restore()
    assert repr(counter.state) == repr(state)


def test_abandoned_files_of_dead_processes_are_removed(
    strategy: Any, folder: Path, job: Any
) -> None:
    host = os.uname().nodename
    alive = temporary_name("ckpt-0000000001.h5")
    dead = alive.replace(f"-{os.getpid()}.", "-999999999.")
    away = dead.replace(host, "elsewhere")
    if job.rank == 0:
        for name in (dead, alive, away, "mine.txt"):
            (folder / name).touch()
    job.Barrier()
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder, x=x)
    assert manager.checkpoints == []
    if job.rank == 0:
        assert sorted(listed(folder)) == sorted([alive, away, "mine.txt"])


def test_plain_variables_need_folders_of_their_own(folder: Path, job: Any) -> None:
    x = hs.Variable(float(job.rank))
    if job.size > 1:
        with pytest.raises(RuntimeError, match="independent=True"):
            hs.CheckpointManager(folder, x=x)
    manager = hs.CheckpointManager(folder / str(job.rank), independent=True, x=x)
    manager.save(1)
    x.assign(-1.0)
    assert manager.restore() == 1
    assert x.numpy() == job.rank


def test_variables_of_two_strategies_need_two_managers(
    strategy: Any, make_strategy: Callable[..., Any], folder: Path
) -> None:
    other = make_strategy()
    with strategy.scope():
        x = hs.Variable(1.0)
    with other.scope():
        y = hs.Variable(2.0)
    with pytest.raises(ValueError, match="one strategy"):
        hs.CheckpointManager(folder, x=x, y=y)
    other.close()


@dataclass(frozen=True)
class _Event:
    """A file call of a rank, with its times; all ranks of a machine share the clock."""

    kind: str
    rank: int
    began: int
    ended: int


def _trace_of(
    job: Any, folder: Path, action: Callable[[], Any]
) -> tuple[list[_Event], list[int]]:
    """Run an action; return the file calls of all ranks, with their times."""
    own: list[_Event] = []

    def note(kind: str, act: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        del arguments
        began = time.monotonic_ns()
        try:
            return act()
        finally:
            # Threads call this function too, which is safe because append is atomic.
            own.append(_Event(kind, job.rank, began, time.monotonic_ns()))

    job.Barrier()
    with around_calls(folder, note):
        action()
        through = time.monotonic_ns()
    events = [event for part in job.allgather(own) for event in part]
    return events, job.allgather(through)


def _only(events: list[_Event], kind: str) -> _Event:
    (found,) = (event for event in events if event.kind == kind)
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_all_ranks_flush_before_the_next_step(
    overwrite: bool,
    asynchronous: bool,
    strategies: dict[int, Any],
    folder: Path,
    job: Any,
) -> None:
    """A power failure at any moment leaves either the old or the new checkpoint."""
    count = job.size << 18
    with strategies[job.size].scope():
        x = hs.Variable(np.ones(count))
    manager = hs.CheckpointManager(folder, max_to_keep=1, x=x)
    manager.save(1)

    step = 1 if overwrite else 2

    def save() -> None:
        manager.save(step, asynchronous=asynchronous, overwrite=overwrite)
        manager.wait()

    events, through = _trace_of(job, folder, save)
    first = min(e.began for e in events if e.kind == "write table")
    for rank in range(job.size):
        own = [e for e in events if e.rank == rank]
        written = [e.ended for e in own if e.kind == "write block"]
        flushed = _only(own, "flush block")
        assert len(written) >= 2
        assert max(written) < flushed.began
        # The record behind the data says that the data are on the disk.
        assert flushed.ended < first
        if asynchronous and rank > 0:
            assert flushed.ended < _only(own, "write verdict").began
    order = ["write table", "write record", "cut", "flush record"]
    if overwrite:
        order += ["replace", "flush folder"]
    else:
        order += ["link", "remove name", "flush folder", "remove old"]
    last = [_only(events, kind) for kind in order]
    assert {event.rank for event in last} == {0}
    for before, after in itertools.pairwise(last):
        assert before.ended <= after.began, (before, after)
    assert _only(events, "flush folder").ended < min(through)
    assert manager.restore() == step


def _resources() -> tuple[int, int]:
    """Return the numbers of open files and of threads of this process."""
    gc.collect()
    for thread in threading.enumerate():
        # This thread frees the blocks of a removed file; wait until it ends.
        if thread.name == "hpcstrat-remove":
            thread.join()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.once
def test_many_small_saves_keep_nothing(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    with strategy.scope():
        x = hs.Variable(np.zeros(50_000))
        seen = make_variable("sum", np.int64(0))
    draw = np.random.default_rng(5)
    manager = hs.CheckpointManager(folder, max_to_keep=2, x=x, seen=seen)

    def save(steps: range) -> None:
        for step in steps:
            x.assign(np.full(50_000, float(step)))
            manager.save(step, asynchronous=bool(draw.integers(2)))
        manager.wait()

    # Save some steps first, so that memory that is allocated once exists.
    save(range(30))
    resources, memory = _resources(), _resident_bytes()
    save(range(30, 80))
    # Fewer is possible, because threads of earlier tests may have ended since.
    assert all(map(operator.le, _resources(), resources))
    # If each save kept its block, memory would grow by 20 MB.
    assert _resident_bytes() < memory + (8 << 20)
    assert manager.restore() == 79
    np.testing.assert_array_equal(x.component, np.full(50_000, 79.0))
