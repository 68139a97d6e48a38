"""Simulate heat in a rod whose cells are divided among the ranks, with mpi4py alone."""

import sys

import numpy as np
from mpi4py import MPI

CELLS, STEPS = 1000, int(sys.argv[1])

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
starts = np.arange(size + 1) * CELLS // size
left = rank - 1 if rank > 0 else MPI.PROC_NULL
right = rank + 1 if rank < size - 1 else MPI.PROC_NULL

rod = np.zeros(CELLS)
rod[450:550] = 100.0
own = rod[starts[rank] : starts[rank + 1]].copy()
for step in range(1, STEPS + 1):
    before, after = np.zeros(1), np.zeros(1)
    world.Sendrecv(own[-1:], right, recvbuf=before, source=left)
    world.Sendrecv(own[:1], left, recvbuf=after, source=right)
    padded = np.concatenate([before, own, after])
    own += 0.4 * (padded[:-2] - 2 * own + padded[2:])
    if step % 500 == 0:
        hottest = world.allreduce(own.max(), op=MPI.MAX)
        total = world.allreduce(own.sum(), op=MPI.SUM)
        if rank == 0:
            print(f"step {step}: hottest {hottest:.4f}, total {total:.4f}", flush=True)
