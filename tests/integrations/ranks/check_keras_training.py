"""Keras' fit, evaluate and predict on many ranks, compared with one process.

KERAS_BACKEND selects the backend. Global batches divide unevenly, and the last batch of
an epoch leaves some ranks without rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import hpcstrat as hs
import hpcstrat.integrations.keras as hsk

pytestmark = [
    # Ignore NumPy's warnings on Keras variables, and Python's on TensorFlow modules.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
layers = keras.layers
BACKEND = keras.config.backend()
ROWS, SIZE = 43, 14
_draw = np.random.default_rng(0)
X = _draw.normal(size=(ROWS, 6)).astype(np.float32)
Y = (X @ _draw.normal(size=6) > 0).astype(np.float32)[:, None]
W = _draw.uniform(0.1, 2, size=ROWS).astype(np.float32)


def _model(seed: int = 1, *inner: Any, **options: Any) -> Any:
    """Return a compiled model with the layers ``inner`` before its last layer."""
    keras.utils.set_random_seed(seed)
    dense = layers.Dense(8, activation="tanh", kernel_regularizer="l2")
    last = layers.Dense(1, activation="sigmoid")
    model = keras.Sequential([layers.Input((6,)), dense, *inner, last])
    given = {"optimizer": keras.optimizers.Adam(0.02), "loss": "binary_crossentropy"}
    model.compile(**{**given, **options})
    return model


def _alone(strategy: Any, compute: Callable[[], Any]) -> Any:
    """Return the result of a function that runs on rank 0 only, in one process."""
    found = compute() if strategy.replica_id == 0 else None
    return strategy.collectives.broadcast_object(found, 0, "alone")


def _weights(model: Any, strategy: Any = None) -> list[Any]:
    """Return a model's weights; with a strategy, check equal bits on all ranks."""
    found = [np.array(keras.ops.convert_to_numpy(v)) for v in model.weights]
    if strategy is not None:
        strategy.check_equal(found)
    return found


def _expect(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol, 1e-5)


def _batches(strategy: Any, **options: Any) -> Any:
    return hsk.Batches(X, Y, W, batch_size=SIZE, strategy=strategy, **options)


def test_fit_is_that_of_one_process(strategy: Any) -> None:
    """All epochs have equal weights and logs, whatever weights a rank starts with."""

    def seen() -> dict[str, Any]:
        auc = keras.metrics.AUC(name="auc", num_thresholds=50)
        return {"metrics": ["accuracy", auc], "weighted_metrics": ["mse"]}

    held = X[30:], Y[30:], W[30:]

    def batches(where: Any) -> Any:
        rows = X[:30], Y[:30], W[:30]
        options = {"batch_size": SIZE, "shuffle": True, "seed": 5}
        return hsk.Batches(*rows, strategy=where, **options)

    def compute() -> Any:
        model, data = _model(1, **seen()), batches(hs.get_strategy())
        history: dict[str, list[float]] = {}
        for epoch in range(3):
            data.epoch = epoch
            logs = model.fit(data, shuffle=False, verbose=0, validation_data=held)
            for name, values in logs.history.items():
                history.setdefault(name, []).extend(values)
        numbers = model.evaluate(X, Y, sample_weight=W, verbose=0, return_dict=True)
        return _weights(model), history, numbers, model.predict(X, verbose=0)

    weights, history, numbers, predicted = _alone(strategy, compute)
    model = _model(1 + strategy.replica_id, **seen())
    assert hsk.distribute(model, strategy) is model
    data = batches(strategy)
    found = model.fit(data, epochs=3, verbose=0, validation_data=held)
    _expect(_weights(model, strategy), weights)
    assert found.history.keys() == history.keys() >= {"auc", "val_auc", "val_mse"}
    for name, values in history.items():
        np.testing.assert_allclose(found.history[name], values, 1e-4, err_msg=name)
    again = model.evaluate(X, Y, sample_weight=W, verbose=0, return_dict=True)
    assert again == pytest.approx(numbers, rel=1e-4)
    # All ranks get all predictions.
    _expect([model.predict(X, verbose=0)], [predicted])
    _expect([model.predict(_batches(strategy), verbose=0)], [predicted])
    _expect([model.predict_on_batch(X[:2])], [predicted[:2]])
    strategy.check_equal(model.predict(X[:1], verbose=0))


def test_arrays_are_global_batches(strategy: Any) -> None:
    """The order of fit's own shuffling is global; on_batch methods accept few rows."""
    model = hsk.distribute(_model(metrics=["mse"]), strategy)
    model.fit(X, Y, SIZE, 2, verbose=0, validation_split=0.3, sample_weight=W)
    _weights(model, strategy)

    def compute() -> Any:
        alone = _model(metrics=["mse"])
        alone.fit(X, Y, SIZE, 2, 0, shuffle=False, class_weight={0: 1.0, 1: 3.0})
        alone.reset_metrics()  # Keras before 3.15 does not.
        logs = alone.train_on_batch(X[:3], Y[:3], W[:3])
        alone.reset_metrics()
        tested = alone.test_on_batch(X[:1], Y[:1], return_dict=True)
        return _weights(alone), logs, tested

    weights, logs, tested = _alone(strategy, compute)
    model = hsk.distribute(_model(metrics=["mse"]), strategy)
    model.fit(X, Y, SIZE, 2, 0, shuffle=False, class_weight={0: 1.0, 1: 3.0})
    found = model.train_on_batch(X[:3], Y[:3], W[:3])
    np.testing.assert_allclose(found, logs, 1e-4)
    found = model.test_on_batch(X[:1], Y[:1], return_dict=True)
    assert found.keys() == tested.keys()
    np.testing.assert_allclose([*found.values()], [*tested.values()], 1e-4)
    _expect(_weights(model, strategy), weights)


def _accumulating() -> Any:
    return keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5),
        momentum=0.9,
        gradient_accumulation_steps=2,
        global_clipnorm=0.05,
    )


def _averaging() -> Any:
    return keras.optimizers.AdamW(
        *(0.02,), use_ema=True, ema_momentum=0.8, clipnorm=0.05, loss_scale_factor=8.0
    )


def _scaling() -> Any:
    inner = keras.optimizers.SGD(0.5)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)


@pytest.mark.parametrize("make", [_accumulating, _averaging, _scaling])
def test_optimizers_see_the_gradient_of_the_global_batch(
    strategy: Any, make: Callable[[], Any]
) -> None:
    """Gradients are clipped, accumulated, averaged and scaled as in one process."""

    def compute() -> Any:
        model = _model(optimizer=make())
        model.fit(X, Y, SIZE, 2, 0, shuffle=False)
        return _weights(model)

    weights = _alone(strategy, compute)
    model = hsk.distribute(_model(optimizer=make()), strategy)
    model.fit(X, Y, SIZE, 2, 0, shuffle=False)
    _expect(_weights(model, strategy), weights)


def test_infinite_gradients_of_one_replica_skip_the_step_of_all(strategy: Any) -> None:
    model = hsk.distribute(_model(optimizer=_scaling(), loss="mse"), strategy)
    before = _weights(model)
    bad = X[:7].copy()
    # The first row belongs to the first replica.
    bad[0] = np.inf
    model.train_on_batch(bad, Y[:7])
    _expect(_weights(model, strategy), before, 0)
    assert float(model.optimizer.dynamic_scale) == 2.0**9
    model.train_on_batch(X[:7], Y[:7])
    after = _weights(model, strategy)
    assert not np.array_equal(after[0], before[0])


def test_dropout_differs_and_its_state_does_not(strategy: Any) -> None:
    """Moving means include all replicas' rows, also if some replicas have no rows."""
    dropout = layers.Dropout(0.5, seed=3)
    model = hsk.distribute(_model(1, dropout, layers.BatchNormalization()), strategy)
    drawn = keras.ops.convert_to_numpy(dropout(np.ones((1, 64)), training=True))
    rows = strategy.collectives.all_gather(drawn, 0, "drawn")
    assert len(np.unique(rows, axis=0)) == strategy.num_replicas_in_sync
    for _ in range(2):
        model.fit(X, Y, SIZE, 1, 0, shuffle=False)
        values = _weights(model, strategy)
        assert all(np.isfinite(value).all() for value in values)
    seed = keras.ops.convert_to_numpy(dropout.seed_generator.state)
    strategy.check_equal(np.array(seed))
    assert seed[1] > 2


def test_moving_means_are_means_over_replicas(strategy: Any) -> None:
    normalization = layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([layers.Input((6,)), normalization])
    model.compile("sgd", "mse")
    model = hsk.distribute(model, strategy)
    model.train_on_batch(X[:12], X[:12])
    parts = np.array_split(X[:12], strategy.num_replicas_in_sync)
    expected = 0.5 * np.mean([part.mean(axis=0) for part in parts], axis=0)
    found = keras.ops.convert_to_numpy(normalization.moving_mean)
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
    strategy.check_equal(np.array(found))


def _masked() -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(2)
    tokens = np.random.default_rng(3).integers(0, 4, size=(11, 5))
    tokens[:, 0] = 1
    model = keras.Sequential(
        [
            layers.Input((5,), dtype="int32"),
            layers.Embedding(4, 3, mask_zero=True),
            layers.Dense(1),
        ]
    )
    return model, tokens, tokens[..., None].astype(np.float32)


@pytest.mark.parametrize("kind", ["masked", "sum", "mean_with_sample_weight"])
def test_losses_with_other_divisors_are_those_of_the_global_batch(
    strategy: Any, kind: str
) -> None:
    def run(where: Any) -> Any:
        if kind == "masked":
            model, x, y = _masked()
            model.compile(keras.optimizers.SGD(0.1), "mse")
            w = None
        else:
            loss = keras.losses.MeanSquaredError(reduction=kind)
            model = _model(loss=loss, optimizer=keras.optimizers.SGD(0.01))
            x, y, w = X[:11], Y[:11], W[:11]
        if where is not None:
            hsk.distribute(model, where)
        logs = [
            model.fit(x, y, 7, 2, 0, shuffle=False, sample_weight=w).history["loss"],
            [model.evaluate(x, y, 7, 0, sample_weight=w)],
        ]
        return logs, _weights(model, where)

    logs, weights = _alone(strategy, lambda: run(None))
    found, trained = run(strategy)
    _expect(found, logs)
    _expect(trained, weights)


def test_steps_of_the_programs_own(strategy: Any) -> None:
    """The model's own step has an unscaled loss, and several optimizers."""

    def run(where: Any) -> Any:
        model = _own_step()
        if where is not None:
            hsk.distribute(model, where)
        # Each replica has rows, because the mean of this step over no rows is NaN.
        history = model.fit(X, Y, 13, 2, 0, shuffle=False)
        return history.history["loss"], _weights(model, where)

    logs, weights = _alone(strategy, lambda: run(None))
    found, trained = run(strategy)
    _expect([found], [logs])
    _expect(trained, weights)


def _own_step() -> Any:
    keras.utils.set_random_seed(4)
    inputs = layers.Input((6,))
    outputs = layers.Dense(1)(layers.Dense(4, activation="tanh")(inputs))
    model = {"torch": OfTorch, "jax": OfJax, "tensorflow": OfTensorFlow}[BACKEND](
        inputs, outputs
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class OfTorch(keras.Model):
    def train_step(self, data: Any) -> Any:
        import torch

        x, y = data
        self.zero_grad()
        loss = torch.mean((self(x, training=True) - y) ** 2)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        self._loss_tracker.update_state(loss, sample_weight=len(x))
        return {"loss": self._loss_tracker.result()}


class OfJax(keras.Model):
    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        trained, others, slots, metrics = state
        x, y = data

        def loss_of(weights: Any) -> Any:
            out, updated = self.stateless_call(weights, others, x, training=True)
            return ((out - y) ** 2).mean(), updated

        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        trained, slots = self.optimizer.stateless_apply(slots, gradients, trained)
        metrics = self._loss_tracker.stateless_update_state(
            metrics, loss, sample_weight=len(x)
        )
        logs = {"loss": self._loss_tracker.stateless_result(metrics)}
        return logs, (trained, others, slots, metrics)


class OfTensorFlow(keras.Model):
    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self._loss_tracker.result()}


def test_steps_of_an_epoch_are_those_that_are_asked_for(strategy: Any) -> None:
    """Steps continue where the last epoch ended, as in Keras, also several per call."""
    several = 1 if BACKEND == "torch" else 2

    def compute() -> Any:
        model = _model(steps_per_execution=several)
        for number in range(6):
            some = slice(number % 4 * SIZE, number % 4 * SIZE + SIZE)
            model.train_on_batch(X[some], Y[some])
        return _weights(model)

    weights = _alone(strategy, compute)
    model = hsk.distribute(_model(steps_per_execution=several), strategy)
    data = hsk.Batches(X, Y, batch_size=SIZE, strategy=strategy)
    model.fit(data, epochs=2, verbose=0, steps_per_epoch=3)
    _expect(_weights(model, strategy), weights)
    again = hsk.distribute(_model(steps_per_execution=several), strategy)
    again.fit(data, epochs=1, verbose=0, steps_per_epoch=3)
    again.fit(data, epochs=2, initial_epoch=1, verbose=0, steps_per_epoch=3)
    _expect(_weights(again), _weights(model), 0)


def test_chains_of_data_sets_are_global_batches(strategy: Any) -> None:
    """Chains equal `Batches` of the same rows: one epoch each, or parts of a stream."""
    chain = hs.Dataset.from_tensor_slices((X, Y)).shuffle(seed=5).batch(SIZE)
    found = []
    for data in (
        hsk.Batches(X, Y, batch_size=SIZE, strategy=strategy, shuffle=True, seed=5),
        chain,
        chain.prefetch(2),
    ):
        model = hsk.distribute(_model(), strategy)
        given = {} if isinstance(data, hsk.Batches) else {"validation_data": chain}
        history = model.fit(data, epochs=3, verbose=0, **given).history
        assert not given or len(history["val_loss"]) == 3
        found.append(_weights(model, strategy))
    _expect(found[1], found[0], 0)
    _expect(found[2], found[0], 0)
    model = hsk.distribute(_model(), strategy)
    endless = hs.Dataset.from_tensor_slices((X, Y)).shuffle(seed=5).repeat().batch(SIZE)
    history = model.fit(endless, epochs=2, steps_per_epoch=3, verbose=0).history
    assert len(history["loss"]) == 2
    batches = hs.Dataset.from_tensor_slices(X).batch(SIZE)
    _expect([model.predict(batches)], [model.predict(X)])
    pairs = hs.Dataset.from_tensor_slices((X, Y)).batch(SIZE)
    np.testing.assert_allclose(
        model.evaluate(pairs, verbose=0), model.evaluate(X, Y, SIZE, verbose=0), 1e-5
    )
    for bad, message in (
        (hs.Dataset.from_tensor_slices((X, Y)), "call batch"),
        (hs.Dataset.from_tensor_slices((X, Y)).filter(bool).batch(4), "leave out"),
        (
            hs.Dataset.from_tensor_slices((X, Y)).batch(4, costs=np.ones(len(X))),
            "without costs",
        ),
        (endless, "steps_per_epoch"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(bad, verbose=0)


def test_data_of_the_programs_own_are_shares(strategy: Any) -> None:
    """Each rank passes its own rows; predictions are in replica order."""
    model = hsk.distribute(_model(), strategy)
    parts = np.array_split(np.arange(ROWS), strategy.num_replicas_in_sync)
    own = parts[strategy.replica_id]

    class Own(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return X[own], Y[own]

    model.fit(Own(), epochs=2, verbose=0)

    def compute() -> Any:
        alone = _model()
        alone.fit(X, Y, ROWS, 2, 0, shuffle=False)
        return _weights(alone), alone.predict(X, verbose=0)

    weights, predicted = _alone(strategy, compute)
    _expect(_weights(model, strategy), weights)
    _expect([model.predict(Own(), verbose=0)], [predicted])


def test_embeddings_and_several_inputs(strategy: Any) -> None:
    """Test gradients that TensorFlow has as rows, dict inputs and two losses."""

    def run(where: Any) -> Any:
        keras.utils.set_random_seed(6)
        words, numbers = layers.Input((2,), name="a"), layers.Input((6,), name="b")
        inner = layers.Flatten()(layers.Embedding(5, 3)(words))
        outputs = {
            "u": layers.Dense(1, name="u")(inner),
            "v": layers.Dense(1, name="v")(layers.concatenate([inner, numbers])),
        }
        model = keras.Model({"a": words, "b": numbers}, outputs)
        model.compile("sgd", {"u": "mse", "v": "mae"}, metrics={"u": ["mae"]})
        if where is not None:
            hsk.distribute(model, where)
        x = {"a": np.arange(2 * ROWS).reshape(ROWS, 2) % 5, "b": X}
        y = {"u": Y, "v": Y + 1}
        logs = model.fit(x, y, SIZE, 2, 0, shuffle=False).history
        if BACKEND == "tensorflow":
            # Keras itself reports means over batches of any size here.
            del logs["u_loss"], logs["v_loss"]
        found = model.predict(x, verbose=0)
        return sorted(logs.items()), _weights(model, where), sorted(found.items())

    logs, weights, predicted = _alone(strategy, lambda: run(None))
    found, trained, outputs = run(strategy)
    _expect(trained, weights)
    for one, other in ((found, logs), (outputs, predicted)):
        assert [name for name, _ in one] == [name for name, _ in other]
        _expect([value for _, value in one], [value for _, value in other])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow's memory")
@pytest.mark.parametrize("eagerly", [False, True])
def test_means_are_written_into_memory_of_their_own(
    strategy: Any, eagerly: bool
) -> None:
    """Results share no memory with other values; one tensor is passed twice."""
    import tensorflow as tf

    from hpcstrat.integrations.keras.tensor_calls import exchanges

    mean, size = exchanges().mean, strategy.num_replicas_in_sync
    variable = tf.Variable(tf.ones([5, 40]))

    def step(own: Any, weight: Any) -> Any:
        product = own @ own
        half = tf.cast(product, tf.bfloat16)
        given = [product, product, half, tf.ones([7]), own, own[0, 0], own[:0]]
        given.append(variable.read_value())
        first = mean(strategy, given, weight)
        return given, first, mean(strategy, given, 1), mean(strategy, first, 0)

    compute = step if eagerly else tf.function(step)
    rank = strategy.replica_id + 1.0
    # Sums of these small integers are exact in any type.
    ranks = np.arange(1.0, size + 1)
    powers = (2, 2, 2, 0, 1, 1, 1, 0)
    factors = (4, 4, 4, 1, 1, 1, 1, 1)
    for _ in range(2):
        found = compute(tf.fill([4, 4], rank), tf.constant(2 * rank))
        for place, (power, factor) in enumerate(zip(powers, factors, strict=True)):
            expected = (
                *(factor * rank**power, (2 * ranks * factor * ranks**power).mean()),
                *((factor * ranks**power).mean(), 0),
            )
            for values, number in zip(found, expected, strict=True):
                own = values[place].numpy().astype(np.float64)
                np.testing.assert_allclose(own, number, 1e-2 if place == 2 else 1e-6)
    assert (variable.numpy() == 1).all()
