"""Models made in a strategy's scope, like programs for tf.distribute.

Each model trains on all replicas without a further call, with the results of one
process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import hpcstrat as hs
import hpcstrat.integrations.keras as hsk
from hpcstrat.integrations.keras.replicas import scope_strategies
from hpcstrat.integrations.keras.scope_models import own_all_models
from tests.mpi.ranks.outcomes import outcome

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


def _layers(seed: int, has_input: bool) -> Any:
    keras.utils.set_random_seed(seed)
    first = [layers.Input((6,))] if has_input else []
    dense = layers.Dense(8, activation="tanh", kernel_regularizer="l2")
    return keras.Sequential([*first, dense, layers.Dense(1, activation="sigmoid")])


def _compile(model: Any) -> Any:
    optimizer = keras.optimizers.Adam(0.02)
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
    return model


def _weights(model: Any, strategy: Any = None) -> list[Any]:
    """Return a model's weights; with a strategy, check equal bits on all ranks."""
    found = [np.array(keras.ops.convert_to_numpy(v)) for v in model.weights]
    if strategy is not None:
        strategy.check_equal(found)
    return found


def _expect(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol, 1e-5)


def _alone(strategy: Any, compute: Callable[[], Any]) -> Any:
    """Return the result of a function that runs on rank 0 only, in one process."""
    found = compute() if strategy.replica_id == 0 else None
    return strategy.collectives.broadcast_object(found, 0, "alone")


@functools.cache
def _one_process() -> Any:
    return _of_keras_itself()


def _of_keras_itself(epochs: int = 2, **options: Any) -> Any:
    """Return weights, history, evaluation and predictions of Keras without hpcstrat."""
    model = _compile(_layers(1, True))
    given = {"batch_size": SIZE, "shuffle": False, "verbose": 0} | options
    history = model.fit(X, Y, epochs=epochs, validation_data=(X[:9], Y[:9]), **given)
    numbers = model.evaluate(X, Y, SIZE, 0, return_dict=True)
    return _weights(model), history.history, numbers, model.predict(X, verbose=0)


def _check(model: Any, strategy: Any, history: Any, expected: Any) -> None:
    weights, logs, numbers, predicted = expected
    _expect(_weights(model, strategy), weights)
    for name, values in logs.items():
        np.testing.assert_allclose(history[name], values, 1e-4, err_msg=name)
    found = model.evaluate(X, Y, SIZE, 0, return_dict=True)
    assert found == pytest.approx(numbers, rel=1e-4)
    _expect([model.predict(X, verbose=0)], [predicted])


@pytest.mark.parametrize("has_input", [True, False])
@pytest.mark.parametrize("fits_inside", [True, False])
def test_fit_in_a_scope_is_that_of_one_process(
    strategy: Any, has_input: bool, fits_inside: bool
) -> None:
    """The ranks' seeds do not matter, nor where the model gets its weights."""
    expected = _alone(strategy, _one_process)

    def fit() -> Any:
        options = {"validation_data": (X[:9], Y[:9]), "shuffle": False, "verbose": 0}
        return model.fit(X, Y, batch_size=SIZE, epochs=2, **options).history

    with strategy.scope():
        model = _compile(_layers(1 + strategy.replica_id, has_input))
        if fits_inside:
            history = fit()
    if not fits_inside:
        history = fit()
    _check(model, strategy, history, expected)


def _dataset() -> Any:
    return hs.Dataset.from_tensor_slices((X, Y)).batch(SIZE)


def _stream() -> Any:
    """Return a dataset chain without random access."""
    rows = hs.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True)
    return rows.batch(SIZE)


def _global() -> Iterator[Any]:
    for start in range(0, ROWS, SIZE):
        yield X[start : start + SIZE], Y[start : start + SIZE]


class _Iterable:
    """An iterable of batches of unknown number, which can be read again."""

    def __iter__(self) -> Iterator[Any]:
        return _global()


def _own_batches(strategy: Any) -> Any:
    """Return a distributed dataset of per-replica batches, with the same rows."""
    size = strategy.num_replicas_in_sync
    replicas = strategy.topology.worker_replicas

    def make(context: hs.InputContext) -> Iterator[Any]:
        del context
        for x, y in _global():
            parts = zip(np.array_split(x, size), np.array_split(y, size), strict=True)
            own = list(parts)
            yield from (own[replica] for replica in replicas)

    class Each:
        def __init__(self, context: Any) -> None:
            self.context = context

        def __iter__(self) -> Iterator[Any]:
            return make(self.context)

    return strategy.distribute_datasets_from_function(Each)


DATA: dict[str, Callable[[Any], Any]] = {
    "dataset": lambda strategy: _dataset(),
    "distributed": lambda s: s.experimental_distribute_dataset(_dataset()),
    "own rows": lambda s: s.experimental_distribute_dataset(
        _dataset(), hs.InputOptions(own_rows=True)
    ),
    "stream": lambda s: s.experimental_distribute_dataset(_stream()),
    "iterable": lambda s: s.experimental_distribute_dataset(_Iterable()),
    "of a function": _own_batches,
    "plain iterable": lambda strategy: _Iterable(),
}


@pytest.mark.parametrize("kind", list(DATA))
def test_distributed_data_sets_are_data_of_fit(strategy: Any, kind: str) -> None:
    """Each row occurs once per epoch, in validation, evaluate and predict, too."""
    weights, logs, numbers, predicted = _alone(strategy, _one_process)
    with strategy.scope():
        model = _compile(_layers(1 + strategy.replica_id, False))
        data = DATA[kind](strategy)
        history = model.fit(
            data, epochs=2, validation_data=DATA[kind](strategy), verbose=0
        ).history
    _expect(_weights(model, strategy), weights)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(history[name], logs[name], 1e-4, err_msg=name)
    assert len(history["val_loss"]) == 2
    found = model.evaluate(DATA[kind](strategy), verbose=0, return_dict=True)
    assert found == pytest.approx(numbers, rel=1e-4)
    assert history["val_loss"][-1] == pytest.approx(found["loss"], rel=1e-4)
    _expect([model.predict(DATA[kind](strategy), verbose=0)], [predicted])


def test_distributed_data_sets_are_data_of_distributed_models(strategy: Any) -> None:
    """`distribute` accepts distributed datasets; other iterables are shares there."""
    weights = _alone(strategy, lambda: _of_keras_itself(class_weight={0: 1.0, 1: 3.0}))[
        0
    ]
    for kind in ("distributed", "stream"):
        model = hsk.distribute(_compile(_layers(1, True)), strategy)
        data = DATA[kind](strategy)
        model.fit(data, epochs=2, verbose=0, class_weight={0: 1.0, 1: 3.0})
        _expect(_weights(model, strategy), weights)


def test_central_storage_trains_models_of_its_scope(strategy: Any) -> None:
    expected = _alone(strategy, _one_process)
    with hs.CentralStorageStrategy() as central, central.scope():
        model = _compile(_layers(1 + central.replica_id, False))
        model.fit(X, Y, SIZE, 2, 0, shuffle=False)
        _expect(_weights(model, central), expected[0])


def test_several_steps_at_once_are_those_of_one_process_or_refused(
    strategy: Any,
) -> None:
    """TensorFlow would read ahead between the calls of a step."""
    if BACKEND == "torch":
        pytest.skip("it makes one step at a time")

    def model() -> Any:
        made = _layers(1, True)
        made.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=2)
        return made

    def compute() -> Any:
        alone = model()
        alone.fit(X, Y, batch_size=SIZE, shuffle=False, verbose=0)
        return _weights(alone)

    weights = _alone(strategy, compute)
    for kind in ("distributed", "stream"):
        with strategy.scope():
            trained = model()
        error = outcome(trained.fit, DATA[kind](strategy), verbose=0)
        if kind == "stream" and BACKEND == "tensorflow":
            assert isinstance(error, NotImplementedError)
            assert "steps_per_execution=1" in str(error)
        else:
            assert error is None
            _expect(_weights(trained, strategy), weights)


def test_data_of_another_strategy_are_refused(strategy: Any) -> None:
    with hs.MultiWorkerMirroredStrategy() as other:
        data = other.experimental_distribute_dataset(_dataset())
        with strategy.scope():
            model = _compile(_layers(1, True))
        error = outcome(model.fit, data, verbose=0)
        assert isinstance(error, ValueError)
        assert "distribute it by the model's strategy" in str(error)


def _without_gradients() -> Any:
    """Return a context for calling an optimizer outside of Keras' training step."""
    if BACKEND != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


class _Sequence(keras.utils.PyDataset):
    def __init__(self) -> None:
        super().__init__()
        self.batches = list(_global())

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def _endless() -> Iterator[Any]:
    while True:
        yield from _global()


def test_batches_of_the_program_are_global_in_a_scope(strategy: Any) -> None:
    """As in tf.distribute, equal data on all ranks are trained on only once."""
    weights = _alone(strategy, _one_process)[0]
    steps = len(list(_global()))
    endless = {"steps_per_epoch": steps}
    for make, options in ((_Sequence, {"shuffle": False}), (_endless, endless)):
        with strategy.scope():
            model = _compile(_layers(1, True))
        model.fit(make(), epochs=2, verbose=0, **options)
        _expect(_weights(model, strategy), weights)


class _Changing(_Sequence):
    """Batches that change after each epoch, with a list of the calls by Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        self.batches = [(x * 0.9, y) for x, y in self.batches]


@pytest.mark.parametrize("has_input", [True, False])
def test_py_datasets_are_shuffled_and_told_of_epochs_as_by_keras(
    strategy: Any, has_input: bool
) -> None:
    """The order of batches is that of Keras, and so is the next random number."""

    def fit(model: Any) -> Any:
        data = _Changing()
        model.fit(data, epochs=3, verbose=0)
        model.fit(data, epochs=2, initial_epoch=1, shuffle=False, verbose=0)
        return model, data.calls, random.random()

    def compute() -> Any:
        model, *others = fit(_compile(_layers(1, has_input)))
        return _weights(model), others

    weights, others = _alone(strategy, compute)
    with strategy.scope():
        model, *found = fit(_compile(_layers(1, has_input)))
    _expect(_weights(model, strategy), weights)
    if BACKEND != "tensorflow":  # TensorFlow reads ahead, and so changes later.
        assert found == others


def test_arrays_take_no_number_from_pythons_generator(strategy: Any) -> None:
    """The weights of the next model are those without hpcstrat."""
    with strategy.scope():
        model = _compile(_layers(1, True))
        keras.utils.set_random_seed(7)
        model.fit(X, Y, SIZE, 2, 0)
    found = random.random()
    keras.utils.set_random_seed(7)
    assert found == random.random()
    _weights(model, strategy)


@pytest.mark.parametrize("shuffle", [False, "batch"])
def test_arrays_begin_with_the_first_row_at_a_later_epoch(
    strategy: Any, shuffle: Any
) -> None:
    options = {"initial_epoch": 3, "steps_per_epoch": 2, "verbose": 0}

    def fit(model: Any) -> Any:
        model.fit(X, Y, SIZE, 5, shuffle=shuffle, **options)
        return _weights(model)

    weights = _alone(strategy, lambda: fit(_compile(_layers(1, True))))
    with strategy.scope():
        _expect(fit(_compile(_layers(1, True))), weights)


@pytest.mark.parametrize("pack", [list, tuple])
def test_several_targets_of_fit_may_be_lists(strategy: Any, pack: Any) -> None:
    def fit() -> Any:
        keras.utils.set_random_seed(1)
        first, second = layers.Input((3,)), layers.Input((3,))
        joined = layers.Concatenate()([first, second])
        outputs = [layers.Dense(1)(joined), layers.Dense(1)(joined)]
        model = keras.Model([first, second], outputs)
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"])
        x, y = pack([X[:, :3], X[:, 3:]]), pack([Y, 1 - Y])
        model.fit(x, y, SIZE, 2, 0, shuffle=False)
        return _weights(model)

    weights = _alone(strategy, fit)
    with strategy.scope():
        _expect(fit(), weights)


@pytest.mark.skipif(BACKEND != "torch", reason="of loaders of PyTorch")
def test_loaders_of_torch_are_global_in_a_scope(strategy: Any) -> None:
    import torch

    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    weights = _alone(strategy, _one_process)[0]
    with strategy.scope():
        model = _compile(_layers(1, False))
    loader = torch.utils.data.DataLoader(rows, batch_size=SIZE)
    model.fit(loader, epochs=2, verbose=0)
    _expect(_weights(model, strategy), weights)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="of tf.data")
def test_data_of_tensorflow_are_global_in_a_scope(strategy: Any) -> None:
    import tensorflow as tf

    weights = _alone(strategy, _one_process)[0]
    with strategy.scope():
        model = _compile(_layers(1, False))
    model.fit(
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE), epochs=2, verbose=0
    )
    _expect(_weights(model, strategy), weights)


def test_models_of_a_scope_may_be_compiled_outside_and_again(strategy: Any) -> None:
    def compute() -> Any:
        model = _compile(_layers(1, True))
        model.fit(X, Y, SIZE, 1, 0, shuffle=False)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, SIZE, 1, 0, shuffle=False)
        logs = model.train_on_batch(X[:5], Y[:5])
        return _weights(model), logs

    weights, logs = _alone(strategy, compute)
    with strategy.scope():
        model = _layers(1 + strategy.replica_id, True)
    _compile(model)
    model.fit(X, Y, SIZE, 1, 0, shuffle=False)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, SIZE, 1, 0, shuffle=False)
    found = model.train_on_batch(X[:5], Y[:5])
    np.testing.assert_allclose(found, logs, 1e-4)
    _expect(_weights(model, strategy), weights)


def test_predictions_need_no_compile(strategy: Any) -> None:
    """All ranks predict with the weights of replica 0."""

    def compute() -> Any:
        model = _layers(1, True)
        return model.predict(X, verbose=0), model.predict_on_batch(X[:3])

    predicted, some = _alone(strategy, compute)
    with strategy.scope():
        model = _layers(1 + strategy.replica_id, False)
        _expect([model.predict(X, verbose=0)], [predicted])
        _expect([model.predict_on_batch(X[:3])], [some])
    strategy.check_equal(_weights(model))


def test_what_cannot_be_is_an_error_on_all_ranks(strategy: Any) -> None:
    with strategy.scope():
        normalized = keras.Sequential([layers.Input((6,)), layers.BatchNormalization()])
        normalized.compile("sgd", "mse")
        # Set the flag late, because Keras' constructor refuses it on some backends.
        normalized.layers[-1].synchronized = True
        error = outcome(normalized.fit, X, X, verbose=0)
    assert isinstance(error, NotImplementedError)
    assert "synchronized=True" in str(error)
    # The error occurs on one rank only, and the other ranks do not wait.
    model = _compile(_layers(1, True))
    with strategy.scope():
        given = X[:, :5] if strategy.replica_id == 0 else X
        last = _compile(_layers(1, False))
    error = outcome(
        last.fit, given, Y[:7] if strategy.replica_id == 0 else Y, verbose=0
    )
    assert error is not None
    # Outside of all scopes, Keras behaves as without hpcstrat.
    model.fit(X, Y, verbose=0)
    assert "fit" not in vars(model)
    assert strategy.reduce("sum", np.float64(1)) == strategy.num_replicas_in_sync


def test_state_of_a_model_of_a_scope_is_saved(strategy: Any, folder: Any) -> None:
    with strategy.scope():
        model = _compile(_layers(1 + strategy.replica_id, True))
    manager = hs.CheckpointManager(folder, **hsk.state(model))
    model.fit(_dataset(), epochs=1, callbacks=[hsk.Checkpoint(manager)], verbose=0)
    weights = _weights(model, strategy)
    with strategy.scope():
        other = _compile(_layers(9 + strategy.replica_id, True))
    manager = hs.CheckpointManager(folder, **hsk.state(other))
    assert manager.restore_or_initialize() == 1
    _expect(_weights(other, strategy), weights, 0)


@pytest.mark.skipif(BACKEND == "jax", reason="its optimizers carry no gradients there")
def test_steps_of_keras_in_replica_functions_are_combined_or_refused(
    strategy: Any,
) -> None:
    """In the program's own loop, gradients are averaged over replicas."""

    with strategy.scope():
        model = _layers(1, True)
        model.compile(keras.optimizers.SGD(1.0), "mse")
    own = strategy.replica_id + 1.0

    def step() -> None:
        variables = model.trainable_variables
        gradients = [keras.ops.ones(v.shape) * own for v in variables]
        with _without_gradients():
            model.optimizer.apply(gradients, variables)

    error = outcome(strategy.run, step)
    assert isinstance(error, RuntimeError) == (strategy.num_replicas_in_sync > 1)
    assert error is None or "would train by itself; compile" in str(error)
    hsk.distribute(model, strategy)
    before = _weights(model, strategy)
    strategy.run(step)
    mean = np.mean(np.arange(strategy.num_replicas_in_sync) + 1.0)
    _expect(_weights(model, strategy), [weight - mean for weight in before])


def test_keras_may_be_imported_in_the_scope() -> None:
    program = (
        "import sys, hpcstrat as hs\n"
        "strategy = hs.OneDeviceStrategy()\n"
        "with strategy.scope():\n"
        "    assert 'keras' not in sys.modules\n"
        "    import keras\n"
        "    model = keras.Sequential([keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\n"
        "import numpy as np\n"
        "x = np.ones((8, 2), np.float32)\n"
        "data = hs.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)\n"
        "model.fit(strategy.experimental_distribute_dataset(data), verbose=0)\n"
        "assert 'fit' in vars(model)\n"
        "assert keras.__spec__.loader.__class__.__name__ == 'SourceFileLoader'\n"
    )
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI", "PMI"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False, capture_output=True, text=True, timeout=120, env=alone,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_models_that_each_replica_trained_by_itself_are_refused(strategy: Any) -> None:
    """If a scope imports Keras, models may train before hpcstrat sees Keras."""
    gc.collect()
    model = _compile(_layers(1, True))
    with strategy.scope():
        own_all_models()
    assert scope_strategies[model] is strategy
    other = _compile(_layers(1, True))
    other.fit(X, Y, verbose=0)
    with strategy.scope():
        error = outcome(own_all_models)
    assert isinstance(error, RuntimeError) == (strategy.num_replicas_in_sync > 1)
    assert error is None or "import keras before strategy.scope()" in str(error)
