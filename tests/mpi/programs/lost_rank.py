"""Handle the loss of the last rank without `hs.elastic`: ``lost_rank.py WAY WORKER``.

WAY is the reaction of the survivors to the error: ``go_on``, ``leave`` or ``nothing``.
With ``piece``, the rank is lost in the midst of a sum, and the survivors continue.
WORKER is the number of replicas of a worker, or 0.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time

import numpy as np

import hpcstrat as hs
from tests.mpi.programs.midst import large, lay_trap


def say_how_mpi_ended() -> None:
    """Print whether MPI_Finalize was called, after the exit functions of hpcstrat."""
    from mpi4py import MPI

    print("finalized" if MPI.Is_finalized() else "left", flush=True)


def loop(strategy: hs.Strategy, seconds: float) -> None:
    """Reduce large and small arrays again and again for some seconds."""
    size = strategy.num_replicas_in_sync
    end = time.monotonic() + seconds
    running = 1.0
    while running:
        for length in (1, 300_000):
            total = strategy.reduce("sum", np.ones(length), axis=None)
            assert (total == size).all()
        # The clock of rank 0 decides for all ranks when the loop ends.
        running = float(time.monotonic() < end) if strategy.replica_id == 0 else 0.0
        running = strategy.reduce("sum", running, axis=None)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Kill the last rank, and react on the other ranks."""
    way, each = sys.argv[1], int(sys.argv[2]) or None
    atexit.register(say_how_mpi_ended)
    strategy = hs.MultiWorkerMirroredStrategy(
        on_lost_rank="raise", replicas_per_worker=each
    )
    size = strategy.num_replicas_in_sync
    loop(strategy, 0.2)
    if strategy.replica_id == size - 1:
        if way != "piece":
            _die()
        lay_trap(_die)
    try:
        if way == "piece":
            strategy.reduce("sum", large(), axis=None)
        loop(strategy, 60)
    except hs.RankLostError as error:
        if way == "nothing":
            raise
        print("noticed", error.ranks, flush=True)
    try:
        strategy.barrier()
    except hs.RankLostError as error:
        print("again", error.ranks, flush=True)
    if way == "leave":
        return
    survivors = strategy.topology.replica_comm.Shrink()
    strategy.close()
    with hs.MultiWorkerMirroredStrategy(
        comm=survivors, on_lost_rank="raise", replicas_per_worker=each
    ) as smaller:
        assert smaller.num_replicas_in_sync == size - 1
        loop(smaller, 0.2)
    print("done", flush=True)


if __name__ == "__main__":
    main()
