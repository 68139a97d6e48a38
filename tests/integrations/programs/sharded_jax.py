"""A program of several JAX processes, for ``hpcstrat jax``: a sum over all devices.

With ``fail``, rank 1 raises an error, and the other ranks must not wait for it. With
``again``, the program itself initializes jax.distributed; with ``wrong``, it
initializes jax.distributed with other values.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hpcstrat as hs
import hpcstrat.integrations.jax as hsj


def main() -> None:
    """Sum over the devices of all processes, and over all replicas."""
    how = sys.argv[1]
    if how == "again":
        jax.distributed.initialize()
    if how == "wrong":
        jax.distributed.initialize("127.0.0.1:1", jax.process_count() + 1, 0)
    rank, size = jax.process_index(), jax.process_count()
    if how == "fail" and rank == 1:
        raise ValueError("a broken rank")
    assert len(jax.devices()) == size * len(jax.local_devices())
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    own = np.full((len(jax.local_devices()), 3), rank + 1.0, np.float32)
    array = jax.make_array_from_process_local_data(rows, own)
    total = jax.jit(
        lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec())
    )(array)
    expected = 3 * len(jax.local_devices()) * size * (size + 1) / 2
    assert float(total) == expected, (float(total), expected)
    strategy = hs.MultiWorkerMirroredStrategy()
    assert strategy.replica_id == rank

    @jax.jit
    def step(value: jax.Array) -> jax.Array:
        return hsj.all_reduce(value, "sum", strategy)

    assert float(step(jax.numpy.float32(rank + 1.0))) == size * (size + 1) / 2
    print(f"process {rank} of {size}: {float(total)}")


if __name__ == "__main__":
    main()
