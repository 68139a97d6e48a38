"""Batch normalization in one process: its formula, gradients and update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.layers import (
    SyncBatchNormalization,
    sync_batch_moments,
    sync_batch_moments_backward,
)

RNG = np.random.default_rng(5)


def differences(function: Any, at: Any, step: float = 1e-6) -> Any:
    """Return the numerical gradient of a scalar function, by central differences."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        kept = at[index]
        at[index] = kept + step
        above = function()
        at[index] = kept - step
        gradient[index] = (above - function()) / (2 * step)
        at[index] = kept
    return gradient


@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_agree_with_finite_differences(axis: int, training: bool) -> None:
    x, target = RNG.standard_normal((2, 4, 3, 5))
    layer = SyncBatchNormalization(x.shape[axis], axis, dtype=np.float64)
    for variable in layer.checkpoint_variables().values():
        variable.assign(RNG.uniform(0.5, 1.5, x.shape[axis]))

    def loss() -> float:
        return float(((layer.forward(x, training) - target) ** 2).sum())

    y = layer.forward(x, training)
    dx, *found = layer.backward(2 * (y - target))
    np.testing.assert_allclose(dx, differences(loss, x), rtol=0, atol=1e-7)
    for variable, gradient in zip(layer.trainable_variables, found, strict=True):
        expected = differences(loss, variable.component)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-7)


def test_gradients_through_moments_agree_with_finite_differences() -> None:
    x, (a, b) = RNG.standard_normal((6, 3)), RNG.standard_normal((2, 3))

    def loss() -> float:
        mean, variance, _ = sync_batch_moments(x)
        return float((a * mean + b * variance).sum())

    found = sync_batch_moments_backward(x, sync_batch_moments(x), a, b)
    np.testing.assert_allclose(found, differences(loss, x), rtol=0, atol=1e-8)


def test_moments_of_a_large_mean_are_not_lost() -> None:
    rest = RNG.standard_normal((1000, 2))
    mean, variance, count = sync_batch_moments(rest + 1e9)
    assert count == 1000
    np.testing.assert_allclose(variance, (rest + 1e9).var(axis=0), rtol=1e-12)
    np.testing.assert_allclose(mean, 1e9 + rest.mean(axis=0), rtol=1e-15)
    single = np.float32(rest + 1000)
    mean, variance, _ = sync_batch_moments(single)
    assert mean.dtype == variance.dtype == np.float64
    np.testing.assert_allclose(variance, np.float64(single).var(axis=0), rtol=1e-12)


def test_results_are_those_of_the_formula() -> None:
    x = RNG.standard_normal((7, 2)) * [1, 3] + [5, -5]
    layer = SyncBatchNormalization(2, momentum=0.9, epsilon=0.1, dtype=np.float64)
    y = layer.forward(x, training=True)
    scale = np.sqrt(x.var(axis=0) + 0.1)
    np.testing.assert_allclose(y, (x - x.mean(axis=0)) / scale, rtol=0, atol=1e-14)
    np.testing.assert_allclose(layer.moving_mean, 0.1 * x.mean(axis=0), rtol=1e-14)
    moved = 0.9 + 0.1 * x.var(axis=0)
    np.testing.assert_allclose(layer.moving_variance, moved, rtol=1e-14)
    y = layer.forward(x)
    expected = (x - layer.moving_mean.numpy()) / np.sqrt(moved + 0.1)
    np.testing.assert_allclose(y, expected, rtol=1e-14)


def test_types_are_kept() -> None:
    layer = SyncBatchNormalization(3)
    for code in ("f2", "f4", "f8"):
        x = RNG.standard_normal((4, 3)).astype(code)
        y = layer.forward(x, training=True)
        dx, dgamma, dbeta = layer.backward(y)
        assert y.dtype == dx.dtype == code
        assert dgamma is not None
        assert dbeta is not None
        assert dgamma.dtype == dbeta.dtype == np.float32
    assert layer.forward(np.arange(6).reshape(2, 3)).dtype == np.float32


def test_parts_that_are_left_out() -> None:
    layer = SyncBatchNormalization(3, center=False, scale=False)
    assert layer.trainable_variables == []
    assert list(layer.checkpoint_variables()) == ["moving_mean", "moving_variance"]
    x = RNG.standard_normal((4, 3))
    assert layer.backward(layer.forward(x, training=True))[1:] == (None, None)


def test_a_batch_without_examples_changes_nothing() -> None:
    layer = SyncBatchNormalization(3)
    y = layer.forward(np.zeros((0, 3)), training=True)
    dx, dgamma, dbeta = layer.backward(y)
    assert y.shape == dx.shape == (0, 3)
    np.testing.assert_array_equal([dgamma, dbeta], np.zeros((2, 3)))
    np.testing.assert_array_equal(layer.moving_mean, [0, 0, 0])
    np.testing.assert_array_equal(layer.moving_variance, [1, 1, 1])


def test_wrong_arguments_are_refused() -> None:
    layer = SyncBatchNormalization(3)
    for x in (np.ones((4, 2)), np.ones(3), np.ones((4, 3)) * 1j, "a"):
        with pytest.raises(ValueError, match="expected"):
            layer.forward(x, training=True)
    with pytest.raises(ValueError, match="channels in dimension 2"):
        sync_batch_moments(np.ones((2, 3)), axis=2)
    with pytest.raises(RuntimeError, match="forward before"):
        layer.backward(np.ones((4, 3)))
    layer.forward(np.ones((4, 3)), training=True)
    with pytest.raises(ValueError, match="latest forward"):
        layer.backward(np.ones((5, 3)))
    moments = sync_batch_moments(np.ones((4, 3)))
    with pytest.raises(ValueError, match="expected derivatives"):
        sync_batch_moments_backward(np.ones((4, 3)), moments, np.ones(2), np.ones(2))
    for options in ({"momentum": 2}, {"epsilon": -1}, {"channels": 0}):
        with pytest.raises(ValueError, match="expected channels"):
            SyncBatchNormalization(**{"channels": 3, **options})
    with hs.OneDeviceStrategy().scope(), pytest.raises(RuntimeError, match="replica"):
        sync_batch_moments(np.ones((2, 3)))
