"""Numbered rows, and a model of Lightning that says which of them it has seen."""

from __future__ import annotations

from typing import Any

import lightning
import torch

import hpcstrat.integrations.torch as hst

__all__ = ["NumberedRows", "RowsLearner", "quiet_trainer"]


class NumberedRows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A row is its number and inputs that are computed from it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        return row, torch.sin(torch.arange(4.0) * (1 + row))


class RowsLearner(lightning.LightningModule):  # type: ignore[misc]
    """A linear model; `saw` gets the epoch, the number and the rows of each batch."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(self.line.weight)
        self.strategy = strategy
        self.seen: list[tuple[int, int, list[int]]] = []

    def saw(self, epoch: int, number: int, rows: list[int]) -> None:
        self.seen.append((epoch, number, rows))

    def training_step(self, batch: Any, number: int) -> Any:
        rows, x = batch
        self.saw(self.current_epoch, number, rows.tolist())
        loss = (self.line(x.double())[:, 0] - rows).square().sum()
        return hst.global_mean(loss, len(rows), strategy=self.strategy)

    def predict_step(self, batch: Any) -> Any:
        rows, x = batch
        return {"row": rows, "parts": (x[:, :2], rows.double() * 0.5)}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.1)


def quiet_trainer(*callbacks: Any, folder: Any, **options: Any) -> Any:
    """Return a Trainer that prints nothing, and saves only what its callbacks save."""
    return lightning.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
