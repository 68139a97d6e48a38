"""The backend of torch.distributed with tensors on GPUs, in real groups and real DDP.

torch has no GPU here, so tensors in host memory stand in for tensors on a GPU: the
group treats them as GPU tensors, and reads their memory as memory of the stand-in's
device. torch's kernels finish at once. Therefore each test makes a stream write values
late if the order matters, and then waits for torch's stream only, which the library
must have ordered with its own streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest

standin = pytest.importorskip("cupy._standin", reason="needs the stand-in's streams")
torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from cupy import _store  # noqa: E402
from torch import nn  # noqa: E402

import hpcstrat.integrations.torch  # noqa: E402, F401
from hpcstrat.engine.gpu.device_memory import memory_at  # noqa: E402
from hpcstrat.integrations.torch import device_tensors  # noqa: E402
from hpcstrat.integrations.torch.host_tensors import HostTensors  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[Any]:
    """Make the default group and its transports, before tests delay streams."""
    torch.set_num_threads(1)
    dist.init_process_group("hpcstrat")
    made = dist.group.WORLD
    made._areas.off = True
    made.strategy.reduce("sum", cupy.ones(3), axis=None)
    yield made
    dist.destroy_process_group()


@pytest.fixture
def stream(group: Any, monkeypatch: Any) -> Iterator[Any]:
    """Treat host tensors as GPU tensors; yield torch's stream."""
    del group
    made = cupy.cuda.Stream(non_blocking=True)
    current = SimpleNamespace(cuda_stream=made.ptr, device_index=made.device_id)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    dense = lambda tensor: tensor.dtype in device_tensors._TYPES  # noqa: E731
    monkeypatch.setattr(device_tensors, "is_on_gpu", dense)
    monkeypatch.setattr(device_tensors, "memory_of", _memory_of)
    monkeypatch.setattr(standin, "longest_delay", 0.01)
    yield made
    made.synchronize()


@pytest.fixture
def stays(monkeypatch: Any) -> None:
    """Make a test fail if it copies a tensor to the host."""

    def read(self: Any, tensor: Any) -> Any:
        raise AssertionError(f"expected no tensor on the host, found {tensor.dtype}")

    monkeypatch.setattr(HostTensors, "read", read)


def _memory_of(tensor: Any) -> Any:
    """Return a tensor's memory as memory of this rank's device."""
    place, nbytes = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    if nbytes and _store.find(place) is None:
        start = tensor.untyped_storage().data_ptr()
        block = _store._add(_store.Block("cuda", _store.foreign(start, nbytes), 0))
        block.device = cupy.cuda.runtime.getDevice()
        # Keep the storage until the process ends, so that torch does not reuse the
        # memory.
        block.storage = tensor.untyped_storage()
    import ml_dtypes

    half = tensor.dtype is torch.bfloat16
    name = str(tensor.dtype).rpartition(".")[2]
    dtype = np.dtype(ml_dtypes.bfloat16 if half else name)
    return memory_at(place, tuple(tensor.shape), dtype)


def _late(stream: Any, tensor: Any) -> Any:
    """Make a stream write a tensor's values after a delay."""
    values = tensor.clone()
    tensor.zero_()
    stream._queue.put(lambda: tensor.copy_(values))
    return tensor


def _seen(stream: Any, *tensors: Any) -> list[Any]:
    """Return the values that the next kernel of a stream reads, then overwrite them."""
    seen = [torch.empty_like(tensor) for tensor in tensors]

    def read() -> None:
        for copy, tensor in zip(seen, tensors, strict=True):
            copy.copy_(tensor)
            tensor.fill_(-1)

    stream._queue.put(read)
    stream.synchronize()
    return seen


@pytest.mark.usefixtures("stays")
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "complex64"])
def test_sums_and_means_take_their_place_in_torchs_stream(
    stream: Any, job: Any, name: str
) -> None:
    dtype = getattr(torch, name)
    own = _late(stream, torch.full((700, 3), job.rank + 1).to(dtype))
    dist.all_reduce(own)
    if dtype.is_floating_point:
        dist.all_reduce(own, dist.ReduceOp.AVG)
    [found] = _seen(stream, own)
    assert torch.equal(found, torch.full_like(found, sum(range(1, job.size + 1))))


def test_tensors_of_any_strides_are_copied_there_and_back() -> None:
    """The copies run in torch's stream on a GPU; here they run on the host."""
    tensor = torch.zeros(4, 6)
    held = device_tensors.DeviceTensors()
    for part in (tensor[0], tensor[1::2, ::2], tensor[1:, 5]):
        array = held.write(part)
        assert array.flags.c_contiguous
        array += 1
    held.written()
    held.written()
    assert tensor.sum(1).tolist() == [6, 4, 1, 4]


@pytest.mark.usefixtures("stays")
def test_tensors_are_moved_on_the_gpu(stream: Any, job: Any) -> None:
    size, rank = job.size, job.rank
    own = _late(stream, torch.arange(6.0).reshape(2, 3) + 10 * rank)
    every = [torch.arange(6.0).reshape(2, 3) + 10 * number for number in range(size)]
    parts = [torch.zeros(2, 3) for _ in range(size)]
    whole = torch.zeros(2 * size, 3)
    dist.all_gather(parts, own)
    dist.all_gather_into_tensor(whole, own)
    out = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(out, whole)
    listed = torch.zeros(2, 3)
    dist.reduce_scatter(listed, parts, dist.ReduceOp.AVG)
    cast = _late(stream, torch.full((5,), float(rank)))
    dist.broadcast(cast, size - 1)
    *gathered, whole, out, listed, cast = _seen(
        stream, *parts, whole, out, listed, cast
    )
    assert all(map(torch.equal, gathered, every))
    assert torch.equal(whole, torch.cat(every))
    assert torch.equal(out, size * every[rank])
    assert torch.equal(listed, every[rank])
    assert torch.equal(cast, torch.full((5,), float(size - 1)))


def test_extremes_stay_and_averages_of_integers_go_through_the_host(
    stream: Any, job: Any
) -> None:
    own = torch.tensor([job.rank, -job.rank])
    dist.all_reduce(own, dist.ReduceOp.MAX)
    (own,) = _seen(stream, own)
    assert own.tolist() == [job.size - 1, 0]
    averaged = torch.tensor([-3 * (job.rank + 1)])
    dist.all_reduce(averaged, dist.ReduceOp.AVG)
    wanted = -3 * sum(range(1, job.size + 1)) / job.size
    assert averaged.tolist() == [int(wanted)]


def _net() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("nccl", [True, False], ids=["nccl", "other transports"])
def test_ddp_trains_as_one_process_does(
    group: Any, job: Any, request: Any, monkeypatch: Any, nccl: bool
) -> None:
    """With NCCL, the sums of DDP's buckets start during the backward pass."""
    model = nn.parallel.DistributedDataParallel(
        _net(), gradient_as_bucket_view=True, bucket_cap_mb=1e-5
    )
    # Patch only now, because DDP reads tensors on the host when it is made.
    stream = request.getfixturevalue("stream")
    request.getfixturevalue("stays")
    if not nccl:
        monkeypatch.setattr(group, "starts", lambda *_: False)
    elif job.size > 1 and not group.collectives.channel.device_group.capabilities.nccl:
        pytest.skip("NCCL wants a GPU for each rank")
    started = _count(monkeypatch, group)
    alone, x = _net(), torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    x = x[: 12 // job.size * job.size]
    own = x.reshape(job.size, -1, 8)[job.rank]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone)]
    for _ in range(3):
        for one, optimizer, batch in zip(
            (model, alone), optimizers, (own, x), strict=True
        ):
            # Keep the gradients, because the buckets are their memory.
            optimizer.zero_grad(set_to_none=False)
            one(batch).square().mean().backward()
            stream.synchronize()
            optimizer.step()
    assert bool(started) == (nccl and job.size > 1)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def _count(monkeypatch: Any, group: Any) -> list[Any]:
    """Return a list that gets the sums that are started from now on."""
    started: list[Any] = []
    start: Callable[..., Any] = group.start_sum

    def counted(*args: Any, **options: Any) -> Any:
        started.append(args)
        return start(*args, **options)

    monkeypatch.setattr(group, "start_sum", counted)
    return started
