"""Train on GPUs with `hs.elastic.run`, and lose a rank: see `main` for its words.

WHERE the last rank dies: ``between`` calls, when all have come to a reduction
(``inside``), when it has given its part to its stream (``behind``), or before a
``commit``. EACH is the number of replicas of a worker, or 0; SPARE is how many ranks
wait.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import cupy
import numpy as np

import hpcstrat as hs

STEPS, LOSS_STEP = 8, 4
# A sum in one meeting, and one of segments; both of several pieces of a ring.
LENGTHS = (300, 60_000)


def die() -> None:
    """End without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_inside(strategy: Any) -> None:
    """Let this rank die when it comes to its part of a reduction on the device."""
    for transport in strategy.collectives.channel.device_group._transports.values():
        type(transport).reduce = lambda *_: die()


def expected() -> list[float]:
    """Return what becomes of the weights, without a GPU."""
    weights = velocity = 0.0
    for step in range(STEPS):
        velocity = 0.5 * velocity - 0.25 * (step + 1)
        weights += velocity
    return [weights] * len(LENGTHS)


def train(strategy: Any, memory: Any) -> list[float]:
    """Come to weights that do not depend on who is left."""
    where, size = sys.argv[1], strategy.num_replicas_in_sync
    with strategy.scope():
        weights = [
            hs.Variable(cupy.zeros(n), name=f"weights{n}", aggregation="sum")
            for n in LENGTHS
        ]
        optimizer = hs.optimizers.SGD(0.25, momentum=0.5)
        count = cupy.zeros(1, cupy.int64)
        on_read = {"synchronization": "on_read", "aggregation": "sum"}
        seen = hs.Variable(count, name="seen", **on_read)

    def update(gradients: Any) -> None:
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        seen.assign_add(cupy.ones(1, cupy.int64))

    memory.track(weights=weights, optimizer=optimizer, seen=seen)
    start = memory.restore() or 0
    dies = start == 0 and strategy.replica_id == size - 1
    for step in range(start, STEPS):
        dies_now = dies and step == LOSS_STEP
        if dies_now and where == "between":
            die()
        if dies_now and where == "inside":
            die_inside(strategy)
        gradients = [cupy.full(n, (step + 1) / size) for n in LENGTHS]
        strategy.run(update, args=(gradients,))
        total = strategy.reduce("sum", cupy.ones(LENGTHS[0]), axis=None)
        if dies_now and where == "behind":
            die()
        assert float(total.sum()) == size * LENGTHS[0] or strategy.lost_ranks
        if dies_now and where == "commit":
            die()
        memory.commit(step + 1)
    found = [v.numpy() for v in weights]
    assert all((values == values[0]).all() for values in found)
    assert start == 0 or int(seen.component[0]) == STEPS
    return [float(values[0]) for values in found]


def main() -> None:
    """Run ``lost_rank.py WHERE EACH SPARE``, and compare."""
    each, spare = map(int, sys.argv[2:])
    found = hs.elastic.run(
        train,
        replicas_per_worker=each or None,
        spare_ranks=spare,
        partner_copies=spare > 0,
    )
    assert np.allclose(found, expected(), rtol=1e-12), (found, expected())
    print("right", flush=True)


if __name__ == "__main__":
    main()
