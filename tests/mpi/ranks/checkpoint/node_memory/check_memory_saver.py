"""Saves that watchers write from snapshots, beside background saves of the ranks."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcstrat.checkpoint.file.reader import check, open_checkpoint
from hpcstrat.errors import CheckpointError
from tests.mpi.ranks.checkpoint.node_memory.pretend_nodes import (
    Nodes,
    Program,
    Watchers,
)
from tests.mpi.ranks.effort import seeds

pytestmark = pytest.mark.files


def _hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".ckpt")]


def _content(path: str) -> tuple[Any, ...]:
    """Return all of a file, except that HDF5's structures are read by HDF5.

    HDF5 notes in each group when the group was made.
    """
    found = open_checkpoint(path)
    assert found.vouched is not None
    attributes: dict[str, Any] = {}
    with h5py.File(path) as file:
        attributes[""] = sorted((k, repr(v)) for k, v in file.attrs.items())

        def note(name: str, thing: Any) -> None:
            attributes[name] = sorted((k, repr(v)) for k, v in thing.attrs.items())

        file.visititems(note)
    start, stop = found.vouched.plan.table_start, found.vouched.plan.data_end
    data = Path(path).read_bytes()
    return attributes, repr(found.header), len(data), data[start:stop]


@pytest.mark.parametrize("seed", seeds(8))
def test_files_are_those_of_background_saves(
    seed: int,
    strategy: Any,
    folder: Path,
    nodes: Nodes,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(seed)
    monkeypatch.setattr(time, "time_ns", lambda: 1234567890)
    count = int(random.integers(1, job.size + 1))
    shape = int(random.choice([5, 200_000])), int(random.choice([4, 300_001]))
    program = nodes.program(strategy, count, *shape)
    metrics = {"loss": float(random.random())} if random.random() < 0.5 else None
    watchers = Watchers(nodes)
    ranks = program.manager(folder / "ranks", memory=False)
    ours = program.manager(folder / "watched", max_write_bandwidth=1e9)
    with watchers.watching():
        for step in range(1, int(random.integers(2, 5))):
            program.go_to(step)
            for manager in (ranks, ours):
                manager.save(step, metrics=metrics, asynchronous=True)
            # The program goes on while the files are written.
            program.go_to(0)
            ours.save_if_due(10 * step)
            ours.wait()
            ranks.wait()
            assert ours.last_save.step == step
            assert ours.last_save.nbytes == ranks.last_save.nbytes
            assert ours.last_save.asynchronous
        assert not _hidden(folder / "watched")
        contents = [[*map(_content, m.checkpoints)] for m in (ranks, ours)]
        assert contents[0] == contents[1]
        assert len(contents[0]) == step
        assert not list(watchers.folder.glob("save-*"))
        ours.complete()
    ranks.close()


@pytest.mark.parametrize("seed", seeds(6))
def test_killed_writers_leave_no_half_checkpoint(
    seed: int, strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    random = np.random.default_rng(seed)
    program = nodes.program(
        strategy, int(random.integers(1, job.size + 1)), 200_000, 1_000_001
    )
    watchers = Watchers(nodes)
    manager = program.manager(folder, max_to_keep=None)
    saved = []
    with watchers.watching():
        for step in range(1, 6):
            # The first writers take some time to start.
            limit = 1.0 if step == 1 else 0.05
            watchers.kill_after = float(random.uniform(0, limit))
            if step == 5:
                watchers.kill_no_more()
            program.go_to(step)
            manager.save(step, asynchronous=True)
            program.go_to(0)
            error = None
            try:
                manager.wait()
                saved.append(step)
            except CheckpointError as exc:
                error = exc
            assert error is None or "expected the watchers to write" in str(error)
            assert not _hidden(folder)
        assert saved[-1] == 5
        steps = [int(Path(path).stem[-10:]) for path in manager.checkpoints]
        # A writer may be killed just after it has published the file.
        assert set(steps).issuperset(saved)
        for path in manager.checkpoints:
            check(path)
            manager.restore(path)
            program.check(int(Path(path).stem[-10:]), job.size)
        manager.complete()


def test_a_snapshot_is_not_overwritten_while_it_is_saved(
    strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    program = nodes.program(strategy, job.size, 200_000, 300_001)
    watchers = Watchers(nodes)
    # The save lasts until `wait` is called.
    manager = program.manager(folder, max_write_bandwidth=1.0)
    with watchers.watching():
        program.go_to(1)
        manager.save(1, asynchronous=True)
        for step in range(2, 7):
            program.go_to(step)
            manager.save_if_due(step)
        assert manager.save(9, asynchronous=True, on_busy="skip") is None
        assert not manager.checkpoints
        # The newest snapshot is there, too: a later start would restore it.
        again = program.manager(folder / "..")
        assert again is not manager
        manager.wait()
        [path] = manager.checkpoints
        manager.restore(path)
        program.check(1, job.size)
        manager.complete()


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_later_start_continues_the_save_or_gives_it_up(
    goes_back: bool, strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    program = nodes.program(strategy, job.size, 200_000, 300_001)
    watchers = Watchers(nodes)
    manager = program.manager(folder, max_write_bandwidth=1.0)
    with watchers.watching():
        program.go_to(1)
        manager.save(1)
        program.go_to(2)
        manager.save(2, asynchronous=True)
        program.go_to(3)
        manager.save_if_due(3)
        # These ranks end here, and others are started.
        manager._saver._path = None
        watchers.begin(2)
        again = Program(strategy, 200_000, 300_001)
        later = again.manager(folder)
        if goes_back:
            assert later.restore(later.checkpoints[0]) == 1
            later.wait()
            assert [path[-4:] for path in later.checkpoints] == ["1.h5"]
            assert not _hidden(folder)
        else:
            assert later.restore() == 3
            again.check(3, job.size)
            again.go_to(4)
            later.save_if_due(4)
            later.wait()
            assert [path[-4:] for path in later.checkpoints] == ["1.h5", "2.h5"]
            later.restore(later.checkpoints[1])
            again.check(2, job.size)
        again.go_to(5)
        later.save(5, asynchronous=True)
        later.complete()
        assert later.checkpoints[-1].endswith("5.h5")
        assert not list(watchers.folder.glob("save-*"))


def test_a_save_without_the_times_of_a_node_is_a_save(
    strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    """A shared file system may fail when the times are read."""
    program = nodes.program(strategy, job.size, 5, 4)
    watchers = Watchers(nodes)
    manager = program.manager(folder)
    with watchers.watching():
        manager.save(1, asynchronous=True)
        while not job.bcast(len([*watchers.folder.glob("save-*.done")])):
            time.sleep(0.01)
        if job.rank == 0:
            for path in watchers.folder.glob("save-*.wrote-*"):
                path.unlink()
        manager.wait()
        assert manager.last_save.step == 1
        assert manager.last_save.bytes_per_second > 0
        manager.complete()


def test_the_save_of_a_lost_node_is_given_up(
    strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    program = nodes.program(strategy, job.size, 200_000, 300_001)
    watchers = Watchers(nodes)
    manager = program.manager(folder, max_write_bandwidth=1.0)
    with watchers.watching():
        program.go_to(1)
        manager.save(1, asynchronous=True)
        manager._saver._path = None
        watchers.begin(2, lost=1)
        later = program.manager(folder)
        # Nothing was saved, and the snapshot is in memory.
        assert later.restore() == 1
        program.check(1, job.size)
        assert not _hidden(folder)
        assert not list(watchers.folder.glob("save-*"))
        assert not later.checkpoints
        later.close()


def test_a_watcher_that_does_not_answer_is_an_error(
    strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    program = nodes.program(strategy, 1, 5, 4)
    watchers = Watchers(nodes)
    manager = program.manager(folder)
    with pytest.raises(CheckpointError, match="does not answer"):
        manager.save(1, asynchronous=True)
    job.Barrier()
    assert not list(watchers.folder.glob("save-*"))
    assert not _hidden(folder)
    program.go_to(2)
    manager.save(2)
    manager.complete()
    assert len(manager.checkpoints) == 1


@pytest.mark.parametrize("num_lost", [0, 1, 2])
def test_the_newest_snapshot_is_saved_at_the_end(
    num_lost: int, strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    nodes.divide(job.size)
    left = [f"n{number}" for number in range(min(num_lost, job.size - 1), job.size)]
    program = Program(strategy, 200_000, 300_001)
    watchers = Watchers(nodes)
    manager = program.manager(folder)
    program.go_to(1)
    manager.save(1)
    for step in (2, 3):
        program.go_to(step)
        manager.save_if_due(step)
    manager.close()
    job.Barrier()
    with watchers.watching():
        if job.rank == 0:
            watchers.save_newest(1, left)
    # Two neighbors have the only copies of rows of one of them.
    is_whole = job.size - len(left) < 2
    steps = [int(Path(path).stem[-10:]) for path in manager.checkpoints]
    assert steps == ([1, 3] if is_whole else [1])
    assert not _hidden(folder)
    manager.restore(manager.checkpoints[-1])
    program.check(steps[-1], job.size)
    said = nodes.said()
    assert ("saves the snapshot of step 3" in said) == is_whole
    assert ("step 3 was lost with a node" in said) != is_whole
    assert ("the newest checkpoint" in said) != is_whole
    # Nothing is saved twice.
    with watchers.watching():
        if job.rank == 0:
            watchers.save_newest(2, left)
    assert len(manager.checkpoints) == len(steps)


@pytest.mark.parametrize("num_spare", [1, 2])
def test_a_spare_node_has_all_blocks_of_a_snapshot(
    num_spare: int, strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    program = nodes.program(strategy, job.size, 200_000, 300_001)
    watchers = Watchers(nodes, num_spare)
    manager = program.manager(folder)
    program.go_to(1)
    manager.save(1)
    spare = nodes.root / f"node-{job.size + num_spare - 1}"
    if num_spare == 2 and job.rank == 0:
        # The first spare node cannot keep a copy.
        (nodes.root / f"node-{job.size}").rmdir()
    with watchers.watching():
        step = 1
        while not job.bcast(len([*spare.glob("*/slot-?.record")]) == 2):
            step += 1
            assert step < 1000, nodes.said()
            program.go_to(step)
            manager.save_if_due(step)
            time.sleep(0.05)
        program.go_to(step + 1)
        manager.save(step + 1, asynchronous=True)
        manager.wait()
    # All nodes are lost but the spare one. Its copies are older than the file.
    job.Barrier()
    if job.rank == 0:
        (folder / f"ckpt-{step + 1:010}.h5").unlink()
        for node in range(job.size):
            shutil.rmtree(nodes.root / f"node-{node}")
        spare.rename(nodes.root / "node-0")
    job.Barrier()
    nodes.divide(job.size)
    watchers.begin(2)
    program.go_to(0)
    later = program.manager(folder)
    found = later.restore()
    assert 1 < found <= step
    program.check(found, job.size)
    later.complete()
