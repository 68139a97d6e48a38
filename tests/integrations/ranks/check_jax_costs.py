"""Gradients of JAX over global batches that are divided between replicas by cost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj


@pytest.mark.parametrize("equal_rows", [False, True])
def test_loss_and_gradients_are_those_of_the_global_batch(
    strategy: Any, equal_rows: bool
) -> None:
    draw = np.random.default_rng(5)
    sizes = np.clip(draw.lognormal(3.8, 0.7, 48), 10, 200).round()
    x = draw.normal(size=(48, 4)).astype(np.float32)
    y = x.sum(axis=1) * sizes.astype(np.float32)
    rows = hs.Dataset((x, y, np.arange(48))).shuffle(seed=1)
    divided = rows.batch(16, costs=sizes, equal_rows=equal_rows)
    batches = strategy.experimental_distribute_dataset(divided)

    def squares(weights: Any, x: Any, y: Any) -> Any:
        return jnp.sum((x @ weights - y) ** 2)

    @jax.jit
    def mean(weights: Any, x: Any, y: Any) -> Any:
        sums = jax.value_and_grad(squares)(weights, x, y)
        return hsj.global_mean(sums, len(y), strategy)

    weights = jnp.arange(4.0)
    counts = set()
    writer = hs.data.PredictionWriter(strategy, 48, jnp.zeros(()))
    for batch, whole in zip(batches, rows.batch(16), strict=True):
        *own, numbers = strategy.local_value(batch)
        counts.add(len(numbers))
        writer.add(numbers, jnp.asarray(own[0]) @ weights)
        loss, gradient = mean(weights, *own)
        total, expected = jax.value_and_grad(squares)(weights, *whole[:2])
        np.testing.assert_allclose(loss, total / 16, rtol=1e-5)
        np.testing.assert_allclose(gradient, expected / 16, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(writer.result(), x @ np.arange(4), rtol=1e-5)
    # With equal rows, JAX compiles the function once or, for 3 replicas, twice.
    assert not equal_rows or max(counts) - min(counts) <= 1
