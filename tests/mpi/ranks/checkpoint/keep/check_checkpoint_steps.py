"""Saved and kept steps, and values that do not fit the program, on every rank."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.errors import CheckpointError, CollectiveError, ReplicaError
from tests.folders import listed
from tests.mpi.ranks.saved import (
    Counter,
    warnings_of_checkpoints,
)

pytestmark = pytest.mark.files


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
    assert len(listed(folder)) == 1


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


@pytest.mark.parametrize(
    ("values", "dtype", "lost"),
    [
        ([1e300, np.nan, 0.1], "f4", "cannot represent 1 of its 3 saved values"),
        ([1e300, 0.5, -2.0], "i1", "cannot represent 2 of its 3 saved values"),
        ([1 / 3, np.inf, 2.0], "f4", ""),
        ([3.0, 0.0, -2.0], "i8", ""),
    ],
)
def test_values_that_a_cast_loses_are_told(
    strategy: Any, folder: Path, job: Any, values: Any, dtype: str, lost: str
) -> None:
    with strategy.scope():
        x = hs.Variable(np.array(values), name="x")
        y = hs.Variable(np.zeros(3, dtype), name="x")
    hs.CheckpointManager(folder, x=x).save(1)
    with warnings_of_checkpoints() as said:
        hs.CheckpointManager(folder, x=y).restore(allow_cast=True)
    if job.rank or not lost:
        assert said == []
    else:
        assert "variables/x" in said[0]
        assert lost in said[0]


def test_values_that_nothing_takes_must_be_expected(
    strategy: Any, folder: Path
) -> None:
    with strategy.scope():
        x, y = hs.Variable(1.0), hs.Variable(2.0)
    hs.CheckpointManager(folder, x=x, y=y).save(1)
    x.assign(7.0)
    manager = hs.CheckpointManager(folder, x=x)
    with pytest.raises(CheckpointError, match="no object restores variables/y"):
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
        # Wait, because another rank may look at the folder a moment later.
        job.Barrier()
        assert listed(folder) == []
    # Make the copies equal again, because later tests compare all existing variables.
    x.component[...] = 0


def _steps(manager: Any) -> list[int]:
    return [int(Path(path).stem.removeprefix("ckpt-")) for path in manager.checkpoints]


_LOSSES = {1: 0.5, 2: 0.1, 3: 0.7, 4: 0.9, 5: math.nan, 6: 0.3, 7: 0.8}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_rules_together_in_one_job_and_the_next(
    asynchronous: bool, strategy: Any, folder: Path, job: Any
) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    options: dict[str, Any] = {
        "max_to_keep": 2,
        "keep_every": 4,
        "keep_best": hs.KeepBest("loss", count=2),
        "x": x,
    }
    with hs.CheckpointManager(folder, **options) as first:
        assert first.best() is None
        for step, loss in _LOSSES.items():
            x.assign(float(step))
            metrics = {"loss": np.float32(loss), "other": step}
            first.save(step, metrics=metrics, asynchronous=asynchronous)
        first.wait()
        assert _steps(first) == [2, 4, 6, 7]
    job.Barrier()
    # A second manager knows the metrics, because they are in the files.
    with hs.CheckpointManager(folder, **options) as second:
        best = second.best()
        assert best == str(folder / "ckpt-0000000002.h5")
        assert job.allgather(best) == [best] * job.size
        for step, loss in ((9, 0.2), (10, 0.6), (11, None), (12, 0.05)):
            metrics = None if loss is None else {"loss": loss}
            second.save(step, metrics=metrics, asynchronous=asynchronous)
        second.wait()
        assert _steps(second) == [2, 4, 11, 12]
        assert second.restore(second.best()) == 12
        assert second.restore(second.checkpoints[0]) == 2
        assert x.numpy() == 2.0


def test_best_passes_over_what_is_damaged(
    strategy: Any, folder: Path, job: Any
) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    rule = hs.KeepBest("accuracy", mode="max")
    manager = hs.CheckpointManager(folder, keep_best=rule, x=x)
    for step, accuracy in ((1, 0.5), (2, 0.75), (3, 0.25)):
        manager.save(step, metrics={"accuracy": accuracy})
    job.Barrier()
    if job.rank == 0:
        os.truncate(manager.checkpoints[1], 5000)
    job.Barrier()
    with warnings_of_checkpoints() as warnings:
        assert manager.best() == manager.checkpoints[0]
    # Replica 0 looks for the best checkpoint, so only replica 0 warns.
    assert len(warnings) == (strategy.replica_id == 0)
    assert all("ckpt-0000000002.h5" in text for text in warnings)


def test_ranks_that_give_different_metrics_are_told(
    strategy: Any, folder: Path
) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one rank agrees with itself")
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder, x=x)
    own: list[Any] = [{"loss": 0.5 + strategy.replica_id}]
    own.append(None if strategy.replica_id else {"loss": 0.5})
    for metrics in own:
        for asynchronous in (False, True):
            with pytest.raises(CollectiveError, match=r"metrics \{'loss': 0\.5\}"):
                manager.save(1, metrics=metrics, asynchronous=asynchronous)
            assert manager.checkpoints == []
    # Metrics in another order and of other types are the same metrics.
    names = ["a", "b"] if strategy.replica_id else ["b", "a"]
    kind: Any = float if strategy.replica_id else np.float32
    path = manager.save(1, metrics={name: kind("nan") for name in names})
    assert manager.checkpoints == [path]


@pytest.mark.parametrize(
    "options",
    [
        {"max_to_keep": 0},
        {"keep_every": 0},
        {"keep_every": "10"},
        {"keep_best": "loss"},
        {"keep_for": -3600.0},
        {"keep_for": timedelta(0)},
    ],
    ids=repr,
)
def test_rules_that_cannot_be_are_refused_on_every_rank(
    options: dict[str, Any], strategy: Any, folder: Path
) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    with pytest.raises(ValueError, match=f"expected {next(iter(options))}"):
        hs.CheckpointManager(folder / "never", x=x, **options)
    assert not (folder / "never").exists()


def test_what_one_rank_cannot_give_is_refused_on_every_rank(
    strategy: Any, folder: Path
) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder, x=x)
    with pytest.raises((ValueError, ReplicaError), match="metric 'loss'"):
        manager.save(1, metrics={"loss": np.zeros(2)})
    last = strategy.replica_id == strategy.num_replicas_in_sync - 1
    loss: Any = "low" if last else 0.5
    error = ValueError if last else ReplicaError
    with pytest.raises(error, match="metric 'loss' to be one real number, found 'low'"):
        manager.save(1, metrics={"loss": loss})
    assert manager.checkpoints == []
    rule = None if last else hs.KeepBest("loss")
    uneven = hs.CheckpointManager(folder, keep_best=rule, x=x)
    with pytest.raises(error, match="manager with keep_best"):
        uneven.best()
    manager.save(1, metrics={"loss": 0.5})


def test_function_makes_what_no_checkpoint_holds(strategy: Any, folder: Path) -> None:
    with strategy.scope():
        x = hs.Variable(0.0)
    manager = hs.CheckpointManager(folder, x=x)
    calls: list[int] = []

    def begin() -> None:
        calls.append(strategy.replica_id)
        x.assign(5.0)

    assert manager.restore_or_initialize(begin) is None
    assert calls == [strategy.replica_id]
    manager.save(3)
    x.assign(7.0)
    assert manager.restore_or_initialize(begin) == 3
    assert calls == [strategy.replica_id]
    assert x.numpy() == 5.0


class _Training:
    """A program with one object of each kind that a manager can save."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        data = hs.Dataset(np.arange(41.0), 6, shuffle=True, seed=5)
        with strategy.scope():
            self.w = hs.Variable(np.ones(2), name="w")
            self.optimizer = hs.optimizers.Adam(0.1)
            self.loss = hs.metrics.Mean()
            self.group = hs.metrics.MetricGroup(
                {"sum": hs.metrics.Sum(), "mse": hs.metrics.MeanSquaredError()}
            )
            self.streams = strategy.random("noise", seed=3)
            self.data = strategy.experimental_distribute_dataset(data)
        self.counter = Counter()

    def manager(self, folder: Path, **options: Any) -> Any:
        """Return a checkpoint manager for all objects of the program."""
        return hs.CheckpointManager(
            folder,
            **options,
            w=self.w,
            optimizer=self.optimizer,
            loss=self.loss,
            metrics=self.group,
            streams=self.streams,
            data=self.data,
            counter=self.counter,
        )

    def train(self, steps: int) -> list[float]:
        """Train for some steps; return the examples that all replicas saw."""
        seen: list[float] = []

        def step(batch: Any) -> None:
            self.optimizer.apply_gradients([(np.full(2, batch.sum()), self.w)])
            self.loss.update_state(batch)
            self.group["sum"].update_state(batch)
            self.group["mse"].update_state(batch, np.zeros_like(batch))
            seen.extend(batch.tolist())
            self.streams.generator.random(len(batch) + 1)
            self.streams.shared.random()

        batches = iter(self.data)
        for _ in range(steps):
            self.strategy.run(step, args=(next(batches),))
        self.counter.state["größe"] += steps
        parts = self.strategy.collectives.all_gather_object(seen, "examples seen")
        return [float(value) for part in parts for value in part]

    def results(self) -> dict[str, float]:
        """Return the metrics of all replicas."""
        return {"loss": self.loss.result(), **self.group.results()}


def test_everything_comes_back_on_any_number_of_replicas(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    """Metrics, optimizer, streams, data and plain state return from the best file."""
    rule = hs.KeepBest("loss", mode="max")
    for saved in range(1, job.size + 1):
        path = folder / str(saved)
        told = None
        if saved in strategies:
            first = _Training(strategies[saved])
            with first.manager(path, max_to_keep=1, keep_best=rule) as manager:
                seen = first.train(3)
                results = first.results()
                state, streams = _optimizer_state(first), first.streams.state()
                manager.save(metrics=results, asynchronous=True)
                # Save a newer checkpoint with a worse metric.
                first.train(2)
                manager.save(metrics=results | {"loss": -1.0})
            told = seen, results, state, streams
        seen, results, state, streams = job.bcast(told)
        for strategy in strategies.values():
            other = _Training(strategy)
            manager = other.manager(path, keep_best=rule)
            assert _steps(manager) == [3, 5]
            assert manager.restore(manager.best()) == 3
            assert manager.last_restore.unused == ()
            assert other.results() == pytest.approx(results, rel=1e-12)
            assert other.counter.state == {"größe": 3}
            # The optimizer assigns restored values to its slots at the first step.
            found = _optimizer_state(other)
            assert found.keys() == state.keys()
            for name, value in state.items():
                np.testing.assert_array_equal(found[name], value)
            now = other.streams.state()
            np.testing.assert_array_equal(now["shared"], streams["shared"])
            both = min(saved, strategy.num_replicas_in_sync)
            np.testing.assert_array_equal(now["state"][:both], streams["state"][:both])
            rest = other.train(4)
            assert sorted(seen + rest) == list(np.arange(41.0))
        job.Barrier()


def _optimizer_state(training: _Training) -> dict[str, Any]:
    optimizer = training.optimizer
    variables = optimizer.checkpoint_variables()
    return {name: each.component.copy() for name, each in variables.items()}


def test_damaged_later_checkpoints_do_not_stop_saves(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    with strategy.scope():
        x = hs.Variable(np.arange(4096.0))
    options = {"max_to_keep": 1, "x": x}
    hs.CheckpointManager(folder, **{**options, "max_to_keep": 2}).save(90)
    path = Path(hs.CheckpointManager(folder, **{**options, "max_to_keep": 2}).save(100))
    if job.rank == 0:
        content = bytearray(path.read_bytes())
        place = content.find(np.arange(4096.0).tobytes())
        content[place + 8 * 77] ^= 1
        path.write_bytes(content)
    job.Barrier()
    manager = hs.CheckpointManager(folder, **options)
    # The damage is not known yet, because nobody has read the data.
    with pytest.raises(CheckpointError, match="later step than 95"):
        manager.save(95)
    assert manager.restore() == 90
    x.assign(np.full(4096, 2.0))
    manager.save(95)
    job.Barrier()
    # The damaged file does not count as a checkpoint, and is not removed.
    assert [Path(p).name for p in manager.checkpoints] == [
        "ckpt-0000000095.h5",
        "ckpt-0000000100.h5",
    ]
    x.assign(np.zeros(4096))
    assert hs.CheckpointManager(folder, **options).restore() == 95
    np.testing.assert_array_equal(x.component, 2.0)
    manager.save(100)
    assert hs.CheckpointManager(folder, **options).restore() == 100
