"""Metrics that compare labels with predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.kinds import as_array
from hpcstrat.engine.typing import Array, ArrayLike
from hpcstrat.metrics.averages import (
    MeanMetricWrapper,
    as_float64,
    mean_over,
    of_one_library,
)


def _matching(true: Array, predicted: Array) -> tuple[Array, Array]:
    """Return arrays of one shape, without a last dimension of 1 that only one has."""
    true, predicted = of_one_library(true, predicted)
    if true.ndim == predicted.ndim + 1 and true.shape[-1] == 1:
        true = true[..., 0]
    elif predicted.ndim == true.ndim + 1 and predicted.shape[-1] == 1:
        predicted = predicted[..., 0]
    # Do not broadcast, because shapes (n,) and (m, n) would become (m, n).
    if true.shape != predicted.shape:
        raise ValueError(
            f"expected labels and predictions of one shape, found {true.shape} and "
            f"{predicted.shape}; reshape them, nothing is broadcast"
        )
    return true, predicted


def _over_columns(values: Array) -> Array:
    """Average over the last dimension, except in a vector of one value per example."""
    array = values.astype(np.float64, copy=False)
    # Keep vectors: averaged as in tf.keras, small batches would weigh as much as large.
    return mean_over(array, -1) if array.ndim > 1 else array


@without_fp_warnings
def _equal(y_true: ArrayLike, y_pred: ArrayLike) -> Array:
    true, predicted = _matching(as_array(y_true), as_array(y_pred))
    # Compare in the labels' dtype, because 0.1 in float32 is not 0.1 in float64.
    if true.dtype.kind == predicted.dtype.kind == "f":
        predicted = predicted.astype(true.dtype, copy=False)
    return as_array(true == predicted)


@without_fp_warnings
def _equal_largest(y_true: ArrayLike, y_pred: ArrayLike) -> Array:
    true, predicted = of_one_library(as_float64(y_true), as_float64(y_pred))
    if true.ndim == 0 or true.shape != predicted.shape:
        raise ValueError(
            "expected labels in one-hot form, of the predictions' shape "
            f"{predicted.shape}, found {true.shape}; use SparseCategoricalAccuracy for "
            "numbers of classes"
        )
    return as_array(true.argmax(axis=-1) == predicted.argmax(axis=-1))


@without_fp_warnings
def _equal_class(y_true: ArrayLike, y_pred: ArrayLike) -> Array:
    true, predicted = of_one_library(as_array(y_true), as_float64(y_pred))
    if predicted.ndim == true.ndim and true.shape[-1:] == (1,):
        true = true[..., 0]
    if predicted.ndim == 0 or true.shape != predicted.shape[:-1]:
        raise ValueError(
            "expected one label for each row of predictions, of shape "
            f"{predicted.shape[:-1]}, found {true.shape}; use CategoricalAccuracy for "
            "labels in one-hot form"
        )
    return as_array(true == predicted.argmax(axis=-1))


def _difference(y_true: ArrayLike, y_pred: ArrayLike) -> Array:
    true, predicted = _matching(as_float64(y_true), as_float64(y_pred))
    return predicted - true


@without_fp_warnings
def _squared(y_true: ArrayLike, y_pred: ArrayLike) -> Array:
    difference = _difference(y_true, y_pred)
    return as_array(difference * difference)


@without_fp_warnings
def _squared_of_columns(y_true: ArrayLike, y_pred: ArrayLike) -> Array:
    return _over_columns(_squared(y_true, y_pred))


@without_fp_warnings
def _absolute_of_columns(y_true: ArrayLike, y_pred: ArrayLike) -> Array:
    return _over_columns(abs(_difference(y_true, y_pred)))


class _PairMetric(MeanMetricWrapper):
    """Base class of the metrics below, which set the function and the default name."""

    _of_pairs: Callable[[ArrayLike, ArrayLike], ArrayLike]
    _default_name: str

    def __init__(self, name: str | None = None, dtype: Any = np.float64) -> None:
        super().__init__(self._of_pairs, name or self._default_name, dtype)


class Accuracy(_PairMetric):
    """The fraction of predictions that equal their labels.

    Floats are compared in the precision of the labels. Unlike in tf.keras, a prediction
    of 1.7 is not equal to the integer label 1.

    Parameters
    ----------
    name : str, optional
        Name in messages and checkpoints; default: the name in tf.keras, such as
        ``accuracy``.
    dtype : dtype
        Dtype of the result.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> metric = hs.metrics.Accuracy()
    >>> metric.update_state([1, 2, 3, 4], [0, 2, 3, 4])
    >>> float(metric.result())
    0.75
    """

    _of_pairs, _default_name = staticmethod(_equal), "accuracy"


class BinaryAccuracy(_PairMetric):
    """The fraction of predictions that are on their label's side of a threshold.

    If an example has several columns, its value is the fraction of matching columns.

    Parameters
    ----------
    name : str, optional
        Name in messages and checkpoints.
    dtype : dtype
        Dtype of the result.
    threshold : float
        Predictions above the threshold count as label 1, others as label 0.
    """

    _default_name = "binary_accuracy"

    def __init__(
        self, name: str | None = None, dtype: Any = np.float64, threshold: float = 0.5
    ) -> None:
        super().__init__(name, dtype)
        self.threshold = threshold

    @without_fp_warnings
    def _of_pairs(self, y_true: ArrayLike, y_pred: ArrayLike) -> Array:
        true, predicted = _matching(as_float64(y_true), as_float64(y_pred))
        return _over_columns(true == (predicted > self.threshold))


class CategoricalAccuracy(_PairMetric):
    """The fraction of rows whose largest prediction is at the largest label's position.

    Labels are in one-hot form. The constructor has the same arguments as `Accuracy`."""

    _of_pairs = staticmethod(_equal_largest)
    _default_name = "categorical_accuracy"


class SparseCategoricalAccuracy(_PairMetric):
    """The fraction of rows whose largest prediction is at the label's class.

    Labels are class numbers. Their shape is the predictions' shape without the last
    dimension, or with a last dimension of 1. The constructor has the same arguments as
    `Accuracy`.
    """

    _of_pairs = staticmethod(_equal_class)
    _default_name = "sparse_categorical_accuracy"


class MeanSquaredError(_PairMetric):
    """The mean of squared differences, averaged over the columns of each example.

    The constructor has the same arguments as `Accuracy`."""

    _of_pairs = staticmethod(_squared_of_columns)
    _default_name = "mean_squared_error"


class MeanAbsoluteError(_PairMetric):
    """The mean of absolute differences, averaged over the columns of each example.

    The constructor has the same arguments as `Accuracy`."""

    _of_pairs = staticmethod(_absolute_of_columns)
    _default_name = "mean_absolute_error"


class RootMeanSquaredError(_PairMetric):
    """The square root of the mean of squared differences.

    The root is computed from the mean over all replicas, because an average of roots
    would be wrong. The constructor has the same arguments as `Accuracy`.
    """

    # Do not average columns first: as in tf.keras, all elements have equal weight.
    _of_pairs, _default_name = staticmethod(_squared), "root_mean_squared_error"

    @without_fp_warnings
    def result_of(self, totals: Any) -> Any:
        total, count = totals
        return self.dtype.type(np.sqrt(total / count) if count else 0.0)
