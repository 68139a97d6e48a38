"""Train with JAX, lose rank 2 of three inside of jit, and continue."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj

KILLED_AT, BATCH = 9, 7
jax.config.update("jax_enable_x64", True)
x = np.sin(np.linspace(-1, 1, 240)).reshape(60, 4)
source = hs.Dataset((x, x.sum(1)), batch_size=BATCH, shuffle=True)


def train(strategy: hs.Strategy, memory: Any) -> None:
    """Train for three epochs, from the step of the last commit."""
    batches = strategy.experimental_distribute_dataset(source)
    held = hsj.state({"weights": jnp.zeros(4)}, strategy)
    memory.track(training=held, data=batches)
    step = memory.restore() or 0

    @jax.jit
    def update(tree: Any, rows: Any, targets: Any) -> Any:
        def loss(tree: Any) -> Any:
            return jnp.sum((rows @ tree["weights"] - targets) ** 2) / BATCH

        found = jax.value_and_grad(loss)(tree)
        value, slope = hsj.all_reduce(found, "sum", strategy)
        return {"weights": tree["weights"] - 0.1 * slope["weights"]}, value

    value = jnp.zeros(())
    while step < 3 * 9:
        for batch in batches:
            if (step, strategy.replica_id) == (KILLED_AT, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            held.tree, value = update(held.tree, *strategy.local_value(batch))
            step += 1
            memory.commit(step)
    strategy.check_equal(held.tree)
    # Print the line in one write, so that lines of different ranks do not mix.
    weight = float(held.tree["weights"].sum())
    print(f"{strategy.num_replicas_in_sync} {step} {float(value)} {weight}\n", end="")


hs.elastic.run(train)
