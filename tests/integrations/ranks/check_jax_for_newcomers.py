"""The claims of the page for users who come from mpi4jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hpcstrat.integrations.jax as hsj
from tests.mpi.ranks.outcomes import outcome


def test_calls_of_mpi4jax_as_numpy_computes_them(strategy: Any, job: Any) -> None:
    size, rank = job.size, job.rank
    ranks = np.arange(size, dtype=np.float32)

    def calls(x: Any) -> Any:
        every = hsj.all_gather(x[None], 0, strategy)
        return {
            "sums": hsj.all_reduce({"a": x, "b": 2 * x}, "sum", strategy),
            "mean": hsj.all_reduce(x, "mean", strategy),
            # Results are concatenated; add an axis to the argument to stack them.
            "every": every,
            "max": every.max(0),
            "product": every.prod(0),
            "scan": every[: rank + 1].sum(0),
            # This rank's part of one rank's array, and its part of all ranks' arrays.
            "scatter": hsj.broadcast(jnp.arange(size) + x, size - 1, strategy)[rank],
            "alltoall": hsj.all_gather((jnp.arange(size) * 10 + x)[None], 0, strategy)[
                :, rank
            ],
        }

    for function in (calls, jax.jit(calls)):
        found = function(jnp.float32(rank))
        assert found["sums"] == {"a": ranks.sum(), "b": 2 * ranks.sum()}
        assert found["mean"] == ranks.mean()
        np.testing.assert_array_equal(found["every"], ranks)
        assert found["max"] == size - 1
        assert found["product"] == ranks.prod()
        assert found["scan"] == ranks[: rank + 1].sum()
        assert found["scatter"] == rank + size - 1
        np.testing.assert_array_equal(found["alltoall"], 10 * rank + ranks)


def test_gradients_are_those_of_the_sum_and_vmap_is_refused(
    strategy: Any, job: Any
) -> None:
    def own(x: Any) -> Any:
        return (job.rank + 1) * hsj.all_reduce(x, "sum", strategy)

    # The gradient of the sum over replicas of (rank + 1) * (sum of all x), by x.
    gradient = jax.grad(own)(jnp.float32(1))
    assert gradient == sum(range(1, job.size + 1))
    error = outcome(jax.vmap(own), jnp.ones(2))
    assert "vmap" in str(error)
