"""Train with PyTorch, lose rank 2 of three, continue, and print the result."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import hpcstrat as hs
import hpcstrat.integrations.torch as hst

KILLED_AT = 9

x = torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(60, 4).sin()
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def train(strategy: hs.Strategy, memory: Any) -> None:
    """Train for three epochs, from the step of the last commit."""
    torch.manual_seed(strategy.replica_id)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    model = hst.replicate(torch.nn.Sequential(*layers).double(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    sampler = hst.GlobalBatchSampler(data, 7, strategy, shuffle=True)
    memory.track(**hst.state(model, optimizer), data=sampler)
    step = memory.restore() or 0
    loader, loss = sampler.loader(), torch.zeros(())
    while sampler.epoch < 3:
        for rows, targets in loader:
            if (step, strategy.replica_id) == (KILLED_AT, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            errors = (model(rows) - targets).square().sum()
            loss = hst.global_mean(errors, len(rows), strategy=strategy)
            loss.backward()
            optimizer.step()
            step += 1
            memory.commit(step)
    strategy.check_equal(model.state_dict())
    # Print the line in one write, so that lines of different ranks do not mix.
    weight = float(model[0].weight.detach().sum())
    print(f"{strategy.num_replicas_in_sync} {step} {loss.item()} {weight}\n", end="")


hs.elastic.run(train)
