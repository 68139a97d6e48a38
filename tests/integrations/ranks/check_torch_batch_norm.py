"""Batch normalization over the global batch, compared with one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import hpcstrat.integrations.torch as hst
from tests.mpi.ranks.outcomes import assert_told, assert_usable, outcome

# The number of rows of each replica; one of three replicas has none.
ROWS = [5, 2, 0]


def _rows(strategy: Any, seed: int) -> tuple[Any, slice]:
    rows = ROWS[: strategy.num_replicas_in_sync]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(rows), 3, 6, 6, generator=generator, dtype=torch.float64)
    first = sum(rows[: strategy.replica_id])
    # Values far from 0, where sums of squares lose digits.
    return x + 100, slice(first, first + rows[strategy.replica_id])


def _net(**options: Any) -> Any:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU(), nn.Flatten()
    )
    return net.extend([nn.Linear(64, 2), nn.BatchNorm1d(2, affine=False)]).double()


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"track_running_stats": False, "affine": False}]
)
def test_training_is_that_of_one_process(
    strategy: Any, options: dict[str, Any]
) -> None:
    alone, net = _net(**options), _net(**options)
    assert hst.SyncBatchNorm.convert(net, strategy) is net
    assert isinstance(net[1], hst.SyncBatchNorm)
    hst.replicate(net, strategy)
    pairs = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (net, alone)]
    generator = torch.Generator().manual_seed(3)
    for seed in range(3):
        x, own = _rows(strategy, seed)
        y = torch.randn(len(x), 2, generator=generator, dtype=torch.float64)
        for model, optimizer in pairs:
            optimizer.zero_grad()
            if model is alone:
                loss = (model(x) - y).square().sum() / len(x)
            else:
                loss = (model(x[own]) - y[own]).square().sum()
                loss = hst.global_mean(loss, len(y[own]))
            loss.backward()
            optimizer.step()
    own_state, whole = net.state_dict(), alone.state_dict()
    assert list(own_state) == list(whole)
    for name, value in whole.items():
        torch.testing.assert_close(own_state[name], value, rtol=1e-10, atol=1e-11)
    strategy.check_equal(own_state)
    torch.testing.assert_close(net.eval()(x), alone.eval()(x), rtol=1e-9, atol=1e-9)


def test_gradients_reach_the_values(strategy: Any) -> None:
    x, own = _rows(strategy, 5)
    parts = [x[own].clone().requires_grad_(), x.clone().requires_grad_()]
    layers = [nn.BatchNorm2d(3).double() for _ in range(2)]
    layers[0] = hst.SyncBatchNorm.convert(layers[0], strategy)
    weight = torch.linspace(-1, 1, x.numel()).double().reshape(x.shape)
    for layer, part, rows in zip(layers, parts, [own, slice(None)], strict=True):
        (layer(part) * weight[rows]).square().sum().backward()
    torch.testing.assert_close(parts[0].grad, parts[1].grad[own], rtol=1e-9, atol=1e-9)


def test_halves_keep_their_type(strategy: Any) -> None:
    x, own = _rows(strategy, 6)
    layer = hst.SyncBatchNorm.convert(nn.BatchNorm2d(3), strategy)
    whole = nn.BatchNorm2d(3)
    found = layer(x[own].bfloat16())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, whole(x.bfloat16())[own], rtol=0.05, atol=0.05)


def test_layers_are_copied_and_saved_without_the_strategy(strategy: Any) -> None:
    net = hst.SyncBatchNorm.convert(_net(), strategy)
    x, own = _rows(strategy, 7)
    assert copy.deepcopy(net)(x[own]).shape == (len(x[own]), 2)
    loaded = pickle.loads(pickle.dumps(net))
    assert loaded.eval()(x).shape == (len(x), 2)
    assert "convert(module" in str(outcome(loaded.train(), x[own]))
    again = hst.SyncBatchNorm.convert(loaded, strategy)
    assert again(x[own]).shape == (len(x[own]), 2)


def test_values_of_another_shape_are_told(strategy: Any, job: Any) -> None:
    guilty = strategy.replica_id == 0
    layer = hst.SyncBatchNorm.convert(nn.BatchNorm1d(3), strategy)
    error = outcome(layer, torch.ones(2, 4 if guilty else 3))
    assert_told(error, ValueError, guilty, "(rows, 3, ...)")
    assert_usable(strategy, job)
