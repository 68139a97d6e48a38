"""Replicated modules of PyTorch, compared with one process that has all rows."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from tests.mpi.ranks.outcomes import assert_told, assert_usable, outcome

# The number of rows of each replica: uneven, and one of three replicas has none.
ROWS = [5, 2, 0]


def _whole(strategy: Any, seed: int = 1, columns: int = 4) -> tuple[Any, Any]:
    """Return the rows of all replicas, and the slice of this replica's rows."""
    rows = ROWS[: strategy.num_replicas_in_sync]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(rows), columns, generator=generator, dtype=torch.float64)
    first = sum(rows[: strategy.replica_id])
    return x, slice(first, first + rows[strategy.replica_id])


def _net(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _assert_close(module: Any, alone: Any, **limits: float) -> None:
    limits = limits or {"rtol": 1e-12, "atol": 1e-12}
    for own, whole in zip(module.parameters(), alone.parameters(), strict=True):
        if whole.grad is None:
            assert own.grad is None
        else:
            torch.testing.assert_close(own.grad, whole.grad, **limits)
        torch.testing.assert_close(own, whole, **limits)


def _gradients(module: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.to_dense() for p in module.parameters()]


def test_training_on_ragged_batches_is_that_of_one_process(strategy: Any) -> None:
    module = _net(strategy.replica_id)
    assert hst.replicate(module, strategy) is module
    alone = _net(0)
    pairs = [(m, torch.optim.AdamW(m.parameters(), 0.01)) for m in (module, alone)]
    for step in range(4):
        x, own = _whole(strategy, step)
        losses = []
        for model, optimizer in pairs:
            optimizer.zero_grad()
            if model is alone:
                loss = model(x).square().mean()
            else:
                mine = model(x[own]).square().sum()
                loss = hst.global_mean(mine, len(x[own]))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    _assert_close(module, alone)
    strategy.check_equal([module.state_dict(), _gradients(module)])
    assert list(module.state_dict()) == list(alone.state_dict())


def test_gradients_stay_where_they_are(strategy: Any) -> None:
    module = hst.replicate(_net(0), strategy)
    for _ in range(2):
        hst.global_mean(module(torch.ones(2, 4).double()).sum(), 2).backward()
        places = [p.grad.data_ptr() for p in module.parameters()]
        module.zero_grad(set_to_none=False)
    hst.global_mean(module(torch.ones(2, 4).double()).sum(), 2).backward()
    assert places == [p.grad.data_ptr() for p in module.parameters()]


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_several_backwards_add_up(strategy: Any, op: str) -> None:
    module, alone = hst.replicate(_net(0), strategy, op=op), _net(0)
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    parts = torch.randn(3, size, 2, 4, dtype=torch.float64, generator=_seeded(5))
    scale = size if op == "mean" else 1
    with hst.no_sync(module):
        module(parts[0, rank]).sum().backward()
    module(parts[1, rank]).sum().backward()
    strategy.check_equal(_gradients(module))
    # Add gradients without a reduction, and then with one.
    with hst.no_sync(module):
        module(parts[2, rank]).sum().backward()
    module(parts[2, rank]).sum().backward()
    module(parts[0, rank]).sum().backward()
    for part in (*parts, parts[2], parts[0]):
        (alone(part.flatten(0, 1)).sum() / scale).backward()
    _assert_close(module, alone)
    strategy.check_equal(_gradients(module))


def _seeded(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


class _Branches(nn.Module):
    """A module with a layer for each replica, one for odd steps, and an unused one."""

    def __init__(self, *replicas: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(4))
        self.never = nn.Linear(4, 1).double()
        self.replicas = replicas

    def forward(self, x: Any, step: int) -> Any:
        total = self.layers[3](x) if step % 2 else 0
        for replica in self.replicas:
            total = total + self.layers[replica](x)
        return total


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("to_none", [True, False])
def test_parameters_that_some_replicas_do_not_use(
    strategy: Any, op: str, to_none: bool
) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    torch.manual_seed(0)
    module = hst.replicate(_Branches(rank), strategy, op=op)
    alone = _Branches(*range(size))
    alone.load_state_dict(module.state_dict())
    x = torch.randn(5, 4, dtype=torch.float64, generator=_seeded(2))
    scale = size if op == "mean" else 1
    for step in range(4):
        module(x, step).sum().backward()
        (
            (alone(x, 0).sum() + (step % 2) * size * alone.layers[3](x).sum()) / scale
        ).backward()
        if step == 0:
            # One process has multiplied the unused layer's output by zero.
            alone.layers[3].zero_grad()
        _assert_close(module, alone)
        strategy.check_equal(_gradients(module))
        if step == 2:
            module.zero_grad(to_none)
            alone.zero_grad(to_none)
    assert module.never.weight.grad is None


def test_parameters_are_frozen_and_thawed(strategy: Any) -> None:
    module = _net(0)
    module[0].requires_grad_(False)
    hst.replicate(module, strategy)
    alone = copy.deepcopy(module)
    x, own = _whole(strategy)
    for trained, of in [(True, 2), (True, 0), (False, 2), (True, 2)]:
        for model in (module, alone):
            model[of].requires_grad_(trained)
        hst.global_mean(module(x[own]).square().sum(), len(x[own])).backward()
        alone(x).square().mean().backward()
        _assert_close(module, alone)
    assert not module[2].weight.grad.isnan().any()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_halves(strategy: Any, kind: Any) -> None:
    module = hst.replicate(nn.Linear(4, 3).to(kind), strategy)
    x = torch.full((2, 4), strategy.replica_id + 1.0).to(kind)
    module(x).sum().backward()
    assert module.weight.grad.dtype is kind
    mean = np.mean([2.0 * (r + 1) for r in range(strategy.num_replicas_in_sync)])
    torch.testing.assert_close(module.weight.grad, torch.full((3, 4), mean).to(kind))
    strategy.check_equal([g.float() for g in _gradients(module)])


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_sparse_gradients(strategy: Any, op: str) -> None:
    torch.manual_seed(0)
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    module, alone = (
        nn.ModuleDict(
            {"rows": nn.Embedding(9, 3, sparse=True), "last": nn.Linear(3, 1)}
        )
        for _ in range(2)
    )
    hst.replicate(module, strategy, op=op)
    alone.load_state_dict(module.state_dict())
    scale = size if op == "mean" else 1
    picks = [torch.tensor([r, r + 1, 5]) for r in range(size)]

    def loss(model: Any, r: int) -> Any:
        # The last replica uses no rows, if there are several replicas.
        rows = model["rows"](picks[r]) if r < max(size - 1, 1) else torch.ones(1, 3)
        return model["last"](rows).square().sum()

    for _ in range(2):
        loss(module, rank).backward()
        (sum(loss(alone, r) for r in range(size)) / scale).backward()
        assert module["rows"].weight.grad.is_sparse
        for own, whole in zip(_gradients(module), _gradients(alone), strict=True):
            torch.testing.assert_close(own, whole)
        strategy.check_equal(_gradients(module))
    torch.optim.SGD(module.parameters(), 0.1).step()
    strategy.check_equal(module.state_dict())


def test_gradients_of_two_kinds_are_an_error_on_all(strategy: Any, job: Any) -> None:
    last = strategy.num_replicas_in_sync - 1
    module = nn.Embedding(4, 2, sparse=strategy.replica_id == last)
    hst.replicate(module, strategy)
    error = outcome(module(torch.tensor([1, 2])).sum().backward)
    assert isinstance(error, ValueError) == (last > 0)
    assert error is None or "'weight' of one kind" in str(error)
    assert_usable(strategy, job)


# Ignore a warning of torch 2.4 about its own call.
@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_reduced_once(
    strategy: Any, reentrant: bool, monkeypatch: Any
) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Any) -> Any:
            x = checkpoint(self[1], self[0](x).tanh(), use_reentrant=reentrant)
            return checkpoint(self[2], x.tanh(), use_reentrant=reentrant)

    torch.manual_seed(0)
    module = Checkpointed(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()
    hst.replicate(module, strategy, op="sum")
    alone = copy.deepcopy(module)
    x, own = _whole(strategy)
    made, reduce = [], strategy.collectives.batch_reduce

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args[2])
        return reduce(*args, **options)

    for _ in range(2):
        made.clear()
        with monkeypatch.context() as patch:
            patch.setattr(strategy.collectives, "batch_reduce", counted)
            module(x[own]).square().sum().backward()
        alone(x).square().sum().backward()
        _assert_close(module, alone)
    assert made == ["gradients"]


def test_gradients_outside_of_parameters_are_left_alone(strategy: Any) -> None:
    """A penalty on the gradient by the inputs leaves other gradients unchanged."""
    module, alone = hst.replicate(_net(0), strategy), _net(0)
    x, own = _whole(strategy)

    def penalty(model: Any, x: Any) -> Any:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    hst.global_mean(penalty(module, x[own]), len(x[own])).backward()
    (penalty(alone, x) / len(x)).backward()
    for mine, whole in zip(_gradients(module), _gradients(alone), strict=True):
        if whole is not None:
            torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_gradients_by_parameters_leave_those_there_are(strategy: Any, op: str) -> None:
    module = hst.replicate(_net(0), strategy, op=op)
    x = torch.ones(2, 4, dtype=torch.float64)
    module(x).sum().backward()
    before = [gradient.clone() for gradient in _gradients(module)]
    own = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    scale = strategy.num_replicas_in_sync if op == "sum" else 1
    for mine, sums, old in zip(own, _gradients(module), before, strict=True):
        assert torch.equal(sums, old)
        torch.testing.assert_close(scale * mine, old, rtol=1e-12, atol=1e-12)
    module(x).sum().backward()
    for sums, old in zip(_gradients(module), before, strict=True):
        torch.testing.assert_close(sums, 2 * old, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("buffers", ["first", "mean", None])
def test_running_means(strategy: Any, buffers: str | None) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    module = nn.BatchNorm1d(2).double()
    module.register_buffer("constant", torch.full((2,), rank))
    hst.replicate(module, strategy, buffers=buffers)
    assert not module.constant.any()
    for _ in range(2):
        x = torch.arange(4.0).double().reshape(2, 2) + 10 * rank
        module(x).sum().backward()
    mean = {"first": 0, "mean": 10 * (size - 1) / 2, None: 10 * rank}[buffers]
    expected = (torch.tensor([1.0, 2.0]).double() + mean) * 0.19
    torch.testing.assert_close(module.running_mean, expected)
    if buffers:
        strategy.check_equal(module.state_dict())


def test_a_scaler_skips_the_same_steps_everywhere(strategy: Any) -> None:
    module = hst.replicate(nn.Linear(4, 3), strategy)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    last = strategy.num_replicas_in_sync - 1
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(torch.ones(2, 4)).float().sum()
        if step == 2 and strategy.replica_id == last:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    strategy.check_equal(module.state_dict())


def test_compiled_modules_and_fused_optimizers(strategy: Any) -> None:
    if strategy.num_replicas_in_sync != 2:
        pytest.skip("takes seconds, and says the same on any number of ranks")
    module, alone = hst.replicate(_net(0), strategy), _net(0)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    pairs = [
        (m, torch.optim.Adam(m.parameters(), 0.01, fused=True)) for m in (module, alone)
    ]
    for step in range(3):
        x = torch.randn(3, 4, dtype=torch.float64, generator=_seeded(step))
        hst.global_mean(compiled(x).square().sum(), len(x)).backward()
        alone(x).square().mean().backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    _assert_close(module, alone)


def test_after_a_backward_that_failed_everywhere(strategy: Any) -> None:
    module, alone = hst.replicate(_net(0), strategy), _net(0)
    fails = [True]

    def refuse(_: Any) -> None:
        if fails[0]:
            raise ZeroDivisionError

    module[0].weight.register_hook(refuse)
    x, own = _whole(strategy)
    error = outcome(hst.global_mean(module(x[own]).sum(), len(x[own])).backward)
    assert isinstance(error, ZeroDivisionError)
    fails[0] = False
    module.zero_grad()
    hst.global_mean(module(x[own]).sum(), len(x[own])).backward()
    alone(x).mean().backward()
    _assert_close(module, alone)


def test_modules_that_differ_are_named(strategy: Any, job: Any) -> None:
    last = strategy.num_replicas_in_sync - 1
    width = 5 if last and strategy.replica_id == last else 4
    error = outcome(hst.replicate, nn.Linear(width, 1), strategy)
    assert isinstance(error, hs.CollectiveError) == (last > 0)
    assert error is None or "[1, 5]" in str(error), str(error)
    assert_usable(strategy, job)


def test_a_replica_that_calls_something_else_is_named(strategy: Any, job: Any) -> None:
    if job.size == 1:
        return
    module = hst.replicate(_net(0), strategy)
    loss = module(torch.ones(2, 4).double()).sum()
    call = loss.backward
    if strategy.replica_id == 0:
        call = lambda: strategy.reduce("sum", np.ones(3), axis=None)  # noqa: E731
    error = outcome(call)
    assert isinstance(error, hs.CollectiveError), repr(error)
    assert "gradients" in str(error)
    assert_usable(strategy, job)


def test_wrong_arguments_are_told(strategy: Any, job: Any) -> None:
    guilty = strategy.replica_id == 0
    options = {"buffers": "all"} if guilty else {}
    error = outcome(hst.replicate, _net(0), strategy, **options)
    assert_told(error, ValueError, guilty, "buffers")
    loss = torch.ones(2) if guilty else torch.ones(())
    error = outcome(hst.global_mean, loss, 1, strategy=strategy)
    assert_told(error, ValueError, guilty, "one element")
    error = outcome(hst.global_mean, torch.zeros(()), 0, strategy=strategy)
    assert isinstance(error, ValueError)
    assert "replicated" in str(outcome(hst.no_sync(_net(0)).__enter__))
    assert_usable(strategy, job)


def test_a_module_can_be_copied_and_let_go_of(strategy: Any) -> None:
    module = hst.replicate(_net(0), strategy)
    module(torch.ones(2, 4).double()).sum().backward()
    again = copy.deepcopy(module)
    seen = weakref.ref(module[0].weight)
    hst.replicate(module, strategy)
    del module
    gc.collect()
    assert seen() is None
    loss = again(torch.ones(2, 4).double())
    assert loss.requires_grad


def test_a_backward_that_fails_on_one_replica_is_not_mixed_with_the_next(
    job: Any,
) -> None:
    """If a program skips a bad batch, gradients of two steps must not be added."""
    faulty, fails = job.size - 1, [False]
    if job.size == 1:
        pytest.skip("alone")

    def refuse(_: Any) -> None:
        if fails[0]:
            raise ZeroDivisionError

    with hs.MultiWorkerMirroredStrategy(comm=job) as strategy:
        module = hst.replicate(_net(0), strategy)
        module[2].weight.register_hook(refuse)
        errors: list[Any] = []
        for step in range(3):
            fails[0] = step == 1 and job.rank == faulty
            module.zero_grad()
            backward = module(torch.ones(2, 4).double()).sum().backward
            errors.append(outcome(backward))
            if isinstance(errors[-1], hs.CollectiveError):
                break
        assert errors[0] is None
        assert isinstance(errors[1], ZeroDivisionError) == (job.rank == faulty)
        assert isinstance(errors[-1], hs.CollectiveError)
        told = f"rank {faulty}: 0 calls of run, 0 of next(), 3 of backward()"
        assert told in str(errors[-1])


def _assigned(module: Any) -> None:
    module.load_state_dict(_net(1).state_dict(), assign=True)


def _normed(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module[0])


def _replaced(module: Any) -> None:
    module[2].weight = nn.Parameter(torch.ones(1, 8).double())


def _appended(module: Any) -> None:
    module.append(nn.Linear(1, 1).double())


@pytest.mark.parametrize("change", [_assigned, _normed, _replaced, _appended])
def test_parameters_that_come_later_are_named(
    strategy: Any, job: Any, change: Any
) -> None:
    module, x = hst.replicate(_net(0), strategy), torch.ones(2, 4).double()
    module(x).sum().backward()
    change(module)
    error = outcome(module, x)
    assert isinstance(error, ValueError), error
    assert "another '" in str(error)
    with torch.no_grad(), hst.no_sync(module):
        module(x)
    hst.replicate(module, strategy)
    module.zero_grad()
    module(x * (1 + strategy.replica_id)).sum().backward()
    found = job.allgather([g.tolist() for g in _gradients(module)])
    assert found == found[:1] * job.size
    assert_usable(strategy, job)


def test_tensors_in_place_of_parameters_are_named(strategy: Any) -> None:
    module, x = hst.replicate(_net(0), strategy), torch.ones(2, 4).double()
    own = {k: v.detach().requires_grad_() for k, v in module.named_parameters()}
    error = outcome(torch.func.functional_call, module, own, x)
    assert isinstance(error, ValueError), error
    with hst.no_sync(module):
        torch.func.functional_call(module, own, x)
    module(x).sum().backward()


def test_strategies_that_do_not_sum_each_step_are_refused(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(strategy), "sums_each_step", False)
    with pytest.raises(NotImplementedError, match="in sync for a module of PyTorch"):
        hst.replicate(nn.Linear(1, 1), strategy)


def test_steps_inside_hooks_are_refused(strategy: Any, job: Any) -> None:
    module = hst.replicate(_net(0), strategy)
    weight = module[2].weight

    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad

    handle = weight.register_post_accumulate_grad_hook(step)
    error = outcome(module(torch.ones(2, 4).double()).sum().backward)
    assert isinstance(error, ValueError), error
    assert "'2.weight' changed" in str(error)
    handle.remove()
    module.zero_grad()
    module(torch.ones(2, 4).double()).sum().backward()
    assert_usable(strategy, job)


def test_a_copy_that_trains_alone_says_so(
    strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module, x = hst.replicate(_net(0), strategy), torch.ones(2, 4).double()
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin(x)
    twin.eval()(x)
    assert "copy" not in caplog.text
    twin.train()
    for _ in range(2):
        twin(x).sum().backward()
    assert caplog.text.count("a copy of a replicated Sequential") == 1


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_parameters_of_two_replicated_modules_are_combined_once(
    strategy: Any, job: Any, op: str
) -> None:
    whole = hst.replicate(_net(0), strategy, op=op)
    other = nn.Sequential(whole[0], nn.Linear(8, 1).double())
    for module in (hst.replicate(whole[0], strategy, op=op), other):
        hst.replicate(module, strategy, op=op)
    x = torch.ones(2, 4).double()
    count = strategy.num_replicas_in_sync
    scale = count * (count + 1) / 2 / (1 if op == "sum" else count)
    for module in (whole, other):
        alone = copy.deepcopy(module)
        module.zero_grad()
        (module(x).sum() * (1 + strategy.replica_id)).backward()
        (alone(x).sum() * scale).backward()
        for one, right in zip(_gradients(module), _gradients(alone), strict=True):
            torch.testing.assert_close(one, right)
    error = outcome(hst.replicate, other, strategy, op="mean" if op == "sum" else "sum")
    assert isinstance(error, ValueError)
    assert_usable(strategy, job)


def test_lazy_modules_are_replicated_after_a_forward(strategy: Any, job: Any) -> None:
    module = nn.LazyLinear(3)
    error = outcome(hst.replicate, module, strategy)
    assert isinstance(error, ValueError), error
    assert "'weight' of a lazy module" in str(error)
    module(torch.ones(2, 4))
    hst.replicate(module, strategy)
    module(torch.ones(2, 4)).sum().backward()
    assert_usable(strategy, job)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sparse_gradients_without_rows_are_added_to(
    strategy: Any, op: str, job: Any
) -> None:
    module = hst.replicate(nn.Embedding(5, 2, sparse=True), strategy, op=op)
    for row in ([], [3], [3], []):
        module(torch.tensor(row, dtype=torch.int64)).sum().backward()
    wanted = torch.zeros(5, 2)
    wanted[3] = 2.0 * (strategy.num_replicas_in_sync if op == "sum" else 1)
    torch.testing.assert_close(module.weight.grad.to_dense(), wanted)
    assert_usable(strategy, job)
