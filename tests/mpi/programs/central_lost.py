"""Kill the last rank in the midst of steps: ``central_lost.py FOLDER EACH SECONDS``.

Variables lie in central storage. EACH is the number of replicas per worker, or 0 for
one worker with all replicas. The last rank is killed SECONDS after a checkpoint, and
the other ranks continue from that checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np

import hpcstrat as hs

_SIZE = 200_000


class Training:
    """Training of one central variable with Adam."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.strategy = hs.CentralStorageStrategy(on_lost_rank="raise", **options)
        with self.strategy.scope():
            self.variable = hs.Variable(np.zeros(_SIZE, np.float32), name="v")
            self.optimizer = hs.optimizers.Adam(0.1)
        self.manager = hs.CheckpointManager(
            folder, v=self.variable, optimizer=self.optimizer
        )

    def step(self, number: int) -> None:
        """Make one step, with the same gradient on all replicas."""
        gradient = np.random.default_rng(number).normal(size=_SIZE).astype(np.float32)
        pairs = [(gradient, self.variable)]
        self.strategy.run(self.optimizer.apply_gradients, args=(pairs,))


def main() -> None:
    """Run the training, lose the last rank, and continue."""
    folder, each, seconds = sys.argv[1], int(sys.argv[2]) or None, float(sys.argv[3])
    training = Training(folder, replicas_per_worker=each)
    strategy = training.strategy
    for number in range(3):
        training.step(number)
    training.manager.save(3)
    saved = training.variable.numpy()
    if strategy.replica_id == strategy.num_replicas_in_sync - 1:
        kill = os.kill, (os.getpid(), signal.SIGKILL)
        threading.Timer(seconds, *kill).start()
    number = 3
    try:
        while True:
            training.step(number)
            number += 1
    except hs.RankLostError as error:
        print("noticed", error.ranks, flush=True)
    survivors = strategy.topology.replica_comm.Shrink()
    strategy.close()
    smaller = Training(folder, replicas_per_worker=each, comm=survivors)
    assert smaller.manager.restore() == 3
    np.testing.assert_array_equal(smaller.variable, saved)
    for number in range(3, 6):
        smaller.step(number)
    assert int(smaller.optimizer.iterations) == 6
    print("done", flush=True)


if __name__ == "__main__":
    main()
