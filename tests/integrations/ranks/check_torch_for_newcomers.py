"""The claims about tensors in the pages for users of DDP and Horovod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from tests.mpi.ranks.outcomes import outcome


def test_calls_of_torch_distributed_have_counterparts(strategy: Any, job: Any) -> None:
    tensor = torch.full((2,), float(job.rank))
    total = sum(range(job.size))
    # Results are in place if ``out`` is given; otherwise arguments are unchanged.
    assert strategy.reduce("sum", tensor, out=tensor) is tensor
    assert tensor.tolist() == [total] * 2
    mine = torch.full((job.rank + 1,), float(job.rank))

    def inside() -> None:
        context = hs.get_replica_context()
        given = mine[:1].clone()
        context.all_reduce("sum", given)
        assert given.tolist() == [job.rank]
        context.all_reduce("sum", given, out=given)
        assert given.tolist() == [total]
        started = mine[:1].clone()
        context.start_all_reduce("sum", started, out=started).wait()
        assert started.tolist() == [total]
        gathered = context.all_gather(mine, axis=0)
        expected = [float(r) for r in range(job.size) for _ in range(r + 1)]
        assert gathered.tolist() == expected

    strategy.run(inside)
    assert np.asarray(strategy.extended.broadcast_to(mine[:1])) == [0]


def test_replicas_begin_equal_and_may_leave_parameters_unused(
    strategy: Any, job: Any, folder: Path
) -> None:
    torch.manual_seed(job.rank)
    net = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    model = hst.replicate(net, strategy)
    # ``replicate`` returns the module itself, without a wrapper.
    assert model is net
    strategy.check_equal(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # Each replica uses another one of the two layers.
    model[job.rank % 2](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with hst.no_sync(model):
        model[0](torch.ones(1, 2)).sum().backward()
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    strategy.check_equal(model.state_dict())
    # All replicas must save.
    checkpoints = hs.CheckpointManager(folder, **hst.state(model, optimizer))
    saved = [p.clone() for p in model.parameters()]
    checkpoints.save(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert checkpoints.restore_or_initialize() == 1
    assert all(map(torch.equal, saved, model.parameters()))


def test_changes_by_hand_are_seen_by_check_equal_alone(strategy: Any, job: Any) -> None:
    model = hst.replicate(torch.nn.Linear(2, 1), strategy)
    with torch.no_grad():
        model.bias.fill_(job.rank)
    # The next backward does not report the difference.
    model(torch.ones(1, 2)).sum().backward()
    error = outcome(strategy.check_equal, model.state_dict())
    assert (error is None) == (job.size == 1)
