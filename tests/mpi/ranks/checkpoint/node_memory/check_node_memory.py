"""Snapshots in the memory of pretend nodes, damaged at random, against an oracle."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.keep.retention import Retention
from hpcstrat.checkpoint.node_memory import node_memory
from hpcstrat.checkpoint.node_memory.node_memory import NodeMemory
from hpcstrat.checkpoint.node_memory.slot_files import NUM_SLOTS, unpack
from hpcstrat.errors import CheckpointError, CheckpointMismatchError
from tests.mpi.ranks.checkpoint.node_memory.pretend_nodes import Nodes, Program
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.saved import warnings_of_checkpoints

pytestmark = pytest.mark.files

_DAMAGES = ("none", "flip", "cut", "no data", "flip record", "cut record", "no node")


def _contents(nodes: Nodes) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Return the bytes of all slots, by node and slot; missing files are empty."""
    return {
        (node, slot): tuple(
            path.read_bytes() if path.exists() else b""
            for path in nodes.files(node, slot)
        )
        for node in range(nodes.count)
        for slot in range(NUM_SLOTS)
    }


def _damage(nodes: Nodes, random: Any) -> list[str]:
    """Damage the slots of some nodes, on rank 0; return the kinds of damage."""
    kinds = []
    for node in range(nodes.count):
        for slot in range(NUM_SLOTS):
            kind = str(random.choice(_DAMAGES, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05]))
            place = random.random()
            bit = int(random.integers(8))
            kinds.append(kind)
            data, record = nodes.files(node, slot)
            path = record if "record" in kind else data
            if nodes.job.rank or not path.exists():
                continue
            size = path.stat().st_size
            if kind == "no node":
                shutil.rmtree(data.parent)
            elif kind == "no data":
                data.unlink()
            elif kind.startswith("cut"):
                os.truncate(path, int(place * size))
            elif kind.startswith("flip"):
                content = bytearray(path.read_bytes())
                content[int(place * size)] ^= 1 << bit
                path.write_bytes(content)
    return kinds


def _restorable(
    before: dict[tuple[int, int], tuple[bytes, bytes]],
    after: dict[tuple[int, int], tuple[bytes, bytes]],
    num_nodes: int,
) -> int | None:
    """Return the newest step of which each block is unchanged on one of the nodes."""
    blocks: dict[tuple[int, ...], set[int]] = {}
    count = 0
    for place, (data, packed) in before.items():
        record = unpack(packed)
        if record is None:
            continue
        key, plan, count = (
            record.about.key,
            record.about.plan,
            len(record.hashes),
        )
        intact = blocks.setdefault(key, set())
        now, packed_now = after[place]
        if packed_now != packed or place[0] >= num_nodes:
            continue
        for block in np.flatnonzero(record.held).tolist():
            part = slice(*plan.span(block))
            if len(now) >= part.stop and now[part] == data[part]:
                intact.add(block)
    whole = [key for key, intact in blocks.items() if len(intact) == count]
    return max(whole)[2] if whole else None


@pytest.mark.parametrize("seed", seeds(24))
def test_damaged_memory_is_never_restored(
    seed: int, strategy: Any, strategies: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, job.size + 1))
    shape = int(random.choice([5, 200_000])), int(random.choice([4, 300_001]))
    program = nodes.program(strategy, count, *shape)
    manager = program.manager(folder)
    program.go_to(1)
    manager.save(1)
    last = int(random.integers(2, 6))
    for step in range(2, last + 1):
        program.go_to(step)
        manager.save_if_due(step)
    job.Barrier()
    before = _contents(nodes)
    job.Barrier()
    kinds = _damage(nodes, random)
    job.Barrier()
    num_ranks = int(random.integers(1, job.size + 1))
    num_nodes = (num_ranks - 1) * nodes.count // job.size + 1
    wanted = _restorable(before, _contents(nodes), num_nodes) or 1
    job.Barrier()
    if job.rank < num_ranks:
        again = Program(strategies[num_ranks], *shape)
        other = again.manager(folder)
        found = other.restore(per_replica="cycle")
        assert found == wanted, (found, wanted, num_ranks, kinds)
        again.check(found, job.size)
        # The state is in memory again, and a further step can be restored, too.
        again.go_to(found + 7)
        other.save_if_due(found + 7)
        again.go_to(0)
        third = again.manager(folder)
        assert third.restore() == found + 7
        again.check(found + 7, num_ranks)
        third.complete()
    job.Barrier()
    if num_ranks == job.size:
        assert not any(nodes.root.glob("*/*"))


def test_lost_node_is_restored_from_the_next_node(
    strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    program = nodes.program(strategy, job.size, 200_000, 4)
    manager = program.manager(folder)
    program.go_to(3)
    manager.save_if_due(3)
    manager.close()
    assert manager.checkpoints
    for step in range(4, 4 + job.size):
        program.go_to(step)
        manager.save_if_due(step)
        job.Barrier()
        if job.rank == 0:
            shutil.rmtree(nodes.root / f"node-{step % job.size}")
        job.Barrier()
        nodes.divide(job.size)
        program.go_to(0)
        manager = program.manager(folder)
        assert manager.restore() == (step if job.size > 1 else 3)
        program.check(step if job.size > 1 else 3, job.size)
    manager.complete()


def test_two_lost_nodes_are_restored_from_the_disk(
    strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    program = nodes.program(strategy, job.size, 200_000, 4)
    manager = program.manager(folder)
    program.go_to(3)
    manager.save(3)
    program.go_to(4)
    manager.save_if_due(4)
    job.Barrier()
    if job.rank < 2:
        # Node 1 keeps the only copy of the rows of node 0.
        shutil.rmtree(nodes.root / f"node-{job.rank}")
    job.Barrier()
    nodes.divide(job.size)
    manager = program.manager(folder)
    assert manager.restore() == 3
    program.check(3, job.size)
    manager.complete()


def test_too_little_memory_leaves_saves_to_the_disk(
    strategy: Any,
    folder: Path,
    nodes: Nodes,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = nodes.program(strategy, 1, 5, 300_001)
    manager = program.manager(folder)
    space = os.statvfs_result((4096, 4096, 256, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    with warnings_of_checkpoints() as said:
        for step in (1, 2):
            program.go_to(step)
            manager.save(step)
            manager.save_if_due(step)
    if job.rank == 0:
        assert len(said) == 1
        assert "needs 5 MiB, of which 0 MiB are free" in said[0]
        assert "saves to the disk only" in said[0]
    else:
        assert not said
    program.go_to(0)
    assert manager.restore() == 2
    program.check(2, job.size)


def test_an_error_of_one_rank_leaves_no_other_waiting(
    strategy: Any,
    folder: Path,
    nodes: Nodes,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = nodes.program(strategy, job.size, 5, 4)
    manager = program.manager(folder)
    program.go_to(1)
    manager.save(1)

    def no_memory(*_: Any) -> Any:
        raise MemoryError("of 3 GiB")

    if job.rank == job.size - 1:
        monkeypatch.setattr(node_memory, "state_bytes", no_memory)
    with warnings_of_checkpoints() as said:
        for step in (2, 3):
            program.go_to(step)
            manager.save_if_due(step)
    assert len(said) == (job.rank == 0)
    assert all("a copy failed: MemoryError: of 3 GiB" in text for text in said)
    program.go_to(0)
    assert manager.restore() == 1
    program.check(1, job.size)


def test_folder_of_other_users_is_not_used(
    strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    program = nodes.program(strategy, 1, 5, 4)
    program.manager(folder)
    job.Barrier()
    if job.rank == 0:
        nodes.files(0, 0)[0].parent.chmod(0o777)
    job.Barrier()
    with warnings_of_checkpoints() as said:
        manager = program.manager(folder)
        program.go_to(1)
        manager.save(1)
    assert len(said) == (job.rank == 0)
    assert all("with mode 700, but" in text and "mode 777" in text for text in said)


def test_older_generation_neither_saves_nor_copies(
    strategy: Any,
    folder: Path,
    nodes: Nodes,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes.divide(1)
    monkeypatch.setenv("HPCSTRAT_WATCH_FOLDER", str(nodes.root))
    monkeypatch.setenv("HPCSTRAT_WATCH_RUN", "abc")
    monkeypatch.setenv("HPCSTRAT_WATCH_GENERATION", "2")
    (nodes.root / "gen-2").touch()
    program = Program(strategy, 5, 4)
    manager = program.manager(folder)
    program.go_to(1)
    manager.save_if_due(1)
    manager.wait()
    job.Barrier()
    (nodes.root / "gen-3").touch()
    job.Barrier()
    for save in (manager.save, manager.save_if_due):
        with pytest.raises(CheckpointError, match=r"generation 2 .* generation 3"):
            save(2)
    assert len(manager.checkpoints) == 1


def test_generation_comes_before_the_step(
    strategy: Any,
    folder: Path,
    nodes: Nodes,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = nodes.program(strategy, job.size, 5, 4)
    manager = program.manager(folder)
    for step in (8, 9):
        program.go_to(step)
        manager.save_if_due(step)
    # A later run starts from the beginning, and so has smaller steps.
    manager = program.manager(folder)
    program.go_to(2)
    manager._snapshot(2)
    program.go_to(0)
    again = program.manager(folder)
    assert again.restore() == 2
    program.check(2, job.size)
    again.complete()


def test_logical_replicas_keep_their_bits(folder: Path, nodes: Nodes, job: Any) -> None:
    strategy = hs.MultiWorkerMirroredStrategy(logical_replicas=4)
    nodes.divide(job.size)

    def make() -> tuple[Any, Any, hs.CheckpointManager]:
        with strategy.scope():
            weights = hs.Variable(np.zeros(5, np.float32))
            means = hs.Variable(
                np.zeros(3), synchronization="on_read", aggregation="mean"
            )
        rules = hs.CheckpointOptions(memory=1, every=10**6)
        objects = {"weights": weights, "means": means}
        return weights, means, hs.CheckpointManager(folder, options=rules, **objects)

    weights, means, manager = make()

    def train(step: int, weights: Any, means: Any) -> None:
        def one() -> None:
            replica = hs.get_replica_context().replica_id_in_sync_group
            means.assign_add(np.full(3, 0.1 * (replica + step)))

        strategy.run(one)
        weights.assign_add(np.full(5, np.float32(0.1) * step))

    for step in range(1, 5):
        train(step, weights, means)
        manager.save_if_due(step)
    for step in (5, 6):
        train(step, weights, means)
    wanted = [weights.component.copy(), *(c.copy() for c in means.components)]
    job.Barrier()
    if job.rank == 0 and job.size > 1:
        shutil.rmtree(nodes.root / "node-1")
    job.Barrier()
    nodes.divide(job.size)
    weights, means, manager = make()
    assert manager.restore() == 4
    for step in (5, 6):
        train(step, weights, means)
    found = [weights.component, *means.components]
    assert [one.tobytes() for one in found] == [one.tobytes() for one in wanted]
    manager.complete()
    strategy.close()


def test_another_run_starts_from_the_beginning(
    strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    program, checkpoints = (
        nodes.program(strategy, job.size, 5, 4),
        folder / "checkpoints",
    )
    manager = program.manager(checkpoints)
    program.go_to(1)
    manager.save_if_due(1)
    manager.close()
    # Another program in the same folder is told where the state is from.
    other = Program(strategy, 5, 7)
    with pytest.raises(CheckpointMismatchError, match=r"remove .* on them"):
        other.manager(checkpoints).restore()
    job.Barrier()
    if job.rank == 0:
        shutil.rmtree(checkpoints)
    job.Barrier()
    manager = other.manager(checkpoints)
    assert manager.restore_or_initialize() is None
    other.go_to(2)
    manager.save_if_due(2)
    other.go_to(0)
    assert other.manager(checkpoints).restore() == 2
    other.check(2, job.size)
    manager.complete()


@pytest.mark.parametrize("layers", [3, 70_000])
def test_divided_variables_and_groups_are_restored(
    layers: int, folder: Path, nodes: Nodes, job: Any
) -> None:
    if job.size % 2:
        strategy = hs.MultiWorkerMirroredStrategy()
    else:
        strategy = hs.MultiWorkerMirroredStrategy(ranks_per_replica=2)
    nodes.divide(job.size)
    shape = 8, layers
    with strategy.scope():
        split = {} if job.size % 2 else {"split": 0}
        start = np.zeros((8 // strategy.inside.size, layers))
        weights = hs.Variable(start, **split)
    options = hs.CheckpointOptions(memory=1, every=10**6)

    def manager() -> hs.CheckpointManager:
        return hs.CheckpointManager(folder, options=options, weights=weights)

    kept, count = manager(), int(np.prod(start.shape))
    first = 0 if job.size % 2 else strategy.inside.position * count
    for step in (1, 2):
        wanted = (
            np.arange(first, first + count, dtype=float).reshape(start.shape) + step
        )
        weights.component[...] = wanted
        kept.save_if_due(step)
    weights.component[...] = 0
    job.Barrier()
    if job.rank == 0 and job.size > 1:
        shutil.rmtree(nodes.root / f"node-{job.size - 1}")
    job.Barrier()
    nodes.divide(job.size)
    again = manager()
    assert again.restore() == 2
    assert shape[0] == 8
    np.testing.assert_array_equal(weights.component, wanted)
    again.complete()
    strategy.close()


def test_slots_that_are_made_later_are_restored(
    strategy: Any, folder: Path, nodes: Nodes, job: Any
) -> None:
    nodes.divide(job.size)
    options = hs.CheckpointOptions(memory=1, every=10**6)

    def make() -> tuple[Any, Any, hs.CheckpointManager]:
        with strategy.scope():
            weights = hs.Variable(np.zeros(7), aggregation="mean")
        adam = hs.optimizers.Adam(0.1)
        objects = {"weights": weights, "adam": adam}
        return weights, adam, hs.CheckpointManager(folder, options=options, **objects)

    def train(weights: Any, adam: Any, num_steps: int, save: Any = None) -> bytes:
        for _ in range(num_steps):
            gradient = np.full(7, 1.0 + int(adam.iterations))
            strategy.run(lambda g=gradient: adam.apply_gradients([(g, weights)]))
            if save is not None:
                save()
        return bytes(weights.component.tobytes())

    weights, adam, _ = make()
    wanted = train(weights, adam, 6)
    weights, adam, manager = make()
    train(weights, adam, 3, manager.save_if_due)
    # The first of these runs is lost before the optimizer has made its slots.
    for _ in range(2):
        weights, adam, manager = make()
        assert manager.restore() == 3
    assert train(weights, adam, 3, manager.save_if_due) == wanted
    weights, adam, manager = make()
    assert manager.restore() == 6
    assert weights.component.tobytes() == wanted
    manager.complete()


def test_memory_names_itself(strategy: Any, folder: Path, nodes: Nodes) -> None:
    nodes.divide(1)
    rules = Retention(str(folder), hs.CheckpointOptions())
    memory = NodeMemory(strategy.all_ranks, rules)
    assert "NodeMemory" in repr(memory)
