"""Restoring parts of checkpoints, renamed objects, older files, in little memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.reader import open_checkpoint
from hpcstrat.checkpoint.restore import parallel_read
from hpcstrat.errors import CheckpointError, CorruptCheckpointError, ReplicaError
from tests.mpi.ranks.saved import Counter, fill, make_variable, warnings_of_checkpoints

pytestmark = pytest.mark.files


VERSION_1 = Path(__file__).parents[4] / "old_files" / "version-1.h5"


def _objects(strategy: Any, value: float, names: tuple[str, ...]) -> dict[str, Any]:
    with strategy.scope():
        return {name: {"w": hs.Variable(np.full(3, value))} for name in names}


def _values(objects: dict[str, Any]) -> list[float]:
    return [float(net["w"].component[0]) for net in objects.values()]


def test_only_the_named_objects_are_restored(strategy: Any, folder: Path) -> None:
    saved = _objects(strategy, 1.0, ("a", "b", "c"))
    counter = Counter()
    counter.state = {"größe": 5}
    hs.CheckpointManager(folder, counter=counter, **saved).save(1)
    other = _objects(strategy, 7.0, ("a", "b", "d"))
    counter.state = {}
    # A restore of ``a`` alone needs no saved ``d``, and no object named ``c``.
    manager = hs.CheckpointManager(folder, counter=counter, **other)
    assert manager.last_restore is None
    assert manager.restore(only=["a"]) == 1
    assert _values(other) == [1.0, 7.0, 7.0]
    assert counter.state == {}
    assert manager.last_restore.unused == ("variables/b/w", "variables/c/w")
    with pytest.raises(hs.errors.CheckpointMismatchError, match="variables/b/w"):
        manager.last_restore.assert_consumed()
    assert manager.restore(only=["b", "counter"]) == 1
    assert _values(other) == [1.0, 1.0, 7.0]
    assert counter.state == {"größe": 5}
    with pytest.raises(CheckpointError, match="variables/d/w is not in"):
        manager.restore(only=["d"])
    for wrong in (["c"], "a", ["variables/a"]):
        with pytest.raises((ValueError, ReplicaError), match="only"):
            manager.restore(only=wrong)


def test_saved_names_may_be_others_than_todays(strategy: Any, folder: Path) -> None:
    saved = _objects(strategy, 1.0, ("a", "b"))
    hs.CheckpointManager(folder, **saved).save(1)
    other = _objects(strategy, 7.0, ("first", "b"))
    manager = hs.CheckpointManager(folder, **other)
    with pytest.raises(CheckpointError, match="variables/first/w is not in"):
        manager.restore()
    assert manager.restore(rename={"variables/a": "variables/first"}) == 1
    assert _values(other) == [1.0, 1.0]
    manager.last_restore.assert_consumed()
    other["first"]["w"].assign(np.full(3, 7.0))
    assert manager.restore(rename={"variables/a/w": "variables/first/w"}) == 1
    assert _values(other) == [1.0, 1.0]
    for rename, words in (
        ({"variables/x": "variables/first"}, "variables/x is not in"),
        ({"variables/a": "variables/b"}, "two values get the name variables/b/w"),
    ):
        with pytest.raises(CheckpointError, match=words):
            manager.restore(rename=rename)
    assert _values(other) == [1.0, 1.0]


def test_files_of_version_1_are_restored_but_not_verified(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    counter = Counter()
    with strategy.scope():
        weights = hs.Variable(np.zeros((2, 3)), name="w")
        flag, scalar = hs.Variable(False), hs.Variable(np.int32(0))
        optimizer = hs.optimizers.SGD(0.5, momentum=0.5)
    data = hs.Dataset(np.arange(10), 4, shuffle=True, seed=3)
    manager = hs.CheckpointManager(
        folder,
        weights=weights,
        flag=flag,
        scalar=scalar,
        optimizer=optimizer,
        counter=counter,
        noise=strategy.random("noise", seed=3),
        data=strategy.experimental_distribute_dataset(data),
    )
    if job.rank == 0:
        shutil.copy(VERSION_1, folder / "ckpt-0000000012.h5")
    job.Barrier()
    assert manager.restore() == 12
    assert manager.last_restore.verified is False
    wanted = np.arange(6.0).reshape(2, 3) - 0.5
    np.testing.assert_array_equal(weights.component, wanted)
    assert flag.component[()]
    assert scalar.component == -7
    assert int(optimizer.iterations.component) == 1
    assert counter.state == {"größe": [1, 2.5, None]}
    manager.save(13)
    assert manager.restore() == 13
    assert manager.last_restore.verified is True
    np.testing.assert_array_equal(weights.component, wanted)


def _large(strategy: Any, count: int, kind: str) -> Any:
    with strategy.scope():
        return make_variable(kind, np.zeros((count, 3)))


@pytest.mark.parametrize("kept", ["all", "one"])
@pytest.mark.parametrize("piece_bytes", [4 << 20, 8192])
def test_values_larger_than_blocks_come_back(
    kept: str,
    piece_bytes: int,
    strategy: Any,
    folder: Path,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = job.size * 70_001
    rng = np.random.default_rng(7)
    value, small = rng.standard_normal((count, 3)), rng.standard_normal(5)
    with strategy.scope():
        objects = {
            "x": hs.Variable(value),
            "small": hs.Variable(small),
            "total": make_variable("sum", np.zeros(count, np.int64)),
        }
    numbers = np.arange(count) - count // 2
    objects["total"].assign(numbers, read_value=False)
    manager = hs.CheckpointManager(folder, **objects)
    path = manager.save(1)
    vouched = open_checkpoint(path).vouched
    assert vouched is not None
    assert vouched.plan.num_blocks > job.size
    for variable in objects.values():
        variable.component[...] = 0
    if kept == "one":
        # Each rank keeps only one block, and reads the other blocks again.
        monkeypatch.setattr(parallel_read, "_KEPT_BYTES", 1)
    monkeypatch.setattr(parallel_read, "_PIECE_BYTES", piece_bytes)
    manager.restore()
    np.testing.assert_array_equal(objects["x"].component, value)
    np.testing.assert_array_equal(objects["small"].component, small)
    with strategy.scope():
        np.testing.assert_array_equal(objects["total"].numpy(), numbers)
    shares = job.allreduce(manager.last_restore.nbytes)
    once = vouched.plan.data_end - vouched.plan.data_start
    if kept == "all":
        # Together, the ranks read the file at most once.
        assert shares <= once
    if kept == "all" and job.size > 1:
        assert manager.last_restore.nbytes < once
    small_only = hs.CheckpointManager(folder, small=objects["small"])
    small_only.restore(only=["small"])
    read = job.allreduce(small_only.last_restore.nbytes)
    assert read <= vouched.plan.block_bytes


@pytest.mark.parametrize("policy", ["first", "cycle", "init"])
def test_large_rows_are_read_by_their_own_replica(
    policy: str, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    count = 90_000
    for saved in range(1, job.size + 1):
        path = folder / str(saved)
        if saved in strategies:
            strategy = strategies[saved]
            x = _large(strategy, count, "none")
            fill(x, np.arange(3) + 10 * strategy.replica_id)
            hs.CheckpointManager(path, x=x).save(1)
        job.Barrier()
        for restoring_now, strategy in strategies.items():
            x = _large(strategy, count, "none")
            fill(x, -1)
            manager = hs.CheckpointManager(path, x=x)
            manager.restore(per_replica=policy)
            replica = strategy.replica_id
            rows = {"first": 0, "cycle": replica % saved, "init": None}
            row = replica if restoring_now == saved else rows[policy]
            wanted = np.full(3, -1.0) if row is None else np.arange(3.0) + 10 * row
            assert (x.component == wanted).all()
        job.Barrier()


def test_damaged_data_change_nothing_on_any_rank(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    count = job.size << 18
    with strategy.scope():
        x = hs.Variable(np.zeros(count))
    manager = hs.CheckpointManager(folder, x=x)
    for step in (1, 2):
        x.assign(np.full(count, float(step)))
        path = manager.save(step)
    vouched = open_checkpoint(path).vouched
    assert vouched is not None
    plan: FileLayout = vouched.plan
    draw = np.random.default_rng(11)
    x.assign(np.full(count, 5.0))
    for _ in range(8):
        place = int(draw.integers(plan.data_start, plan.data_end))
        bit = 1 << int(draw.integers(8))
        _flip(job, path, place, bit)
        with pytest.raises(CorruptCheckpointError, match=r"that bytes|ckpt-0000000002"):
            manager.restore(path)
        np.testing.assert_array_equal(x.component, 5.0)
        with warnings_of_checkpoints() as said:
            assert manager.restore() == 1
        assert sum(job.allgather(len(said))) == 1
        assert manager.last_restore.passed_over == (path,)
        np.testing.assert_array_equal(x.component, 1.0)
        x.assign(np.full(count, 5.0))
        _flip(job, path, place, bit)
    assert manager.restore() == 2


def _flip(job: Any, path: str, place: int, bit: int) -> None:
    job.Barrier()
    if job.rank == 0:
        file = os.open(path, os.O_RDWR)
        byte = os.pread(file, 1, place)[0]
        os.pwrite(file, bytes([byte ^ bit]), place)
        os.close(file)
    job.Barrier()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_checkpoint_from_before_the_first_step_comes_back(
    strategy: Any, folder: Path, steps: int
) -> None:
    """Momentum and gradient sums made since the save are reset by the restore."""

    def train(count: int) -> Any:
        for _ in range(count):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))
        return v.component.copy()

    options: dict[str, Any] = {"momentum": 0.9, "accumulate_steps": steps}
    with strategy.scope():
        v = hs.Variable(np.ones(3), name="v")
        optimizer = hs.optimizers.SGD(0.1, **options)
        other = hs.optimizers.Adam(0.1)
    manager = hs.CheckpointManager(folder, v=v, optimizer=optimizer)
    manager.save(0)
    wanted = train(5)
    for _ in range(2):
        manager.restore()
        np.testing.assert_array_equal(v.component, np.ones(3))
        np.testing.assert_array_equal(train(5), wanted)
    # Restore between two updates, when gradient sums exist but no momentum yet.
    if steps == 2:
        manager.restore()
        train(1)
        manager.save(1)
        train(4)
        manager.restore()
        np.testing.assert_array_equal(train(4), wanted)
    # The file has only the state of SGD, which Adam cannot restore.
    manager.save(2)
    strategy.run(lambda: other.apply_gradients([(np.ones(3), v)]))
    wrong = hs.CheckpointManager(folder, v=v, optimizer=other)
    with pytest.raises(CheckpointError, match=r"optimizer/.*/v is not in"):
        wrong.restore()
