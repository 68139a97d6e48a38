"""Corrects losses that are not plain means over rows: sums, weighted or masked means.

The mean over replicas weights each replica's loss by its number of rows. A loss that is
not a plain mean over rows is multiplied by a factor that makes the weighted mean equal
to the loss of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend import get_keras_mask

from hpcstrat.integrations.keras.replicas import put

__all__ = ["correct"]

# A function that returns a loss's factor, given the divisor of this replica's loss.
Factor = Callable[[Any], Any]


def correct(compiled: Any, factor: Factor) -> None:
    """Correct a compiled model's losses, now or when Keras has created them.

    ``factor`` is called with the divisor of this replica's loss, or with None if the
    loss is a sum. Outside of a step ``factor`` returns None, and changes nothing.
    """

    def replace() -> None:
        compiled._flat_losses = [
            one._replace(loss=_corrected(getattr(one.loss, "inner", one.loss), factor))
            for one in compiled._flat_losses
        ]

    def build(inner: Callable[..., None], *args: Any) -> None:
        inner(*args)
        replace()

    # Keras creates the loss objects at the first batch, when it knows the outputs.
    put(compiled, "build", build)
    if compiled.built:
        replace()


def _corrected(loss: Any, factor: Factor) -> Callable[..., Any]:
    def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = loss(y_true, y_pred, sample_weight)
        if tuple(value.shape) == (0,):
            # For a batch without rows, Keras returns the loss as an empty array.
            value = keras.ops.sum(value)
        mask = get_keras_mask(y_pred)
        reduction = getattr(loss, "reduction", None)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            divisor = _total(sample_weight, mask)
        elif reduction == "sum" or mask is None:
            divisor = None
        else:
            divisor = _total(mask)
        if divisor is None and reduction != "sum":
            return value
        found = factor(divisor)
        return value if found is None else value * keras.ops.cast(found, value.dtype)

    call.inner = loss  # type: ignore[attr-defined]
    return call


def _total(weights: Any, mask: Any = None) -> Any:
    weights = keras.ops.cast(weights, "float32")
    if mask is not None:
        mask = keras.ops.cast(mask, "float32")
        while len(weights.shape) < len(mask.shape):
            weights = keras.ops.expand_dims(weights, -1)
        weights = weights * mask
    # A divisor depends only on the data, so no gradient is computed through it.
    return keras.ops.stop_gradient(keras.ops.sum(weights))
