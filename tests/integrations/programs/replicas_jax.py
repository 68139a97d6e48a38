"""A program for ``hpcstrat jax --ranks-per-replica M``: shard_map inside of replicas.

JAX divides the rows of a field among the devices of a replica, and sums over them;
hpcstrat averages over the replicas. Print the largest difference from one process.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj

jax.config.update("jax_enable_x64", True)
NX, NY, SAMPLES, STEPS = 8, 5, 12, 5


def one_step(weights: Any, fields: Any) -> Any:
    """Return the sum of the losses of whole fields; also the whole program's oracle."""
    padded = jnp.pad(fields, ((0, 0), (1, 1), (0, 0)))
    return rows_loss(weights, padded)


def rows_loss(weights: Any, padded: Any) -> Any:
    """Return the sum of the losses of rows, from these and one more on each side."""
    smooth = sum(weights[i] * padded[:, i : i + padded.shape[1] - 2] for i in range(3))
    return jnp.sum((jnp.tanh(smooth) - 0.5) ** 2)


def main() -> None:
    """Train, and compare the weights with those of one process."""
    ranks = int(sys.argv[1])
    strategy = hs.MultiWorkerMirroredStrategy(ranks_per_replica=ranks)
    assert jax.process_count() == ranks
    assert jax.process_index() == strategy.inside.position
    mesh = Mesh(np.array(jax.devices()), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(None, "x"))

    @jax.jit
    @jax.value_and_grad
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(None, "x")),
        out_specs=PartitionSpec(),
    )
    def loss_and_gradient(weights: Any, fields: Any) -> Any:
        count = len(jax.devices())
        down = [(i, i + 1) for i in range(count - 1)]
        up = [(i + 1, i) for i in range(count - 1)]
        before = jax.lax.ppermute(fields[:, -1:], "x", down)
        after = jax.lax.ppermute(fields[:, :1], "x", up)
        padded = jnp.concatenate([before, fields, after], 1)
        return jax.lax.psum(rows_loss(weights, padded), "x")

    fields = np.random.default_rng(0).standard_normal((SAMPLES, NX, NY))
    own = fields[strategy.replica_id :: strategy.num_replicas_in_sync]
    divided = jax.make_array_from_callback(own.shape, rows, lambda index: own[index])
    weights = alone = jnp.array([0.3, 0.5, -0.2])
    for _ in range(STEPS):
        copy = np.asarray(weights)
        given = jax.make_array_from_callback(copy.shape, everywhere, copy.__getitem__)
        sums = loss_and_gradient(given, divided)
        loss, gradient = hsj.global_mean(sums, len(own), strategy)
        weights = weights - 0.01 * gradient
        expected, slope = jax.value_and_grad(one_step)(alone, fields)
        alone = alone - 0.01 * slope / SAMPLES
        np.testing.assert_allclose(loss, expected / SAMPLES, rtol=1e-12)
    np.testing.assert_allclose(weights, alone, rtol=1e-12)
    with pytest.raises(ValueError, match="psum"):
        hsj.all_reduce(divided, "sum", strategy)
    print(f"replica {strategy.replica_id}, position {strategy.inside.position}: equal")


if __name__ == "__main__":
    main()
