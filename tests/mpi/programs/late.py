"""Make every call late on one rank: ``late.py END FOLDER``.

Replica 0 writes ``FOLDER/pids`` with all process numbers after the other ranks have
waited in calls. END says how the program ends: ``return``, or on the last rank ``wait``
(until FOLDER/go exists), ``error``, or ``kill``. With one more argument, each rank is a
worker.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hpcstrat as hs

_LATE_SECONDS = 0.02
_CALLS = 30
_PAUSE_SECONDS = 0.05


def main() -> None:
    """Make the late calls, and end in the given way."""
    end, folder = sys.argv[1], Path(sys.argv[2])
    logging.getLogger("hpcstrat.arrivals").setLevel(logging.INFO)
    each = 1 if len(sys.argv) > 3 else None
    strategy = hs.MultiWorkerMirroredStrategy(replicas_per_worker=each)
    last = strategy.topology.num_replicas - 1
    is_late = strategy.replica_id == last
    pids = strategy.topology.replica_comm.allgather(os.getpid())
    for number in range(_CALLS):
        if is_late:
            time.sleep(_LATE_SECONDS)
        strategy.reduce("sum", np.float64(number), axis=None)
    if strategy.replica_id == 0:
        (folder / "part").write_text(" ".join(map(str, pids)))
        (folder / "part").rename(folder / "pids")
    if end == "wait" and is_late:
        while not (folder / "go").exists():
            time.sleep(_PAUSE_SECONDS)
    if end in ("kill", "error"):
        # Wait until the recorded events are written, which happens once per second.
        time.sleep(2.5)
    if is_late and end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_late and end == "error":
        with hs.trace("the last one"):
            pass
        raise ValueError("the cause")
    strategy.reduce("sum", np.float64(0), axis=None)


main()
