"""Batch normalization over the batches of all replicas."""

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
    to_host,
)
from hpcstrat.engine.context import AnnouncesInitErrors, own_index, second_strategy
from hpcstrat.engine.options import VariableAggregation, VariableSynchronization
from hpcstrat.engine.typing import Array, ArrayLike
from hpcstrat.layers.moments import (
    checked,
    others,
    spread,
    strategy_of,
    sync_batch_moments,
    through_moments,
)
from hpcstrat.strategies import Strategy
from hpcstrat.variables import Variable, class_for_state


class SyncBatchNormalization(AnnouncesInitErrors):
    """Normalizes each channel by its mean and variance over the global batch.

    Let ``m`` and ``v`` be this mean and variance or, outside of training, the moving
    mean and variance. The result is ``gamma * (x - m) / sqrt(v + epsilon) + beta``
    (Ioffe and Szegedy, arXiv:1502.03167). Results, gradients and moving moments are the
    same as in one process with all replicas' examples, however the examples are divided
    among replicas. Defaults and updates are the same as in Keras: ``moving = momentum *
    moving + (1 - momentum) * new``, in which ``new`` is the global batch's mean or
    variance. Creation in the strategy's scope is collective over the replicas.

    Parameters
    ----------
    channels : int
        Number of channels, which is the length of dimension ``axis``.
    axis : int
        The dimension of the channels.
    momentum : float
        Weight of the old moving mean and variance in an update, from 0 to 1.
    epsilon : float
        Small number that is added to the variance.
    center, scale : bool
        Whether the layer has a ``beta`` (center) and a ``gamma`` (scale).
    name : str
        First part of the variables' names, unique in the model, because optimizers
        distinguish variables by name.
    dtype : dtype
        Type of the variables.

    Attributes
    ----------
    gamma, beta : Variable or None
        Trainable variables; their initial values are 1 and 0.
    moving_mean, moving_variance : Variable
        SyncOnRead variables with aggregation ``MEAN``; their initial values are 0 and
        1. All replicas update their components with the same moments.

    Raises
    ------
    ValueError
        If the number of channels, the momentum or epsilon is out of range.
    """

    def __init__(
        self,
        channels: int,
        axis: int = -1,
        *,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        name: str = "sync_batch_normalization",
        dtype: Any = np.float32,
    ) -> None:
        if channels < 1 or not 0 <= momentum <= 1 or epsilon < 0:
            raise ValueError(
                "expected channels >= 1, 0 <= momentum <= 1 and epsilon >= 0, found "
                f"{channels}, {momentum} and {epsilon}; the defaults are usual"
            )
        self.channels, self.axis, self.name = channels, axis, name
        self.momentum, self.epsilon = momentum, epsilon
        ones, zeros = np.ones(channels, dtype), np.zeros(channels, dtype)
        self.gamma = Variable(ones, name=f"{name}/gamma") if scale else None
        self.beta = Variable(zeros, name=f"{name}/beta") if center else None
        moving: dict[str, Any] = {
            "trainable": False,
            "synchronization": VariableSynchronization.ON_READ,
            "aggregation": VariableAggregation.MEAN,
        }
        own = class_for_state()
        self.moving_mean = own(zeros, name=f"{name}/moving_mean", **moving)
        self.moving_variance = own(ones, name=f"{name}/moving_variance", **moving)
        self._forward = f"forward of {name}"
        self._backward = f"backward of {name}"
        # Kept by `forward` for `backward`, by replica of this process: centered values,
        # inverse standard deviations, dtype of the result, number of values (None
        # outside of training).
        self._kept_by: dict[int, tuple[Array, Array, Any, Any]] = {}

    @property
    def _kept(self) -> tuple[Array, Array, Any, Any] | None:
        return self._kept_by.get(own_index() or 0)

    @_kept.setter
    def _kept(self, kept: tuple[Array, Array, Any, Any] | None) -> None:
        if kept is None:
            self._kept_by.pop(own_index() or 0, None)
        else:
            self._kept_by[own_index() or 0] = kept

    @property
    def trainable_variables(self) -> list[Variable]:
        """Gamma and beta, if the layer has them."""
        return [v for v in (self.gamma, self.beta) if v is not None]

    @without_fp_warnings
    def forward(self, x: ArrayLike, training: bool = False) -> Array:
        """Normalize this replica's part of the batch.

        Collective over the strategy's replicas with ``training``, in replica context,
        with one reduction. Without ``training`` the call is not collective.

        Parameters
        ----------
        x : array_like of shape (..., channels, ...)
            This replica's values; may be empty.
        training : bool
            True: normalize by the moments of the global batch, and update the moving
            moments. False: normalize by the moving moments.

        Returns
        -------
        ndarray of the shape of x
            Has the type of ``x``, or float32 if ``x`` has integers; computed in
            float64.

        Raises
        ------
        ValueError
            If the array's shape or type is wrong; the other replicas raise
            ReplicaError.
        RuntimeError
            With ``training``, if called in cross-replica context, or outside of
            ``run``.
        """
        if not training:
            return self._normalized(x, training)
        # In ``collectives.call``, an error on one replica makes all replicas raise.
        normalized: Array = self._replicas(self._forward).collectives.call(
            self._forward, self._normalized, x, training
        )
        return normalized

    def _normalized(self, x: ArrayLike, training: bool) -> Array:
        """Compute the result of `forward`."""
        array, _ = checked(x, self.axis)
        self._require_channels(array)
        count: Any = None
        if training:
            mean, variance, count = sync_batch_moments(
                array, self.axis, name=self._forward
            )
            if is_device(count) or count:
                self._move(self.moving_mean, mean, count)
                self._move(self.moving_variance, variance, count)
        else:
            mean = _beside(array, self.moving_mean.component).astype(np.float64)
            moving = _beside(array, self.moving_variance.component)
            variance = moving.astype(np.float64)
        centered = array - self._spread(mean, array)
        inverse = 1 / array_module(variance).sqrt(variance + self.epsilon)
        floating = array.dtype.kind == "f" or is_half(array.dtype)
        dtype = array.dtype if floating else np.dtype(np.float32)
        self._kept = centered, inverse, dtype, count
        scaled = centered * self._spread(inverse * self._gamma(array), array)
        if self.beta is not None:
            scaled += self._spread(_beside(array, self.beta.component), array)
        return scaled.astype(dtype, copy=False)

    @without_fp_warnings
    def backward(self, dy: ArrayLike) -> tuple[Array, Array | None, Array | None]:
        """Return the gradients of the latest `forward`; call once after each `forward`.

        Collective over the strategy's replicas after a `forward` with ``training``,
        with one reduction. After a `forward` without ``training`` the call is not
        collective.

        Parameters
        ----------
        dy : array_like of the shape of x
            Derivative of the sum of all replicas' losses with respect to this replica's
            results.

        Returns
        -------
        dx : ndarray of the shape of x
            Derivative of the sum of all replicas' losses with respect to this replica's
            values.
        dgamma, dbeta : ndarray of shape (channels,), or None
            Derivatives of this replica's part of the loss with respect to gamma and
            beta. Optimizers sum them over replicas. None for a variable that the layer
            does not have.

        Raises
        ------
        ValueError
            If ``dy`` has another shape; the other replicas raise ReplicaError.
        RuntimeError
            If no `forward` was called before; after a `forward` with ``training``, also
            if called in cross-replica context.
        """
        if self._kept is None:
            raise RuntimeError(
                f"expected a forward before each backward of layer {self.name!r}, found"
                " none; call forward first"
            )
        count = self._kept[-1]
        if count is None:
            return self._gradients(dy, None)
        strategy = self._replicas(self._backward)
        gradients: tuple[Array, Array | None, Array | None]
        gradients = strategy.collectives.call(
            self._backward, self._gradients, dy, strategy
        )
        return gradients

    def _gradients(
        self, dy: ArrayLike, strategy: Strategy | None
    ) -> tuple[Array, Array | None, Array | None]:
        """Compute the result of `backward`."""
        assert self._kept is not None
        centered, inverse, dtype, count = self._kept
        found = _beside(centered, as_array(dy))
        if found.shape != centered.shape:
            raise ValueError(
                f"expected gradients of shape {centered.shape}, that of the latest "
                f"forward of layer {self.name!r}, found {found.shape}; call "
                "backward once after each forward"
            )
        # Free these large arrays now, because each forward has only one backward.
        self._kept = None
        gradient = found.astype(np.float64, copy=False)
        axes = others(centered.ndim, self.axis)
        dbeta = gradient.sum(axis=axes)
        products = (gradient * centered).sum(axis=axes)
        factor = inverse * self._gamma(centered)
        dx = gradient * self._spread(factor, centered)
        if strategy is not None:
            partial = array_module(dbeta).stack(
                [-dbeta * factor, -products * factor * inverse**2 / 2]
            )
            offset, slope = through_moments(strategy, partial, count, self._backward)
            dx += self._spread(offset, dx) + self._spread(slope, dx) * centered
        return (
            dx.astype(dtype, copy=False),
            # Do not sum these over replicas: the optimizer does, in one reduction.
            _cast(products * inverse, self.gamma),
            _cast(dbeta, self.beta),
        )

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the variables to save.

        Not collective.

        Returns
        -------
        dict of str to Variable
            ``gamma``, ``beta``, ``moving_mean`` and ``moving_variance``, by name.
        """
        names = ("gamma", "beta", "moving_mean", "moving_variance")
        found = {name: getattr(self, name) for name in names}
        return {name: v for name, v in found.items() if v is not None}

    def _replicas(self, what: str) -> Strategy:
        """Return the current strategy; RuntimeError if it does not own the layer."""
        strategy = strategy_of(what)
        own = self.moving_mean.distribute_strategy
        if own is not None and own is not strategy:
            raise RuntimeError(
                f"expected {what} in the scope of the strategy that the layer was made "
                f"in, {own!r}, {second_strategy(strategy)}"
            )
        return strategy

    def _require_channels(self, array: Array) -> None:
        if array.shape[self.axis] != self.channels:
            raise ValueError(
                f"expected {self.channels} channels in dimension {self.axis} for layer "
                f"{self.name!r}, found an array of shape {array.shape}; check axis"
            )

    def _gamma(self, array: Array) -> Any:
        if self.gamma is None:
            return 1.0
        return _beside(array, self.gamma.component).astype(np.float64)

    def _spread(self, vector: Array, array: Array) -> Array:
        return spread(vector, array.ndim, self.axis)

    def _move(self, moving: Variable, new: Array, count: Any) -> None:
        # Every replica changes only its own component, with the same moments.
        old = moving.component
        moved = self.momentum * _beside(new, old) + (1 - self.momentum) * new
        if is_device(count):
            # The count is on the GPU: testing it on the host would wait for the GPU.
            moved = array_module(count).where(count > 0, moved, _beside(new, old))
        moved = _beside(old, moved)
        if is_device(old):
            old[...] = moved.astype(old.dtype)
        else:
            # Write in place: checkpoints and views of the program refer to this memory.
            np.copyto(old, moved, casting="same_kind")

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} channels={self.channels}, "
            f"axis={self.axis}, momentum={self.momentum}, epsilon={self.epsilon}>"
        )


def _beside(array: Array, other: Array) -> Array:
    """Return ``other`` as an array on the device of ``array``: its GPU, or the host."""
    return to_device(other) if is_device(array) else to_host(other)


def _cast(gradient: Array, variable: Variable | None) -> Array | None:
    return None if variable is None else gradient.astype(variable.dtype, copy=False)
