"""Train on GPUs with `hs.elastic.run`, and lose a rank: ``lost_rank.py``.

The words are WHERE EACH SPARE. WHERE is the moment at which the last rank dies:
``between`` calls, when all ranks have reached a reduction (``inside``), when the rank
has queued its part in its stream (``behind``), or before a ``commit``. EACH is the
number of replicas of a worker, or 0; SPARE is the number of spare ranks.
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
# A sum in one message exchange, and one of segments, both in several pieces of a ring.
LENGTHS = (300, 60_000)


def die() -> None:
    """Kill this process without any message to the other ranks."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_inside(strategy: Any) -> None:
    """Kill this rank when it reaches its part of a reduction on the device."""
    for transport in strategy.collectives.channel.device_group._transports.values():
        type(transport).reduce = lambda *_: die()


def expected() -> list[float]:
    """Return the expected weights, computed without a GPU."""
    weights = velocity = 0.0
    for step in range(STEPS):
        velocity = 0.5 * velocity - 0.25 * (step + 1)
        weights += velocity
    return [weights] * len(LENGTHS)


def train(strategy: Any, memory: Any) -> list[float]:
    """Train weights that do not depend on which ranks are left."""
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
    """Run ``lost_rank.py WHERE EACH SPARE``, and compare the weights."""
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
