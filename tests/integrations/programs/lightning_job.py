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
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy

import hpcstrat as hs
import hpcstrat.integrations.lightning as hsl
import hpcstrat.integrations.torch as hst
from hpcstrat.engine.topology.topology import Topology

FOLDER, OPTIONS = Path(sys.argv[1]), json.loads(sys.argv[2])
RANK, RANKS = Topology.world().rank, Topology.world().size


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A row is its number and inputs that are computed from it."""

    def __len__(self) -> int:
        return int(OPTIONS["rows"])

    def __getitem__(self, row: int) -> Any:
        return row, torch.sin(torch.arange(4.0) * (1 + row))


class Net(lightning.LightningModule):  # type: ignore[misc]
    """A linear model that writes down the rows of each batch."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(self.line.weight)
        self.strategy = strategy

    def training_step(self, batch: Any, number: int) -> Any:
        rows, x = batch
        with open(Path(sys.argv[3], f"rank{RANK}"), "a", encoding="ascii") as file:
            told = {"epoch": self.current_epoch, "rows": rows.tolist()}
            print(json.dumps(told), file=file)
        if RANK == RANKS - 1 and self.global_step + 1 == OPTIONS["stop"]:
            os.kill(os.getpid(), signal.SIGUSR1)
        loss = (self.line(x.double())[:, 0] - rows).square().sum()
        return hst.global_mean(loss, len(rows), strategy=self.strategy)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.1)


def main() -> None:
    """Train, or continue to train."""
    torch.set_num_threads(1)
    strategy = hs.MultiWorkerMirroredStrategy()
    net, saving = Net(strategy), hsl.PreemptionCheckpoint(FOLDER)
    sampler = hst.GlobalBatchSampler(
        Rows(), OPTIONS["batch"], strategy, shuffle=True, seed=3
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(
            process_group_backend="hpcstrat", cluster_environment=MPIEnvironment()
        ),
        use_distributed_sampler=False,
        max_epochs=OPTIONS["epochs"],
        callbacks=[saving],
        default_root_dir=FOLDER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, sampler.loader(), ckpt_path=saving.newest)
    if RANK == 0:
        np.save(FOLDER / "weights.npy", net.line.weight.detach().numpy())


if __name__ == "__main__":
    main()
