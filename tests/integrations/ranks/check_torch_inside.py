"""Calls inside a replica on tensors: values and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from tests.mpi.ranks.outcomes import assert_told, assert_usable, outcome


def _inside(strategy: Any) -> Any:
    """Return the ranks of a strategy as those of one replica."""
    return SimpleNamespace(
        position=strategy.replica_id,
        size=strategy.num_replicas_in_sync,
        collectives=strategy.collectives,
        lines=lambda along: None,
    )


@pytest.fixture
def inside(strategy: Any) -> Any:
    return _inside(strategy)


@pytest.fixture
def alone() -> Iterator[Any]:
    """Return a replica of this rank alone, for the result of one process."""
    with hs.OneDeviceStrategy() as strategy:
        yield _inside(strategy)


def _part(x: torch.Tensor, dim: int, inside: Any) -> torch.Tensor:
    low, high = (
        (inside.position + end) * x.shape[dim] // inside.size for end in (0, 1)
    )
    own = x.detach().narrow(dim, low, high - low).clone()
    return own.requires_grad_(x.requires_grad)


def _model(x: torch.Tensor, weight: torch.Tensor, inside: Any) -> torch.Tensor:
    """Return a part of a loss, whose sum over all ranks depends on the field only."""
    call: Any = {"inside": inside}
    y = hst.inside.halo(x, 2, (1, 3), periodic=True, **call)
    y = torch.nn.functional.conv1d(y, weight).tanh()
    y = hst.inside.halo(y, 2, 4, **call)
    y = torch.nn.functional.conv1d(y, weight.repeat(1, 1, 2)[:, :, :9]).sin()
    # The sum of all rows before each row needs whole rows.
    z = hst.inside.transpose(y, 2, 1, **call).cumsum(2) / x.shape[1]
    y = y + hst.inside.transpose(z, 1, 2, **call)
    mean = hst.inside.sum(y.mean(1).sum(1), **call)
    whole = hst.inside.gather(y * mean[:, None, None], 2, **call)
    first = hst.inside.broadcast(y.sum() + whole.sum(), 0, **call)
    own = y.square().sum() + (y * mean[:, None, None]).sum()
    return own + (whole.prod(1).sum() + mean.prod()) / inside.size + 0 * first


@pytest.mark.parametrize("length", [23, 8, 5])
def test_gradients_of_two_orders_are_those_of_one_process(
    inside: Any, alone: Any, length: int
) -> None:
    results = []
    for ranks in (inside, alone):
        torch.manual_seed(1)
        weight = torch.randn(4, 4, 5, dtype=torch.float64, requires_grad=True)
        x = torch.randn(2, 4, length, dtype=torch.float64, requires_grad=True)
        own = _part(x, 2, ranks)
        loss = _model(own, weight, ranks)
        [slope] = torch.autograd.grad(loss, own, create_graph=True)
        (loss + slope.square().sum()).backward()
        total = hst.inside.sum(torch.stack([loss, slope.square().sum()]), inside=ranks)
        both = hst.inside.sum(weight.grad, inside=ranks)
        slopes = [hst.inside.gather(g, 2, inside=ranks) for g in (slope, own.grad)]
        results.append([total, both, *slopes])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_broadcasts_give_their_gradient_to_the_root(inside: Any) -> None:
    root = inside.size - 1
    x = torch.full((3,), 1.0 + inside.position, requires_grad=True)
    found = hst.inside.broadcast(x, root, inside=inside)
    assert found.tolist() == [inside.size] * 3
    (found.sum() * (inside.position + 1)).backward()
    total = sum(range(1, inside.size + 1)) if inside.position == root else 0
    assert x.grad is not None
    assert x.grad.tolist() == [total] * 3


@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "complex64"])
def test_dtypes_and_views_are_kept(inside: Any, alone: Any, dtype: str) -> None:
    x = torch.arange(inside.size * 12).reshape(inside.size, 4, 3) % 7
    x = x.to(getattr(torch, dtype)).conj()
    for ranks in (inside, alone):
        own = x.narrow(0, ranks.position, 1) if ranks is inside else x
        # A view that is not contiguous.
        found = hst.inside.halo(own.mT, 0, (0, 1), periodic=True, inside=ranks)
        assert found.dtype == x.dtype
        if ranks is inside:
            part = found
    low = inside.position
    assert torch.equal(part, torch.cat([found, found[1:2]])[low : low + 2])


def test_errors_are_raised_on_all_ranks(inside: Any, strategy: Any, job: Any) -> None:
    odd = job.rank == job.size - 1
    x = torch.ones(4, 3)
    for call, right, wrong, text in (
        (hst.inside.halo, (0, 1), (2, 1), "found axis 2"),
        (hst.inside.halo, (0, 1), (0, -1), "found -1"),
        (hst.inside.gather, (0,), (3,), "found axis 3"),
        (hst.inside.broadcast, (0,), (job.size,), f"found {job.size}"),
        (hst.inside.transpose, (0, 1), (1, 1), "found 1 twice"),
    ):
        given = wrong if odd else right
        error = outcome(call, x, *given, inside=inside)
        assert_told(error, ValueError, odd, text)
        assert_usable(strategy, job)
    if job.size > 1:
        with pytest.raises(hs.CollectiveError, match=r"float32.*float64"):
            hst.inside.halo(x.double() if odd else x, 0, 1, inside=inside)
        assert_usable(strategy, job)


def test_the_current_strategys_replica_is_the_default(job: Any) -> None:
    with (
        hs.MultiWorkerMirroredStrategy(ranks_per_replica=job.size) as strategy,
        strategy.scope(),
    ):
        assert hst.inside.sum(torch.ones(2)).tolist() == [job.size] * 2
