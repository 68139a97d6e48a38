"""Steps of Keras models on logical replicas: the code that depends on the backend."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["CompiledSteps", "Outcome", "compiled_steps"]


class Outcome(NamedTuple):
    """Results of one replica's part of a step; for ``own`` see `CompiledSteps`."""

    own: list[Any]
    gradients: list[Any] | None
    divisors: list[Any]
    logs: Any


def compiled_steps(distributed: Any) -> CompiledSteps:
    """Return the `CompiledSteps` of a model, for Keras' current backend."""
    kinds = {"torch": _OfTorch, "jax": _OfJax, "tensorflow": _OfTensorFlow}
    kind: Any = kinds[keras.config.backend()]
    return kind(distributed)


def _next(batches: Iterator[Any], count: int) -> list[Any]:
    """Return a list of the next batches, at most ``count``.

    Raises StopIteration if there are no more batches, as Keras requires.
    """
    found = list(itertools.islice(batches, count))
    if not found:
        raise StopIteration
    return found


class CompiledSteps:
    """The parts of a step that depend on the backend; this base class compiles nothing.

    ``common`` is the state that JAX passes from step to step; it is None with other
    backends, which keep the state in variables. ``own`` are one replica's values of the
    variables that differ between replicas.
    """

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._model = distributed.model

    def function(self, kind: str) -> Callable[..., Any]:
        """Return the function that Keras calls for a ``train`` or ``test`` step."""

        def function(batches: Any) -> Any:
            logs = None
            for data in _next(batches, self._model.steps_per_execution):
                logs, _ = self._distributed.step(kind, None, self._plain(data))
            return logs

        return function

    @staticmethod
    def _plain(data: Any) -> Any:
        return data

    def own(self, variables: list[Any], common: Any) -> list[Any]:
        """Return copies of the current values of these variables."""
        del common
        return [keras.ops.copy(variable.value) for variable in variables]

    def with_own(self, variables: list[Any], own: list[Any], common: Any) -> Any:
        """Set variables to a replica's ``own`` values; return the new ``common``."""
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)
        return common

    def part(
        self,
        kind: str,
        common: Any,
        state: tuple[list[Any], list[Any]],
        inputs: list[Any],
    ) -> Outcome:
        """Call the model's step for one replica.

        ``state`` is a pair: variables, and the replica's own values of these variables.
        ``inputs`` are the `_StepInputs` and the replica's rows.
        """
        variables, own = state
        common = self.with_own(variables, own, common)
        gradients, divisors, logs, common = self._call(kind, common, *inputs)
        return Outcome(self.own(variables, common), gradients, divisors, logs)

    def _call(self, kind: str, common: Any, given: Any, data: Any) -> Any:
        step = getattr(self._model, f"{kind}_step")
        with self._distributed.part(given):
            logs = step(data)
            return *self._distributed.told(), logs, common

    def apply(self, gradients: list[Any], common: Any) -> Any:
        """Let the optimizer apply the gradients; return the new ``common``."""
        self._model.optimizer.apply(gradients, self._model.trainable_variables)
        return common

    def array(self, gradient: Any) -> Array:
        """Return a gradient as an array, which the caller must not change."""
        return np.asarray(gradient)


class _OfTorch(CompiledSteps):
    def function(self, kind: str) -> Callable[..., Any]:
        import torch

        def function(data: Any) -> Any:
            with torch.set_grad_enabled(kind == "train"):
                return self._distributed.step(kind, None, data[0])[0]

        return function

    def own(self, variables: list[Any], common: Any) -> list[Any]:
        del common
        return [variable.value.detach().clone() for variable in variables]

    def apply(self, gradients: list[Any], common: Any) -> Any:
        import torch

        with torch.no_grad():
            return super().apply(gradients, common)

    def array(self, gradient: Any) -> Array:
        from hpcstrat.integrations.torch.tensors import memory_of

        return memory_of(gradient)


class _OfTensorFlow(CompiledSteps):
    def __init__(self, distributed: Any) -> None:
        super().__init__(distributed)
        self._compiled: dict[Any, Any] = {}

    @staticmethod
    def _plain(data: Any) -> Any:
        import tensorflow as tf

        # tf.data represents a missing part of a batch by this type.
        missing = tf.experimental.Optional
        return keras.tree.map_structure(
            lambda leaf: None if isinstance(leaf, missing) else leaf, data
        )

    def _call(self, kind: str, common: Any, given: Any, data: Any) -> Any:
        import tensorflow as tf

        call = functools.partial(super()._call, kind, common)
        if self._model.run_eagerly:
            return call(given, data)
        leaves = keras.tree.flatten((given, data))
        there = [i for i, leaf in enumerate(leaves) if leaf is not None]
        tensors = [tf.convert_to_tensor(leaves[i]) for i in there]
        pairs = zip(there, tensors, strict=True)
        key = kind, *((i, t.dtype, *t.shape[1:]) for i, t in pairs)
        if key not in self._compiled:
            # The number of rows is open, so that one graph serves batches of all sizes.
            signature = [
                tf.TensorSpec([None, *t.shape[1:]] if len(t.shape) else [], t.dtype)
                for t in tensors
            ]

            def compiled(*tensors: Any) -> Any:
                filled = [None] * len(leaves)
                for index, tensor in zip(there, tensors, strict=True):
                    filled[index] = tensor
                return call(*keras.tree.pack_sequence_as((given, data), filled))

            self._compiled[key] = tf.function(compiled, input_signature=signature)
        return self._compiled[key](*tensors)

    def apply(self, gradients: list[Any], common: Any) -> Any:
        import tensorflow as tf

        if self._model.run_eagerly:
            return super().apply(gradients, common)
        if "apply" not in self._compiled:
            apply = super().apply
            self._compiled["apply"] = tf.function(lambda given: apply(given, None))
        self._compiled["apply"](gradients)
        return common

    def array(self, gradient: Any) -> Array:
        return gradient.numpy()


class _OfJax(CompiledSteps):
    """Steps with JAX; ``common`` has trained and other weights, optimizer, metrics."""

    def __init__(self, distributed: Any) -> None:
        import jax

        super().__init__(distributed)
        compiled = not self._model.run_eagerly and self._model.jit_compile
        jit: Any = jax.jit if compiled else lambda function, **_: function
        self._part = jit(self._called, static_argnums=0)
        self._apply = jit(self._applied, donate_argnums=(0, 1))

    def function(self, kind: str) -> Callable[..., Any]:
        def function(state: Any, batches: Any) -> Any:
            logs = None
            for data in _next(batches, self._model.steps_per_execution):
                logs, state = self._distributed.step(kind, state, data)
            return logs, state

        return function

    def _places(self, variables: list[Any]) -> list[tuple[int, int]]:
        """Return variables' places in ``common``: a part and an index in that part."""
        model = self._model
        found = {id(v): (1, i) for i, v in enumerate(model.non_trainable_variables)}
        found |= {id(v): (-1, i) for i, v in enumerate(model.metrics_variables)}
        return [found[id(variable)] for variable in variables]

    def own(self, variables: list[Any], common: Any) -> list[Any]:
        return [common[part][index] for part, index in self._places(variables)]

    def with_own(self, variables: list[Any], own: list[Any], common: Any) -> Any:
        state = [list(part) for part in common]
        for (part, index), value in zip(self._places(variables), own, strict=True):
            state[part][index] = value
        return tuple(state)

    def _call(self, kind: str, common: Any, given: Any, data: Any) -> Any:
        *told, changed = self._part(kind, common, given, data)
        common = list(common)
        common[1], common[-1] = changed
        return *told, common

    def _called(self, kind: str, state: Any, given: Any, data: Any) -> Any:
        step = getattr(self._model, f"{kind}_step")
        with self._distributed.part(given):
            logs, state = step(state, data)
            return *self._distributed.told(), logs, (state[1], state[-1])

    def apply(self, gradients: list[Any], common: Any) -> Any:
        trained, others, optimizer, metrics = common
        trained, optimizer = self._apply(trained, optimizer, gradients)
        return trained, others, optimizer, metrics

    def _applied(self, trained: Any, optimizer: Any, gradients: Any) -> Any:
        return self._model.optimizer.stateless_apply(optimizer, gradients, trained)
