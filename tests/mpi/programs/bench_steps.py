"""Step functions for ``hpcstrat bench scaling --step``: a small one and faulty ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hpcstrat as hs

# Time for one row of the batch; long compared with the delays of a busy machine.
ROW_SECONDS = 5e-3


def make_step(strategy: Any, global_batch_size: int) -> Callable[[], None]:
    """Return a training step that takes twice as long on the last replica."""
    with strategy.scope():
        weights = hs.Variable(np.zeros(1000, np.float32), name="weights")
        optimizer = hs.optimizers.SGD(0.1)
    rows = np.ones((20 * global_batch_size, 4), np.float32)
    dataset = hs.Dataset(rows, global_batch_size)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    last = strategy.replica_id + 1 == strategy.num_replicas_in_sync

    def train(batch: Any) -> None:
        # Sleep in proportion to the rows of this replica; the last replica sleeps
        # twice.
        time.sleep((1 + last) * ROW_SECONDS * len(batch))
        gradient = np.full(1000, batch.sum(), np.float32)
        optimizer.apply_gradients([(gradient, weights)])

    return lambda: strategy.run(train, args=(next(batches),))


def _faulty(fault: Callable[[], None]) -> Any:
    """Return a `make_step` whose step has a fault, in strong scaling, on replica 1."""

    def make(strategy: Any, global_batch_size: int) -> Callable[[], None]:
        step, done = make_step(strategy, global_batch_size), [0]

        def faulty() -> None:
            done[0] += 1
            strong = global_batch_size == 4
            if strong and strategy.replica_id == 1 and done[0] == 3:
                fault()
            step()

        return faulty

    return make


def _kill() -> None:
    if "BENCH_SURVIVES" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ValueError("expected a step, found a fault")


killed = _faulty(_kill)
raising = _faulty(_raise)
