"""Classify points of two spirals with a PyTorch network, and resume after an end."""

import sys

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
turn = torch.rand(1000, 1) * 9
points = turn * torch.cat([torch.cos(turn), torch.sin(turn)], dim=1) / 9
labels = torch.randint(0, 2, (1000, 1)).float()
data = TensorDataset(points * (2 * labels - 1), labels)

strategy = hs.MultiWorkerMirroredStrategy()
model = nn.Sequential(
    nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
)
model = hst.replicate(model, strategy)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = hst.GlobalBatchSampler(data, 100, strategy, shuffle=True)
loader = sampler.loader()
state = hst.state(model, optimizer)
checkpoints = hs.CheckpointManager("spirals", **state, data=sampler)
checkpoints.restore_or_initialize()

while sampler.epoch < int(sys.argv[1]):
    for rows, answers in loader:
        optimizer.zero_grad()
        errors = nn.functional.binary_cross_entropy_with_logits(
            model(rows), answers, reduction="sum"
        )
        loss = hst.global_mean(errors, len(rows))
        loss.backward()
        optimizer.step()
    checkpoints.save(sampler.epoch)
    if sampler.epoch % 5 == 0:
        hs.print_once(f"epoch {sampler.epoch}: loss {loss:.4f}")
