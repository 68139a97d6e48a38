"""Keras' callbacks, checkpoints and errors on many ranks.

KERAS_BACKEND selects the backend.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import hpcstrat as hs
import hpcstrat.integrations.keras as hsk

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
layers = keras.layers
X = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def _model(seed: int = 1, **options: Any) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            layers.Input((3,)),
            layers.Dense(4),
            layers.Dropout(0.2, seed=1),
            layers.Dense(1),
        ]
    )
    model.compile(**{"optimizer": keras.optimizers.Adam(0.1), "loss": "mse", **options})
    return model


def _values(model: Any) -> list[Any]:
    known = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in known]


class _Counts(keras.callbacks.Callback):
    """A callback that counts epochs, and batches if a subclass counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1


class _Stops(keras.callbacks.Callback):
    """A callback that stops the training within an epoch, on one replica only."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self.stops = stops
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.stops and self.batches == 3:
            self.model.stop_training = True


class _Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise OSError("expected room on the disk, found none; make some")


def test_callbacks_write_once_and_decide_alike(strategy: Any, folder: Path) -> None:
    last = strategy.num_replicas_in_sync - 1
    model = hsk.distribute(_model(strategy.replica_id), strategy)
    own = folder / str(strategy.replica_id)
    counts = _Counts()
    rate = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e9)
    stopping = keras.callbacks.EarlyStopping(
        "val_loss", patience=1, min_delta=1e9, restore_best_weights=True
    )
    writers = [
        keras.callbacks.CSVLogger(f"{own}.csv"),
        keras.callbacks.ModelCheckpoint(f"{own}.keras"),
    ]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        model.fit(
            *(X, Y, 4, 9),
            validation_data=(X, Y),
            callbacks=[counts, rate, stopping, *writers],
        )
    strategy.check_equal(_values(model))
    assert counts.epochs == 2
    assert bool(shown.getvalue()) == (strategy.replica_id == 0)
    strategy.collectives.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["0.csv", "0.keras"]
    with open(folder / "0.csv") as file:
        assert {len(row) for row in csv.reader(file)} >= {4}
    # One replica stops within an epoch; the other replicas have no such callback.
    stops = _Stops(strategy.replica_id == last)
    own_callbacks = [stops] if strategy.replica_id == last else []
    model.fit(X, Y, 4, 2, 0, callbacks=own_callbacks)
    assert stops.batches == (3 if stops.stops else 0)
    assert model.stop_training
    strategy.check_equal(_values(model))


def test_a_backup_on_replica_0_is_where_all_go_on(strategy: Any, folder: Path) -> None:
    def backup() -> list[Any]:
        return [
            keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
        ]

    model = hsk.distribute(_model(), strategy)
    model.fit(X, Y, 4, 2, 0, callbacks=backup())
    other = hsk.distribute(_model(2), strategy)
    counts = _Counts()
    other.fit(X, Y, 4, 3, 0, callbacks=[counts, *backup()])
    assert counts.epochs == 1
    strategy.check_equal(_values(other))
    assert int(other.optimizer.iterations) == 9


def test_an_error_of_one_replica_is_one_of_all(strategy: Any) -> None:
    model = hsk.distribute(_model(), strategy)
    first = strategy.replica_id == 0
    with pytest.raises(OSError if first else hs.errors.ReplicaError, match="room on"):
        model.fit(X, Y, 4, 2, 0, callbacks=[_Fails()] if first else [])
    # After the error, the training continues.
    model.fit(X, Y, 4, 1, 0)
    strategy.check_equal(_values(model))
    if strategy.num_replicas_in_sync > 1:
        rows = 11 if first else 3
        with pytest.raises(hs.errors.CollectiveError, match="fit of 1 epochs of 1 st"):
            model.fit(X[:rows], Y[:rows], 4, 1, 0)
        model.fit(X, Y, 4, 1, 0)


def test_saved_models_know_nothing_of_it(strategy: Any, folder: Path) -> None:
    path = folder / f"{strategy.replica_id}.keras"
    model = hsk.distribute(hsk.distribute(_model(), strategy), strategy)
    model.fit(X, Y, 4, 1, 0)
    model.save(path)
    with zipfile.ZipFile(path) as file:
        assert b"hpcstrat" not in file.read("config.json")
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert "apply" not in vars(loaded.optimizer)
    assert "fit" not in vars(loaded)
    for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(loaded.optimizer.iterations) == 3
    copied = keras.models.clone_model(model)
    assert "fit" not in vars(copied)


def test_what_two_replicas_saved_goes_on_with_all(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    """The order of the rows, and all state of the optimizer, continue, too."""

    def fit(epochs: int, where: Any, seed: int, **options: Any) -> Any:
        # Use no layers that draw different random numbers on different replicas.
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        data = hsk.Batches(X, Y, batch_size=4, strategy=where, shuffle=True)
        hsk.distribute(model, where)
        log = hs.metrics.Log(folder, strategy=where)
        state = {**hsk.state(model), "log": log}
        with hs.CheckpointManager(folder, **state, **options) as manager:
            keep = hsk.Checkpoint(manager, log=log)
            found = model.fit(data, epochs=epochs, verbose=0, callbacks=[keep])
        return model, found.epoch

    if 2 in strategies:
        fit(2, strategies[2], 1)
    job.Barrier()
    strategy = strategies[job.size]
    model, epochs = fit(3, strategy, 5)
    strategy.check_equal(_values(model))
    assert epochs == ([0, 1, 2] if job.size == 1 else [2])
    job.Barrier()
    logged = hs.metrics.read_log(folder)
    assert [record["step"] for record in logged] == [1, 2, 3]
    assert all(np.isfinite(record["scalars"]["loss"]) for record in logged)
    if job.size > 1:
        folder = folder / "whole"
        whole, _ = fit(3, strategy, 1)
        for one, other in zip(_values(model), _values(whole), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def test_state_is_saved_by_names_that_stay(strategy: Any, folder: Path) -> None:
    """Names are equal for another model of the same process; seeds are saved, too."""
    model = hsk.distribute(_model(), strategy)
    model.fit(X, Y, 4, 1, 0)
    held = hsk.state(model)
    with hs.CheckpointManager(folder, **held) as manager:
        manager.save(1)
    names = list(held["optimizer"].checkpoint_variables())
    assert {"0/iteration", "1/learning_rate"} <= set(names)
    other = hsk.distribute(_model(7), strategy)
    with hs.CheckpointManager(folder, **hsk.state(other)) as manager:
        manager.restore()
    for one, other_value in zip(_values(other), _values(model), strict=True):
        np.testing.assert_array_equal(one, other_value)
    smaller = keras.Sequential([layers.Input((3,)), layers.Dense(1)])
    smaller.compile("adam", "mse")
    hsk.distribute(smaller, strategy)
    with (
        hs.CheckpointManager(folder, **hsk.state(smaller)) as manager,
        pytest.raises(ValueError, match="model"),
    ):
        manager.restore()


class _Synchronized(layers.Layer):
    synchronized = True


def test_what_cannot_be_is_refused(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(error: type[Exception], words: str, model: Any, **where: Any) -> None:
        with pytest.raises(error, match=words):
            hsk.distribute(model, where.get("strategy", strategy))

    refused(
        ValueError, "expected a strategy of hpcstrat, found str", _model(), strategy=""
    )
    refused(ValueError, "expected a keras.Model, found Dense", layers.Dense(1))
    refused(
        ValueError, "call model.compile before", keras.Sequential([layers.Dense(1)])
    )
    unbuilt = keras.Sequential([layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    refused(ValueError, "call model.build with the shape", unbuilt)
    synchronized = keras.Sequential([layers.Input((3,)), _Synchronized()])
    synchronized.compile("sgd", "mse")
    refused(NotImplementedError, "found synchronized=True in", synchronized)
    with monkeypatch.context() as patch:
        patch.setattr(type(strategy), "sums_each_step", False)
        refused(NotImplementedError, "in sync for a model of Keras", _model())
    with monkeypatch.context() as patch:
        patch.setattr(keras.distribution, "distribution", lambda: "some")
        refused(RuntimeError, "expected no distribution of Keras itself", _model())
    model = hsk.distribute(_model(), strategy)
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="compile was called again; call distribute"):
        model.fit(X, Y, verbose=0)
    hsk.distribute(model, strategy).fit(X, Y, verbose=0)
    if keras.config.backend() == "tensorflow":
        compiled = _model(jit_compile=True)
        refused(ValueError, "whose XLA cannot call MPI", compiled)
    if keras.config.backend() == "torch":
        import torch.distributed as dist

        monkeypatch.setattr(keras, "__version__", "3.16.0")
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        refused(RuntimeError, "Keras 3.16.0 combines gradients over it", _model())
