"""Train with Lightning's Trainer: ``lightning_job.py FOLDER OPTIONS ROWS``.

The options are in JSON: ``rows``, ``batch``, ``epochs``, and ``stop``: after this
number of steps, the last rank gets SIGUSR1; 0: never. The program continues from a
checkpoint in FOLDER. Each rank writes the rows of each step into a file in the folder
ROWS; rank 0 writes the final weights into FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy

import hpcstrat as hs
import hpcstrat.integrations.lightning as hsl
import hpcstrat.integrations.torch as hst
from hpcstrat.engine.topology.topology import Topology
from tests.integrations.programs.lightning_rows import (
    NumberedRows,
    RowsLearner,
    quiet_trainer,
)

FOLDER, OPTIONS = Path(sys.argv[1]), json.loads(sys.argv[2])
RANK, RANKS = Topology.world().rank, Topology.world().size


class RowsWriter(RowsLearner):
    """Writes the rows of each step into a file; sends itself SIGUSR1 if it must."""

    def saw(self, epoch: int, number: int, rows: list[int]) -> None:
        with open(Path(sys.argv[3], f"rank{RANK}"), "a", encoding="ascii") as file:
            print(json.dumps({"epoch": epoch, "rows": rows}), file=file)
        if RANK == RANKS - 1 and self.global_step + 1 == OPTIONS["stop"]:
            os.kill(os.getpid(), signal.SIGUSR1)


def main() -> None:
    """Train, or continue to train."""
    torch.set_num_threads(1)
    strategy = hs.MultiWorkerMirroredStrategy()
    net, saving = RowsWriter(strategy), hsl.PreemptionCheckpoint(FOLDER)
    sampler = hst.GlobalBatchSampler(
        NumberedRows(OPTIONS["rows"]), OPTIONS["batch"], strategy, shuffle=True, seed=3
    )
    trainer = quiet_trainer(
        saving,
        folder=FOLDER,
        devices=RANKS,
        strategy=DDPStrategy(
            process_group_backend="hpcstrat", cluster_environment=MPIEnvironment()
        ),
        max_epochs=OPTIONS["epochs"],
    )
    trainer.fit(net, sampler.loader(), ckpt_path=saving.newest)
    if RANK == 0:
        np.save(FOLDER / "weights.npy", net.line.weight.detach().numpy())


if __name__ == "__main__":
    main()
