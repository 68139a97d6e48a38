"""Mean and variance over the global batch, and their derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.kinds import (
    array_module,
    as_array,
    is_device,
    is_half,
    to_device,
)
from hpcstrat.engine.context import current
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array, ArrayLike
from hpcstrat.strategies import Strategy, get_strategy

_BACKWARD = "sync_batch_moments_backward"


@without_fp_warnings
def sync_batch_moments(
    x: ArrayLike, axis: int = -1, *, name: str = "sync_batch_moments"
) -> tuple[Array, Array, int]:
    """Return mean and variance of each channel over the batches of all replicas.

    Collective over the strategy's replicas, in replica context; one reduction.

    Each replica computes three numbers per channel from its values, in float64: count,
    mean, and sum of squared differences from the mean. Every replica combines the
    numbers of all replicas as if one process had all values (Chan, Golub and LeVeque,
    Algorithms for computing the sample variance, The American Statistician 37, 1983,
    doi:10.1080/00031305.1983.10483115). Sums of values and of squares would need a
    smaller message, but for values with a large mean the variance would lose twice as
    many digits.

    Parameters
    ----------
    x : array_like of shape (..., channels, ...)
        This replica's real values, at least two-dimensional; may be empty. All replicas
        have the same number of channels.
    axis : int
        The dimension of the channels; the averages are over all other dimensions.
    name : str
        Name of the call in messages.

    Returns
    -------
    mean, variance : ndarray of shape (channels,)
        Arrays of the library of ``x`` (NumPy or CuPy), float64, equal bit for bit on
        every replica; 0 if no replica has values. The variance is divided by the count.
    count : int
        Number of values of each channel, over all replicas. For values on a GPU it is a
        float64 array of shape () on that GPU, so that the host does not wait for the
        GPU.

    Raises
    ------
    ValueError
        If values are not real numbers, or if ``x`` has no dimension ``axis``; the other
        replicas raise ReplicaError.
    CollectiveError
        If replicas have different numbers of channels; raised on every replica.
    RuntimeError
        If called in cross-replica context.
    """
    strategy = strategy_of(name)
    moments: tuple[Array, Array, int] = strategy.collectives.call(
        name, _combined, strategy, x, axis, name
    )
    return moments


def _combined(
    strategy: Strategy, x: ArrayLike, axis: int, name: str
) -> tuple[Array, Array, int]:
    """Compute the result of `sync_batch_moments`."""
    array, axes = checked(x, axis)
    channels = array.shape[axis]
    row = _own_moments(array, axes, channels)
    library = array_module(row)
    # Each replica fills only its own row, so that the sum over replicas has all rows,
    # without rounding. Ranks compare this array's shape, and so the number of channels.
    rows = library.zeros((strategy.num_replicas_in_sync, row.size))
    rows[strategy.replica_id] = row
    rows = strategy.collectives.batch_reduce(ReduceOp.SUM, rows, name)
    counts, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, -channels:]
    count: Any = counts.sum()
    # The count is 0 if no replica has values.
    divisor = library.maximum(count, 1)
    # Average differences from one replica's mean: a sum of large means loses digits.
    origin = library.take(means, counts.argmax(), axis=0)
    mean = origin + (counts * (means - origin)).sum(axis=0) / divisor
    between = counts * (means - mean) ** 2
    variance = (squares + between).sum(axis=0) / divisor
    return mean, variance, count if is_device(count) else round(float(count))


@without_fp_warnings
def sync_batch_moments_backward(
    x: ArrayLike,
    moments: tuple[Array, Array, int],
    dmean: ArrayLike,
    dvariance: ArrayLike,
    axis: int = -1,
) -> Array:
    """Return the part of the gradient of ``x`` that comes from its mean and variance.

    Collective over the strategy's replicas, in replica context; one reduction.

    Parameters
    ----------
    x : array_like of shape (..., channels, ...)
        The values that were passed to `sync_batch_moments`.
    moments : tuple of (mean, variance, count)
        The result of `sync_batch_moments`.
    dmean, dvariance : array_like of shape (channels,)
        Derivatives of this replica's part of the loss with respect to mean and
        variance.
    axis : int
        The dimension of the channels.

    Returns
    -------
    ndarray of the shape of x
        Derivative of the sum of all replicas' losses with respect to this replica's
        values, in float64.

    Raises
    ------
    ValueError
        If shapes do not match; the other replicas raise ReplicaError.
    RuntimeError
        If called in cross-replica context.
    """
    strategy = strategy_of(_BACKWARD)
    gradient: Array = strategy.collectives.call(
        _BACKWARD, _backward, strategy, x, moments, (dmean, dvariance), axis
    )
    return gradient


def _backward(
    strategy: Strategy,
    x: ArrayLike,
    moments: tuple[Array, Array, int],
    by_moments: tuple[ArrayLike, ArrayLike],
    axis: int,
) -> Array:
    """Compute the result of `sync_batch_moments_backward`."""
    mean, _, count = moments
    array, _ = checked(x, axis)
    derivatives = [as_array(d, np.float64) for d in by_moments]
    if is_device(array):
        mean, *derivatives = map(to_device, (mean, *derivatives))
    partial = array_module(array).stack(derivatives)
    if partial.shape != (2, array.shape[axis]):
        raise ValueError(
            f"expected derivatives of shape {(array.shape[axis],)}, found "
            f"{partial.shape[1:]}; give one for each channel"
        )
    centered = array - spread(mean, array.ndim, axis)
    offset, slope = through_moments(strategy, partial, count, _BACKWARD)
    return as_array(
        spread(offset, array.ndim, axis) + spread(slope, array.ndim, axis) * centered
    )


def strategy_of(what: str) -> Strategy:
    """Return the strategy of the running replica function, or the default strategy.

    Raises RuntimeError in cross-replica context; ``what`` is the name of the call in
    the error message.
    """
    entry = current()
    if entry is not None and entry.replica_context is None:
        raise RuntimeError(
            f"expected {what} in replica context, found cross-replica context; call it "
            "inside the function that strategy.run runs"
        )
    return get_strategy()


def checked(x: ArrayLike, axis: int) -> tuple[Array, tuple[int, ...]]:
    """Return ``x`` as an array, and the dimensions to average over: all but ``axis``.

    Raises ValueError if the values are not real numbers, or if the array has fewer than
    two dimensions, or no dimension ``axis``.
    """
    array = as_array(x)
    if array.dtype.kind not in "iuf" and not is_half(array.dtype):
        raise ValueError(
            f"expected real numbers to normalize, found dtype {array.dtype}; cast them"
        )
    if array.ndim < 2 or not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"expected an array with channels in dimension {axis} and at least one "
            f"other dimension, found shape {array.shape}; reshape it"
        )
    return array, others(array.ndim, axis)


def others(ndim: int, axis: int) -> tuple[int, ...]:
    """Return all dimensions except ``axis``, in ascending order."""
    return tuple(i for i in range(ndim) if i != axis % ndim)


def spread(vector: Array, ndim: int, axis: int) -> Array:
    """Reshape a vector over channels to (1, ..., channels, ..., 1), to broadcast it."""
    shape = [1] * ndim
    shape[axis] = -1
    return vector.reshape(shape)


def _own_moments(array: Array, axes: tuple[int, ...], channels: int) -> Array:
    """Return a vector: this replica's count, means and sums of squared differences."""
    library = array_module(array)
    row: Array = library.zeros(1 + 2 * channels)
    count = array.size // channels if channels else 0
    if not count:
        return row
    mean = array.sum(axis=axes, dtype=np.float64, keepdims=True) / count
    centered = array - mean
    # This sum differs from 0 only by the rounding error of ``mean``, which it corrects.
    rest = centered.sum(axis=axes)
    library.square(centered, out=centered)
    row[0] = count
    row[1 : 1 + channels] = mean.reshape(-1) + rest / count
    row[1 + channels :] = centered.sum(axis=axes) - rest * rest / count
    return row


def through_moments(
    strategy: Strategy, partial: Array, count: Any, name: str
) -> tuple[Array, Array]:
    """Return the offset and slope of the gradient with respect to a channel's values.

    Collective over the strategy's replicas: one reduction sums ``partial``, of shape
    (2, channels), which has the derivatives of this replica's part of the loss with
    respect to mean and variance. The derivative of the whole loss with respect to a
    value, through mean and variance, is ``offset + slope * (value - mean)``.
    """
    summed = strategy.collectives.batch_reduce(ReduceOp.SUM, partial, name)
    offset, slope = summed / array_module(summed).maximum(count, 1)
    return offset, 2 * slope
