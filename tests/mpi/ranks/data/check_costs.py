"""Global batches that are made, and divided between replicas, by the costs of rows."""

from __future__ import annotations

from itertools import chain as joined
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.data.row_division import divide_by_cost
from tests.mpi.ranks.effort import examples
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = pytest.mark.rule

Steps = list[list[list[int]]]
"""The rows of each replica, for each step."""


class Drawn:
    """A chain of batches by cost that a seed determines, and its expected batches."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        length = int(draw.integers(1, 60))
        kinds = [
            draw.integers(0, 9, length).astype(float),
            np.clip(draw.lognormal(3.8, 0.7, length), 10, 200).round(),
            draw.pareto(0.5, length),
            np.zeros(length),
        ]
        self.costs = kinds[draw.integers(len(kinds))]
        rows = hs.Dataset({"row": np.arange(length), "cost": self.costs})
        if draw.integers(2):
            rows = rows.shuffle(seed=seed)
        if not draw.integers(3):
            rows = rows.repeat(2)
        if not draw.integers(3):
            rows = rows.map(lambda row: {**row, "more": row["row"] + 1})
        options: dict[str, Any] = {"equal_rows": bool(draw.integers(2))}
        self.equal_rows = options["equal_rows"]
        size: int | None = int(draw.integers(1, 20))
        if draw.integers(2):
            options["max_cost"] = 1 + self.costs.max() * draw.uniform(1, 12)
            size = None if draw.integers(2) else size
        given = [self.costs, "cost", lambda row: float(row["cost"])]
        options["costs"] = given[draw.integers(3)]
        drop = "max_cost" not in options and bool(draw.integers(2))
        dataset = rows.batch(size, drop, **options)
        # These methods keep the batches, or repeat or cut them.
        if not draw.integers(4):
            dataset = dataset.map(lambda batch: {"row": batch["row"] + 0})
        if "max_cost" not in options and not draw.integers(3):
            dataset = dataset.skip(1).take(4)
        if not draw.integers(3):
            dataset = dataset.repeat(2)
        if not draw.integers(4):
            dataset = dataset.cache()
        self.dataset = dataset.prefetch(2) if draw.integers(2) else dataset
        self.batches = [batch["row"].tolist() for batch in self.dataset]
        self.start = int(draw.integers(0, len(self.batches) + 1))

    def divided(self, count: int) -> Steps:
        """Return the rows of each of ``count`` replicas, for each step."""
        found = []
        for batch in self.batches:
            costs = self.costs[batch]
            order, ends = divide_by_cost(costs, count, equal_rows=self.equal_rows)
            rows = [batch[index] for index in order]
            found.append([rows[ends[r] : ends[r + 1]] for r in range(count)])
        return found


def _steps(strategy: Any, job: Any, batches: Any) -> Steps:
    """Return the rows of each replica in the steps that are left."""
    own = []
    for batch in batches:
        if strategy.logical:
            parts = strategy.experimental_local_results(batch)
        else:
            parts = (strategy.local_value(batch),)
        own.append([part["row"].tolist() for part in parts])
    ranks = job.allgather(own)
    assert len({len(steps) for steps in ranks}) == 1
    return [list(joined(*parts)) for parts in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def logical() -> Any:
    with (
        hs.MultiWorkerMirroredStrategy(logical_replicas=5) as first,
        hs.MultiWorkerMirroredStrategy(logical_replicas=8) as second,
    ):
        yield first, second


def check_draw(seed: int, strategies: Any, job: Any) -> None:
    """Read an epoch with one strategy, up to a step, and its rest with another."""
    drawn = Drawn(seed)
    first, second = (strategies[(seed + i) % len(strategies)] for i in range(2))
    dataset = first.experimental_distribute_dataset(drawn.dataset)
    begun = [batch for _, batch in zip(range(drawn.start), dataset, strict=False)]
    steps = _steps(first, job, begun)
    other = second.experimental_distribute_dataset(drawn.dataset)
    if drawn.start < len(drawn.batches):
        other.restore_state(dataset.state())
        rest = _steps(second, job, other)
    else:
        rest = []
    assert steps == drawn.divided(first.num_replicas_in_sync)[: drawn.start]
    assert rest == drawn.divided(second.num_replicas_in_sync)[drawn.start :]


def test_batches_are_those_of_one_process_on_any_number_of_replicas(
    strategy: Any, logical: Any, job: Any
) -> None:
    for seed in range(examples(120)):
        check_draw(seed, [strategy, *logical], job)


def test_largest_cost_is_near_the_mean(strategy: Any, job: Any) -> None:
    draw = np.random.default_rng(1)
    count = strategy.num_replicas_in_sync
    costs = np.clip(draw.lognormal(3.8, 0.7, 32 * count * 5), 10, 200).round()
    chain = hs.Dataset({"row": np.arange(len(costs))}).shuffle()
    chain = chain.batch(32 * count, costs=costs)
    batches = strategy.experimental_distribute_dataset(chain)
    for step in _steps(strategy, job, batches):
        sums = [costs[rows].sum() for rows in step]
        assert max(sums) <= 1.05 * np.mean(sums)


@pytest.mark.parametrize("wrong", ["negative", "nan", "long", "function", "above"])
def test_wrong_costs_on_one_rank_are_an_error_on_all(
    strategy: Any, job: Any, wrong: str
) -> None:
    costs: Any = np.arange(12.0)
    if job.rank == job.size - 1:
        costs[5] = {"negative": -1.0, "nan": np.nan, "above": 99.0}.get(wrong, 5.0)
        costs = np.append(costs, 1.0) if wrong == "long" else costs
    given = costs if wrong != "function" else lambda row: 1 / (int(row) - 11)
    chain = hs.Dataset.range(12).batch(4, costs=given, max_cost=50)
    error = outcome(strategy.experimental_distribute_dataset, chain)
    assert isinstance(error, (ValueError, ZeroDivisionError, hs.ReplicaError)), error
    assert_usable(strategy, job)


def test_costs_that_differ_between_ranks_are_an_error_on_all(
    strategy: Any, job: Any
) -> None:
    costs = np.arange(12.0)
    costs[3] += job.rank
    chain = hs.Dataset.range(12).batch(4, costs=costs)
    error = outcome(strategy.experimental_distribute_dataset, chain)
    if job.size > 1:
        assert isinstance(error, hs.CollectiveError)
        assert "found 3 for row 3 on rank 0, 4 on rank 1, and" in str(error)
    else:
        assert error is None
    assert_usable(strategy, job)


def test_a_function_is_called_once_for_each_row_by_all_ranks(
    strategy: Any, job: Any
) -> None:
    calls: list[int] = []

    def cost(row: Any) -> float:
        calls.append(int(row))
        return 1.0 + int(row)

    chain = hs.Dataset.range(23).shuffle(seed=1).batch(6, costs=cost)
    batches = strategy.experimental_distribute_dataset(chain)
    for _ in batches:
        pass
    assert sorted(joined(*job.allgather(calls))) == list(range(23))


def test_measured_costs_are_the_same_on_all_ranks(strategy: Any, job: Any) -> None:
    sizes = np.random.default_rng(3).integers(1, 99, (64, 2))
    costs = hs.data.MeasuredCosts(sizes)
    chain = hs.Dataset({"row": np.arange(64)}).shuffle(seed=1).batch(16, costs=costs)
    batches = strategy.experimental_distribute_dataset(chain)
    for _ in range(3):
        steps = _steps(strategy, job, batches)
        assert sorted(row for step in steps for row in joined(*step)) == list(range(64))
        assert len({tuple(one) for one in job.allgather(costs.values.tolist())}) == 1
    assert (costs.values >= 0).all()
    assert costs.values.any()


def test_logical_replicas_and_other_rules_are_refused(logical: Any) -> None:
    costs = hs.data.MeasuredCosts(np.ones(9))
    chain = hs.Dataset.range(9).batch(3, costs=costs)
    error = outcome(logical[0].experimental_distribute_dataset, chain)
    assert isinstance(error, ValueError)
    assert "logical replicas promise" in str(error)
    own = hs.InputOptions(own_rows=True)
    chain = hs.Dataset.range(9).batch(3, costs=np.ones(9))
    error = outcome(logical[0].experimental_distribute_dataset, chain, own)
    assert "costs as the only rule" in str(error)
