"""The training of ``hpcstrat bench survive``, which checks every byte that it restores.

``python -m hpcstrat.tools.bench.survival_training OPTIONS``, where OPTIONS are JSON.
Each step adds 1 to all weights, so that they tell the number of steps. Rank 0 writes a
line of JSON for each step, and every rank one at its start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from hpcstrat.checkpoint import CheckpointManager, CheckpointOptions
from hpcstrat.engine.settings import Settings
from hpcstrat.strategies import MultiWorkerMirroredStrategy
from hpcstrat.variables import Variable

__all__ = ["main"]

_NUM_VARIABLES = 4


def main() -> None:
    """Train until there is a file ``stop`` in the run's folder."""
    told = json.loads(sys.argv[1])
    folder, job = Path(told["folder"]), Path(os.environ["RUN_FOLDER"])
    number = os.environ["HPCSTRAT_WATCH_GENERATION"]
    settings = Settings(hang_folder=str(job / "hang"))
    strategy = MultiWorkerMirroredStrategy(settings=settings)
    size = max(1, int(told["state_mib"] * 2**20) // _NUM_VARIABLES // 4)
    with strategy.scope():
        weights = [Variable(np.zeros(size, np.float32)) for _ in range(_NUM_VARIABLES)]
    options = CheckpointOptions(
        memory=told["snapshot_steps"] or False, every=told["save_steps"], max_to_keep=2
    )
    manager = CheckpointManager(
        folder / "checkpoints", options=options, weights=weights
    )
    step = manager.restore_or_initialize() or 0
    for weight in weights:
        if not (weight.component == step).all():
            # The command counts these files as wrong restores.
            (job / f"wrong-{number}-{strategy.rank}").touch()
    path = job / f"steps-{int(number):06}-{strategy.rank}"
    with path.open("a", buffering=1, encoding="utf-8") as log:

        def write(*line: object) -> None:
            log.write(json.dumps([time.time(), *line]) + "\n")

        write("start", step, os.uname().nodename, os.getpid())
        stops = 0.0
        while not stops:
            began = time.perf_counter()
            # The hosts may share their cores, so a step sleeps instead of computing.
            time.sleep(told["step_ms"] / 1e3)
            stop = float(strategy.rank == 0 and (job / "stop").exists())
            stops = float(strategy.reduce("sum", stop, axis=None))
            for weight in weights:
                weight.component[...] += 1
            step += 1
            ended = time.perf_counter()
            manager.save_if_due(step, overwrite=True)
            if strategy.rank == 0:
                write("step", step, ended - began, time.perf_counter() - ended)
    manager.save(step, overwrite=True)
    manager.complete()


if __name__ == "__main__":
    main()
