"""Equal inputs of a replicated module on all ranks are warned about, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpcstrat as hs
import hpcstrat.integrations.torch as hst


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def test_equal_batches_of_a_module_are_warned_about_once(
    job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def check(inputs: Any, is_mistake: bool, *, train: bool = True) -> None:
        caplog.clear()
        with hs.MultiWorkerMirroredStrategy(comm=job) as strategy:
            sees = job.rank == 0 and strategy.topology.worker_comm.size > 1
            net = hst.replicate(torch.nn.Linear(4, 1), strategy).train(train)
            for step in range(5):
                net(input=inputs(step)).sum().backward()
        found = caplog.text.count("a replicated PyTorch module were bitwise equal")
        assert found == (sees and is_mistake)

    check(drawn, True)
    # The same batch in each step is a mistake, too.
    check(lambda step: drawn(0).bfloat16().float(), True)
    check(lambda step: drawn(step * job.size + job.rank), False)
    check(lambda step: torch.ones(8, 4), False)
    check(drawn, False, train=False)
