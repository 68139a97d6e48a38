"""Gradients that are summed between workers during the backward pass."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from tests.integrations.ranks.check_torch_gradients import (  # noqa: F401
    _assert_close,
    _gradients,
    _net,
    _seeded,
    _whole,
    test_a_replica_that_calls_something_else_is_named,
    test_after_a_backward_that_failed_everywhere,
    test_gradients_of_two_kinds_are_an_error_on_all,
    test_gradients_stay_where_they_are,
    test_halves,
    test_parameters_are_frozen_and_thawed,
    test_parameters_that_some_replicas_do_not_use,
    test_several_backwards_add_up,
    test_sparse_gradients,
    test_training_on_ragged_batches_is_that_of_one_process,
)
from tests.mpi.ranks.outcomes import assert_usable, outcome

# A size for buckets of one weight, or of a weight and a bias.
SMALL = 64


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[Any, Any]]:
    """Yield a dict of strategies, which the tests share."""
    strategies: dict[Any, Any] = {}
    yield strategies
    for strategy in strategies.values():
        strategy.close()


@pytest.fixture
def strategy(kept: Any, monkeypatch: Any) -> Any:
    """Return a strategy whose workers have one replica, with small buckets."""
    small = functools.partial(hst.replicate, bucket_bytes=SMALL)
    monkeypatch.setattr(hst, "replicate", small)
    return _strategy(kept)


def _strategy(kept: Any, replicas_per_worker: int = 1, **options: Any) -> Any:
    key = replicas_per_worker, str(options)
    if key not in kept:
        kept[key] = hs.MultiWorkerMirroredStrategy(
            replicas_per_worker=replicas_per_worker,
            communication_options=hs.CommunicationOptions(**options),
        )
    return kept[key]


def _seen(module: Any, strategy: Any, patch: Any) -> list[str]:
    """Return a list of events: starts of reductions, gradients of the first layer."""
    seen: list[str] = []
    start = strategy.collectives.start_in_call

    def started(*args: Any, **options: Any) -> Any:
        seen.append("start")
        return start(*args, **options)

    patch.setattr(strategy.collectives, "start_in_call", started)
    first = next(module.parameters())
    first.register_post_accumulate_grad_hook(lambda _: seen.append("first"))
    return seen


def _mlp(width: int, num_layers: int = 3) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(num_layers)]
    return nn.Sequential(*[one for layer in layers for one in (layer, nn.Tanh())])


@pytest.mark.parametrize("replicas_per_worker", [1, 2])
def test_buckets_go_out_before_the_end_with_the_same_bits(
    kept: Any, replicas_per_worker: int, job: Any, monkeypatch: Any
) -> None:
    strategy = _strategy(kept, replicas_per_worker)
    # A bucket has one layer, which is too large for the header of two workers.
    module = hst.replicate(_mlp(300), strategy, bucket_bytes=300_000)
    at_end = hst.replicate(_mlp(300), strategy, bucket_bytes=0)
    several = strategy.topology.num_workers > 1
    seen = _seen(module, strategy, monkeypatch)
    for step in range(3):
        seen.clear()
        generator = torch.Generator().manual_seed(10 * step + job.rank)
        x = torch.randn(4, 300, generator=generator)
        for model in (module, at_end):
            model.zero_grad(set_to_none=step == 2)
            model(x).square().sum().backward()
        starts = seen[: seen.index("first")].count("start")
        assert starts == (2 if several and step else 0)
        for own, other in zip(_gradients(module), _gradients(at_end), strict=True):
            assert torch.equal(own, other)
    strategy.check_equal(_gradients(module))


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_layers_that_checkpoints_reach_twice(
    strategy: Any, op: str, monkeypatch: Any
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.shared, self.last = (nn.Linear(4, 4) for _ in range(3))
            self.double()

        def forward(self, x: Any, again: bool) -> Any:
            x = checkpoint(self.shared, self.first(x), use_reentrant=True)
            if again:
                x = checkpoint(self.shared, x.tanh(), use_reentrant=True)
            return self.last(x)

    module = hst.replicate(Twice(), strategy, op=op)
    alone = Twice()
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    scale = size if op == "mean" else 1
    x = torch.randn(size, 2, 4, dtype=torch.float64, generator=_seeded(3))
    for step in range(4):
        # In the last step, only one replica reaches the layers twice.
        again = step < 3 or rank == 0
        module(x[rank], again).square().sum().backward()
        for other in range(size):
            whole = alone(x[other], step < 3 or other == 0)
            (whole.square().sum() / scale).backward()
        _assert_close(module, alone)
        strategy.check_equal(_gradients(module))


def test_memory_that_the_rest_of_a_backward_needs_is_left_alone(strategy: Any) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
            self.positions = nn.Parameter(torch.zeros(3, 4))
            self.double()

        def forward(self, x: Any) -> Any:
            # Both operands get the same gradient; the parameter's gradient is a view of
            # it.
            return self.after(self.before(x) + self.positions.unsqueeze(0)).tanh()

    module, alone = hst.replicate(Positions(), strategy), Positions()
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    x = torch.randn(size, 1, 3, 4, dtype=torch.float64, generator=_seeded(4))
    for _ in range(3):
        for model in (module, alone):
            model.zero_grad()
        module(x[rank]).sum().backward()
        for part in x:
            (alone(part).sum() / size).backward()
        _assert_close(module, alone)


def test_calls_of_layers_come_between_buckets(strategy: Any) -> None:
    net = _net(0)
    net.insert(1, nn.BatchNorm1d(8).double())
    alone = copy.deepcopy(net)
    module = hst.SyncBatchNorm.convert(net, strategy)
    hst.replicate(module, strategy, op="sum")
    x, own = _whole(strategy)
    for _ in range(3):
        module(x[own]).square().sum().backward()
        alone(x).square().sum().backward()
        _assert_close(module, alone, rtol=1e-9, atol=1e-9)


def test_a_failure_in_the_midst_is_named_on_all(strategy: Any, job: Any) -> None:
    if job.size == 1:
        pytest.skip("one rank has nobody to tell")
    module, faulty = hst.replicate(_mlp(4, 4), strategy), job.size - 1
    fails = [False]

    def refuse(_: Any) -> None:
        if fails[0] and job.rank == faulty:
            raise ZeroDivisionError

    def meet(_: Any) -> None:
        # By then, several buckets of the other ranks wait for the failed rank.
        if fails[0]:
            job.Barrier()

    module[4].weight.register_hook(refuse)
    module[0].weight.register_hook(meet)
    for _ in range(2):
        module(torch.ones(2, 4)).sum().backward()
    fails[0] = True
    error = outcome(module(torch.ones(2, 4)).sum().backward)
    if job.rank == faulty:
        job.Barrier()
        assert isinstance(error, ZeroDivisionError)
        error = outcome(strategy.reduce, "sum", np.ones(3), axis=None)
    assert isinstance(error, hs.CollectiveError), repr(error)
    assert "gradients" in str(error)
    assert "reduce" in str(error)
    fails[0] = False
    assert_usable(strategy, job)
    module.zero_grad()
    module(torch.ones(2, 4)).sum().backward()
    strategy.check_equal(_gradients(module))


def test_halves_on_the_wire_leave_what_is_agreed_exact(
    kept: Any, job: Any, monkeypatch: Any
) -> None:
    strategy, unused = _strategy(kept, wire_dtype="float16"), nn.Linear(300, 1)
    module = _mlp(300).append(unused)
    hst.replicate(module, strategy, bucket_bytes=300_000)
    alone = copy.deepcopy(module)
    seen = _seen(module, strategy, monkeypatch)
    for step in range(3):
        seen.clear()
        for model in (module, alone):
            model.zero_grad()
        x = torch.randn(job.size, 4, 300, generator=_seeded(step))
        # The gradient is so large that a 1 added to it is lost.
        module[:6](x[job.rank]).mul(1e25).sum().backward()
        for part in x:
            (alone[:6](part).mul(1e25).sum() / job.size).backward()
        _assert_close(module, alone, rtol=4e-3, atol=1e22)
        starts = seen[: seen.index("first")].count("start")
        assert starts == (2 if job.size > 1 and step else 0)
        strategy.check_equal(_gradients(module)[:-2])
        assert unused.weight.grad is None


def test_two_modules_in_a_backward_of_which_a_replica_skips_a_layer(
    strategy: Any,
) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(3))

        def forward(self, x: Any, skipped: int | None = None) -> Any:
            for number, layer in enumerate(self.layers):
                x = x if number == skipped else layer(x).tanh()
            return x

    first, last = (hst.replicate(Skips(), strategy) for _ in range(2))
    alone = nn.ModuleList([Skips(), Skips()])
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    x = torch.randn(size, 2, 4, dtype=torch.float64, generator=_seeded(3))
    for step in range(3):
        # The buckets of the first module are then complete before those of the second.
        skips: list[int | None] = [None] * size
        skips[-1] = 2 if step == 2 else None
        last(first(x[rank]), skips[rank]).square().sum().backward()
        for part, skipped in zip(x, skips, strict=True):
            (alone[1](alone[0](part), skipped).square().sum() / size).backward()
    _assert_close(nn.ModuleList([first, last]), alone)


def test_a_module_that_is_given_another_type(strategy: Any) -> None:
    module, size = hst.replicate(_net(0), strategy), strategy.num_replicas_in_sync
    for dtype in (torch.float64, torch.float32):
        module.to(dtype)
        for _ in range(2):
            module.zero_grad()
            x = torch.full((1, 4), float(strategy.replica_id), dtype=dtype)
            module(x).sum().backward()
    assert module[2].bias.grad.dtype == torch.float32
    alone = _net(0).float()
    for other in range(size):
        (alone(torch.full((1, 4), float(other))).sum() / size).backward()
    _assert_close(module, alone, rtol=1e-5, atol=1e-6)
