"""Classify points of two spirals with a PyTorch network, on any number of ranks."""

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
loader = hst.GlobalBatchSampler(data, 100, strategy, shuffle=True).loader()

for epoch in range(30):
    for rows, answers in loader:
        optimizer.zero_grad()
        errors = nn.functional.binary_cross_entropy_with_logits(
            model(rows), answers, reduction="sum"
        )
        loss = hst.global_mean(errors, len(rows))
        loss.backward()
        optimizer.step()
    if epoch % 5 == 4:
        hs.print_once(f"epoch {epoch + 1}: loss {loss:.4f}")
