"""Losses that are scaled so that their sum over replicas is the global loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.kinds import as_array, is_device, is_half, to_device
from hpcstrat.engine.typing import Array, ArrayLike
from hpcstrat.strategies.current import get_strategy, in_cross_replica_context


@without_fp_warnings
def compute_average_loss(
    per_example_loss: ArrayLike,
    sample_weight: ArrayLike | None = None,
    global_batch_size: Any = None,
) -> Array:
    """Return this replica's part of the mean loss over the global batch.

    Not collective. The sum of the parts of all replicas is the mean, so both the loss
    and its gradient must be summed, not averaged, over replicas. With
    ``global_batch_size`` the replicas' batches may have any sizes.

    Parameters
    ----------
    per_example_loss : array_like of shape (n, ...)
        Loss of each of this replica's examples; ``n`` may be 0.
    sample_weight : array_like, optional
        Weights that multiply the losses; broadcast to the losses' shape.
    global_batch_size : int, optional
        Number of examples of all replicas. Default: ``n`` times the number of replicas,
        which is correct only if all replicas have the same ``n``.

    Returns
    -------
    ndarray of shape ()
        Sum of this replica's losses, divided by the global batch size; a float dtype.

    Raises
    ------
    ValueError
        If the loss is a scalar, or the global batch size is not a positive integer.
    RuntimeError
        If called in cross-replica context.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> float(hs.compute_average_loss([1.0, 2.0, 3.0], global_batch_size=6))
    1.0
    """
    _require_replica_context("compute_average_loss")
    losses = as_array(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "expected a loss for each example, found a scalar; leave out the mean over "
            "the batch"
        )
    losses = _floating(losses)
    if sample_weight is not None:
        weights = as_array(sample_weight, losses.dtype)
        losses = losses * (to_device(weights) if is_device(losses) else weights)
    size = global_batch_size
    if size is None:
        # Without a collective call, other replicas' batch sizes are unknown.
        size = losses.shape[0] * get_strategy().num_replicas_in_sync
    number = np.int64(size) if type(size) is int and size < 1 << 63 else as_array(size)
    if number.ndim or number.dtype.kind not in "iu" or number <= 0:
        raise ValueError(
            f"expected a positive integer as global_batch_size, found {size!r}; pass "
            "the number of examples of all replicas"
        )
    # The sum and the batch size could overflow in a 16-bit dtype.
    wide = np.dtype(np.float32) if is_half(losses.dtype) else losses.dtype
    mean = losses.sum(dtype=wide) / wide.type(number)
    return as_array(mean).astype(losses.dtype, copy=False)


@without_fp_warnings
def scale_regularization_loss(regularization_loss: ArrayLike) -> Array:
    """Return this replica's part of a regularization loss.

    Not collective. Every replica adds its part to its own loss, so that the sum over
    replicas contains the regularization loss once.

    Parameters
    ----------
    regularization_loss : array_like of any shape
        The losses of all terms, such as one per layer; the same on every replica.

    Returns
    -------
    ndarray of shape ()
        The sum of the losses, divided by the number of replicas; a floating dtype.

    Raises
    ------
    RuntimeError
        If called in cross-replica context.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> float(hs.scale_regularization_loss([1.0, 2.0]))
    3.0
    """
    _require_replica_context("scale_regularization_loss")
    losses = _floating(as_array(regularization_loss))
    wide = np.dtype(np.float32) if is_half(losses.dtype) else losses.dtype
    part = losses.sum(dtype=wide) / wide.type(get_strategy().num_replicas_in_sync)
    return as_array(part).astype(losses.dtype, copy=False)


def _require_replica_context(what: str) -> None:
    if in_cross_replica_context():
        raise RuntimeError(
            f"expected {what} in replica context, found cross-replica context; call it "
            "inside the function that strategy.run runs"
        )


def _floating(losses: Array) -> Array:
    if losses.dtype.kind in "fc" or is_half(losses.dtype):
        return losses
    return losses.astype(np.float32)
