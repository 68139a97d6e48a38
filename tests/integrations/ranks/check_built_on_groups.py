"""Parts of torch that use a process group, over MPI, train like one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcstrat.integrations.torch.process_group import BACKEND

pytestmark = pytest.mark.filterwarnings("ignore")
dtensor = pytest.mark.skipif(
    not hasattr(torch.distributed.tensor, "DTensor"), reason="torch before 2.5"
)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[Any]:
    """Make the default group of the job for the tests of this module."""
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND)
    yield dist.group.WORLD
    dist.destroy_process_group()


def net() -> Any:
    """Return a small model, in float64."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2)
    return nn.Sequential(*layers).double()


def rows(job: Any) -> Any:
    """Return two batches of rows, in which each rank owns an equal part."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 3 * job.size, 4, generator=generator).double()


def mean(model: Any, batch: Any) -> Any:
    """Return the mean squared error of a model on a batch."""
    return (model(batch) - 1).square().mean()


def stepped(model: Any, batches: Any, **options: Any) -> Any:
    """Train a model on batches, and return the model."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        mean(model, batch).backward()
        optimizer.step()
    return model


def require_equal(model: Any, other: Any, **close: Any) -> None:
    """Assert equal weights; compare whole tensors if they are divided."""
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        torch.testing.assert_close(whole.detach(), two.detach(), **(close or CLOSE))


def test_ddp_without_communication_adds_up(job: Any) -> None:
    batches = rows(job)
    own = batches.chunk(job.size, dim=1)[job.rank]
    model, alone = DistributedDataParallel(net()), net()
    with model.no_sync():
        mean(model, own[0]).backward()
    mean(model, own[1]).backward()
    for batch in batches:
        mean(alone, batch).backward()
    for one, two in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, **CLOSE)


def test_ddp_join_lets_ranks_have_fewer_batches(job: Any) -> None:
    """Rank r has r + 1 batches; ranks that have finished are not part of the mean."""
    batches = rows(job)[0].chunk(job.size)
    model, alone = DistributedDataParallel(net()), net()
    optimizer, theirs = (
        torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)
    )
    with model.join(divide_by_initial_world_size=False):
        for _ in range(job.rank + 1):
            optimizer.zero_grad()
            mean(model, batches[job.rank]).backward()
            optimizer.step()
    for number in range(job.size):
        theirs.zero_grad()
        left = batches[number:]
        (sum(mean(alone, batch) for batch in left) / len(left)).backward()
        theirs.step()
    require_equal(model, alone)


class Doubled(torch.autograd.Function):
    """A function whose backward starts two sums, and waits for only one of them."""

    left: Any = None

    @staticmethod
    def forward(ctx: Any, values: Any) -> Any:
        """Return the values."""
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Return twice the gradient."""
        left, needed = torch.ones(2), torch.ones(3)
        Doubled.left = left, dist.all_reduce(left, async_op=True)
        dist.all_reduce(needed)
        return 2 * gradient * needed[0] / dist.get_world_size()


class Between(nn.Module):
    """A layer that applies a function to its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Any) -> Any:
        """Return the result of the function."""
        return self.function(values)


@pytest.mark.parametrize("option", [None, "static_graph", "find_unused_parameters"])
def test_sums_within_a_backward_pass_keep_their_order(job: Any, option: Any) -> None:
    batches = rows(job)
    own = batches.chunk(job.size, dim=1)[job.rank]
    model, alone = (
        nn.Sequential(net(), Between(function), nn.Linear(2, 2).double())
        for function in (Doubled.apply, lambda values: 2 * values - values.detach())
    )
    alone.load_state_dict(model.state_dict())
    # With this size, each parameter has its own bucket.
    options = {option: True} if option else {}
    model = DistributedDataParallel(model, bucket_cap_mb=1e-5, **options)
    for batch, whole in zip(own, batches, strict=True):
        mean(model, batch).backward()
        mean(alone, whole).backward()
        left, work = Doubled.left
        assert work.is_completed()
        torch.testing.assert_close(left, torch.full((2,), float(job.size)))
    for one, two in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, **CLOSE)


class Failing(torch.autograd.Function):
    """A function whose backward raises an error."""

    @staticmethod
    def forward(ctx: Any, values: Any) -> Any:
        """Return the values."""
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Raise an error."""
        raise ValueError("planned")


def test_a_backward_pass_that_fails_holds_up_no_other_one(job: Any) -> None:
    batches = rows(job)
    own = batches.chunk(job.size, dim=1)[job.rank]
    failing = nn.Sequential(net(), Between(Failing.apply), nn.Linear(2, 2).double())
    # The sum of the last layer has already started when the backward fails.
    failing = DistributedDataParallel(failing, bucket_cap_mb=1e-5)
    model = DistributedDataParallel(net())
    with pytest.raises(ValueError, match="planned"):
        mean(failing, own[0]).backward()
    require_equal(stepped(model, own), stepped(net(), batches))


def test_ddp_compiled(job: Any) -> None:
    batches = rows(job)
    own = batches.chunk(job.size, dim=1)[job.rank]
    model = torch.compile(DistributedDataParallel(net()), backend="aot_eager")
    require_equal(stepped(model, own), stepped(net(), batches))


def test_ddp_hooks_of_python_compress(job: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks,
        powerSGD_hook,
    )

    batches = rows(job)
    own = batches.chunk(job.size, dim=1)[job.rank]
    alone = stepped(net().float(), batches.float())
    model = DistributedDataParallel(net().float())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    require_equal(stepped(model, own.float()), alone, rtol=0.05, atol=5e-3)
    model = DistributedDataParallel(net().float())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    stepped(model, own.float().repeat(2, 1, 1))
    weights = [p.detach().clone() for p in model.parameters()]
    for weight in weights:
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight)
    assert mean(model, own[0].float()) < mean(net().float(), own[0].float())


@dtensor
def test_dtensors_are_redistributed(job: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (job.size,))
    whole = torch.arange(5.0 * job.size * 2).reshape(-1, 5)
    divided = distribute_tensor(whole, mesh, [Shard(0)])
    assert len(divided.to_local()) == 2
    columns = divided.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    product = columns @ distribute_tensor(whole.t(), mesh, [Shard(0)])
    assert isinstance(product.placements[0], Partial) or job.size == 1
    total = product.redistribute(mesh, [Replicate()]).to_local()
    torch.testing.assert_close(total, whole @ whole.t())


def test_tensor_parallel_modules(job: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (job.size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net(), mesh, plan)
    batches = rows(job)
    require_equal(stepped(model, batches), stepped(net(), batches))


@dtensor
def test_what_some_ranks_have_saved_others_read(job: Any, tmp_path: Any) -> None:
    """The values are divided among all ranks except the last, then among all ranks."""
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    path = job.bcast(str(tmp_path / "saved"))
    whole = torch.arange(24.0).reshape(12, 2)
    some = dist.new_group(list(range(max(1, job.size - 1))))
    if job.rank < max(1, job.size - 1):
        mesh = DeviceMesh.from_group(some, "cpu")
        state = {"weights": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}
        checkpoint.save(state, checkpoint_id=path, process_group=some)
    dist.barrier()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    empty = distribute_tensor(torch.zeros(12, 2), mesh, [Shard(0)])
    read = {"weights": empty, "step": 0}
    checkpoint.load(read, checkpoint_id=path)
    assert torch.equal(read["weights"].full_tensor(), whole)
    assert read["step"] == 7


def test_calls_have_ended_when_they_return(job: Any) -> None:
    own = torch.full((3,), job.rank + 1.0)
    work = dist.all_reduce(own, async_op=True)
    assert work.is_completed()
    assert (own == sum(range(1, job.size + 1))).all()
    assert work.get_future().then(lambda f: f.value()[0]).wait() is not None


def test_the_profiler_shows_calls(job: Any) -> None:
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["hpcstrat:all_reduce"] == counts["hpcstrat:broadcast"] == 1


def test_what_torch_has_for_its_own_backends_alone_says_so(job: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match="monitored"):
        dist.monitored_barrier()


def test_ddp_hooks_of_torch_itself(job: Any) -> None:
    """The built-in float16 hook needs a feature that no Python backend can offer."""
    batches = rows(job)
    own = batches.chunk(job.size, dim=1)[job.rank]
    model = DistributedDataParallel(net())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    require_equal(stepped(model, own), stepped(net(), batches))
    model = DistributedDataParallel(net().float())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(RuntimeError, match="TensorList"):
        mean(model, own[0].float()).backward()
