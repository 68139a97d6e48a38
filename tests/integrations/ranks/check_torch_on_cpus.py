"""Programs that were written for GPUs, on CPUs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from hpcstrat.integrations.torch import on_cpus, replacements
from hpcstrat.integrations.torch.process_group import BACKEND
from tests.docs.said import assert_said

pytestmark = pytest.mark.filterwarnings("ignore")
DDP = nn.parallel.DistributedDataParallel


@pytest.fixture(autouse=True)
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change torch for one test."""
    places = [
        *[(m, n) for m in (dist, distributed_c10d) for n in ("new_group",)],
        *[(m, "init_process_group") for m in (dist, distributed_c10d)],
        (DDP, "__init__"),
        (DDP, "_passing_sync_batchnorm_handle"),
        (nn.SyncBatchNorm, "forward"),
        (torch.cuda, "_lazy_init"),
        (torch.cuda, "set_device"),
    ]
    for place, name in places:
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(replacements, "_told", set())
    on_cpus.ignore_devices()
    on_cpus.synchronize_norms()
    on_cpus.explain_cuda()
    dist.init_process_group(BACKEND, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def test_devices_are_ignored(job: Any, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    alone = copy.deepcopy(model)
    wrapped = DDP(model, [0], 0)
    again = DDP(model, device_ids=[job.rank], output_device=job.rank)
    assert wrapped.device_ids is None
    assert again.device_ids is None
    own = torch.full((2, 3), float(job.rank + 1))
    wrapped(own).sum().backward()
    for rank in range(job.size):
        (alone(torch.full((2, 3), float(rank + 1))).sum() / job.size).backward()
    np.testing.assert_allclose(model.weight.grad, alone.weight.grad, rtol=1e-6)
    group = dist.new_group(device_id=torch.device("cuda", 0))
    dist.barrier(group, device_ids=[0])
    lines = capfd.readouterr().err.splitlines()
    told = [line for line in lines if line.startswith("hpcstrat torch: ignored")]
    # Also of init_process_group, in the fixture.
    expected = {
        "device_ids=[0] of DistributedDataParallel",
        "output_device=0 of DistributedDataParallel",
        "device_id=cuda:0 of new_group",
    }
    found = {line.split("ignored ")[1].split(", because")[0] for line in told}
    assert found >= expected if job.rank == 0 else not found


@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("wraps", [False, True])
def test_torchs_sync_batch_norm_normalizes_all_rows(
    job: Any, dims: int, wraps: bool
) -> None:
    kind = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims]
    alone = nn.Sequential(kind(5)).double()
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    assert isinstance(model[0], nn.SyncBatchNorm)
    model = DDP(model, device_ids=[0]) if wraps else model
    shape = (3 * job.size, 5, 2, 2)[:dims]
    rows = np.random.default_rng(5).normal(2.0, 3.0, shape)
    weights = np.random.default_rng(6).normal(size=shape)
    whole, factors = torch.from_numpy(rows), torch.from_numpy(weights)
    own = whole[job.rank :: job.size].clone().requires_grad_()
    whole.requires_grad_()
    for _ in range(2):
        found, expected = model(own), alone(whole)
    np.testing.assert_allclose(
        found.detach(), expected.detach()[job.rank :: job.size], rtol=1e-10, atol=1e-12
    )
    (found * factors[job.rank :: job.size]).sum().backward()
    (expected * factors).sum().backward()
    assert whole.grad is not None
    np.testing.assert_allclose(
        own.grad, whole.grad[job.rank :: job.size], rtol=1e-9, atol=1e-12
    )
    norm = model.module[0] if wraps else model[0]
    assert int(norm.num_batches_tracked) == 2
    for name in ("running_mean", "running_var"):
        np.testing.assert_allclose(getattr(norm, name), getattr(alone[0], name))
    # In evaluation no rank waits for another one.
    norm.eval()
    if job.rank == 0:
        norm(own)


def test_a_norm_of_another_group_normalizes_its_rows(job: Any) -> None:
    last = dist.new_group([job.size - 1])
    alone = dist.new_group([*range(job.size - 1)]) if job.size > 1 else last
    group = last if job.rank == job.size - 1 else alone
    norm: Any = nn.SyncBatchNorm(2, process_group=group)
    values = torch.tensor([[1.0, 2.0], [3.0, 6.0]]) + (job.rank == job.size - 1)
    found = norm(values)
    expected = nn.BatchNorm1d(2)(values)
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("how", ["cuda", "to", "zeros", "set_device"])
def test_a_request_for_cuda_names_its_line_and_the_remedy(job: Any, how: str) -> None:
    asks = {
        "cuda": lambda: torch.ones(1).cuda(),
        "to": lambda: nn.Linear(1, 1).to("cuda"),
        "zeros": lambda: torch.zeros(1, device=torch.device("cuda")),
        "set_device": lambda: torch.cuda.set_device(0),
    }
    words = r"it asks for CUDA at check_torch_on_cpus.py:\d+ \(.*; pass the program's"
    kinds = AssertionError, AttributeError, RuntimeError
    with pytest.raises(kinds, match=words) as caught:
        asks[how]()
    text = str(caught.value).replace("check_torch_on_cpus.py", "train.py")
    assert_said("asks-for-cuda", text)
