"""PyTorch on real GPUs: gradients, groups, FSDP2 and checkpoints, in torch's streams.

Each test fills torch's stream with work before a call, so that a call that is not
ordered with this stream would read or return values from before the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if hasattr(cupy, "_standin") or not torch.cuda.is_available():
    pytest.skip("needs CUDA in torch, and a GPU", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import hpcstrat as hs  # noqa: E402
import hpcstrat.integrations.torch as hst  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, BUSY = 24, 4096
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.complex64]


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    """Yield a strategy whose ranks have GPUs, which torch uses too."""
    with hs.MultiWorkerMirroredStrategy(settings=hs.Settings(device="gpu")) as made:
        torch.cuda.set_device(cupy.cuda.runtime.getDevice())
        yield made


@pytest.fixture(scope="module")
def group(strategy: Any) -> Iterator[None]:
    """Make the default group of torch.distributed, on the backend hpcstrat."""
    del strategy
    dist.init_process_group("hpcstrat")
    yield
    dist.destroy_process_group()


def _late(values: Any) -> Any:
    """Return a tensor that torch's stream writes after some milliseconds of work."""
    work = torch.ones(BUSY, BUSY, device="cuda")
    for _ in range(8):
        work = work @ work * 1e-6
    return values.cuda() + (work[0, 0] * 0).to(values.dtype)


def _net() -> Any:
    torch.manual_seed(1)
    layers = [nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 7), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(7, 1)).double().cuda()


def _data() -> Any:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, ROWS, 8, generator=generator, dtype=torch.float64)
    return x.cuda(), x.sum(-1).cuda()


def _part(job: Any, rows: Any) -> Any:
    return rows[job.rank :: job.size]


def _alone() -> Any:
    """Return the weights after three steps of one process with all rows."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(*_data(), strict=True):
        optimizer.zero_grad()
        (net(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


def _assert_trained(found: Any) -> None:
    for one, other in zip(found, _alone(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own_stream", [False, True])
def test_tensors_are_summed_in_the_order_of_the_stream(
    strategy: Any, job: Any, dtype: Any, own_stream: bool
) -> None:
    total = job.size * (job.size + 1) // 2
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        own = _late(torch.full((1000, 3), job.rank + 1).to(dtype))
        found = strategy.reduce("sum", own, axis=None)
        assert isinstance(found, cupy.ndarray)
        into = torch.zeros_like(own)
        strategy.reduce("sum", own, axis=None, out=cupy.from_dlpack(into))
        own.fill_(0)
        assert torch.equal(into, torch.full_like(into, total))
        assert torch.equal(torch.from_dlpack(found), into)


def test_replicated_modules_train_as_one_process(strategy: Any, job: Any) -> None:
    net = hst.replicate(_net(), strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(*_data(), strict=True):
        optimizer.zero_grad()
        errors = net(_part(job, x)).squeeze(1) - _part(job, y)
        hst.global_mean(errors.square().sum(), len(errors)).backward()
        optimizer.step()
    _assert_trained(net.parameters())
    strategy.check_equal(net.state_dict())


def test_halves_and_compiled_modules_get_equal_gradients(
    strategy: Any, job: Any
) -> None:
    net = hst.replicate(_net().float(), strategy)
    x, y = _data()
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            found = net(_part(job, x[0]).float()).squeeze(1)
            loss = (found - _part(job, y[0]).float()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    strategy.check_equal(net.state_dict())


def test_batch_norm_has_the_statistics_of_all_rows(strategy: Any, job: Any) -> None:
    whole = nn.BatchNorm1d(8).double().cuda()
    divided = hst.SyncBatchNorm.convert(nn.BatchNorm1d(8), strategy).double().cuda()
    x = _data()[0][0]
    mine = _part(job, x).clone().requires_grad_()
    all_rows = x.clone().requires_grad_()
    whole(all_rows).pow(3).sum().backward()
    divided(mine).pow(3).sum().backward()
    torch.testing.assert_close(mine.grad, _part(job, all_rows.grad))
    torch.testing.assert_close(divided.running_var, whole.running_var)


def test_saved_training_goes_on(strategy: Any, job: Any, tmp_path: Path) -> None:
    folder = job.bcast(str(tmp_path))
    net = hst.replicate(_net(), strategy)
    optimizer = torch.optim.Adam(net.parameters())
    net(_data()[0][0]).sum().backward()
    optimizer.step()
    noise = torch.rand(3, device="cuda")
    hs.CheckpointManager(folder, **hst.state(net, optimizer)).save(1)
    drawn = torch.rand(3, device="cuda")
    other = hst.replicate(_net(), strategy)
    state = hst.state(other, torch.optim.Adam(other.parameters()))
    hs.CheckpointManager(folder, **state).restore()
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert not torch.equal(noise, drawn)
    for one, same in zip(net.parameters(), other.parameters(), strict=True):
        assert one.is_cuda
        assert torch.equal(one, same)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_collectives_of_a_group_move_tensors(job: Any, dtype: Any) -> None:
    own = _late(torch.arange(6).reshape(2, 3) + 10 * job.rank).to(dtype)
    every = [
        (torch.arange(6).reshape(2, 3) + 10 * n).to(dtype) for n in range(job.size)
    ]
    whole = torch.zeros(2 * job.size, 3, dtype=dtype, device="cuda")
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole.cpu(), torch.cat(every))
    got = torch.zeros_like(whole)
    dist.all_to_all_single(got, torch.cat([own] * job.size))
    assert torch.equal(got.cpu(), torch.cat(every))
    last = own.clone()
    dist.broadcast(last, job.size - 1)
    assert torch.equal(last.cpu(), every[-1])
    if dtype not in (torch.bool, torch.complex64):
        dist.all_reduce(own, dist.ReduceOp.MAX)
        assert torch.equal(own.cpu(), torch.stack(every).amax(0))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stream", ["default", "own"])
def test_ddp_trains_as_one_process(job: Any, stream: str) -> None:
    used = torch.cuda.Stream() if stream == "own" else torch.cuda.current_stream()
    used.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(used):
        net = nn.parallel.DistributedDataParallel(_net(), bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for x, y in zip(*_data(), strict=True):
            optimizer.zero_grad()
            rows = torch.tensor_split(x, job.size)[job.rank]
            wanted = torch.tensor_split(y, job.size)[job.rank]
            loss = (net(rows).squeeze(1) - wanted).square().sum()
            (loss * job.size / ROWS).backward()
            optimizer.step()
        _assert_trained(net.module.parameters())
    torch.cuda.current_stream().wait_stream(used)


@pytest.mark.usefixtures("group")
def test_fsdp2_trains_as_one_process(job: Any) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = dist.init_device_mesh("cuda", (job.size,))
    net = _net()
    for layer in (net[0], net[2], net):
        fsdp.fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(*_data(), strict=True):
        optimizer.zero_grad()
        errors = net(_part(job, x)).squeeze(1) - _part(job, y)
        (errors.square().sum() * job.size / ROWS).backward()
        optimizer.step()
    _assert_trained([parameter.full_tensor() for parameter in net.parameters()])
