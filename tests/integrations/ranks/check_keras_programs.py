"""Keras programs drawn from seeds train like one process with all rows.

Each program draws a model, a loss, metrics, an optimizer and its steps per call, then
calls of fit, evaluate, train_on_batch and predict on batches that leave some ranks
without rows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import hpcstrat.integrations.keras as hsk
from tests.integrations.ranks.drawn import seeds

pytestmark = [
    # Ignore NumPy's warnings on Keras variables, and Python's on TensorFlow modules.
    pytest.mark.filterwarnings("ignore"),
]
layers, Draw = keras.layers, np.random.Generator
WIDTH = 3


def _optimizer(draw: Draw) -> Any:
    options: dict[str, Any] = {}
    if draw.random() < 0.3:
        options["gradient_accumulation_steps"] = 2
    if draw.random() < 0.3:
        options[str(draw.choice(["clipnorm", "global_clipnorm", "clipvalue"]))] = 0.3
    if draw.random() < 0.2:
        options |= {"use_ema": True, "ema_momentum": 0.9}
    kinds = [
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options),
        lambda: keras.optimizers.Adam(0.01, epsilon=1e-4, **options),
        lambda: keras.optimizers.AdamW(0.01, epsilon=1e-4, **options),
        lambda: keras.optimizers.Adagrad(0.05, **options),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=64.0
        ),
    ]
    return kinds[draw.integers(len(kinds))]()


def _model(draw: Draw, seed: int) -> Any:
    """Return a compiled model that computes one number from several."""
    keras.utils.set_random_seed(seed)
    net = [layers.Input((WIDTH,))]
    for _ in range(int(draw.integers(1, 3))):
        how = draw.choice([None, "l2"])
        net.append(layers.Dense(4, activation="tanh", kernel_regularizer=how))
        if draw.random() < 0.2:
            net.append(layers.LayerNormalization())
    losses = ["mse", "mae", "huber", "binary_crossentropy"]
    kind = str(draw.choice(losses))
    ends = "sigmoid" if kind == "binary_crossentropy" else None
    net.append(layers.Dense(1, activation=ends))
    model = keras.Sequential(net)
    several = int(draw.choice([1, 1, 3]))
    if keras.config.backend() == "torch":
        several = 1  # Keras requires this with torch.
    names = [n for n in ("mse", "mae") if draw.random() < 0.5]
    model.compile(
        _optimizer(draw),
        kind,
        metrics=names,
        weighted_metrics=["mse"] if draw.random() < 0.3 else None,
        steps_per_execution=several,
    )
    return model


def _rows(draw: Draw) -> dict[str, Any]:
    count = int(draw.integers(1, 30))
    x = draw.normal(size=(count, WIDTH)).astype(np.float32)
    found = {"x": x, "y": (x.sum(axis=1, keepdims=True) > 0).astype(np.float32)}
    if draw.random() < 0.4:
        found["sample_weight"] = draw.uniform(0, 2, count).astype(np.float32)
    return found


class Play:
    """A drawn program; without a strategy it runs in one process."""

    def __init__(self, seed: int, strategy: Any, folder: Path) -> None:
        self.draw = np.random.default_rng(seed)
        self.strategy = strategy
        self.model = _model(self.draw, seed)
        name = "one" if strategy is None else "all"
        self.path = folder / f"{name}.weights.h5"
        # Keras does not save the state of an optimizer before its first step.
        self.model.optimizer.build(self.model.trainable_variables)
        if strategy is not None:
            hsk.distribute(self.model, strategy)

    def saw(self) -> list[Any]:
        """Make some drawn calls; return their results, and the weights after each."""
        kinds = ["fit", "fit", "evaluate", "train", "test", "predict", "save", "load"]
        saw: list[Any] = []
        for _ in range(5):
            kind, rows = str(self.draw.choice(kinds)), _rows(self.draw)
            size = int(self.draw.integers(1, 12))
            saw.append(getattr(self, f"_{kind}")(rows, size))
            weights = self.model.weights
            saw.append([np.array(keras.ops.convert_to_numpy(v)) for v in weights])
            if self.strategy is not None:
                self.strategy.check_equal(saw[-1])
        return saw

    def _fit(self, rows: dict[str, Any], size: int) -> Any:
        draw = self.draw
        if draw.random() < 0.3:
            rows["validation_data"] = tuple(_rows(draw).values())
            rows["validation_batch_size"] = int(draw.integers(1, 9))
        epochs = int(draw.integers(1, 3))
        options = {"batch_size": size, "epochs": epochs, "verbose": 0}
        return self.model.fit(**rows, **options, shuffle=False).history

    def _evaluate(self, rows: dict[str, Any], size: int) -> Any:
        return self.model.evaluate(**rows, batch_size=size, verbose=0)

    def _train(self, rows: dict[str, Any], size: int) -> Any:
        self.model.reset_metrics()  # Keras before 3.15 does not.
        return self.model.train_on_batch(**rows, return_dict=True)

    def _test(self, rows: dict[str, Any], size: int) -> Any:
        self.model.reset_metrics()
        return self.model.test_on_batch(**rows, return_dict=True)

    def _predict(self, rows: dict[str, Any], size: int) -> Any:
        return self.model.predict(rows["x"], batch_size=size, verbose=0)

    def _save(self, rows: dict[str, Any], size: int) -> Any:
        if self.strategy is None or self.strategy.replica_id == 0:
            self.model.save_weights(self.path)
        if self.strategy is not None:
            self.strategy.collectives.barrier("saved")

    def _load(self, rows: dict[str, Any], size: int) -> Any:
        if self.path.exists():
            self.model.load_weights(self.path)


def _same(found: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            _same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            _same(*pair, f"{where}[{number}]")
    elif wanted is not None:
        np.testing.assert_allclose(found, wanted, 2e-3, 2e-4, err_msg=where)


@pytest.mark.parametrize("seed", seeds(12))
def test_programs_train_as_one_process(strategy: Any, folder: Path, seed: int) -> None:
    own = Play(seed, None, folder).saw() if strategy.replica_id == 0 else None
    wanted = strategy.collectives.broadcast_object(own, 0, "alone")
    _same(Play(seed, strategy, folder).saw(), wanted, "saw")
