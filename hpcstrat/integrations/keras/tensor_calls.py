"""Collective calls on tensors in a training step, for each backend of Keras.

JAX or TensorFlow may compile a step. The collective call is then a part of the compiled
function, and runs in a thread of the backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np

from hpcstrat.engine.options import ReduceOp
from hpcstrat.strategies import Strategy

__all__ = ["TensorCalls", "drawn_seed", "exchanges"]


class TensorCalls(NamedTuple):
    """A strategy's collective functions for tensors of one backend.

    ``total`` sums a number over the replicas. ``mean`` returns the means of gradients
    over replicas, after each replica has multiplied its gradients by its weight;
    gradients with weight 0 may be NaN. ``after(total)`` returns a context; operations
    in this context run after the sum that returned ``total``.
    """

    total: Callable[[Strategy, Any], Any]
    mean: Callable[[Strategy, list[Any], Any], list[Any]]
    after: Callable[[Any], AbstractContextManager[Any]] = nullcontext


@functools.cache
def exchanges() -> TensorCalls:
    """Return the `TensorCalls` of Keras' current backend."""
    backend = keras.config.backend()
    made = {"torch": _of_torch, "jax": _of_jax, "tensorflow": _of_tensorflow}
    if backend not in made:
        raise NotImplementedError(
            "expected the backend torch, jax or tensorflow, found "
            f"{backend!r}, which trains no models; set KERAS_BACKEND"
        )
    return made[backend]()


def drawn_seed() -> int:
    """Draw a seed for an order of rows, from the generator from which Keras draws one.

    Keras draws seeds of weights from Python's generator, but no orders of arrays.
    """
    backend, most = keras.config.backend(), 2**31 - 1
    if backend == "torch":
        import torch

        return int(torch.randint(most, ()))
    if backend == "tensorflow":
        import tensorflow as tf

        return int(tf.random.uniform((), maxval=most, dtype=tf.int32))
    return int(np.random.randint(most))  # noqa: NPY002


def _added(strategy: Strategy, number: Any) -> Any:
    own = np.asarray(number, np.float64)
    return strategy.collectives.batch_reduce(ReduceOp.SUM, own, "rows of a batch")


def _weigh(arrays: Iterable[Any], weight: Any) -> None:
    """Multiply arrays by a number in place; 0 also sets NaN to 0."""
    for array in arrays if weight != 1 else ():
        # Without rows the gradient is NaN, and NaN * 0 would be NaN, too.
        array[...] = array * array.dtype.type(weight) if weight else 0


def _of_torch() -> TensorCalls:
    import torch

    from hpcstrat.integrations.torch.tensors import memory_of, torchs_stream

    @torchs_stream()
    def mean(strategy: Strategy, gradients: list[Any], weight: Any) -> list[Any]:
        # Reduce in place, because nothing else uses the gradients' memory.
        arrays = [memory_of(gradient) for gradient in gradients]
        _weigh(arrays, weight)
        collectives = strategy.collectives
        collectives.batch_reduce(ReduceOp.MEAN, arrays, "gradients", out=arrays)
        return gradients

    def total(strategy: Strategy, number: Any) -> float:
        return float(_added(strategy, number))

    # torch.compile calls these functions without compiling them.
    leave = torch.compiler.disable
    return TensorCalls(leave(total), leave(mean))


def _of_jax() -> TensorCalls:
    import jax.numpy as jnp

    from hpcstrat.integrations.jax import all_reduce

    def total(strategy: Strategy, number: Any) -> Any:
        return all_reduce(jnp.asarray(number, jnp.float32), "sum", strategy)

    def mean(strategy: Strategy, gradients: list[Any], weight: Any) -> list[Any]:
        if type(weight) is int and weight == 0:
            gradients = [jnp.zeros_like(gradient) for gradient in gradients]
        elif type(weight) is not int:
            gradients = [g * weight.astype(g.dtype) for g in gradients]
        found: list[Any] = all_reduce(gradients, "mean", strategy)
        return found

    return TensorCalls(total, mean)


def _of_tensorflow() -> TensorCalls:
    import tensorflow as tf

    def total(strategy: Strategy, number: Any) -> Any:
        own = tf.cast(number, tf.float64)
        added = functools.partial(_added, strategy)
        result = tf.numpy_function(added, [own], tf.float64)
        # TensorFlow does not know the shape of a Python function's result.
        result.set_shape(())
        return result

    def alone(gradients: list[Any]) -> list[Any]:
        # Return tensors that share their memory with no other tensor, by writing an
        # empty slice into each. TensorFlow writes in place, but copies a tensor that
        # something else uses, such as a variable or a later operation. The slice begins
        # at the current time: with a constant, TensorFlow would fold constant gradients
        # into one tensor for all steps, and merge equal operations of two calls.
        # Different strides keep it from merging the operations of one call.
        at = tf.reshape(tf.cast(tf.timestamp(), tf.int64), [1])
        return [
            tf.raw_ops.TensorStridedSliceUpdate(
                input=tf.reshape(gradient, [-1]),
                begin=at,
                end=at,
                strides=tf.constant([number], tf.int64),
                value=tf.zeros([0], gradient.dtype),
            )
            for number, gradient in enumerate(gradients, 1)
        ]

    def mean(strategy: Strategy, gradients: list[Any], weight: Any) -> list[Any]:
        def reduced(weight: Any, *tensors: Any) -> list[Any]:
            # `_numpy` returns the memory itself; `numpy` would copy.
            arrays = [tensor._numpy() for tensor in tensors]
            _weigh(arrays, float(weight))
            collectives = strategy.collectives
            collectives.batch_reduce(ReduceOp.MEAN, arrays, "gradients", out=arrays)
            # Return the tensor if it shares the array's memory, because the optimizer
            # may write into tensors, but not into arrays.
            return [
                tensor if np.may_share_memory(tensor._numpy(), array) else array
                for tensor, array in zip(tensors, arrays, strict=True)
            ]

        # Gradients of embeddings are rows with indices: make them dense.
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        given, function = alone(dense), functools.partial(reduced, weight)
        if type(weight) is not int:
            given = [tf.cast(weight, tf.float64), *given]
            function = functools.partial(reduced)
        results = tf.py_function(function, given, [g.dtype for g in dense])
        return [
            tf.reshape(result, tf.shape(gradient))
            for result, gradient in zip(results, dense, strict=True)
        ]

    def after(total: Any) -> AbstractContextManager[Any]:
        # Without this, TensorFlow could compute before it joins the sum, while other
        # replicas wait for this replica in the sum.
        return tf.control_dependencies([total])

    return TensorCalls(total, mean, after)
