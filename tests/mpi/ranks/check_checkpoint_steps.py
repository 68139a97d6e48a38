"""Which steps are saved and kept, and what does not fit, on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.errors import CheckpointError, CollectiveError
from tests.mpi.ranks.saved import Counter


def test_retention_keeps_the_newest(strategy: Any, folder: Path, job: Any) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder, max_to_keep=2, x=x)
    for step in (1, 2, 10, 11):
        manager.save(step)
        job.Barrier()
        assert len(manager.checkpoints) <= 2
    names = [os.path.basename(path) for path in manager.checkpoints]
    assert names == ["ckpt-0000000010.h5", "ckpt-0000000011.h5"]
    assert manager.latest() == manager.checkpoints[-1]
    job.Barrier()
    keeper = hs.CheckpointManager(folder, max_to_keep=None, x=x)
    assert keeper.save().endswith("ckpt-0000000012.h5")
    assert keeper.save().endswith("ckpt-0000000013.h5")
    job.Barrier()
    assert len(keeper.checkpoints) == 4


def test_lower_steps_than_those_of_the_folder_are_refused_or_replace_them(
    strategy: Any, folder: Path
) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder, max_to_keep=3, x=x)
    for step in (10, 20, 30):
        x.assign(float(step))
        manager.save(step)
    manager.restore(manager.checkpoints[0])
    x.assign(11.0)
    with pytest.raises(CheckpointError, match=r"ckpt-0+20\.h5, ckpt-0+30\.h5"):
        manager.save(11)
    assert len(manager.checkpoints) == 3
    manager.save(11, overwrite=True)
    names = [Path(path).name for path in manager.checkpoints]
    assert names == ["ckpt-0000000010.h5", "ckpt-0000000011.h5"]
    assert manager.restore() == 11
    assert x.numpy() == 11


def test_step_is_not_used_twice_unless_asked(
    strategy: Any, folder: Path, job: Any
) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder, x=x)
    manager.save(5)
    x.assign(2.0)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        manager.save(5)
    x.assign(3.0)
    job.Barrier()
    manager.restore()
    assert x.numpy() == 1.0
    x.assign(4.0)
    manager.save(5, overwrite=True)
    x.assign(5.0)
    manager.restore()
    assert x.numpy() == 4.0
    assert len(os.listdir(folder)) == 1


def test_ranks_that_save_different_steps_are_told(strategy: Any, folder: Path) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one rank agrees with itself")
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder, x=x)
    with pytest.raises(CollectiveError, match="save of step"):
        manager.save(strategy.replica_id)
    assert manager.checkpoints == []


def test_negative_steps_are_refused(strategy: Any, folder: Path) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder, x=x)
    with pytest.raises(ValueError, match="0 <= step"):
        manager.save(-1)
    assert manager.checkpoints == []


def test_all_that_does_not_fit_is_named_and_nothing_changes(
    strategy: Any, folder: Path
) -> None:
    with strategy.scope():
        saved = {
            "shape": hs.Variable(np.zeros((2, 3))),
            "dtype": hs.Variable(np.zeros(3, np.float32)),
            "fits": hs.Variable(1.0),
            "extra": hs.Variable(1.0),
        }
        other = {
            "shape": hs.Variable(np.full((3, 2), 7.0)),
            "dtype": hs.Variable(np.full(3, 7.0)),
            "fits": hs.Variable(7.0),
            "missing": hs.Variable(7.0),
        }
    path = hs.CheckpointManager(folder, **saved).save(4)
    manager = hs.CheckpointManager(folder, counter=Counter(), **other)
    for restore in (manager.restore, manager.restore_or_initialize):
        with pytest.raises(CheckpointError) as caught:
            restore()
        text = str(caught.value)
        for words in (
            "variables/shape has shape (2, 3), not (3, 2)",
            "variables/dtype has dtype float32, not float64",
            "variables/missing is not in",
            "python/counter is not in",
            "step 4",
        ):
            assert words in text
        assert "fits" not in text
        for variable in other.values():
            np.testing.assert_array_equal(variable.component, 7.0)
    with pytest.raises(CheckpointError):
        manager.restore(path)


def test_other_data_set_is_refused_before_anything_changes(
    strategy: Any, folder: Path
) -> None:
    def make(value: float, rows: int, seed: int) -> dict[str, Any]:
        data = hs.Dataset(np.arange(rows), 4, shuffle=True, seed=seed)
        with strategy.scope():
            x = hs.Variable(value)
        return {"x": x, "data": strategy.experimental_distribute_dataset(data)}

    hs.CheckpointManager(folder, **make(1.0, 10, 1)).save(1)
    for rows, seed in ((11, 1), (10, 2)):
        state = make(7.0, rows, seed)
        with pytest.raises(CheckpointError, match="data"):
            hs.CheckpointManager(folder, **state).restore()
        assert state["x"].component == 7.0


def test_values_of_another_dtype_are_cast_when_allowed(
    strategy: Any, folder: Path
) -> None:
    with strategy.scope():
        x = hs.Variable(np.arange(3, dtype=np.float64))
        y = hs.Variable(np.zeros(3, np.float32))
    hs.CheckpointManager(folder, x=x).save(1)
    hs.CheckpointManager(folder, x=y).restore(allow_cast=True)
    np.testing.assert_array_equal(y.component, np.arange(3, dtype=np.float32))


def test_values_that_nothing_takes_must_be_expected(
    strategy: Any, folder: Path
) -> None:
    with strategy.scope():
        x, y = hs.Variable(1.0), hs.Variable(2.0)
    hs.CheckpointManager(folder, x=x, y=y).save(1)
    x.assign(7.0)
    manager = hs.CheckpointManager(folder, x=x)
    with pytest.raises(CheckpointError, match="nothing takes variables/y"):
        manager.restore()
    assert x.component == 7.0
    assert manager.restore(expect_partial=True) == 1
    assert x.component == 1.0


def test_copies_that_differ_are_not_saved(
    strategy: Any, folder: Path, job: Any
) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one copy does not differ")
    with strategy.scope():
        x = hs.Variable(1.0)
    x.component[...] = strategy.replica_id
    manager = hs.CheckpointManager(folder, x=x)
    for asynchronous in (False, True):
        with pytest.raises(CollectiveError, match="variables/x"):
            manager.save(1, asynchronous=asynchronous)
        # Another rank may be a moment later.
        job.Barrier()
        assert os.listdir(folder) == []
    # Later tests compare the copies of all variables that are still there.
    x.component[...] = 0
