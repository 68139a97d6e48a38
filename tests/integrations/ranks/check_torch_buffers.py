"""Buffers of replicated modules that change in ways that torch does not count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hpcstrat.integrations.torch as hst
from tests.mpi.ranks.outcomes import outcome

WAYS = ["in place", "data", "numpy", "new tensor", "registered"]


class _Counting(nn.Module):
    """A layer with a buffer that its forward sets to a number, in a certain way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.number = way, 0.0
        self.layer = nn.Linear(1, 1)
        if way != "registered":
            self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        value = torch.full((3,), self.number)
        if self.way == "in place":
            self.seen.copy_(value)
        elif self.way == "data":
            self.seen.data = value
        elif self.way == "numpy":
            self.seen.numpy()[...] = self.number
        elif self.way == "new tensor":
            self.seen = value
        elif not hasattr(self, "seen"):
            self.register_buffer("seen", value)
        else:
            self.seen.numpy()[...] = self.number
        return self.layer(x)


@pytest.mark.parametrize("buffers", ["first", "mean", None])
@pytest.mark.parametrize("way", WAYS)
def test_buffers_changed_in_any_way_are_synchronized(
    strategy: Any, job: Any, way: str, buffers: str | None
) -> None:
    layers = nn.Sequential(nn.Flatten(), _Counting(way), _Counting(way), nn.Flatten())
    module = hst.replicate(layers, strategy, buffers=buffers)
    draw = np.random.default_rng(5)
    for _ in range(5):
        # Each replica's numbers; a buffer may stay the same on some of the replicas.
        numbers = draw.integers(0, 3, size=(2, job.size)).astype(float)
        for layer, row in zip(layers[1:3], numbers, strict=True):
            layer.number = float(row[job.rank])
        module(torch.ones(1, 1)).sum().backward()
        for layer, row in zip(layers[1:3], numbers, strict=True):
            wanted = {"first": row[0], "mean": row.mean(), None: row[job.rank]}[buffers]
            torch.testing.assert_close(layer.seen, torch.full((3,), float(wanted)))


def test_submodules_added_later_are_synchronized(strategy: Any, job: Any) -> None:
    module = hst.replicate(nn.Sequential(nn.Linear(1, 1)), strategy)
    module(torch.ones(1, 1)).sum().backward()
    added = nn.BatchNorm1d(1, affine=False)
    module.append(added)
    rows = torch.arange(2.0).reshape(2, 1) + job.rank
    for _ in range(2):
        module(rows).sum().backward()
    found = job.allgather(added.running_mean.tolist())
    assert found == found[:1] * job.size


def test_a_buffer_that_only_one_replica_registers_is_an_error_on_all(
    strategy: Any, job: Any
) -> None:
    module = hst.replicate(nn.Sequential(nn.Linear(1, 1)), strategy)
    if job.rank == 0:
        module.register_buffer("own", torch.ones(2))
    error = outcome(module(torch.ones(1, 1)).sum().backward)
    if job.size > 1:
        assert "float32[2]" in str(error), error
