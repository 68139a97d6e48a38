"""JAX on real GPUs: exchanges in and out of jit, in XLA's stream and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
jax = pytest.importorskip("jax")
if hasattr(cupy, "_standin") or jax.default_backend() != "gpu":
    pytest.skip("needs CUDA in JAX, and a GPU", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402

import hpcstrat as hs  # noqa: E402
import hpcstrat.integrations.jax as hsj  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, BUSY = 24, 2048


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    """Yield a strategy whose ranks have GPUs."""
    with hs.MultiWorkerMirroredStrategy(settings=hs.Settings(device="gpu")) as made:
        yield made


def _late(values: Any) -> Any:
    """Return an array that XLA's stream writes after some milliseconds of work."""

    def work(_: Any, found: Any) -> Any:
        return found @ found * 1e-6

    busy = jax.lax.fori_loop(0, 8, work, jnp.ones((BUSY, BUSY)))
    return values + (busy[0, 0] * 0).astype(values.dtype)


def _data() -> Any:
    x = np.random.default_rng(3).normal(size=(3, ROWS, 8)).astype(np.float32)
    return x, x.sum(-1)


def _loss(weights: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ weights["first"])
    return jnp.sum((hidden @ weights["second"] - y) ** 2)


def _weights() -> Any:
    generator = np.random.default_rng(4)
    first = generator.normal(size=(8, 50)).astype(np.float32)
    return {"first": jnp.asarray(first), "second": jnp.ones(50) / 50}


def _updated(weights: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "complex64"])
@pytest.mark.parametrize("jitted", [False, True])
def test_arrays_are_summed_in_the_order_of_the_stream(
    strategy: Any, job: Any, dtype: str, jitted: bool
) -> None:
    def total(own: Any) -> Any:
        late = _late(own)
        return hsj.all_reduce(late, "sum", strategy) * 2, late

    own = jnp.full((1000, 3), job.rank + 1, dtype)
    for _ in range(3):
        found, before = (jax.jit(total) if jitted else total)(own)
        wanted = job.size * (job.size + 1)
        np.testing.assert_array_equal(found, jnp.full_like(found, wanted))
        np.testing.assert_array_equal(before, own)
    assert found.devices() == own.devices()


def test_gathers_and_broadcasts_move_arrays(strategy: Any, job: Any) -> None:
    own = jnp.arange(6.0).reshape(2, 3) + 10 * job.rank
    every = np.concatenate(
        [np.arange(6.0).reshape(2, 3) + 10 * n for n in range(job.size)]
    )

    def moved(own: Any) -> Any:
        late = _late(own)
        return hsj.all_gather(late, 0, strategy), hsj.broadcast(late, 0, strategy)

    for function in (moved, jax.jit(moved)):
        whole, first = function(own)
        np.testing.assert_array_equal(whole, every)
        np.testing.assert_array_equal(first, every[:2])


def test_jitted_steps_train_as_one_process(strategy: Any, job: Any) -> None:
    @jax.jit
    def step(weights: Any, x: Any, y: Any) -> Any:
        sums = jax.value_and_grad(_loss)(weights, x, y)
        _, gradients = hsj.global_mean(sums, len(y), strategy)
        return _updated(weights, gradients)

    weights = alone = _weights()
    for x, y in zip(*_data(), strict=True):
        weights = step(weights, x[job.rank :: job.size], y[job.rank :: job.size])
        sums = jax.grad(_loss)(alone, x, y)
        alone = _updated(alone, jax.tree.map(lambda g: g / ROWS, sums))
    for name, values in weights.items():
        np.testing.assert_allclose(values, alone[name], rtol=2e-4, atol=2e-5)
    strategy.check_equal(weights)


def test_saved_state_comes_back(strategy: Any, job: Any, tmp_path: Path) -> None:
    folder = job.bcast(str(tmp_path))
    training = hsj.state(_weights(), strategy)
    hs.CheckpointManager(folder, training=training).save(1)
    other = hsj.state(jax.tree.map(jnp.zeros_like, _weights()), strategy)
    hs.CheckpointManager(folder, training=other).restore()
    for name, values in _weights().items():
        np.testing.assert_array_equal(other.tree[name], values)


def test_arrays_are_read_by_reduce_and_variables(strategy: Any, job: Any) -> None:
    total = strategy.reduce("sum", _late(jnp.ones(1000) * job.rank), axis=None)
    assert isinstance(total, cupy.ndarray)
    back = jax.dlpack.from_dlpack(total)
    np.testing.assert_array_equal(back + 1, sum(range(job.size)) + 1.0)
    with strategy.scope():
        variable = hs.Variable(jnp.arange(3.0), name="variable")
    np.testing.assert_array_equal(cupy.asnumpy(variable.value()), np.arange(3.0))
