"""Ranks that train without each other are found in the first step of an optimizer."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcstrat.errors import TopologyError
from hpcstrat.integrations.torch.process_group import BACKEND
from hpcstrat.integrations.torch.separate_ranks import refuse_separate_ranks
from tests.docs.said import assert_said

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes a step of an optimizer."""
    hooks: Any = OrderedDict()
    # The package removes its attribute of this name.
    optimizers = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(optimizers, "_global_optimizer_post_hooks", hooks)
    weights = torch.nn.Parameter(torch.ones(2))
    weights.grad = torch.ones(2)
    return torch.optim.SGD([weights], 0.1).step


def test_ranks_without_a_group_are_refused(job: Any, step: Any) -> None:
    refuse_separate_ranks()
    if job.size == 1:
        step()
        return
    words = f"{job.size} ranks train together, found no process group in the first"
    with pytest.raises(TopologyError, match=words) as caught:
        step()
    assert_said("separate-ranks", str(caught.value))


@pytest.mark.parametrize("uses", [False, True])
def test_ranks_that_do_not_use_their_group_are_refused(
    job: Any, step: Any, uses: bool
) -> None:
    dist.init_process_group(BACKEND)
    refuse_separate_ranks()
    if uses:
        dist.barrier()
    try:
        if uses or job.size == 1:
            step()
        else:
            with pytest.raises(TopologyError, match="found one that it does not use"):
                step()
    finally:
        dist.destroy_process_group()


def test_a_closure_may_make_the_first_call(job: Any, step: Any, strategy: Any) -> None:
    refuse_separate_ranks()

    def closure() -> float:
        strategy.barrier()
        return 0.0

    step(closure)


def test_ranks_of_a_strategy_are_not_separate(
    job: Any, step: Any, strategy: Any
) -> None:
    refuse_separate_ranks()
    strategy.barrier()
    step()
    # Later steps are not looked at.
    step()
