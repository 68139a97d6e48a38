"""The compiled kernel has the promised bits, and reports its errors to all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcstrat.engine.algorithms import reduction_plans
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.outcomes import assert_only_one_failed, assert_usable, outcome
from tests.mpi.ranks.promised import assert_random_calls

pytestmark = pytest.mark.algorithm


@pytest.mark.parametrize("seed", seeds(6))
def test_random_calls_have_the_promised_bits(
    make_strategy: Any, job: Any, seed: int
) -> None:
    with make_strategy(comm=job) as strategy:
        if strategy.topology.num_workers > 1:
            pytest.skip("the kernel sums inside of a worker")
        shared = np.random.default_rng(seed)
        assert_random_calls(job, strategy, shared, by="the kernel")


@pytest.mark.once
def test_results_without_memory_are_an_error_on_all(
    make_strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty, module = job.size - 1, reduction_plans.load()

    class NoMemory:
        """A kernel whose first sum finds no memory for its results."""

        def __init__(self, real: Any) -> None:
            self.real, self.failed = real, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def reduce(self, *args: Any) -> Any:
            if self.failed:
                return self.real.reduce(*args)
            self.failed = True
            raise MemoryError("no room for results")

    if job.rank == faulty:
        failing = SimpleNamespace(Sum=lambda *args: NoMemory(module.Sum(*args)))
        monkeypatch.setattr(reduction_plans, "load", lambda: failing)
    with make_strategy(comm=job) as strategy:
        channel = strategy.collectives.channel
        if channel is None or strategy.topology.num_workers > 1:
            return
        error = outcome(strategy.reduce, "sum", np.ones(3), axis=None)
        assert_only_one_failed(error, MemoryError, faulty, job)
        monkeypatch.undo()
        total = strategy.reduce("sum", np.ones(3), axis=None)
        assert (total == job.size).all()
        assert_usable(strategy, job)
