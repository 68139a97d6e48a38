"""The parts of a model's state that are kept equal on all replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.strategies import Strategy

__all__ = [
    "TrainingState",
    "as_array",
    "optimizer_of",
    "optimizers_of",
    "put",
    "scope_strategies",
    "seed_generators",
    "seed_mask",
    "separate_seeds",
    "strategies",
    "value_of",
]

# Each distributed model's strategy. It is not an attribute of the model, so that copied
# or saved models do not include it.
strategies: weakref.WeakKeyDictionary[Any, Strategy] = weakref.WeakKeyDictionary()
# The strategy in whose scope a model was last used, even if it is not distributed yet.
scope_strategies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def as_array(tensor: Any) -> Array:
    """Return a copy of a tensor in host memory."""
    # Copy explicitly, because on CPUs some backends return the tensor's own memory.
    return np.array(keras.ops.convert_to_numpy(tensor))


def value_of(variable: Any) -> Array:
    """Return a copy of a Keras variable in host memory."""
    return as_array(variable.value)


def optimizer_of(model: Any) -> Any:
    """Return the optimizer with which a model was compiled, or None."""
    return getattr(model, "optimizer", None)


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return the model's optimizers by attribute name; custom models may have many."""
    kind = keras.optimizers.Optimizer
    return {k: v for k, v in vars(model).items() if isinstance(v, kind)}


def put(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace an object's method; ``function`` gets the original method first.

    The original is the method of the object's class, even if another function has
    already replaced it on this object.
    """
    vars(owner).pop(name, None)
    inner = getattr(owner, name)
    method = functools.wraps(inner)(functools.partial(function, inner))
    # With setattr Keras would track the function as a part of the model.
    object.__setattr__(owner, name, method)


def seed_generators(model: Any) -> list[Any]:
    """Return the seed generators of a model."""
    layers = model._flatten_layers()
    return [generator for layer in layers for generator in layer._seed_generators]


def seed_mask(replica: int) -> Array:
    """Return the mask that is XORed with a replica's seeds; 0 for replica 0."""
    key = np.random.SeedSequence(replica).generate_state(1)[0] >> 1
    return np.array([int(key) if replica else 0, 0])


def separate_seeds(model: Any, mask: Callable[[], Any]) -> None:
    """Make replicas draw different random numbers, although their seeds are equal.

    ``mask`` returns the mask of the replica that draws a number. Replica 0 draws the
    same numbers as one process would.
    """

    def draw(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seed = inner(*args, **kwargs)
        return keras.ops.bitwise_xor(seed, keras.ops.cast(mask(), seed.dtype))

    for generator in seed_generators(model):
        put(generator, "next", draw)


class TrainingState:
    """Weights, metrics and moving means of a model; its methods are collective.

    Between two calls of `average`, this replica's rows alone update its moving means.
    `average` replaces the moving means by their mean over replicas. The result is the
    same as if each step had updated the moving means with the mean over replicas.
    """

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self.model = model
        self.strategy = strategy
        # Not `non_trainable_variables`: this also has weights of frozen layers.
        moving = [
            variable
            for layer in model._flatten_layers()
            for variable in layer._non_trainable_variables
        ]
        is_moving = keras.backend.is_float_dtype
        self._moving = [v for v in moving if is_moving(v.dtype)]
        self._others = [v for v in moving if not is_moving(v.dtype)]
        # All variables whose values depend on a replica's rows.
        self.moving = [*self._moving, *self._others]
        # Values of the moving statistics when they were last equal on all replicas.
        self._common: list[Array] = []

    def begin(self, what: str) -> None:
        """Set all replicas' weights and optimizer state to replica 0's."""
        model, optimizer = self.model, optimizer_of(self.model)
        known = [*model.variables, *(optimizer.variables if optimizer else ())]
        self._broadcast(known, what)
        self._common = [value_of(variable) for variable in self._moving]

    def _broadcast(self, variables: list[Any], what: str) -> None:
        own = [value_of(variable) for variable in variables]
        values = self.strategy.collectives.broadcast(own, 0, what)
        if self.strategy.replica_id:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def average(self) -> None:
        """Replace the moving means of all replicas by their mean."""
        if self._others:
            self._broadcast(self._others, "states of layers")
        if not self._moving:
            return
        given = [self._changes(own) for own in self.replica_values(self._moving)]
        *changes, counts = self._summed(given, "moving means")
        for variable, common, change, count in zip(
            self._moving, self._common, changes, counts, strict=True
        ):
            if count:
                common[...] += (change / count).astype(common.dtype)
            variable.assign(common)

    def replica_values(self, variables: list[Any]) -> list[list[Array]]:
        """Return the values of some variables, for each replica of this rank."""
        return [[value_of(variable) for variable in variables]]

    def _changes(self, values: list[Array]) -> list[Array]:
        """Return the changes of values since `_common`, and whether each is finite."""
        with np.errstate(invalid="ignore"):
            pairs = zip(values, self._common, strict=True)
            changes = [value - common for value, common in pairs]
        # After a batch without rows a moving mean is NaN: leave it out of the sum.
        known = np.array([np.isfinite(change).all() for change in changes], np.float64)
        for change, is_known in zip(changes, known, strict=True):
            if not is_known:
                change[...] = 0
        return [*changes, known]

    def total_metrics(self) -> None:
        """Sum or average the metrics over all replicas, and assign the results."""
        variables = self.model.metrics_variables
        if not variables:
            return
        sums = self._summed(self.replica_values(variables), "metrics")
        for variable, value in zip(variables, sums, strict=True):
            means = variable.aggregation == "mean"
            size = self.strategy.num_replicas_in_sync if means else 1
            variable.assign(value / size if means else value)

    def _summed(self, values: list[list[Array]], what: str) -> list[Array]:
        return self.strategy.replicas.reduce_parts(ReduceOp.SUM, values, what)
