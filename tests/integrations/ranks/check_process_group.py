"""The backend of torch.distributed, compared with gloo and one process."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpcstrat as hs
import hpcstrat.integrations.torch
from hpcstrat.data.measured_costs import StepTimes
from hpcstrat.engine.algorithms.mapped_memory import MappedMemory
from hpcstrat.integrations.torch import at_import
from hpcstrat.integrations.torch.shared_storages import share_storage
from tests.mpi.ranks.outcomes import outcome

pytestmark = pytest.mark.filterwarnings("ignore")

Op = dist.ReduceOp
NUMBERS = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8]
HALVES = [torch.bfloat16, torch.float16]
MOVED = [*NUMBERS, *HALVES, torch.bool, torch.complex64, torch.int16]
SHAPES = [(), (0,), (5,), (3, 4), (130_001,)]


@pytest.fixture(scope="module", autouse=True)
def gloo(job: Any) -> Iterator[Any]:
    """Make the default group, and a group of gloo, which all tests here use."""
    torch.set_num_threads(1)
    dist.init_process_group("hpcstrat")
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def tensor_of(rank: int, shape: Any, dtype: Any, seed: int = 0) -> Any:
    """Return a rank's tensor of small numbers; every rank can make it."""
    generator = torch.Generator().manual_seed(17 * rank + seed)
    numbers = torch.randint(1, 6, tuple(shape), generator=generator)
    return (numbers % 2 == 0) if dtype is torch.bool else numbers.to(dtype)


def every(job: Any, shape: Any, dtype: Any) -> list[Any]:
    """Return the tensors of all ranks."""
    return [tensor_of(rank, shape, dtype) for rank in range(job.size)]


def test_the_group_is_the_job(job: Any) -> None:
    assert dist.get_backend() == "hpcstrat"
    assert (dist.get_rank(), dist.get_world_size()) == (job.rank, job.size)


@pytest.mark.parametrize("dtype", [*NUMBERS, *HALVES, torch.complex64], ids=str)
def test_all_reduce_is_the_sum(job: Any, dtype: Any) -> None:
    for shape in SHAPES:
        tensors = every(job, shape, dtype)
        own = tensors[job.rank].clone()
        assert dist.all_reduce(own, async_op=True).wait()
        wide = torch.complex128 if dtype.is_complex else torch.float64
        expected = torch.stack([t.to(wide) for t in tensors]).sum(0).to(dtype)
        assert own.dtype is dtype
        assert torch.equal(own, expected)


@pytest.mark.parametrize("name", ["MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"])
def test_operations_are_those_of_gloo(job: Any, gloo: Any, name: str) -> None:
    for dtype in (torch.int64, torch.uint8, torch.float32):
        if name.startswith("B") and dtype.is_floating_point:
            continue
        own = tensor_of(job.rank, (3, 50), dtype)
        theirs = own.clone()
        dist.all_reduce(own, getattr(Op, name))
        dist.all_reduce(theirs, getattr(Op, name), group=gloo)
        assert torch.equal(own, theirs)


def test_averages_keep_their_type(job: Any) -> None:
    total = sum(range(1, job.size + 1))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32):
        own = torch.full((3,), -(job.rank + 1)).to(dtype)
        dist.all_reduce(own, Op.AVG)
        expected = torch.full((3,), -float(total)).to(dtype)
        mode = None if dtype.is_floating_point else "trunc"
        expected = torch.div(expected, job.size, rounding_mode=mode)
        assert own.dtype is dtype
        assert torch.equal(own, expected)


def test_booleans_are_combined_as_truths(job: Any) -> None:
    own = torch.tensor([job.rank == 0, True, False])
    for op, expected in (
        (Op.SUM, [True, True, False]),
        (Op.MIN, [job.size == 1, True, False]),
    ):
        result = own.clone()
        dist.all_reduce(result, op)
        assert result.tolist() == expected


def test_tensors_of_any_strides_are_reduced_in_place(job: Any) -> None:
    own = torch.full((4, 6), job.rank + 1.0)
    dist.group.WORLD.allreduce([own.t()]).wait()
    dist.group.WORLD.allreduce([own[:, ::2]]).wait()
    total = sum(range(1, job.size + 1))
    assert (own[:, 1::2] == total).all()
    assert (own[:, ::2] == total * job.size).all()


def test_several_tensors_go_in_one_call(job: Any) -> None:
    tensors = [torch.full((n,), job.rank + 1.0) for n in (1, 1000)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    total = sum(range(1, job.size + 1))
    assert all((tensor == total).all() for tensor in tensors)


def test_sparse_tensors_are_added(job: Any) -> None:
    own = torch.sparse_coo_tensor(
        torch.tensor([[0, job.rank]]), torch.ones(2, 3), (job.size + 1, 3)
    )
    dense = own.to_dense()
    dist.all_reduce(own)
    dist.all_reduce(dense)
    assert torch.equal(own.to_dense(), dense)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_what_is_moved_keeps_its_bits(job: Any, dtype: Any) -> None:
    for number, shape in enumerate(SHAPES):
        tensors = every(job, shape, dtype)
        mine, root = tensors[job.rank], number % job.size
        cast = mine.clone()
        dist.broadcast(cast, root)
        assert torch.equal(cast, tensors[root])
        out = [torch.empty_like(mine) for _ in tensors]
        dist.all_gather(out, mine)
        assert all(map(torch.equal, out, tensors))
        whole = torch.empty((job.size, *shape), dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole, torch.stack(tensors))
        out = [torch.empty_like(mine) for _ in tensors]
        dist.gather(mine, out if job.rank == root else None, root)
        assert job.rank != root or all(map(torch.equal, out, tensors))
        part = torch.empty_like(mine)
        dist.scatter(part, tensors if job.rank == root else None, root)
        assert torch.equal(part, mine)
        out = [torch.empty_like(mine) for _ in tensors]
        dist.all_to_all(out, [mine] * job.size)
        assert all(map(torch.equal, out, tensors))


@pytest.mark.parametrize("dtype", [*NUMBERS, *HALVES], ids=str)
def test_reductions_end_where_they_should(job: Any, dtype: Any) -> None:
    for length in (0, 3, 50_000):
        rows = [
            t.reshape(job.size, length) for t in every(job, (job.size * length,), dtype)
        ]
        total = torch.stack([row.double() for row in rows]).sum(0).to(dtype)
        mine, part = rows[job.rank], torch.empty(length, dtype=dtype)
        dist.reduce_scatter_tensor(part, mine.reshape(-1).clone())
        assert torch.equal(part, total[job.rank])
        dist.reduce_scatter(part.zero_(), [row.clone() for row in mine])
        assert torch.equal(part, total[job.rank])
        # FSDP reduces like this: the output is this rank's part of the input.
        whole = mine.clone().reshape(-1)
        own = whole[job.rank * length : (job.rank + 1) * length]
        dist.reduce_scatter_tensor(own, whole)
        assert torch.equal(own, total[job.rank])
        root, sums = length % job.size, mine.clone()
        dist.reduce(sums, root)
        assert torch.equal(sums, total if job.rank == root else mine)
    average = torch.empty(2)
    dist.reduce_scatter_tensor(average, torch.ones(2 * job.size), op=Op.AVG)
    assert (average == 1).all()


def test_rows_go_to_all_in_any_numbers(job: Any) -> None:
    me, size = job.rank, job.size
    sends = [1 + me + rank for rank in range(size)]
    own = torch.cat([torch.full((n, 2), 10.0 * me + r) for r, n in enumerate(sends)])
    out = torch.empty(sum(sends), 2)
    dist.all_to_all_single(out, own, sends, sends)
    parts = out.split(sends)
    assert all((p == 10.0 * r + me).all() for r, p in enumerate(parts))
    even = torch.empty(size)
    dist.all_to_all_single(even, torch.arange(float(size)) + 10 * me)
    assert torch.equal(even, torch.arange(float(size)) * 10 + me)


def test_messages_and_objects(job: Any) -> None:
    after, before = (job.rank + 1) % job.size, (job.rank - 1) % job.size
    if job.size > 1:
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            # The message is larger than messages that MPI sends without a receiver.
            sent = tensor_of(job.rank, (100_000,), dtype)
            came = torch.zeros_like(sent)
            work = [dist.isend(sent, after, tag=3), dist.irecv(came, before, tag=3)]
            assert all(w.wait() for w in work)
            assert torch.equal(came, tensor_of(before, (100_000,), dtype))
        ops = [
            dist.P2POp(dist.isend, sent, after),
            dist.P2POp(dist.irecv, came.zero_(), before),
        ]
        for one in dist.batch_isend_irecv(ops):
            one.wait()
        assert torch.equal(came, tensor_of(before, (100_000,), dtype))
        if job.rank == 0:
            found = {dist.recv(came) for _ in range(job.size - 1)}
            assert found == set(range(1, job.size))
        else:
            dist.send(sent, 0)
    objects = [None] * job.size
    dist.all_gather_object(objects, {"rank": job.rank})
    assert objects == [{"rank": rank} for rank in range(job.size)]
    dist.barrier()


def test_torch_is_told_the_devices_of_a_group() -> None:
    """Versions of torch ask this before batch_isend_irecv and asynchronous saves."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert not group._get_backend(cpu).supports_coalescing
    assert not group._get_backend(cpu).supports_splitting
    assert cpu in group._device_types
    assert group._get_backend(cpu).name() == "hpcstrat"


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipelines_train_as_one_process(job: Any, schedule: str) -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).double() for _ in range(job.size)]
    rows, targets = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    whole = copy.deepcopy(nn.Sequential(*layers))
    mean = nn.functional.mse_loss
    mean(whole(rows), targets).backward()
    place = job.rank, job.size, torch.device("cpu")
    stage = pipelining.PipelineStage(layers[job.rank], *place)
    steps = getattr(pipelining, schedule)(stage, max(4, job.size), loss_fn=mean)
    given = [rows] if job.rank == 0 else []
    steps.step(*given, target=targets if job.rank == job.size - 1 else None)
    torch.testing.assert_close(
        layers[job.rank].weight.grad, whole[job.rank].weight.grad
    )


def test_handles_that_are_polled_or_dropped(job: Any) -> None:
    if job.size == 1:
        return
    after, before = (job.rank + 1) % job.size, (job.rank - 1) % job.size
    dist.irecv(torch.empty(1_000_000), before)
    dist.barrier()
    dist.isend(torch.full((1_000_000,), 9.0), after)
    # The tensor is not contiguous, so the received data are copied into it.
    came = torch.zeros(2, 1000).t()
    work = dist.irecv(came, before)
    sent = dist.isend(torch.full((1000, 2), float(job.rank)), after)
    while not work.is_completed():
        pass
    assert (came == before).all()
    came.zero_()
    work.wait()
    assert (came == 0).all()
    sent.wait()
    dist.barrier()


def test_sub_groups_are_groups_of_their_own(job: Any) -> None:
    first = dist.new_group([0])
    others = dist.new_group(list(range(1, job.size))) if job.size > 1 else None
    mine = first if job.rank == 0 else others
    size = 1 if job.rank == 0 else job.size - 1
    own = torch.ones(3)
    dist.all_reduce(own, group=mine)
    assert (own == size).all()
    # Calls in one sub-group do not affect the other sub-group.
    for _ in range(job.rank):
        dist.all_reduce(own, group=mine) if size == 1 else None
    dist.barrier()
    if job.size > 1:
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        if job.rank < 2:
            value = torch.tensor([float(job.rank)])
            dist.broadcast(value, 1, group=pair)
            assert value == 1
    dist.barrier()


def net(seed: int = 0) -> Any:
    """Return a small model, in float64."""
    torch.manual_seed(seed)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)
    return nn.Sequential(*layers).double()


def trained(model: Any, rows: Any, make: Any) -> Any:
    """Train on rows; the mean over all ranks is the mean over all rows."""
    optimizer = make(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        (model(rows) - step).square().mean().backward()
        optimizer.step()
    return model


def batch(job: Any) -> tuple[Any, Any]:
    """Return the rows of this rank, and the rows of all ranks."""
    rows = torch.randn(6 * job.size, 4, generator=torch.Generator().manual_seed(3))
    return rows.double().chunk(job.size)[job.rank], rows.double()


def adam(parameters: Any) -> Any:
    """Return an Adam optimizer for parameters."""
    return torch.optim.Adam(parameters, lr=0.05)


def test_ddp_trains_as_one_process(job: Any) -> None:
    own, rows = batch(job)
    alone = trained(net(), rows, adam)
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        model = nn.parallel.DistributedDataParallel(net(job.rank), **options)
        trained(model, own, adam)
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_buckets_of_ddp_are_added_up_where_they_lie(job: Any) -> None:
    def wide(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = nn.Linear(4, 30_000), nn.Tanh(), nn.Linear(30_000, 2)
        return nn.Sequential(*layers).double()

    own, rows = batch(job)
    alone = trained(wide(0), rows, adam)
    for options in ({}, {"gradient_as_bucket_view": True}):
        group = dist.new_group(backend="hpcstrat")
        model = nn.parallel.DistributedDataParallel(
            wide(job.rank), process_group=group, **options
        )
        trained(model, own, adam)
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        # Before torch 2.6, asynchronous work of Python backends is lost.
        if hasattr(torch._C._distributed_c10d, "_register_work"):
            # The mapped buckets of the first step have been released.
            assert len(group._areas._others) == job.size - 1
        dist.destroy_process_group(group)


def test_memory_that_others_may_hold_stays_where_it_is() -> None:
    areas, shown, free = MappedMemory(), torch.ones(1 << 20), torch.ones(1 << 20)
    array = shown.numpy()
    for tensor in (shown, free[8:], free[:8], free[::2]):
        share_storage(tensor, areas, 2)
        assert not areas.offers(tensor.data_ptr())
    share_storage(free, areas, 1 << 40)
    assert not free.is_shared(), "there is not so much room"
    share_storage(free, areas, 2)
    assert areas.offers(free.data_ptr())
    assert (free == 1).all()
    assert array.ctypes.data == shown.data_ptr()
    address = free.data_ptr()
    del free, tensor
    assert not areas.offers(address)


def workers(monkeypatch: Any) -> Any:
    """Return a group of all ranks, in which each rank is a separate worker."""
    alone = functools.partial(hs.MultiWorkerMirroredStrategy, replicas_per_worker=1)
    with monkeypatch.context() as patch:
        patch.setattr(at_import, "MultiWorkerMirroredStrategy", alone)
        return dist.new_group(backend="hpcstrat")


def test_ddp_between_workers_begins_its_sums_at_once(
    job: Any, monkeypatch: Any
) -> None:
    group, (own, rows), seen = workers(monkeypatch), batch(job), []
    model = nn.parallel.DistributedDataParallel(
        net(job.rank), process_group=group, bucket_cap_mb=1e-5
    )
    start = group.collectives.start_in_call

    def started(*args: Any, **options: Any) -> Any:
        seen.append("start")
        return start(*args, **options)

    monkeypatch.setattr(group.collectives, "start_in_call", started)
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: seen.append("first"))
    trained(model, own, adam)
    alone = trained(net(), rows, adam)
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    # In the first step, all parameters share a bucket. Before torch 2.6, asynchronous
    # work of Python backends is lost.
    if job.size > 1 and hasattr(torch._C._distributed_c10d, "_register_work"):
        later = ["start", "start", "start", "first", "start"]
        assert seen == ["first", "start", *later, *later, *later]
    dist.destroy_process_group(group)


def test_an_error_in_a_backward_between_workers_is_named(
    job: Any, monkeypatch: Any
) -> None:
    if job.size == 1:
        return
    group, faulty = workers(monkeypatch), job.size - 1
    model = nn.parallel.DistributedDataParallel(
        net(), process_group=group, bucket_cap_mb=1e-5
    )

    def refuse(_: Any) -> None:
        if job.rank == faulty:
            raise ZeroDivisionError

    loss = model(torch.ones(2, 4).double()).sum()
    next(model.parameters()).register_hook(refuse)
    error = outcome(loss.backward)
    if job.rank == faulty:
        assert isinstance(error, ZeroDivisionError)
        error = outcome(dist.barrier, group=group)
    assert isinstance(error, hs.CollectiveError), repr(error)
    assert "all_reduce" in str(error)
    assert "barrier" in str(error)
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    assert (total == job.size).all()
    dist.destroy_process_group(group)


def test_zero_redundancy_optimizer_trains_as_one_process(job: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    own, rows = batch(job)
    alone = trained(net(), rows, adam)
    model = nn.parallel.DistributedDataParallel(net())
    trained(model, own, lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=0.05))
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_fsdp2_and_dtensor_train_as_one_process(job: Any) -> None:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    if not hasattr(fsdp, "fully_shard"):
        pytest.skip(f"torch {torch.__version__}, before 2.6, has FSDP1 alone")
    own, rows = batch(job)
    alone = trained(net(), rows, adam)
    mesh, model = init_device_mesh("cpu", (job.size,)), net()
    for layer in (model[0], model[2]):
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    trained(model, own, adam)
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            found.full_tensor(), wanted.detach(), rtol=1e-12, atol=1e-12
        )


def test_fsdp1_trains_as_one_process(job: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    own, rows = batch(job)
    alone = trained(net(), rows, adam)
    model = FullyShardedDataParallel(
        net(), device_id=torch.device("cpu"), use_orig_params=True
    )
    trained(model, own, adam)
    with FullyShardedDataParallel.summon_full_params(model):
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_checkpoints_of_torch_are_read_back(job: Any, tmp_path: Any) -> None:
    from torch.distributed import checkpoint

    path = job.bcast(str(tmp_path / "saved"))
    state = {"a": torch.arange(6.0), "step": 3}
    checkpoint.save(copy.deepcopy(state), checkpoint_id=path)
    read = {"a": torch.zeros(6), "step": 0}
    checkpoint.load(read, checkpoint_id=path)
    assert torch.equal(read["a"], state["a"])
    dist.barrier()


def test_functional_collectives(job: Any) -> None:
    from torch.distributed import _functional_collectives as functional

    world = dist.group.WORLD
    total = functional.all_reduce(torch.ones(4), "sum", world)
    assert (total == job.size).all()
    whole = functional.all_gather_tensor(torch.full((2,), job.rank), 0, world)
    assert whole.tolist() == [rank for rank in range(job.size) for _ in range(2)]
    part = functional.reduce_scatter_tensor(torch.ones(2 * job.size), "sum", 0, world)
    assert (part == job.size).all()


def test_a_mismatch_names_both_calls_and_lines(job: Any) -> None:
    if job.size == 1:
        return
    first, second = torch.ones(3), torch.ones(4)
    own = first if job.rank == 0 else second
    with pytest.raises(hs.CollectiveError) as caught:
        dist.all_reduce(own)
    for word in ("all_reduce(SUM)", "float32[3]", "float32[4]"):
        assert word in str(caught.value)
    assert "check_process_group.py:" in str(caught.value)
    other = outcome(dist.broadcast, own, 0) if job.rank else outcome(dist.barrier)
    assert isinstance(other, hs.CollectiveError)
    assert "barrier" in str(other)
    assert "broadcast(root=0)" in str(other)
    dist.all_reduce(torch.ones(1))


def test_an_error_on_one_rank_is_one_on_all(job: Any) -> None:
    size = 2 * job.size
    error = outcome(
        dist.reduce_scatter_tensor, torch.ones(2), torch.ones(size + (job.rank == 0))
    )
    if job.size == 1 or job.rank == 0:
        assert isinstance(error, ValueError), repr(error)
    else:
        assert isinstance(error, hs.ReplicaError), repr(error)
        assert "rank 0 failed in" in str(error)
    own = torch.ones(1)
    dist.all_reduce(own)
    assert own == job.size


def test_what_cannot_be_says_so(job: Any) -> None:
    with pytest.raises(ValueError, match="no order"):
        dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64)], Op.MAX)
    with pytest.raises(NotImplementedError, match=r"AVG"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), Op.AVG)
    with pytest.raises(NotImplementedError, match="sparse"):
        dist.all_reduce(torch.eye(2).to_sparse(), Op.MAX)
    with pytest.raises(NotImplementedError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0))
    with pytest.raises(NotImplementedError, match="float8"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(TypeError, match=r"bitwise_and .* all_reduce\(BAND\)"):
        dist.all_reduce(torch.ones(2), Op.BAND)
    with pytest.raises(TypeError, match=r"bitwise_or .* reduce\(BOR\)"):
        dist.reduce(torch.ones(2).bfloat16(), 0, Op.BOR)
    with pytest.raises(TypeError, match=r"bitwise_xor .* reduce_scatter\(BXOR\)"):
        dist.reduce_scatter(
            torch.ones(2), [torch.ones(2) for _ in range(job.size)], Op.BXOR
        )
    own = torch.ones(1)
    dist.all_reduce(own)
    assert own == job.size


def test_a_wait_in_the_group_does_not_count_as_the_time_of_a_step(job: Any) -> None:
    """Ranks under DDP wait for each other in the group, not in the strategy."""
    arrivals = dist.group.WORLD.collectives.channel.arrivals
    costs = hs.data.MeasuredCosts([1.0, 2.0])
    times, whole = StepTimes(costs), torch.ones(700, 700)
    for _ in range(5):
        report, start = arrivals.own(), time.perf_counter()
        before = report.waited_seconds + report.data_seconds
        times.begin(np.array([0]))
        if job.rank == 0:
            whole @ whole
        dist.all_reduce(torch.ones(3))
        times.end()
        elapsed, report = time.perf_counter() - start, arrivals.own()
        waited = report.waited_seconds + report.data_seconds - before
        assert costs._steps[-1][1] <= elapsed - waited + 1e-6
