"""Metrics that are sums or weighted averages of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import rounded, without_fp_warnings
from hpcstrat.engine.arrays.kinds import (
    array_module,
    as_array,
    is_device,
    is_half,
    to_device,
)
from hpcstrat.engine.typing import Array, ArrayLike
from hpcstrat.metrics.metric import Metric


class Sum(Metric):
    """The weighted sum of all values.

    Parameters
    ----------
    name : str
        Name in messages and checkpoints.
    dtype : dtype
        Dtype of the result.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> metric = hs.metrics.Sum()
    >>> metric.update_state([1, 3, 5], sample_weight=[1, 1, 0])
    >>> float(metric.result())
    4.0
    """

    def __init__(self, name: str = "sum", dtype: Any = np.float64) -> None:
        super().__init__(name, dtype, ("total",))

    @without_fp_warnings
    def update_state(
        self, values: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> None:
        """Add values to this replica's total.

        Not collective; call it in replica context.

        Parameters
        ----------
        values : array_like of any shape
            Real numbers; may be empty.
        sample_weight : array_like, optional
            See `Mean.update_state`; but over dimensions that the weights lack, values
            are summed, not averaged.

        Raises
        ------
        ValueError
            If values are not real numbers, or weights have a wrong shape.
        """
        self._require_own()
        array = as_float64(values)
        if sample_weight is not None:
            array, weights = _fitted(array, as_float64(sample_weight), _sum_over)
            array = array * weights
        self._add(total=array.sum())

    @without_fp_warnings
    def result_of(self, totals: Any) -> Any:
        return self.dtype.type(totals[0])


class _Average(Metric):
    """Base class of metrics that are weighted averages of values."""

    def __init__(self, name: str, dtype: Any) -> None:
        super().__init__(name, dtype, ("total", "count"))

    @without_fp_warnings
    def _average(self, array: Array, sample_weight: ArrayLike | None) -> None:
        count: Any = array.size
        if sample_weight is not None:
            array, weights = _fitted(array, as_float64(sample_weight), mean_over)
            array = array * weights
            # The count is the sum of all values' weights.
            count = array_module(weights).broadcast_to(weights, array.shape).sum()
        self._add(total=array.sum(), count=count)

    @without_fp_warnings
    def result_of(self, totals: Any) -> Any:
        total, count = totals
        # As in tf.keras, the mean is 0 if there are no examples.
        return self.dtype.type(total / count if count else 0.0)


class Mean(_Average):
    """The weighted mean of all values; 0 if there are no values.

    Parameters
    ----------
    name : str
        Name in messages and checkpoints.
    dtype : dtype
        Dtype of the result.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> metric = hs.metrics.Mean()
    >>> metric.update_state([1, 3, 5, 7])
    >>> metric.update_state([])
    >>> float(metric.result())
    4.0
    """

    def __init__(self, name: str = "mean", dtype: Any = np.float64) -> None:
        super().__init__(name, dtype)

    def update_state(
        self, values: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> None:
        """Add values to this replica's totals.

        Not collective; call it in replica context.

        Parameters
        ----------
        values : array_like of any shape
            Real numbers; may be empty.
        sample_weight : array_like, optional
            A scalar, or an array that broadcasts to the values' shape; an additional
            last dimension of length 1 is dropped. Weights with fewer dimensions belong
            to the values' first dimensions: if only the last dimension is missing,
            weights are repeated along it; else values are first averaged over the
            missing dimensions.

        Raises
        ------
        ValueError
            If values are not real numbers, or weights have a wrong shape.
        """
        self._require_own()
        self._average(as_float64(values), sample_weight)


class MeanMetricWrapper(_Average):
    """The weighted mean of a function of labels and predictions.

    Parameters
    ----------
    fn : callable
        Function of the labels and the predictions of a batch. The function returns an
        array with a value for each example; the first dimension is the batch.
    name : str
        Name in messages and checkpoints.
    dtype : dtype
        Dtype of the result.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], ArrayLike],
        name: str = "mean_metric_wrapper",
        dtype: Any = np.float64,
    ) -> None:
        super().__init__(name, dtype)
        self._fn = fn

    def update_state(
        self,
        y_true: ArrayLike,
        y_pred: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> None:
        """Add this replica's batch to its totals.

        Not collective; call it in replica context.

        Parameters
        ----------
        y_true, y_pred : array_like of shape (n, ...)
            Labels and predictions; ``n`` may be 0.
        sample_weight : array_like, optional
            Weights of the examples; see `Mean.update_state`.

        Raises
        ------
        ValueError
            If labels, predictions or weights have wrong shapes or dtypes.
        """
        self._require_own()
        # Show floating-point warnings of the function, which may be the program's own.
        self._average(as_float64(self._fn(y_true, y_pred)), sample_weight)


def as_float64(value: ArrayLike) -> Array:
    """Return real numbers as float64, without a copy if they are float64.

    Raises ValueError for complex numbers and other dtypes."""
    dtype = getattr(value, "dtype", None)
    array = as_array(value, np.float64 if dtype is None else None)
    if array.dtype.kind not in "biuf" and not is_half(array.dtype):
        raise ValueError(
            f"expected real numbers for a metric, found dtype {array.dtype}; convert "
            "them"
        )
    # Totals are float64: in float32, the total of a long epoch would stop growing.
    return rounded(array, np.dtype(np.float64))


def mean_over(array: Array, axis: int | tuple[int, ...]) -> Array:
    """Return the mean over some dimensions; 0 if these dimensions have no elements."""
    total = _sum_over(array, axis)
    return total / max(1, array.size // max(1, total.size))


def _sum_over(array: Array, axis: int | tuple[int, ...]) -> Array:
    total: Array = array_module(array).asarray(array.sum(axis=axis))
    return total


def of_one_library(first: Array, second: Array) -> tuple[Array, Array]:
    """Return both arrays; copy both to the GPU if one of them is on a GPU."""
    if is_device(first) or is_device(second):
        return to_device(first), to_device(second)
    return first, second


def _fitted(
    values: Array, weights: Array, combine: Callable[..., Any]
) -> tuple[Array, Array]:
    """Return values and weights in shapes that can be multiplied, as in tf.keras.

    ``combine`` sums or averages the values over dimensions that the weights lack."""
    values, weights = of_one_library(values, weights)
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    elif 0 < weights.ndim == values.ndim - 1:
        weights = weights[..., None]
    elif 0 < weights.ndim < values.ndim:
        values = combine(values, axis=tuple(range(weights.ndim, values.ndim)))
    pairs = zip(weights.shape, values.shape, strict=False)
    fits = all(w in (1, v) for w, v in pairs) and weights.ndim in (0, values.ndim)
    if not fits:
        raise ValueError(
            f"expected weights that fit values of shape {values.shape}, found shape "
            f"{weights.shape}; give one weight for each example"
        )
    return values, weights
