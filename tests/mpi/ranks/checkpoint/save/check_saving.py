"""Saves in the background, on every rank: nothing is lost, nothing hangs."""

from __future__ import annotations

import errno
import gc
import os
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.file import skeleton
from hpcstrat.checkpoint.file.reader import open_checkpoint, read_header
from hpcstrat.checkpoint.save import part_exchange, part_writer, pending_save
from hpcstrat.errors import CheckpointError, ReplicaError
from hpcstrat.testing.job import wait_until
from tests.folders import listed
from tests.mpi.ranks.saved import Counter, fill, make_variable

pytestmark = pytest.mark.files


_LIMIT_SECONDS = 40.0


def _count(job: Any) -> int:
    """Return a number of floats so large that every rank writes a block."""
    return (job.size << 17) + 5


def _make(strategy: Any, count: int, value: float) -> dict[str, Any]:
    with strategy.scope():
        return {
            "x": hs.Variable(np.full(count, value)),
            "small": [hs.Variable(np.full(k, value, np.float32)) for k in range(5)],
            "seen": make_variable("sum", np.int64(0)),
            "rows": make_variable("none", np.zeros(3)),
        }


def _set(objects: dict[str, Any], strategy: Any, value: float) -> None:
    for variable in (objects["x"], *objects["small"]):
        variable.assign(np.full(variable.shape, value, variable.dtype))
    fill(objects["seen"], int(value) + strategy.replica_id)
    fill(objects["rows"], value + strategy.replica_id)


def _check(objects: dict[str, Any], strategy: Any, value: float) -> None:
    for variable in (objects["x"], *objects["small"]):
        np.testing.assert_array_equal(variable.component, value)
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        total = count * int(value) + sum(range(count))
        assert objects["seen"].numpy() == total
    own = value + strategy.replica_id
    np.testing.assert_array_equal(objects["rows"].component, own)


@contextmanager
def _held_back(
    patch: pytest.MonkeyPatch, begun: threading.Event | None = None
) -> Iterator[threading.Event]:
    """Block all writes until an event is set; set another event when a write begins."""
    goes_on = threading.Event()
    write = part_writer.write_all

    def late(*args: Any) -> None:
        if begun:
            begun.set()
        goes_on.wait(_LIMIT_SECONDS)
        write(*args)

    patch.setattr(part_writer, "write_all", late)
    try:
        yield goes_on
    finally:
        goes_on.set()


def test_values_may_change_as_soon_as_save_returns(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = _make(strategy, _count(job), 0.0)
    counter = Counter()
    with hs.CheckpointManager(folder, counter=counter, **objects) as manager:
        with _held_back(monkeypatch) as goes_on:
            _set(objects, strategy, 1.0)
            counter.state = {"größe": 1}
            path = manager.save(1, asynchronous=True)
            _set(objects, strategy, 2.0)
            counter.state["größe"] = 2
            assert not os.path.exists(path)
            goes_on.set()
            manager.wait()
        assert manager.checkpoints == [path]
        assert manager.restore() == 1
        _check(objects, strategy, 1.0)
        assert counter.state == {"größe": 1}


def test_save_becomes_durable_without_another_call(
    strategy: Any, folder: Path, job: Any
) -> None:
    objects = _make(strategy, _count(job), 3.0)
    manager = hs.CheckpointManager(folder, max_to_keep=2, **objects)
    for step in (1, 2, 3):
        path = manager.save(step, asynchronous=True)
        # The save ends although no rank makes a call here.
        assert wait_until(lambda path=path: os.path.exists(path), _LIMIT_SECONDS)
        assert open_checkpoint(path).header.step == step
        job.Barrier()
    # Older checkpoints are removed in the background, too.
    assert wait_until(lambda: len(listed(folder)) == 2, _LIMIT_SECONDS)
    job.Barrier()
    manager.close()
    assert manager.last_save.path == path


def test_busy_saves_wait_or_are_skipped(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = _make(strategy, _count(job), 1.0)
    manager = hs.CheckpointManager(folder, **objects)
    with _held_back(monkeypatch) as goes_on:
        manager.save(1, asynchronous=True, on_busy="skip")
        for _ in range(3):
            assert manager.save(2, asynchronous=True, on_busy="skip") is None
        goes_on.set()
        path = manager.save(3, asynchronous=True, on_busy="wait")
        assert len(manager.checkpoints) >= 1
        manager.wait()
        # No save is running, so this save is not skipped.
        assert manager.save(4, on_busy="skip") is not None
    names = [os.path.basename(name) for name in manager.checkpoints]
    assert names == [f"ckpt-{step:010d}.h5" for step in (1, 3, 4)]
    assert manager.checkpoints[1] == path
    # The error is a ValueError on a single rank, a ReplicaError on several ranks.
    with pytest.raises((ValueError, ReplicaError), match="on_busy"):
        manager.save(5, on_busy="perhaps")


def test_what_one_rank_alone_cannot_write_is_raised_later_on_all(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = _make(strategy, _count(job), 1.0)
    manager = hs.CheckpointManager(folder, **objects)
    manager.save(1)
    last = job.size - 1

    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for later in ("wait", "save", "close", "restore"):
        with monkeypatch.context() as patch:
            if job.rank == last:
                patch.setattr(part_writer, "write_all", fail)
            manager.save(2, asynchronous=True)
            # An older checkpoint can be restored before the error is raised.
            if later == "restore":
                assert manager.restore() == 1
            call = getattr(manager, "wait" if later == "restore" else later)
            arguments = (3,) if later == "save" else ()
            with pytest.raises(CheckpointError, match=f"rank {last} .*Input/output"):
                call(*arguments)
        job.Barrier()
        assert listed(folder) == ["ckpt-0000000001.h5"]
        job.Barrier()
    # The error is raised only once.
    manager.wait()
    manager.save(2, asynchronous=True)
    manager.close()
    assert len(manager.checkpoints) == 2


def test_managers_can_be_used_after_their_end(
    strategy: Any, folder: Path, job: Any
) -> None:
    objects = _make(strategy, 10, 1.0)
    with hs.CheckpointManager(folder, **objects) as manager:
        manager.save(1, asynchronous=True)
    assert len(manager.checkpoints) == 1
    manager.save(2, asynchronous=True)
    manager.close()
    manager.close()
    assert len(manager.checkpoints) == 2


def test_two_jobs_in_one_folder_keep_whole_files(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (_make(strategy, _count(job), value) for value in (1.0, 2.0))
    slow = hs.CheckpointManager(folder, **first)
    begun = threading.Event()
    with _held_back(monkeypatch, begun) as goes_on:
        slow.save(1, asynchronous=True)
        # Copies of device arrays may run before the write begins.
        assert begun.wait(_LIMIT_SECONDS)
        monkeypatch.undo()
        # A new manager does not remove the other job's file as an abandoned file.
        fast = hs.CheckpointManager(folder, **second)
        path = fast.save(1)
        assert len(listed(folder)) == 2
        job.Barrier()
        goes_on.set()
        with pytest.raises(CheckpointError, match="overwrite=True"):
            slow.wait()
    job.Barrier()
    assert listed(folder) == [os.path.basename(path)]
    assert slow.restore() == 1
    np.testing.assert_array_equal(first["x"].component, 2.0)


def test_errors_of_the_program_leave_the_context_at_once(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = _make(strategy, _count(job), 1.0)
    manager = hs.CheckpointManager(folder, **objects)
    with _held_back(monkeypatch) as goes_on:
        with pytest.raises(KeyError, match="the program"), manager:  # noqa: PT012
            manager.save(1, asynchronous=True)
            raise KeyError("the program")
        assert manager.checkpoints == []
        goes_on.set()
        manager.close()
    assert len(manager.checkpoints) == 1


def test_statistics_tell_what_a_save_cost(
    strategy: Any, folder: Path, job: Any
) -> None:
    objects = _make(strategy, _count(job), 1.0)
    manager = hs.CheckpointManager(folder, **objects)
    assert manager.last_save is None
    for step, asynchronous in ((1, False), (2, True)):
        path = manager.save(step, asynchronous=asynchronous)
        manager.wait()
        found = manager.last_save
        assert (found.path, found.step) == (path, step)
        assert found.asynchronous is asynchronous
        assert found.nbytes == os.path.getsize(path)
        assert 0 < found.blocking_seconds <= found.total_seconds * 10
        assert found.bytes_per_second == found.nbytes / found.total_seconds
        assert min(found.hash_seconds, found.write_seconds, found.flush_seconds) > 0
    totals = job.allgather(found.total_seconds)
    assert len(set(totals)) == 1


def test_plain_state_may_grow(strategy: Any, folder: Path, job: Any) -> None:
    with strategy.scope():
        x = hs.Variable(np.zeros(_count(job)))
    counter = Counter()
    manager = hs.CheckpointManager(folder, max_to_keep=None, x=x, counter=counter)
    for step in range(12):
        wanted = {"list": list(range(3**step % 5000))}
        counter.state = dict(wanted)
        manager.save(step, asynchronous=step % 2 == 0)
        manager.wait()
        counter.state = {}
        assert manager.restore() == step
        assert counter.state == wanted


def test_variables_may_come_and_change_between_saves(
    strategy: Any, folder: Path, job: Any
) -> None:
    with strategy.scope():
        w = hs.Variable(np.ones(_count(job)), name="w")
        optimizer = hs.optimizers.SGD(0.5, momentum=0.5)
    manager = hs.CheckpointManager(folder, w=w, optimizer=optimizer)
    manager.save(0, asynchronous=True)

    def step() -> None:
        optimizer.apply_gradients([(np.ones(_count(job)), w)])

    for number in (1, 2):
        strategy.run(step)
        manager.save(number, asynchronous=True)
    wanted = w.component.copy()
    w.assign(np.zeros(_count(job)))
    assert manager.restore() == 2
    np.testing.assert_array_equal(w.component, wanted)


@pytest.mark.parametrize("choice", ["on", "off"])
def test_direct_and_buffered_writes_give_the_same_file(
    choice: str, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    count = _count(job)
    value = np.random.default_rng(3).standard_normal(count)
    with strategy.scope():
        x = hs.Variable(value)
    manager = hs.CheckpointManager(folder, x=x)
    settings = strategy.settings
    with pytest.MonkeyPatch.context() as patch:
        changed = hs.Settings(direct_io=choice).resolved({})
        for owner in (strategy, type(strategy)):
            if "settings" in vars(owner):
                patch.setattr(owner, "settings", changed, raising=False)
                break
        else:
            patch.setattr(type(strategy), "settings", property(lambda _: changed))
        assert strategy.settings.direct_io == choice
        path = manager.save(1)
        x.assign(np.zeros(count))
        manager.restore()
    np.testing.assert_array_equal(x.component, value)
    with h5py.File(path, "r", locking=False) as file:
        np.testing.assert_array_equal(file["variables/x"][()], value)
    assert strategy.settings == settings


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


@pytest.mark.once
def test_many_saves_keep_neither_files_nor_memory(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    objects = _make(strategy, _count(job), 1.0)
    manager = hs.CheckpointManager(folder, max_to_keep=2, **objects)

    def save(first: int, count: int) -> None:
        for step in range(first, first + count):
            manager.save(step, asynchronous=step % 4 > 0)
        manager.wait()

    save(0, 20)
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    memory = _resident_bytes()
    save(20, 30)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    # A thread that removed an old checkpoint may have been counted before.
    assert wait_until(lambda: threading.active_count() <= threads, _LIMIT_SECONDS)
    # If the images of saves were kept, memory would grow by 30 MiB and more.
    assert _resident_bytes() < memory + (16 << 20)
    assert not pending_save._under_way
    manager.close()


_ROW_SHAPES = {
    "number": (),
    "odd": (1, 3),
    "pages": (5001,),
    "half": ((1 << 18) + 77,),
    "blocks": (3, (1 << 18) + 5),
    "even": (1 << 19,),
}


def _row(name: str, rank: int) -> Any:
    """Return the value of a variable on a replica; the type depends on the name."""
    shape = _ROW_SHAPES[name]
    drawn = np.random.default_rng([rank, len(name)]).standard_normal(shape)
    kinds = {"number": np.int64, "odd": np.bool_, "pages": np.complex64}
    return np.asarray(drawn * 1000).astype(kinds.get(name, np.float32))


def _rowed(strategy: Any) -> dict[str, Any]:
    """Return variables with one row for each replica, and two other variables."""
    with strategy.scope():
        found = {
            name: make_variable("none", _row(name, 0), name=name)
            for name in _ROW_SHAPES
        }
        found["x"] = hs.Variable(np.arange(300_000.0), name="x")
        found["seen"] = make_variable("sum", np.int64(0))
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_of_replicas_are_found_in_the_file(
    asynchronous: bool,
    strategy: Any,
    folder: Path,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = _rowed(strategy)
    for name in _ROW_SHAPES:
        fill(variables[name], _row(name, job.rank))
    manager = hs.CheckpointManager(folder, net=variables)
    exchange, calls = part_exchange._exchange, []

    def counted(*args: Any) -> None:
        calls.append(args)
        exchange(*args)

    monkeypatch.setattr(part_exchange, "_exchange", counted)
    path = manager.save(1, asynchronous=asynchronous)
    for name in _ROW_SHAPES:
        fill(variables[name], 0)
    # One call sends all data; a single rank has nothing to send.
    assert len(calls) == (job.size > 1)
    # The hashes are combined by threads or by the main threads, with the same file.
    assert wait_until(lambda: os.path.exists(path), _LIMIT_SECONDS)
    job.Barrier()
    manager.wait()
    with h5py.File(path, "r", locking=False) as file:
        for name in _ROW_SHAPES:
            found = file[f"variables/net/{name}"]
            wanted = np.stack([_row(name, rank) for rank in range(job.size)])
            np.testing.assert_array_equal(found[()], wanted)
            assert found.attrs["replica_axis"] == 0
        np.testing.assert_array_equal(file["variables/net/x"][()], np.arange(300_000.0))
    assert manager.restore() == 1
    assert manager.last_restore.verified
    for name in _ROW_SHAPES:
        np.testing.assert_array_equal(variables[name].component, _row(name, job.rank))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_replica_holds_the_rows_of_others(
    asynchronous: bool, strategy: Any, folder: Path, job: Any
) -> None:
    # Blocks have a quarter of the size of a row.
    value = np.full((4 << 18) + 12345, 1.0, np.float32)
    with strategy.scope():
        variables = [make_variable("none", value) for _ in range(2)]
    for variable in variables:
        fill(variable, job.rank)
    manager = hs.CheckpointManager(folder, x=variables)
    # The first save builds structures and memory that later saves reuse.
    manager.save(1, asynchronous=asynchronous)
    manager.wait()
    tracemalloc.start()
    try:
        manager.save(2, asynchronous=asynchronous)
        manager.wait()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The memory for ends of rows is smaller than the rows of one other replica.
    assert most < sum(variable.component.nbytes for variable in variables)
    for variable in variables:
        fill(variable, -1)
    assert manager.restore() == 2
    for variable in variables:
        np.testing.assert_array_equal(variable.component, job.rank)


def test_rows_that_one_rank_cannot_send_are_an_error_on_all(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = _rowed(strategy)
    manager = hs.CheckpointManager(folder, net=variables)
    manager.save(1)

    def fail(*args: Any) -> None:
        raise MemoryError("no memory for rows")

    with monkeypatch.context() as patch:
        if job.rank == job.size - 1:
            patch.setattr(part_exchange, "_rounds", fail)
        with pytest.raises((MemoryError, ReplicaError), match="no memory for rows"):
            manager.save(2)
    job.Barrier()
    assert listed(folder) == ["ckpt-0000000001.h5"]
    job.Barrier()
    manager.save(2)
    assert len(manager.checkpoints) == 2


def test_interrupted_saves_are_dropped(
    strategies: dict[int, Any], folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = strategies[job.size]
    with strategy.scope():
        x = hs.Variable(np.zeros(job.size << 18))
    manager = hs.CheckpointManager(folder, x=x)
    may_write, write = threading.Event(), part_writer.write_all

    def wait(*args: Any) -> None:
        assert may_write.wait(60)
        write(*args)

    def interrupt(self: Any, seconds: float | None = None) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(part_writer, "write_all", wait)
    monkeypatch.setattr(part_writer.PartWriter, "join", interrupt)
    threading.Timer(0.2, may_write.set).start()
    # Interrupt all ranks, because the launcher sends its signal to all of them.
    with pytest.raises(KeyboardInterrupt):
        manager.save(1)
    x.assign(np.ones(job.size << 18))
    manager.save(2)
    job.Barrier()
    assert sorted(listed(folder)) == ["ckpt-0000000002.h5"]
    x.assign(np.zeros(job.size << 18))
    assert manager.restore() == 2
    np.testing.assert_array_equal(x.component, 1.0)


def test_structures_that_cannot_be_made_leave_the_manager_usable(
    strategies: dict[int, Any], folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = strategies[job.size]
    with strategy.scope():
        x = hs.Variable(np.arange(3.0))
    manager = hs.CheckpointManager(folder, max_to_keep=None, x=x)
    manager.save(1)
    manager.save(2, metrics={"loss": 1.0})

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(skeleton, "_make", full)
        with pytest.raises(CheckpointError, match="No space left"):
            manager.save(3, metrics={"loss": 1.0, "other": 2.0})
    for step, metrics in ((4, {"loss": 2.0}), (5, None), (6, {"other": 3.0})):
        path = manager.save(step, metrics=metrics)
        assert read_header(path).metrics == (metrics or {})
        assert manager.restore(path) == step
