"""Exchanges between replicas in a training step, for each backend of Keras.

A step may be a function that JAX or TensorFlow has compiled: the exchange is then a
part of it, which calls the library from a thread of theirs.
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

__all__ = ["TensorCalls", "exchanges"]


class TensorCalls(NamedTuple):
    """Collective functions of a strategy on tensors of a backend.

    ``total`` adds up a number of each replica. ``mean`` returns the means of gradients,
    each multiplied by a weight of its replica: those of no rows, with 0, may be no
    numbers. What is computed in the context that ``after`` returns comes after a total.
    """

    total: Callable[[Strategy, Any], Any]
    mean: Callable[[Strategy, list[Any], Any], list[Any]]
    after: Callable[[Any], AbstractContextManager[Any]] = nullcontext


@functools.cache
def exchanges() -> TensorCalls:
    """Return the functions of the backend in use."""
    backend = keras.config.backend()
    made = {"torch": _of_torch, "jax": _of_jax, "tensorflow": _of_tensorflow}
    if backend not in made:
        raise NotImplementedError(
            "expected the backend torch, jax or tensorflow, found "
            f"{backend!r}, which trains no models; set KERAS_BACKEND"
        )
    return made[backend]()


def _added(strategy: Strategy, number: Any) -> Any:
    own = np.asarray(number, np.float64)
    return strategy.collectives.batch_reduce(ReduceOp.SUM, own, "rows of a batch")


def _weigh(arrays: Iterable[Any], weight: Any) -> None:
    """Multiply arrays by a number, in place."""
    for array in arrays if weight != 1 else ():
        # Not times 0: NaN, as the mean over no rows gives it, would stay NaN.
        array[...] = array * array.dtype.type(weight) if weight else 0


def _of_torch() -> TensorCalls:
    import torch

    from hpcstrat.integrations.torch.tensors import memory_of, torchs_stream

    @torchs_stream()
    def mean(strategy: Strategy, gradients: list[Any], weight: Any) -> list[Any]:
        # In place: their memory is used by nothing else.
        arrays = [memory_of(gradient) for gradient in gradients]
        _weigh(arrays, weight)
        collectives = strategy.collectives
        collectives.batch_reduce(ReduceOp.MEAN, arrays, "gradients", out=arrays)
        return gradients

    def total(strategy: Strategy, number: Any) -> float:
        return float(_added(strategy, number))

    # Compiled code is left for the calls.
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
        # TensorFlow knows nothing of what a function of Python returns.
        result.set_shape(())
        return result

    def alone(gradients: list[Any]) -> list[Any]:
        # A slice without elements is written: TensorFlow does that in place where
        # nothing else holds the tensor, such as a variable or an operation that is
        # still to come, and copies it elsewhere. That the slice begins at a time keeps
        # constants from being folded, which all steps would share, and what is the same
        # in two calls from being done once; in a call, strides tell gradients apart.
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
            # Not `numpy`, which copies.
            arrays = [tensor._numpy() for tensor in tensors]
            _weigh(arrays, float(weight))
            collectives = strategy.collectives
            collectives.batch_reduce(ReduceOp.MEAN, arrays, "gradients", out=arrays)
            # The tensors themselves: the optimizer may write into their memory, but not
            # into that of arrays. Where they are copies, after all, the arrays.
            return [
                tensor if np.may_share_memory(tensor._numpy(), array) else array
                for tensor, array in zip(tensors, arrays, strict=True)
            ]

        # Gradients of embeddings are rows with their indices.
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
        # Else some replicas compute before it, and others wait for them.
        return tf.control_dependencies([total])

    return TensorCalls(total, mean, after)
