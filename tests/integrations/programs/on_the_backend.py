"""Train a linear model with a library: ``on_the_backend.py LIBRARY FILE``.

Replica 0 writes the final weights and bias into the file.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcstrat.integrations.torch  # noqa: F401

ROWS, EPOCHS = 480, 2


def data() -> Any:
    """Return the dataset; in each step, each rank uses 16 rows of it."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1))


def line() -> Any:
    """Return the linear model, with the same weights on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1)


def loss_of(module: Any, x: Any, y: Any) -> Any:
    """Return the mean of this rank's squared errors."""
    return torch.nn.functional.mse_loss(module(x).squeeze(1), y)


def _of_launcher(name: str, default: int) -> int:
    """Return a number of Open MPI's launcher, or the default without the launcher."""
    return int(os.environ.get(f"OMPI_COMM_WORLD_{name}", default))


def lightning_trainer() -> Any:
    """Train a LightningModule with Lightning's Trainer."""
    import lightning
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins.environments import MPIEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.line = line()
            self.unused = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            loss = loss_of(self.line, *batch)
            self.log("loss", loss, sync_dist=True)
            assert len(self.all_gather(loss)) == self.trainer.world_size
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    strategy = DDPStrategy(
        process_group_backend="hpcstrat",
        cluster_environment=MPIEnvironment(),
        find_unused_parameters=True,
    )
    folder = Path(sys.argv[2]).parent
    net = Net()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("DEVICES") or _of_launcher("LOCAL_SIZE", 1)),
        strategy=strategy,
        # Lightning's own sampler would shuffle the rows.
        use_distributed_sampler=False,
        max_epochs=EPOCHS,
        logger=CSVLogger(folder, name="logged"),
        log_every_n_steps=1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    ranks = _of_launcher("SIZE", 1), _of_launcher("RANK", 0)
    sampler = DistributedSampler(data(), *ranks, shuffle=False)
    trainer.fit(net, DataLoader(data(), 16, sampler=sampler))
    assert trainer.world_size == ranks[0]
    # After this barrier, replica 0 has written both files.
    trainer.strategy.barrier()
    assert len([*folder.rglob("*.ckpt")]) == len([*folder.rglob("metrics.csv")]) == 1
    return net.line


def lightning_fabric() -> Any:
    """Train in a loop with the objects that Fabric has set up."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import MPIEnvironment
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(
        accelerator="cpu",
        devices=int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        strategy=DDPStrategy(
            process_group_backend="hpcstrat", cluster_environment=MPIEnvironment()
        ),
    )
    fabric.launch()
    net = line()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = fabric.setup_dataloaders(DataLoader(data(), 16))
    fabric.barrier()
    ones = fabric.all_gather(torch.ones(1)).sum()
    assert (
        ones
        == fabric.all_reduce(torch.ones(()), reduce_op="sum")
        == dist.get_world_size()
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, x, y))
            optimizer.step()
    return net


def accelerate() -> Any:
    """Train in a loop with the objects that Accelerate has prepared."""
    dist.init_process_group("hpcstrat")
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), line()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(data(), 16)
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
    return net


def transformers() -> Any:
    """Train with Hugging Face's Trainer, which uses the existing process group."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    dist.init_process_group("hpcstrat")
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = line()

        def forward(self, x: Any, y: Any) -> Any:
            return {"loss": loss_of(self.line, x, y)}

    net = Net()
    options = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=16,
        num_train_epochs=EPOCHS,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="sgd",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"x": x, "y": y} for x, y in data()]
    Trainer(model=net, args=options, train_dataset=rows).train()
    return net.line


def main() -> None:
    """Train with the library of the first argument, and write the weights."""
    torch.set_num_threads(1)
    net = globals()[sys.argv[1]]()
    assert dist.get_backend() == "hpcstrat"
    if dist.get_rank() == 0:
        weights = [*net.weight.flatten().tolist(), *net.bias.tolist()]
        Path(sys.argv[2]).write_text(" ".join(map(str, weights)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
