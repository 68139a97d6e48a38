"""A network in JAX on a field that the ranks of a replica divide, against plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj
from tests.mpi.ranks.outcomes import assert_same_bits, outcome

NX, NY, CHANNELS, SAMPLES, BATCH, STEPS = 10, 6, 4, 12, 6, 20


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def strategies(job: Any) -> Iterator[dict[int, Any]]:
    """Yield strategies by the number of ranks of their replicas."""
    counts = [count for count in range(2, job.size + 1) if job.size % count == 0]
    with ExitStack() as stack:
        yield {
            count: stack.enter_context(
                hs.MultiWorkerMirroredStrategy(ranks_per_replica=count)
            )
            for count in counts or [1]
        }


def convolution(layer: Any, x: Any, halo: Callable[[Any], Any]) -> Any:
    """Return a 3x3 convolution of a field (batch, x, y, channels), zeros around."""
    x = jnp.pad(halo(x), ((0, 0), (0, 0), (1, 1), (0, 0)))
    orders = "NHWC", "HWIO", "NHWC"
    y = jax.lax.conv_general_dilated(
        x, layer["w"], (1, 1), "VALID", dimension_numbers=orders
    )
    return y + layer["b"]


def loss_sum(layers: Any, x: Any, y: Any, halo: Callable[[Any], Any]) -> Any:
    """Return the sum of the losses of these rows of the samples."""
    *first, last = layers
    for layer in first:
        x = jnp.tanh(convolution(layer, x, halo))
    return jnp.sum((convolution(last, x, halo) - y) ** 2) / (NX * NY)


def start() -> Any:
    rng = np.random.default_rng(0)
    sizes = (1, CHANNELS), (CHANNELS, CHANNELS), (CHANNELS, 1)
    return [
        {"w": jnp.asarray(rng.standard_normal((3, 3, a, b)) / 6), "b": jnp.zeros(b)}
        for a, b in sizes
    ]


def data() -> Any:
    fields = np.random.default_rng(1).standard_normal((SAMPLES, NX, NY, 1))
    pairs = fields, np.cumsum(fields, 1) / 8
    return hs.Dataset(pairs, BATCH, shuffle=True, seed=1).repeat()


def updated(layers: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.05 * g, layers, gradients)


def alone() -> tuple[Any, ...]:
    """Return the losses, and the last gradients and parameters, of one process."""
    layers, losses = start(), []

    def halo(x: Any) -> Any:
        return jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)))

    @jax.jit
    def step(layers: Any, x: Any, y: Any) -> Any:
        found = jax.value_and_grad(loss_sum)(layers, x, y, halo)
        loss, gradients = jax.tree.map(lambda total: total / len(x), found)
        return loss, gradients, updated(layers, gradients)

    for _, batch in zip(range(STEPS), data(), strict=False):
        loss, gradients, layers = step(layers, *batch)
        losses.append(float(loss))
    return losses, *jax.tree.leaves((gradients, layers))


def trained(strategy: Any) -> tuple[Any, ...]:
    """Return the same of a strategy's ranks, with one jitted function for a step."""
    layers, losses, inside = start(), [], strategy.inside

    def halo(x: Any) -> Any:
        return hsj.inside.halo(x, 1, 1, inside=inside)

    @jax.jit
    def step(layers: Any, x: Any, y: Any) -> Any:
        # The gradient of this rank's part of the loss, then the replica's, then all.
        part = jax.value_and_grad(loss_sum)(layers, x, y, halo)
        whole = hsj.inside.sum(part, inside=inside)
        loss, gradients = hsj.global_mean(whole, len(x), strategy)
        return loss, gradients, updated(layers, gradients)

    batches = strategy.experimental_distribute_dataset(data().split(0))
    for _, batch in zip(range(STEPS), batches, strict=False):
        x, y = strategy.local_value(batch)
        loss, gradients, layers = step(layers, x, y)
        losses.append(float(loss))
    return losses, *jax.tree.leaves((gradients, layers))


def test_training_is_that_of_one_process(job: Any, strategies: dict[int, Any]) -> None:
    expected = alone()
    for strategy in strategies.values():
        found = trained(strategy)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
        assert_same_bits(job, *found)


def test_a_forgotten_sum_is_an_error(strategies: dict[int, Any]) -> None:
    strategy = strategies[max(strategies)]
    if strategy.inside.size == 1:
        return
    own = jnp.full(3, float(strategy.inside.position))
    calls = {
        "global_mean": lambda: hsj.global_mean(own, 3, strategy),
        "all_reduce": lambda: hsj.all_reduce(own, "sum", strategy),
        "all_gather": lambda: hsj.all_gather(own, 0, strategy),
    }
    for call in calls.values():
        error = outcome(call)
        assert isinstance(error, hs.CollectiveError), error
        assert "strategy.inside.sum" in str(error)
    with strategy.inside.divided():
        mean = hsj.global_mean(own, 1, strategy)
    np.testing.assert_allclose(mean, own, rtol=1e-12)
    assert hsj.inside.sum(own, inside=strategy.inside)[0] > 0
