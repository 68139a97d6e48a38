"""A program that runs for a given time: ``steady.py NAME SECONDS``.

The name on the command line distinguishes its processes from those of other jobs. Each
step sums an array over all ranks. At the end, rank 0 prints the number of sums, and the
number of wrong sums.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import hpcstrat as hs


def main() -> None:
    end = time.monotonic() + float(sys.argv[2])
    with hs.MultiWorkerMirroredStrategy() as strategy:
        size = strategy.num_replicas_in_sync
        steps = wrong = 0
        while not strategy.broadcast_object(time.monotonic() > end):
            steps += 1
            own = np.full(1000, steps * (strategy.replica_id + 1))
            total = strategy.reduce("sum", own)
            wrong += int((total != steps * size * (size + 1) // 2).any())
            time.sleep(0.001)
        wrong = int(strategy.reduce("sum", wrong))
        if strategy.replica_id == 0:
            print(f"steps {steps > 0} wrong {wrong}")


if __name__ == "__main__":
    main()
