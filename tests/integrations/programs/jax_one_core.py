"""Exchange arrays that JAX still computes, with asynchronous dispatch, on one core."""

from __future__ import annotations

import faulthandler

import jax
import jax.numpy as jnp

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj

faulthandler.dump_traceback_later(60, exit=True)
jax.config.update("jax_cpu_enable_async_dispatch", True)
strategy = hs.MultiWorkerMirroredStrategy()
size = strategy.num_replicas_in_sync


@jax.jit
def heavy(value):
    """Compute a value; the computation takes longer than its dispatch."""
    for _ in range(20):
        value = value @ value / 200
    return value


@jax.jit
def gradient(value):
    """Return a gradient through an exchange."""
    return jax.grad(lambda v: hsj.all_reduce(v * v, "mean", strategy).sum())(value)


reduced = jax.jit(lambda value: hsj.all_reduce(value, "mean", strategy))
value = jnp.ones((200, 200))
for _ in range(10):
    value = reduced(heavy(value))
    # Call outside of jit, while the calls above may still run in XLA's threads.
    count = hsj.all_reduce(jnp.float32(1), "sum", strategy)
    assert count == size
    slope = gradient(heavy(value))
assert abs(float(value[0, 0]) - 1) < 1e-5
assert abs(float(slope[0, 0]) - 2) < 1e-5
print("done", flush=True)
