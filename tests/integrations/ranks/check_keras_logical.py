"""Keras' fit on logical replicas has the bits of one process with all replicas.

KERAS_BACKEND selects the backend. The last batch of an epoch leaves some replicas
without rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Set this early, because a framework may compute before the first strategy exists.
os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "NPROC": "1"}

import keras

import hpcstrat as hs
import hpcstrat.integrations.keras as hsk
from tests.mpi.ranks.outcomes import outcome

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
layers = keras.layers
ROWS, SIZE = 43, 14
_draw = np.random.default_rng(0)
X = _draw.normal(size=(ROWS, 6)).astype(np.float32)
Y = (X @ _draw.normal(size=6) > 0).astype(np.float32)[:, None]
W = _draw.uniform(0.1, 2, size=ROWS).astype(np.float32)


def made(comm: Any = None) -> Any:
    return hs.MultiWorkerMirroredStrategy(logical_replicas=4, comm=comm)


def alone() -> Any:
    """Return a strategy in which this process has all replicas."""
    from mpi4py import MPI

    return made(MPI.COMM_SELF)


def model_of(*inner: Any, **options: Any) -> Any:
    """Return a compiled model with the layers ``inner`` before its last layer."""
    keras.utils.set_random_seed(1)
    dense = layers.Dense(8, activation="tanh", kernel_regularizer="l2")
    last = layers.Dense(1, activation="sigmoid")
    model = keras.Sequential([layers.Input((6,)), dense, *inner, last])
    given = {"optimizer": keras.optimizers.Adam(0.02), "loss": "binary_crossentropy"}
    model.compile(**{**given, **options})
    return model


def bits(model: Any) -> list[bytes]:
    found = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(v).tobytes() for v in found]


def same(train: Callable[[Any], Any]) -> None:
    """Assert that a function has the same results on all ranks and on one rank."""
    with alone() as one:
        wanted = train(one)
    with made() as strategy:
        found = train(strategy)
    assert found == wanted


def test_fit_evaluate_and_predict(job: Any) -> None:
    """Test dropout, moving means, metrics, weights and validation."""

    def train(strategy: Any) -> Any:
        dropout, norm = layers.Dropout(0.3, seed=3), layers.BatchNormalization()
        auc = keras.metrics.AUC(name="auc", num_thresholds=50)
        seen = {"metrics": ["accuracy", auc], "weighted_metrics": ["mse"]}
        model = hsk.distribute(model_of(dropout, norm, **seen), strategy)
        held = X[30:], Y[30:], W[30:]
        options = {"shuffle": False, "verbose": 0}
        first = model.fit(X[:30], Y[:30], SIZE, 2, validation_data=held, **options)
        second = model.fit(X, Y, SIZE, 2, sample_weight=W, **options)
        weights = {0: 1.0, 1: 3.0}
        third = model.fit(X, Y, SIZE, 1, class_weight=weights, **options)
        tested = model.evaluate(X, Y, verbose=0, return_dict=True)
        batches = hsk.Batches(X, Y, W, batch_size=SIZE, strategy=strategy)
        logs = [
            *(first.history, second.history, third.history, tested),
            model.evaluate(batches, verbose=0, return_dict=True),
            model.train_on_batch(X[:9], Y[:9], W[:9], return_dict=True),
            model.test_on_batch(X[:2], Y[:2], return_dict=True),
        ]
        predicted = model.predict(X, verbose=0)
        # Bits may differ for other batch sizes, but all ranks must have the same bits.
        few = model.predict_on_batch(X[:2])
        return bits(model), logs, predicted.tobytes(), few.tobytes()

    same(train)


def test_losses_over_a_mask(job: Any) -> None:
    def train(strategy: Any) -> Any:
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [
                layers.Input((5,), dtype="int32"),
                layers.Embedding(7, 4, mask_zero=True),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy")
        rng = np.random.default_rng(3)
        rows, labels = rng.integers(0, 7, (ROWS, 5)), rng.integers(0, 3, (ROWS, 5))
        hsk.distribute(model, strategy)
        history = model.fit(rows, labels, SIZE, 2, verbose=0, shuffle=False).history
        return bits(model), history

    same(train)


@pytest.mark.parametrize("kind", ["accumulating", "scaling"])
def test_optimizers(job: Any, kind: str) -> None:
    def train(strategy: Any) -> Any:
        if kind == "scaling":
            inner = keras.optimizers.SGD(0.5)
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2**10)
        else:
            optimizer = keras.optimizers.SGD(
                *(0.5, 0.9), gradient_accumulation_steps=2, global_clipnorm=0.05
            )
        model = hsk.distribute(model_of(optimizer=optimizer, loss="mse"), strategy)
        bad = X[:7].copy()
        bad[0] = np.inf if kind == "scaling" else 1
        before = bits(model)[:2]
        model.train_on_batch(bad, Y[:7])
        if kind == "scaling":
            assert bits(model)[:2] == before
        model.fit(X, Y, SIZE, 2, verbose=0, shuffle=False)
        return bits(model)

    same(train)


def test_training_stopped_on_all_ranks_ends_on_one(job: Any, folder: Any) -> None:
    """The training stops on all ranks after two epochs, and continues on one rank."""

    def train(strategy: Any, epochs: int, place: Any) -> Any:
        dropout, norm = layers.Dropout(0.3, seed=3), layers.BatchNormalization()
        model = hsk.distribute(model_of(dropout, norm), strategy)
        callbacks = []
        if place is not None:
            held = hsk.state(model)
            manager = hs.CheckpointManager(place, **held)
            callbacks = [hsk.Checkpoint(manager)]
        data = hsk.Batches(
            X, Y, batch_size=SIZE, strategy=strategy, shuffle=True, seed=5
        )
        model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
        return bits(model)

    with alone() as one:
        wanted = train(one, 3, None)
    with made() as strategy:
        train(strategy, 2, folder / "keras")
        assert train(strategy, 3, folder / "keras") == wanted


def test_what_cannot_be_divided_is_refused(job: Any) -> None:
    with made() as strategy:
        model = hsk.distribute(model_of(), strategy)
        error = outcome(model.fit, iter([(X[:4], Y[:4])]), verbose=0)
        assert isinstance(error, NotImplementedError), repr(error)
        assert "hpcstrat.Dataset" in str(error)


def test_models_of_a_scope_have_the_same_bits(job: Any) -> None:
    """The model is built by the first batch that the strategy distributes."""

    def train(strategy: Any) -> Any:
        rows = hs.Dataset.from_tensor_slices((X, Y)).shuffle(seed=5).batch(SIZE)
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([layers.Dense(3), layers.Dense(1)])
            model.compile("adam", "mse")
            data = strategy.experimental_distribute_dataset(rows)
            history = model.fit(data, epochs=2, verbose=0).history
        return bits(model), history["loss"], model.predict(X, verbose=0).tobytes()

    same(train)
    with made() as strategy, strategy.scope():
        model = keras.Sequential([layers.Dense(1)])
        model.compile("adam", "mse")
        error = outcome(model.fit, iter([(X[:4], Y[:4])]), verbose=0)
        assert isinstance(error, NotImplementedError), repr(error)
        assert "an iterable or a stream" in str(error)
