"""Logical replicas on a GPU have the bits of one process, as in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

cupy = pytest.importorskip("cupy")


def training(comm: Any) -> list[bytes]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 4)).astype(np.float32)
    y = x @ np.arange(4, dtype=np.float32)
    with hs.MultiWorkerMirroredStrategy(logical_replicas=4, comm=comm) as strategy:
        with strategy.scope():
            weights = hs.Variable(cupy.zeros(4, cupy.float32), name="w")
            parts = hs.Variable(
                cupy.zeros(2, cupy.float32),
                synchronization="on_read",
                aggregation="sum",
            )
            optimizer = hs.optimizers.Adam(0.1)
            loss = hs.metrics.Mean("loss")
        data = strategy.experimental_distribute_dataset(hs.Dataset((x, y), 32))

        def step(batch: Any) -> Any:
            rows, targets = map(cupy.asarray, batch)
            error = rows @ weights.value() - targets
            optimizer.apply_gradients([((error @ rows) / 32, weights)])
            loss.update_state((error**2).mean())
            context = hs.get_replica_context()
            parts.assign_add(cupy.full(2, 0.1, cupy.float32) * float(error[0]))
            return context.all_reduce("sum", (error**2).sum())

        for batch in data:
            total = strategy.run(step, args=(batch,))
        mean = strategy.reduce("mean", total, axis=None)
        found = weights.numpy(), parts.numpy(), cupy.asnumpy(mean), loss.result()
        return [np.asarray(one).tobytes() for one in found]


def test_training_has_the_bits_of_one_process(job: Any) -> None:
    from mpi4py import MPI

    assert training(job.Dup()) == training(MPI.COMM_SELF)
