"""A model that PyTorch divides over a strategy's mesh, with FSDP2 over replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from tests.mpi.ranks.outcomes import outcome

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="torch before 2.6"),
]
INPUTS, HIDDEN, BATCH, STEPS = 6, 12, 24, 20


def net() -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
    return nn.Sequential(*layers).double()


def trained(model: Any, rows: slice, mean: Any = float) -> tuple[list[float], Any]:
    """Train on some rows of each batch; ``mean`` averages a loss over replicas."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, INPUTS, generator=generator, dtype=torch.float64)
        y = torch.sin(x.sum(1, keepdim=True))
        sgd.zero_grad()
        loss = (model(x[rows]) - y[rows]).square().mean()
        loss.backward()
        sgd.step()
        losses.append(mean(loss.detach()))
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return losses, np.concatenate([p.detach().numpy().ravel() for p in whole])


@pytest.fixture
def strategies(job: Any) -> Iterator[list[Any]]:
    counts = [n for n in range(2, HIDDEN) if job.size % n == HIDDEN % n == 0] or [1]
    made = [hs.MultiWorkerMirroredStrategy(ranks_per_replica=n) for n in counts]
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()
    for strategy in made:
        strategy.close()


def test_fsdp_and_tensor_parallel_are_one_process(strategies: list[Any]) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    expected = trained(net(), slice(BATCH))
    for strategy in strategies:
        mesh, count = hst.device_mesh(strategy), strategy.num_replicas_in_sync
        assert mesh.shape == (count, strategy.inside.size)
        place = strategy.replica_id, strategy.inside.position
        assert tuple(mesh.get_coordinate()) == place
        model = net()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["inside"], plan)
        error = outcome(hst.replicate, model, strategy)
        assert isinstance(error, ValueError), error
        assert "hst.device_mesh" in str(error)
        fsdp.fully_shard(model, mesh=mesh["replica"])

        def mean(loss: Any, mesh: Any = mesh, count: int = count) -> float:
            dist.all_reduce(loss, group=mesh["replica"].get_group())
            return float(loss) / count

        each = BATCH // count
        first = strategy.replica_id * each
        found = trained(model, slice(first, first + each), mean)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_a_strategy_over_other_ranks_is_refused(
    job: Any, strategies: list[Any]
) -> None:
    hst.device_mesh(strategies[0])
    with hs.OneDeviceStrategy("CPU:0") as alone:
        error = outcome(hst.device_mesh, alone)
    if job.size == 1:
        assert error is None
    else:
        assert isinstance(error, ValueError), error
        assert "default process group" in str(error)
