"""Train a network of PyTorch on handwritten digits, one replica per rank.

    python docs/examples/digits_torch.py
    mpirun -n 4 python docs/examples/digits_torch.py --epochs 20 --checkpoints digits

On any number of ranks it learns what one process learns. With --checkpoints a second
run goes on where the first one stopped, on as many ranks as it has.
"""

import argparse
import json
from pathlib import Path

import h5py
import hpcstrat as hs
import hpcstrat.integrations.torch as hst
import torch
from torch import nn
from torch.utils.data import TensorDataset

DIGITS = Path(__file__).parents[2] / "jobs" / "data" / "digits.h5"
BATCH = 64  # of all replicas; the last batch of an epoch has 30 rows


def digits(part):
    """Return the images and labels of one part of the file."""
    with h5py.File(DIGITS, "r", locking=False) as file:
        images, labels = (file[part][name][:] for name in ("images", "labels"))
    return TensorDataset(
        torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
    )


def network():
    """Return the model, which is the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def main():
    """Train, test, and print loss and accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", help="folder")
    options = parser.parse_args()
    strategy = hs.MultiWorkerMirroredStrategy()
    model = hst.replicate(network(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = hst.GlobalBatchSampler(digits("train"), BATCH, strategy, shuffle=True)
    checkpoints = None
    if options.checkpoints:
        state = hst.state(model, optimizer)
        checkpoints = hs.CheckpointManager(options.checkpoints, **state, data=sampler)
        checkpoints.restore_or_initialize()

    loader, loss = sampler.loader(), torch.tensor(torch.nan)
    while sampler.epoch < options.epochs:
        for images, labels in loader:
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(images), labels, reduction="sum")
            loss = hst.global_mean(losses, len(labels))  # over the rows of all replicas
            loss.backward()  # gradients are combined when it ends
            optimizer.step()
        if checkpoints is not None:
            checkpoints.save(sampler.epoch)
        hs.print_once(f"epoch {sampler.epoch}: loss {loss:.4f}")

    right = torch.zeros(())
    tests = hst.GlobalBatchSampler(digits("test"), BATCH, strategy)
    with torch.no_grad():
        for images, labels in tests.loader():
            right += (model(images).argmax(dim=1) == labels).sum()
    right = strategy.reduce("sum", right, axis=None)
    accuracy = float(right) / len(tests.dataset)
    hs.print_once(json.dumps({"loss": loss.item(), "accuracy": accuracy}))


if __name__ == "__main__":
    main()
