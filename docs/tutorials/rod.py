"""Simulate heat in a rod whose cells are divided among the ranks, with checkpoints."""

import sys

import hpcstrat as hs
import numpy as np
from mpi4py import MPI

CELLS, STEPS = 1000, int(sys.argv[1])

strategy = hs.MultiWorkerMirroredStrategy()
world = MPI.COMM_WORLD
rank, size = strategy.replica_id, strategy.num_replicas_in_sync
starts = np.arange(size + 1) * CELLS // size
left = rank - 1 if rank > 0 else MPI.PROC_NULL
right = rank + 1 if rank < size - 1 else MPI.PROC_NULL

rod = np.zeros(CELLS)
rod[450:550] = 100.0
with strategy.scope():
    whole = hs.Variable(rod, name="rod")
    steps = hs.Variable(0, dtype="int64", name="steps")
checkpoints = hs.CheckpointManager("rod", rod=whole, steps=steps)
checkpoints.restore_or_initialize()

own = whole.numpy()[starts[rank] : starts[rank + 1]].copy()
for step in range(int(steps.numpy()) + 1, STEPS + 1):
    before, after = np.zeros(1), np.zeros(1)
    world.Sendrecv(own[-1:], right, recvbuf=before, source=left)
    world.Sendrecv(own[:1], left, recvbuf=after, source=right)
    padded = np.concatenate([before, own, after])
    own += 0.4 * (padded[:-2] - 2 * own + padded[2:])
    if step % 500 == 0:
        whole.assign(strategy.gather(own, axis=0))
        steps.assign(step)
        checkpoints.save(step)
        total = strategy.reduce("sum", own.sum(), axis=None)
        hottest = whole.numpy().max()
        hs.print_once(f"step {step}: hottest {hottest:.4f}, total {total:.4f}")
