"""Keras' models on logical replicas: a rank runs several replicas in turn.

A step has two parts. First, Keras' own ``train_step`` computes the gradients of one
replica, and is called for each replica of the rank. Then the gradients are combined,
and the optimizer applies them once. Both parts may be compiled.

Each replica has its own moving means, metrics and states of random seeds. These values
are loaded into the model during the replica's part of a step; between steps the model
has the values of the rank's first replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np

from hpcstrat.data.batches import share
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.keras.compiled_steps import Outcome, compiled_steps
from hpcstrat.integrations.keras.distributed_model import DistributedMethods
from hpcstrat.integrations.keras.py_dataset import Batches
from hpcstrat.integrations.keras.replicas import (
    TrainingState,
    as_array,
    put,
    seed_generators,
    seed_mask,
)
from hpcstrat.strategies import Strategy

__all__ = ["LogicalDistributed"]


class _StepInputs(NamedTuple):
    """Inputs of a replica's part of a step, in addition to its rows.

    ``total`` is the number of rows of all replicas. ``wholes`` are the divisors of the
    losses, summed over replicas, or None if these sums are not known yet.
    """

    total: Any
    mask: Any
    wholes: Any


class LogicalState(TrainingState):
    """The state of a model, with own values for each replica of a rank."""

    def __init__(self, model: Any, strategy: Strategy) -> None:
        super().__init__(model, strategy)
        self._count = len(strategy.local_replicas)
        # Own values by replica, or None if all replicas have the model's values.
        self._own: list[list[Any]] | None = None

    def own_variables(self) -> list[Any]:
        """Return the variables for which each replica has its own value."""
        seeds = [generator.state for generator in seed_generators(self.model)]
        return [*self.moving, *seeds, *self.model.metrics_variables]

    def own(self, in_model: Callable[[list[Any]], list[Any]]) -> list[list[Any]]:
        """Return each replica's own values; ``in_model`` reads the model's values."""
        variables = self.own_variables()
        if self._own is None or len(self._own[0]) != len(variables):
            self._own = [in_model(variables)] * self._count
        return self._own

    def keep(self, own: list[list[Any]]) -> None:
        """Store the replicas' own values."""
        self._own = own

    def begin(self, what: str) -> None:
        """Set all replicas' state to replica 0's; collective."""
        super().begin(what)
        self._own = None

    def finish(self) -> None:
        """Drop the own values, so that all replicas have the model's values."""
        self._own = None

    def reset_metrics(self) -> None:
        """Set all replicas' metrics to the model's metrics, which were just reset."""
        if self._own is not None:
            seen = self.model.metrics_variables
            values = [keras.ops.copy(variable.value) for variable in seen]
            first = len(self._own[0]) - len(seen)
            self._own = [[*own[:first], *values] for own in self._own]

    def replica_values(self, variables: list[Any]) -> list[list[Array]]:
        """Return the values of some variables, for each replica of this rank."""
        places = {id(v): i for i, v in enumerate(self.own_variables())}
        every = self.own(lambda own: [variable.value for variable in own])
        return [[as_array(own[places[id(v)]]) for v in variables] for own in every]


class LogicalDistributed(DistributedMethods):
    """Replacements for the methods of a model that has several replicas on a rank."""

    state: LogicalState
    state_class = LogicalState

    def __init__(
        self, model: Any, strategy: Strategy, *, by_scope: bool = False
    ) -> None:
        super().__init__(model, strategy, by_scope=by_scope)
        if len(self._optimizers) != 1:
            raise NotImplementedError(
                "expected a model with one optimizer on logical replicas, found "
                f"{len(self._optimizers)}; use one rank for each replica"
            )
        self._block = strategy.local_replicas
        self._masks = [seed_mask(replica) for replica in self._block]
        self._steps = compiled_steps(self)
        self._given: _StepInputs | None = None
        # Results of the latest replica's part of a step: gradients for the optimizer,
        # and divisors of the losses.
        self._gradients: list[Any] | None = None
        self._divisors: list[Any] = []
        # Number of divisors in a step, by kind of step and structure of a batch.
        self._counts: dict[Any, int] = {}

    def install(self) -> None:
        """Replace the model's methods."""
        super().install()
        for kind in ("train", "test"):
            put(self.model, f"make_{kind}_function", self._maker(kind))
        put(self.model, "reset_metrics", self._reset_metrics)

    def mask(self) -> Array:
        """Return the mask that makes the running replica's random numbers different."""
        return self._masks[0] if self._given is None else self._given.mask

    def _reset_metrics(self, inner: Callable[[], Any]) -> None:
        inner()
        self.state.reset_metrics()

    # Methods that run inside of a replica's part of a step.

    @contextmanager
    def part(self, given: _StepInputs) -> Iterator[None]:
        """Set a replica's inputs, and clear old results, for one call of the step."""
        self._given, self._gradients, self._divisors = given, None, []
        try:
            yield
        finally:
            self._given = None

    def told(self) -> tuple[list[Any] | None, list[Any]]:
        """Return gradients of a replica's part of a step, and the losses' divisors."""
        return self._gradients, self._divisors

    def _train_step(self, inner: Callable[..., Any], *args: Any) -> Any:
        if self._given is None:
            raise RuntimeError(
                "expected train_step to be called by fit or train_on_batch, found it "
                "called directly; with logical replicas it is a part of a step"
            )
        with self._step(args[-1]):
            self._total = self._given.total
            return inner(*args)

    def _factor(self, divisor: Any) -> Any:
        given = self._given
        if self._rows is None or given is None:
            return None
        own = whole = 1
        if divisor is not None:
            number = len(self._divisors)
            self._divisors.append(divisor)
            if given.wholes is None:
                return None
            own, whole = divisor, given.wholes[number]
        return self._ratio(own, whole, given.total)

    def _apply(
        self, inner: Callable[..., Any], grads: Any, trainable_variables: Any = None
    ) -> Any:
        if self._given is None:
            return inner(grads, trainable_variables)
        self._keep(grads)
        return None

    def _stateless_apply(
        self, inner: Callable[..., Any], variables: Any, grads: Any, trainable: Any
    ) -> Any:
        if self._given is None:
            return inner(variables, grads, trainable)
        self._keep(grads)
        return trainable, variables

    def _keep(self, gradients: Any) -> None:
        if self._gradients is not None:
            raise NotImplementedError(
                "expected train_step to apply gradients once on logical replicas, "
                "found a second time in a step; use one rank for each replica"
            )
        weight = self._weight()
        self._gradients = [
            None if gradient is None else self._weighed(gradient, weight)
            for gradient in gradients
        ]

    @staticmethod
    def _weighed(gradient: Any, weight: Any) -> Any:
        # TensorFlow's gradients of embeddings are rows with indices: make them dense.
        gradient = keras.ops.convert_to_tensor(gradient, sparse=False)
        if type(weight) is int:
            return gradient if weight else keras.ops.zeros_like(gradient)
        # Without rows the gradient is NaN, and NaN * 0 would be NaN, too.
        weight = keras.ops.cast(weight, gradient.dtype)
        zero = keras.ops.zeros_like(gradient)
        return keras.ops.where(weight == 0, zero, gradient * weight)

    # A step.

    def _maker(self, kind: str) -> Callable[..., None]:
        def make(inner: Callable[..., Any], force: bool = False) -> None:
            del inner
            name = f"{kind}_function"
            if getattr(self.model, name) is None or force:
                setattr(self.model, name, self._steps.function(kind))

        return make

    def step(self, kind: str, common: Any, data: Any) -> tuple[Any, Any]:
        """Make a step with this rank's rows of the global batch; return logs and state.

        Collective over the strategy's replicas. ``common`` is the state that the
        backend passes from step to step, see `CompiledSteps`.
        """
        steps = self._steps
        # Each replica needs its own values of the metrics' variables, so make these
        # variables now; metrics may otherwise make them only at the first batch.
        self.model._symbolic_build(data_batch=data)
        variables = self.state.own_variables()
        every = self.state.own(lambda own: steps.own(own, common))
        total, parts = self._divided(data)

        def run(wholes: Any) -> list[Outcome]:
            given = [_StepInputs(total, mask, wholes) for mask in self._masks]
            return [
                steps.part(kind, common, (variables, own), inputs)
                for own, *inputs in zip(every, given, parts, strict=True)
            ]

        outcomes = run(self._wholes(kind, data, run))
        self.state.keep([outcome.own for outcome in outcomes])
        common = steps.with_own(variables, outcomes[0].own, common)
        if kind == "train":
            common = steps.apply(self._means(outcomes), common)
        return outcomes[0].logs, common

    def _divided(self, data: Any) -> tuple[np.float64, list[Any]]:
        """Return the global number of rows, and this rank's rows for each replica."""
        rows = int(keras.tree.flatten(data)[0].shape[0])
        collectives = self.strategy.collectives
        own = np.asarray(rows, np.float64)
        total = int(collectives.batch_reduce(ReduceOp.SUM, own, "rows of a batch"))
        count = self.strategy.num_replicas_in_sync
        bounds = [share(total, count, replica) for replica in self._block]
        start = bounds[0][0]
        if bounds[-1][1] - start != rows:
            raise ValueError(
                f"expected {bounds[-1][1] - start} of {total} rows on this rank, found "
                f"{rows}; pass arrays, Batches or a hpcstrat.Dataset to fit"
            )
        return np.float64(total), [
            keras.tree.map_structure(
                lambda leaf, a=a, b=b: (
                    leaf[a - start : b - start]
                    if hasattr(leaf, "shape") and len(leaf.shape)
                    else leaf
                ),
                data,
            )
            for a, b in bounds
        ]

    def _wholes(
        self, kind: str, data: Any, run: Callable[[Any], list[Outcome]]
    ) -> list[Array]:
        """Return the sums of the losses' divisors over all replicas.

        Divisors are sums of weights, or numbers of unmasked values. Losses need these
        sums in advance, so a step of each replica is first run only to compute the
        sums; all other results of this run are discarded.
        """
        shape = keras.tree.map_structure(lambda leaf: leaf is None, data)
        key = kind, str(shape)
        if self._counts.get(key) == 0:
            return []
        told = [outcome.divisors for outcome in run(None)]
        self._counts[key] = len(told[0])
        if not told[0]:
            return []
        reduce_parts = self.strategy.replicas.reduce_parts
        return reduce_parts(ReduceOp.SUM, told, "weights of a batch")

    def _means(self, outcomes: list[Outcome]) -> list[Any]:
        given = [outcome.gradients or [] for outcome in outcomes]
        there = [i for i, gradient in enumerate(given[0]) if gradient is not None]
        parts = [[self._steps.array(own[i]) for i in there] for own in given]
        found = self.strategy.replicas.reduce_parts(ReduceOp.MEAN, parts, "gradients")
        means: list[Any] = [None] * len(given[0])
        for index, mean in zip(there, found, strict=True):
            means[index] = keras.ops.convert_to_tensor(mean)
        return means

    # Methods that contain whole steps, such as fit.

    def _result(self, inner: Callable[..., Any], logs: Any) -> Any:
        found = super()._result(inner, logs)
        self.state.finish()
        return found

    def _batched(
        self, given: dict[str, Any], steps: str, *, shuffle: Any = False, seed: int = 0
    ) -> None:
        super()._batched(given, steps, shuffle=shuffle, seed=seed)
        if not isinstance(given["x"], Batches):
            raise NotImplementedError(
                "expected arrays, Batches or a hpcstrat.Dataset on logical replicas, "
                f"found {type(given['x']).__name__}, which does not say what rows "
                "each replica has; pass one of those"
            )
