"""Steps that some ranks leave out: right gradients, or an error on all ranks."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from tests.mpi.ranks.outcomes import outcome

pytestmark = pytest.mark.algorithm

WAYS = ["fails in the forward", "fails in the loss", "is skipped"]


class _Fails(torch.autograd.Function):
    """Returns its input; its backward fails, above the module."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise MemoryError


@dataclass
class _Output:
    scores: Any


class _Net(nn.Module):
    """Two layers of one weight; the gradients of both are known."""

    def __init__(self, wraps: Any) -> None:
        super().__init__()
        self.wraps = wraps
        self.first = nn.Linear(1, 1, bias=False)
        self.last = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.last.weight)

    def forward(self, x: Any) -> Any:
        return self.wraps(self.last(self.first(x)))


WRAPS: list[Any] = [
    lambda scores: scores,
    lambda scores: {"logits": [scores]},
    _Output,
    lambda scores: torch.distributions.Normal(scores, 1.0, validate_args=False),
]


def _scores(output: Any) -> Any:
    if isinstance(output, dict):
        return output["logits"][0]
    scores = getattr(output, "scores", output)
    return getattr(scores, "loc", scores)


def _step(module: Any, x: float, way: str, kept: list[Any]) -> float | None:
    """Make a step, or leave it out; return the first weight's gradient."""
    module.zero_grad()
    if way == WAYS[0]:
        kept.append(outcome(module, torch.ones(1, 2)))
        return None
    loss = _scores(module(torch.full((1, 1), x))).sum()
    # Whether a program keeps the loss of a step must not matter.
    kept.append(loss)
    if way == WAYS[2]:
        return None
    if way == WAYS[1]:
        kept.append(outcome(_Fails.apply(loss).backward))
        return None
    loss.backward()
    return float(module.first.weight.grad)


def _plan(draw: random.Random, size: int) -> list[list[str]]:
    """Draw, for each step and rank, the way in which the rank leaves the step out."""
    plan = []
    for _ in range(6):
        everywhere = draw.random() < 0.3
        some = draw.sample(range(size), draw.randrange(1, size)) if size > 1 else []
        if everywhere:
            plan.append([draw.choice(WAYS) for _ in range(size)])
        elif draw.random() < 0.3:
            plan.append([draw.choice(WAYS) if r in some else "" for r in range(size)])
        else:
            plan.append([""] * size)
    return [*plan, [""] * size]


@pytest.mark.parametrize("options", [{}, {"replicas_per_worker": 1}])
def test_a_step_that_some_ranks_leave_out_is_an_error_on_all(
    job: Any, options: Any
) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        plan, kept, wraps = _plan(draw, job.size), [], draw.choice(WRAPS)
        uneven = [i for i, ways in enumerate(plan) if len({bool(w) for w in ways}) > 1]
        first = uneven[0] if uneven else len(plan)
        keeps = draw.random() < 0.5
        with hs.MultiWorkerMirroredStrategy(comm=job, **options) as strategy:
            module = hst.replicate(_Net(wraps), strategy, bucket_bytes=4)
            for index, ways in enumerate(plan):
                way, scale = ways[job.rank], (job.size + 1) / 2 * 10.0**index
                x = (job.rank + 1) * 10.0**index
                error = None
                try:
                    found = _step(module, x, way, kept)
                except hs.CollectiveError as caught:
                    error, found = caught, None
                if not keeps:
                    kept.clear()
                if error is None:
                    assert (found is None) == bool(way)
                    # Later steps are only those that this rank leaves out.
                    assert index < first or way, (seed, index)
                    assert way or found == pytest.approx(scale), (seed, index)
                    continue
                assert index >= first, (seed, index, str(error))
                break
            assert (error is not None) == bool(uneven), seed
        if uneven:
            text = str(error)
            assert "of backward(); rank" in text, text
            assert "skip a step on all ranks or on none" in text


def test_a_new_strategy_goes_on_after_a_skipped_step(job: Any) -> None:
    last = job.size - 1
    module = _Net(WRAPS[0])
    for _ in range(2):
        with hs.MultiWorkerMirroredStrategy(comm=job) as strategy:
            hst.replicate(module, strategy)
            assert _step(module, job.rank + 1.0, "", []) == (job.size + 1) / 2
            way = WAYS[2] if job.rank == last else ""
            error = outcome(_step, module, 1.0, way, [])
            if job.size > 1 and job.rank == last:
                error = outcome(_step, module, 1.0, "", [])
            assert isinstance(error, hs.CollectiveError) == (job.size > 1)


def test_ranks_that_meet_in_another_call_go_on(strategy: Any, job: Any) -> None:
    """If a rank reports its error by a call, all ranks leave the step, and go on."""
    faulty = job.rank == job.size - 1
    module = hst.replicate(_Net(WRAPS[0]), strategy)
    for index in range(4):
        bad = index % 2 == 1
        module.zero_grad()
        loss = module(torch.full((1, 1), job.rank + 1.0)).sum()
        if bad and faulty:
            error = outcome(_Fails.apply(loss).backward)
            assert isinstance(error, MemoryError)
            error = outcome(strategy.barrier)
        else:
            error = outcome(loss.backward)
        if bad and job.size > 1:
            assert isinstance(error, hs.CollectiveError), error
        if not bad:
            assert error is None, error
            assert float(module.first.weight.grad) == (job.size + 1) / 2


def test_ranks_may_call_a_module_in_different_numbers(strategy: Any, job: Any) -> None:
    module = hst.replicate(_Net(WRAPS[0]), strategy)
    for step in range(3):
        module.zero_grad()
        if job.rank == 0:
            # Forwards that no backward follows: under no_grad, or in evaluation mode.
            with torch.no_grad():
                module(torch.ones(1, 1))
            module.eval()(torch.ones(1, 1))
            module.train()
        total: Any = 0
        with contextlib.ExitStack() as stack:
            if step == 2:
                stack.enter_context(hst.no_sync(module))
            for _ in range(job.rank + 1):
                total = total + module(torch.ones(1, 1)).sum()
        total.backward()
        assert float(module.first.weight.grad) == (job.size + 1) / 2
