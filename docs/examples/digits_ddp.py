"""Train with torch.distributed: a program that knows nothing of hpcstrat.

    torchrun --nproc-per-node 4 docs/examples/digits_ddp.py
    mpirun -n 4 hpcstrat torch --replace gloo docs/examples/digits_ddp.py

The first line is how it was meant to run, the second runs it over MPI.
"""

import argparse
import json
from pathlib import Path

import h5py
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DIGITS = Path(__file__).parents[2] / "jobs" / "data" / "digits.h5"
BATCH = 64  # of all ranks; the last batch of an epoch has 30 rows


def digits(part):
    """Return the images and labels of one part of the file."""
    with h5py.File(DIGITS, "r", locking=False) as file:
        images, labels = (file[part][name][:] for name in ("images", "labels"))
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()


def network():
    """Return the model, which is the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def order(epoch, length):
    """Return the order of the rows in an epoch."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch))


def main():
    """Train, test, and print loss and accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", type=Path, help="folder")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, file = 0, options.checkpoints and options.checkpoints / "digits.pt"
    if file and file.exists():
        first, weights, state = torch.load(file)
        model.module.load_state_dict(weights)
        optimizer.load_state_dict(state)
    dist.barrier()

    images, labels = digits("train")
    loss = torch.zeros(1)
    for epoch in range(first, options.epochs):
        for rows in order(epoch, len(labels)).split(BATCH):
            own = rows[rank::size]
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(
                model(images[own]), labels[own], reduction="sum"
            )
            # DDP takes the mean of the ranks' gradients.
            (losses * size / len(rows)).backward()
            optimizer.step()
            loss = losses.detach() / len(rows)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                state = optimizer.state_dict()
                torch.save((epoch + 1, model.module.state_dict(), state), file)

    images, labels = digits("test")
    with torch.no_grad():
        found = model(images[rank::size]).argmax(dim=1)
    right = (found == labels[rank::size]).sum()
    dist.all_reduce(right)
    accuracy = right.item() / len(labels)
    if rank == 0:
        print(json.dumps({"loss": loss.item(), "accuracy": accuracy}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
