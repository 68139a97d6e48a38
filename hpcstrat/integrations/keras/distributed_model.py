"""Makes a model's own fit, evaluate and predict work on all replicas together.

Functions of this module replace methods of one model object and of its optimizers, but
not of their classes, so that the model is saved as usual. A step's gradients are
combined when the optimizer receives them, before the optimizer changes anything.

Keras' loss is a mean over this replica's rows. So that the mean of gradients over all
replicas equals the gradient of one process, the loss is first multiplied by this
replica's number of rows, and divided by the mean number of rows per replica.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from hpcstrat.data import Dataset
from hpcstrat.data.iterator import ReducibleDataset
from hpcstrat.data.sources import open_source
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.keras.callbacks import (
    StopTogether,
    SynchronizedCallback,
    chosen,
    is_watched,
)
from hpcstrat.integrations.keras.dealt_batches import (
    DealtBatches,
    dealt,
    ends_with_its_data,
)
from hpcstrat.integrations.keras.loss_corrections import correct
from hpcstrat.integrations.keras.py_dataset import Batches, columns_of, own_rows
from hpcstrat.integrations.keras.replicas import (
    TrainingState,
    optimizer_of,
    optimizers_of,
    put,
    seed_mask,
)
from hpcstrat.integrations.keras.requirements import (
    keras_version,
    require_distributable,
    require_one_step,
)
from hpcstrat.integrations.keras.row_predictions import Predictions
from hpcstrat.integrations.keras.tensor_calls import drawn_seed, exchanges
from hpcstrat.strategies import Strategy

__all__ = ["DistributedMethods"]

_DATA = ("x", "y", "sample_weight")


class DistributedMethods:
    """The functions that replace a model's methods, and the state that they share."""

    state_class = TrainingState

    def __init__(
        self, model: Any, strategy: Strategy, *, by_scope: bool = False
    ) -> None:
        self.model = model
        self.strategy = strategy
        # True for a model of a scope: all data are global batches, as in tf.distribute.
        self._by_scope = by_scope
        self.state = self.state_class(model, strategy)
        self._optimizers = list(optimizers_of(model).values())
        # Set during a step: the number of rows of this replica, and in training the
        # number of rows of all replicas.
        self._rows: Any = None
        self._total: Any = None
        self._is_scaled = self._trains = False
        self._exchanges = exchanges()
        self._predictions = Predictions(model, strategy)

    def install(self) -> None:
        """Replace the methods of the model and of its optimizers."""
        model = self.model
        for optimizer in self._optimizers:
            put(optimizer, "scale_loss", self._scale_loss)
            put(optimizer, "apply", self._apply)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                # Its `stateless_apply` checks for infinities and does not call `apply`.
                put(optimizer, "stateless_apply", self._stateless_apply)
        for name in ("fit", "evaluate", "predict"):
            put(model, name, self._entered(getattr(self, f"_{name}")))
        for name in ("train_on_batch", "test_on_batch"):
            put(model, name, self._entered(self._on_batch))
        put(model, "predict_on_batch", self._entered(self._predict_on_batch))
        put(model, "train_step", self._train_step)
        put(model, "test_step", self._test_step)
        put(model, "_get_metrics_result_or_logs", self._result)
        if model._compile_loss is not None:
            correct(model._compile_loss, self._factor)
        # Functions that Keras has compiled call the old methods: make Keras recompile.
        model.train_function = model.test_function = model.predict_function = None

    def mask(self) -> Array:
        """Return the bit mask that makes this replica's random seeds different."""
        return seed_mask(self.strategy.replica_id)

    # Methods that run inside of a step.

    def _train_step(self, inner: Callable[..., Any], *args: Any) -> Any:
        with self._step(args[-1]):
            self._total = self._exchanges.total(self.strategy, self._rows)
            with self._exchanges.after(self._total):
                return inner(*args)

    def _test_step(self, inner: Callable[..., Any], *args: Any) -> Any:
        with self._step(args[-1]):
            return inner(*args)

    @contextmanager
    def _step(self, data: Any) -> Iterator[None]:
        rows = keras.ops.shape(keras.tree.flatten(data)[0])[0]
        # In a step that TensorFlow compiles, the number of rows may be a tensor.
        self._rows = rows if type(rows) is int else keras.ops.cast(rows, "float64")
        self._is_scaled = False
        try:
            yield
        finally:
            self._rows = self._total = None

    def _scale_loss(self, inner: Callable[..., Any], loss: Any) -> Any:
        loss = inner(loss)
        if self._total is None:
            return loss
        self._is_scaled = True
        return loss * keras.ops.cast(self._share, loss.dtype)

    @property
    def _share(self) -> Any:
        """This replica's number of rows, divided by the mean number per replica."""
        return self._rows * self.strategy.num_replicas_in_sync / self._total

    def _weight(self) -> Any:
        """Return the factor for this replica's gradients; 0 if it has no rows."""
        rows = self._rows
        if self._total is None:
            return 1
        if type(rows) is int and (self._is_scaled or not rows):
            return int(rows > 0)
        if self._is_scaled:
            return keras.ops.cast(rows > 0, "float64")
        # The program's own `train_step` has not scaled the loss: scale the gradients.
        return self._share

    def _factor(self, divisor: Any) -> Any:
        """Return the factor for a loss with this divisor; see `correct`."""
        if self._rows is None:
            return None
        total, own, whole = self._exchanges.total, 1, 1
        if divisor is not None:
            own, whole = divisor, total(self.strategy, divisor)
        rows = self._total
        if rows is None:
            rows = total(self.strategy, self._rows)
        return self._ratio(own, whole, rows)

    def _ratio(self, own: Any, whole: Any, rows: Any) -> Any:
        """Return ``own / whole``, divided by this replica's share of the rows."""
        own, whole, few, rows = (
            keras.ops.cast(n, "float32") for n in (own, whole, self._rows, rows)
        )
        return keras.ops.divide_no_nan(own * rows, whole * few)

    def _apply(
        self, inner: Callable[..., Any], grads: Any, trainable_variables: Any = None
    ) -> Any:
        return inner(self._combined(grads), trainable_variables)

    def _stateless_apply(
        self, inner: Callable[..., Any], variables: Any, grads: Any, trainable: Any
    ) -> Any:
        return inner(variables, self._combined(grads), trainable)

    def _combined(self, gradients: Any) -> list[Any]:
        gradients = list(gradients)
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        own = [gradients[i] for i in there]
        means = self._exchanges.mean(self.strategy, own, self._weight())
        for index, gradient in zip(there, means, strict=True):
            gradients[index] = gradient
        return gradients

    # Methods that contain whole steps, such as fit.

    def _entered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for a model's method; if one replica fails, all fail.

        The replacement calls ``method`` with the original method, and with a dict of
        all arguments by name.
        """

        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(inner).bind(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            before = self._trains
            self._trains = method == self._fit or inner.__name__ == "train_on_batch"
            with self.strategy.collectives.section(inner.__name__):
                try:
                    self._require_ready()
                    return method(inner, given)
                finally:
                    self._trains = before

        return call

    def _require_ready(self) -> None:
        require_distributable(self.model, is_compiled=not self._by_scope)
        optimizer = optimizer_of(self.model)
        if optimizer is not None and optimizer not in self._optimizers:
            raise RuntimeError(
                "expected the optimizer that the model had in distribute, found "
                "another: compile was called again; call distribute after it"
            )

    def _fit(self, inner: Callable[..., Any], given: dict[str, Any]) -> Any:
        strategy = self.strategy
        callbacks = given.pop("callbacks", None)
        callbacks = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks) or [])
        _split(given)
        shuffle = given.pop("shuffle", True)
        # With "batch" Keras shuffles rows within batches: the batches stay the same.
        orders = shuffle and shuffle != "batch" and columns_of(given["x"]) is not None
        told = strategy.collectives.all_gather_object(
            (any(map(is_watched, callbacks)), drawn_seed() if orders else 0), "fit"
        )
        held = {
            "batch_size": given.pop("validation_batch_size", given.get("batch_size")),
            "steps": given.pop("validation_steps", None),
        }
        self._batched(given, "steps_per_epoch", shuffle=shuffle, seed=told[0][1])
        if (data := given.get("validation_data")) is not None:
            parts = data if isinstance(data, (tuple, list)) else (data,)
            held |= dict(zip(_DATA, parts, strict=False))
            self._batched(held, "steps")
            given["validation_steps"] = held.pop("steps", None)
            given["validation_batch_size"] = held.pop("batch_size", None)
            given["validation_data"] = tuple(held.values())
        callbacks = chosen(callbacks, strategy)
        callbacks.append(SynchronizedCallback(self.state, strategy, given["x"]))
        if any(watches for watches, _ in told):
            callbacks.append(StopTogether(strategy))
        if isinstance(given["x"], (Batches, DealtBatches)):
            # They are already shuffled; Keras would draw another order per replica.
            shuffle = False
        given |= {"callbacks": callbacks, "shuffle": shuffle}
        with ends_with_its_data():
            return inner(**self._quiet(given))

    def _evaluate(self, inner: Callable[..., Any], given: dict[str, Any]) -> Any:
        if not given.get("_use_cached_eval_dataset"):
            self._batched(given, "steps")
            self._quiet(given)
        with ends_with_its_data():
            return inner(**given)

    def _predict(self, inner: Callable[..., Any], given: dict[str, Any]) -> Any:
        x = given["x"] = self._whole(given["x"])
        steps = given.get("steps")
        if isinstance(x, Batches) and x.x is None:
            x = x.dataset
        if isinstance(x, Dataset):
            return self._predictions.of_batches(x, steps)
        if isinstance(x, DealtBatches):
            return self._predictions.of_dealt(x, steps)
        if isinstance(x, Batches):
            given["batch_size"], x = x.dataset.batch_size, x.x
        columns: Any = columns_of(x)
        if columns is None:
            # Each replica has its own data: gather the predictions of all replicas.
            return self._predictions.gathered(inner(**self._quiet(given)))
        size = given.get("batch_size") or 32
        if steps:
            columns = columns_of(columns.read(slice(0, given.pop("steps") * size)))
        count = self.strategy.num_replicas_in_sync
        given["batch_size"] = -(-size // count)
        return self._predictions.of_columns(
            columns, lambda rows: inner(**self._quiet({**given, "x": rows}))
        )

    def _predict_on_batch(
        self, inner: Callable[..., Any], given: dict[str, Any]
    ) -> Any:
        return self._predictions.of_columns(open_source(given["x"]), inner)

    def _on_batch(self, inner: Callable[..., Any], given: dict[str, Any]) -> Any:
        columns = open_source({k: given[k] for k in _DATA if given.get(k) is not None})
        given |= own_rows(columns, self.strategy)
        whole = given.pop("return_dict", False)
        if keras_version() < (3, 15):
            # Metrics still contain the last call's values, summed over all replicas.
            self.model.reset_metrics()
        logs = inner(**given, return_dict=True)
        found = self.model._get_metrics_result_or_logs(logs)
        logs = {name: float(found[name]) for name in logs}
        return logs if whole else self.model._flatten_metrics_in_order(logs)

    def _result(self, inner: Callable[..., Any], logs: Any) -> Any:
        self.state.total_metrics()
        if self._trains:
            self.state.average()
        return inner(logs)

    def _batched(
        self, given: dict[str, Any], steps: str, *, shuffle: Any = False, seed: int = 0
    ) -> None:
        """Replace the arrays in a method's arguments by `Batches` of these arrays."""
        given["x"] = self._whole(given["x"])
        data = {name: given[name] for name in _DATA if given.get(name) is not None}
        if isinstance(data["x"], Dataset):
            data["x"] = Batches.of(data["x"], self.strategy)
            given.pop("batch_size", None)
        if isinstance(data["x"], Batches):
            given["x"] = data["x"].with_steps(given.pop(steps, None))
        elif isinstance(data["x"], DealtBatches):
            require_one_step(self.model)
            data["x"].weigh(given.pop("class_weight", None))
            data["x"].shuffle = bool(shuffle)
            if not data["x"].is_repeatable:
                # Keras would build the model with the first batches, and lose them.
                self.model._symbolic_build(data_batch=data["x"].first)
        elif columns_of(data) is not None:
            for name in data:
                del given[name]
            batches = Batches(
                **data,
                batch_size=given.pop("batch_size", None) or 32,
                strategy=self.strategy,
                shuffle=bool(shuffle) and shuffle != "batch",
                seed=seed,
            )
            batches.begins_anew = True
            given["x"] = batches.with_steps(given.pop(steps, None))

    def _whole(self, x: Any) -> Any:
        """Return `dealt` data if they are global batches, or else the data as given."""
        if isinstance(x, ReducibleDataset) or self._by_scope:
            return dealt(x, self.strategy)
        return x

    def _quiet(self, given: dict[str, Any]) -> dict[str, Any]:
        """Turn the progress bar off, except on replica 0."""
        if self.strategy.replica_id:
            given["verbose"] = 0
        return given


def _split(given: dict[str, Any]) -> None:
    """Use the last rows for validation, as Keras does for ``validation_split``."""
    data = {name: given[name] for name in _DATA if given.get(name) is not None}
    fraction, columns = given.get("validation_split"), columns_of(data)
    if not fraction or given.get("validation_data") is not None or columns is None:
        return
    del given["validation_split"]
    at = int(columns.num_rows * (1 - fraction))
    given |= columns.read(slice(0, at))
    held = columns.read(slice(at, None))
    given["validation_data"] = tuple(held[name] for name in data)
