"""Saved modules without hpcstrat, and states of random generators in checkpoints."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hpcstrat as hs
import hpcstrat.integrations.torch as hst

pytestmark = pytest.mark.files

LOAD = """
import sys
sys.modules["hpcstrat"] = None  # An import of it is now an error.
import torch
module = torch.load(sys.argv[1] + "/module.pt", weights_only=False)
own = torch.load(sys.argv[1] + "/parameters.pt", weights_only=True)
x = torch.ones(2, 4)
loss = module(x).sum()
loss.backward()
assert all(torch.equal(p, q) for p, q in zip(module.parameters(), own.values()))
print(loss.item(), module[0].weight.grad.sum().item())
"""


def _net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@pytest.fixture
def folder(tmp_path: Path, job: Any) -> str:
    found: str = job.bcast(str(tmp_path))
    return found


def test_a_saved_module_needs_no_hpcstrat(strategy: Any, job: Any, folder: str) -> None:
    module = hst.replicate(_net(), strategy)
    module(torch.ones(2, 4)).sum().backward()
    module.zero_grad()
    if job.rank == 0:
        torch.save(module, f"{folder}/module.pt")
        torch.save(dict(module.named_parameters()), f"{folder}/parameters.pt")
        ended = subprocess.run(
            [sys.executable, "-c", LOAD, folder],
            check=False,
            capture_output=True,
            text=True,
        )
        assert not ended.returncode, ended.stderr
        alone = copy.deepcopy(module)
        loss = alone(torch.ones(2, 4)).sum()
        loss.backward()
        wanted = f"{loss.item()} {alone[0].weight.grad.sum().item()}"
        assert ended.stdout.split() == wanted.split()


def test_a_loaded_module_can_be_replicated(
    strategy: Any, job: Any, folder: str
) -> None:
    module = hst.replicate(_net(), strategy)
    path = f"{folder}/{job.rank}.pt"
    for _ in range(2):
        torch.save(module, path)
        module = hst.replicate(torch.load(path, weights_only=False), strategy)
        module.zero_grad()
        x = torch.arange(8.0).reshape(2, 4) * (1 + job.rank)
        module(x).square().sum().backward()
        strategy.check_equal([p.grad for p in module.parameters()])
        strategy.check_equal(module.state_dict())


def _drawn() -> list[float]:
    """Draw numbers from all generators, an odd number from those that draw pairs."""
    return [
        *torch.randn(3).tolist(),
        *np.random.normal(size=3).tolist(),  # noqa: NPY002
        *np.random.randint(0, 9, size=2).tolist(),  # noqa: NPY002
        *(random.gauss(0, 1) for _ in range(3)),
        random.random(),
    ]


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002
    random.seed(number)


@pytest.mark.parametrize("kept", ["file", "memory"])
def test_generators_go_on_where_they_were_saved(
    strategy: Any, job: Any, folder: str, kept: str
) -> None:
    module = hst.replicate(_net(), strategy)
    _seed(job.rank)
    _drawn()
    if kept == "file":
        manager = hs.CheckpointManager(folder, **hst.state(module))
        _drawn()
        manager.save(1)
        wanted = _drawn()
        _seed(99)
        manager.restore()
    else:
        memory = hs.elastic.Memory()
        memory.begin(strategy, 1)
        memory.track(**hst.state(module))
        assert memory.restore() is None
        memory.commit(1)
        wanted = _drawn()
        _seed(99)
        memory.begin(strategy, 2)
        memory.track(**hst.state(module))
        assert memory.restore() == 1
    assert _drawn() == wanted
    everywhere = job.allgather(wanted)
    assert all(everywhere.count(one) == 1 for one in everywhere)


def test_other_numbers_of_replicas_and_older_checkpoints(job: Any, folder: str) -> None:
    def made(comm: Any) -> tuple[Any, Any]:
        strategy = hs.MultiWorkerMirroredStrategy(comm=comm)
        return strategy, hst.replicate(_net(), strategy)

    few = job.Split(int(job.rank >= max(job.size - 1, 1)), job.rank)
    wanted: Any = None
    _seed(job.rank)
    if job.rank < max(job.size - 1, 1):
        strategy, module = made(few)
        found = hst.state(module)
        hs.CheckpointManager(f"{folder}/a", **found).save(1)
        wanted = _drawn()
        del found["generators"]
        hs.CheckpointManager(f"{folder}/b", **found).save(1)
        strategy.close()
    few.Free()
    strategy, module = made(job)
    _seed(50 + job.rank)
    hs.CheckpointManager(f"{folder}/a", **hst.state(module)).restore()
    if wanted is None:
        # A replica without a saved state keeps its own.
        found = _drawn()
        _seed(50 + job.rank)
        wanted = _drawn()
        assert found == wanted
    else:
        assert _drawn() == wanted
    _seed(70)
    hs.CheckpointManager(f"{folder}/b", **hst.state(module)).restore()
    found = _drawn()
    _seed(70)
    assert found == _drawn()
    strategy.close()


def test_a_run_that_resumes_in_an_epoch_is_the_same_run(
    strategy: Any, folder: str
) -> None:
    """With dropout, noise of NumPy's and a loader, whose iterators draw numbers."""
    rows = torch.arange(48.0).reshape(12, 4) / 48

    def train(folder: str, last: int, resumes: bool) -> Any:
        _seed(strategy.replica_id + 10 * resumes)
        module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1))
        hst.replicate(module, strategy)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        sampler = hst.GlobalBatchSampler(rows, 4, strategy, shuffle=True)
        found = hst.state(module, optimizer)
        manager = hs.CheckpointManager(folder, **found, data=sampler)
        step = (manager.restore() or 0) if resumes else 0
        while step < last:
            for batch in sampler.loader():
                noise = np.random.normal() + random.random()  # noqa: NPY002
                optimizer.zero_grad()
                loss = (module(batch) - noise).square().sum()
                hst.global_mean(loss, len(batch)).backward()
                optimizer.step()
                step += 1
                if step == 5 and not resumes:
                    manager.save(step)
                if step == last:
                    break
        return [p.detach().clone() for p in module.parameters()]

    whole = train(folder, 8, resumes=False)
    again = train(folder, 8, resumes=True)
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one, other)
