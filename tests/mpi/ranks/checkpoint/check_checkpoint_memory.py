"""Saves and restores share memory and the disk in turn."""

from __future__ import annotations

import errno
import gc
import math
import mmap
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.file import commit_record, image
from hpcstrat.checkpoint.file.image import ImageMemory
from hpcstrat.checkpoint.restore import parallel_read
from hpcstrat.checkpoint.save import part_writer, pending_save
from hpcstrat.errors import CheckpointError, ReplicaError
from hpcstrat.testing.job import wait_until
from tests.mpi.ranks.effort import examples

pytestmark = pytest.mark.files


_LIMIT_SECONDS = 40.0


def _variable(strategy: Any, job: Any) -> hs.Variable:
    """Return a variable so large that every rank has several blocks of it."""
    with strategy.scope():
        return hs.Variable(np.zeros((3 * job.size) << 17))


def _save_when_not_busy(manager: hs.CheckpointManager, step: int) -> None:
    end = time.monotonic() + _LIMIT_SECONDS
    while manager.save(step, asynchronous=True, on_busy="skip") is None:
        assert time.monotonic() < end, "saves are skipped for ever"
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(examples(4)))
def test_saves_and_restores_in_any_order(
    seed: int, strategy: Any, folder: Path, job: Any
) -> None:
    order = np.random.default_rng(seed)
    x = _variable(strategy, job)
    counted = np.arange(x.component.size, dtype=float)
    manager = hs.CheckpointManager(folder, max_to_keep=None, x=x)
    saved = 0
    for turn in range(12):
        kind = order.choice(["synchronous", "asynchronous", "restore", "close"])
        if kind == "restore" and saved:
            step = int(order.integers(1, saved + 1))
            manager.wait()
            manager.restore(manager.checkpoints[step - 1])
            np.testing.assert_array_equal(x.component, counted + step)
        elif kind == "close":
            manager.close()
        else:
            saved += 1
            x.assign(counted + saved)
            manager.save(saved, asynchronous=kind == "asynchronous")
        x.assign(np.full_like(counted, -turn))
    manager.close()
    for step, path in enumerate(manager.checkpoints, start=1):
        manager.restore(path)
        np.testing.assert_array_equal(x.component, counted + step)


def test_memory_of_an_interrupted_restore_is_left_to_its_threads(
    strategies: dict[int, Any], folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _variable(strategies[job.size], job)
    count = x.component.size
    manager = hs.CheckpointManager(folder, x=x)
    x.assign(np.full(count, 1.0))
    manager.save(1)
    may_read, read = threading.Event(), commit_record.read_into
    reading: list[threading.Thread] = []

    def late(*args: Any) -> None:
        reading.append(threading.current_thread())
        assert may_read.wait(60)
        read(*args)

    def interrupt(self: Any, seconds: float | None = None) -> None:
        raise KeyboardInterrupt

    # Interrupt all ranks, because the launcher sends its signal to all of them.
    with monkeypatch.context() as patch:
        patch.setattr(commit_record, "read_into", late)
        patch.setattr(parallel_read.threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.restore()
    x.assign(np.full(count, 2.0))
    manager.save(2, asynchronous=True)
    may_read.set()
    for thread in reading:
        thread.join()
    manager.wait()
    job.Barrier()
    manager.restore()
    np.testing.assert_array_equal(x.component, 2.0)


def test_writes_are_spread_until_somebody_waits(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    x = _variable(strategies[job.size], job)
    # A write bandwidth so low that the save would take an hour.
    manager = hs.CheckpointManager(
        folder, max_write_bandwidth=x.component.nbytes / 3600, x=x
    )
    manager.save(1, asynchronous=True, on_busy="skip")
    time.sleep(0.2)
    assert manager.save(2, asynchronous=True, on_busy="skip") is None
    manager.wait()
    # A save without ``asynchronous`` is not slowed down, because the program waits for
    # it.
    manager.save(3)
    with manager:
        manager.save(4, asynchronous=True)
    assert len(manager.checkpoints) == 3


def test_errors_end_spread_writes(
    strategies: dict[int, Any], folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _variable(strategies[job.size], job)
    manager = hs.CheckpointManager(
        folder, max_write_bandwidth=x.component.nbytes / 3600, x=x
    )

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(part_writer, "write_all", full)
        manager.save(1, asynchronous=True)
        # Save without waiting for the earlier save.
        with pytest.raises(CheckpointError, match="No space left"):
            _save_when_not_busy(manager, 2)
    assert manager.checkpoints == []
    manager.close()


def test_copies_do_not_need_threads(
    strategies: dict[int, Any], folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _variable(strategies[job.size], job)
    manager = hs.CheckpointManager(folder, x=x)

    def none(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    counted = np.arange(x.component.size, dtype=float)
    x.assign(counted)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", none)
        manager.save(1, asynchronous=True)
    x.assign(np.zeros_like(counted))
    manager.restore()
    np.testing.assert_array_equal(x.component, counted)


def _broken(*args: Any) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_skipping_ends_where_one_rank_has_no_memory(
    strategies: dict[int, Any], folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _variable(strategies[job.size], job)
    manager = hs.CheckpointManager(folder, x=x)
    with monkeypatch.context() as patch:
        if job.rank == job.size - 1:
            patch.setattr(ImageMemory, "image", _broken)
        manager.save(1, asynchronous=True)
    with pytest.raises(CheckpointError, match="Cannot allocate memory"):
        _save_when_not_busy(manager, 2)
    manager.save(3)
    job.Barrier()
    assert len(manager.checkpoints) == 1


def test_skipping_ends_where_one_rank_cannot_tell_how_it_went(
    strategies: dict[int, Any], folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _variable(strategies[job.size], job)
    manager = hs.CheckpointManager(folder, x=x)
    with monkeypatch.context() as patch:
        patch.setattr(pending_save, "write_verdict", _broken)
        manager.save(1, asynchronous=True)
        _save_when_not_busy(manager, 2)
        manager.close()
    assert len(manager.checkpoints) == 2


@pytest.mark.parametrize("what", ["memory", "threads", "data"])
def test_what_a_rank_lacks_is_not_the_fault_of_the_file(
    what: str,
    strategies: dict[int, Any],
    folder: Path,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = _variable(strategies[job.size], job)
    manager = hs.CheckpointManager(folder, x=x)
    manager.save(1)
    x.assign(np.full(x.component.size, 2.0))
    manager.save(2)
    x.assign(np.full(x.component.size, 3.0))

    def none(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        if job.rank == job.size - 1:
            patch.setattr(
                *{
                    "memory": (ImageMemory, "image", _broken),
                    "threads": (parallel_read.threading.Thread, "start", none),
                    "data": (commit_record, "read_into", _broken),
                }[what]
            )
        with pytest.raises(CheckpointError, match="try again") as caught:
            manager.restore()
    assert caught.type is CheckpointError
    np.testing.assert_array_equal(x.component, 3.0)
    assert manager.restore() == 2
    np.testing.assert_array_equal(x.component, 2.0)


def test_close_gives_memory_back_at_once(
    strategies: dict[int, Any], folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _variable(strategies[job.size], job)
    made: list[weakref.ref[mmap.mmap]] = []
    make = image._pages

    def noted(nbytes: int) -> mmap.mmap:
        memory = make(nbytes)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(image, "_pages", noted)
    manager = hs.CheckpointManager(folder, x=x)
    gc.disable()
    try:
        manager.save(1, asynchronous=True)
        manager.restore()
        manager.save(2, asynchronous=True)
        manager.close()
        assert made
        assert wait_until(lambda: all(ref() is None for ref in made), _LIMIT_SECONDS)
    finally:
        gc.enable()


def test_spread_writes_go_on_without_another_call(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    x = _variable(strategies[job.size], job)
    manager = hs.CheckpointManager(
        folder, max_write_bandwidth=x.component.nbytes / 0.6, x=x
    )
    began = time.perf_counter()
    manager.save(1, asynchronous=True)
    _save_when_not_busy(manager, 2)
    # The last of three or more blocks begins after two thirds of the time.
    assert time.perf_counter() - began > 0.4
    manager.close()


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "fast"])
def test_bandwidth_is_a_positive_number(
    value: Any, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    x = _variable(strategies[job.size], job)
    with pytest.raises((ValueError, ReplicaError), match="max_write_bandwidth"):
        hs.CheckpointManager(folder, max_write_bandwidth=value, x=x)


def test_saves_are_skipped_while_old_ones_are_freed(
    strategies: dict[int, Any], folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _variable(strategies[job.size], job)
    manager = hs.CheckpointManager(folder, x=x)
    monkeypatch.setattr(pending_save, "gives_back", lambda: True)
    monkeypatch.setattr(pending_save, "_FREEING_SECONDS", 3600.0)
    path = Path(manager.save(1, asynchronous=True))
    assert wait_until(path.exists, _LIMIT_SECONDS)
    assert manager.save(2, asynchronous=True, on_busy="skip") is None
    # ``wait`` waits for the checkpoint, but not for the hour of freeing memory.
    manager.wait()
    assert manager.save(3, asynchronous=True, on_busy="skip") is not None
    manager.close()


@pytest.mark.slow
def test_a_variable_of_more_than_four_gibibytes(
    strategy: Any, folder: Path, job: Any
) -> None:
    if job.size > 2:
        pytest.skip("takes 5 GB of each rank's memory")
    count = (1 << 32) + (1 << 20) + 3
    with strategy.scope():
        large = hs.Variable(np.ones(count, np.int8), name="large")
    marks = {0: 2, 1 << 31: 3, 1 << 32: 4, count - 1: 5}
    for place, value in marks.items():
        large.component[place] = value
    manager = hs.CheckpointManager(folder, large=large)
    manager.save(1)
    large.component[:] = 0
    manager.restore()
    assert {place: int(large.component[place]) for place in marks} == marks
    assert np.count_nonzero(large.component == 1) == count - len(marks)
