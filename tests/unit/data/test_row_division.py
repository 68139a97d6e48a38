"""Rows that are divided between replicas by cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpcstrat.data.row_division import divide_by_cost


def _sums(costs: np.ndarray, order: np.ndarray, ends: list[int]) -> list[float]:
    parts = itertools.pairwise(ends)
    return [float(costs[order[first:last]].sum()) for first, last in parts]


def _greedy(costs: list[int], count: int) -> list[list[int]]:
    """Return the rows of each replica, by the rule as its definition says it."""
    rows: list[list[int]] = [[] for _ in range(count)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        totals = [(sum(costs[r] for r in own), len(own)) for own in rows]
        rows[totals.index(min(totals))].append(row)
    return [sorted(own) for own in rows]


@pytest.mark.parametrize("seed", range(60))
def test_rows_go_to_the_replica_with_the_smallest_sum(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, length = int(draw.integers(1, 9)), int(draw.integers(0, 50))
    costs = draw.integers(0, draw.integers(1, 40), length).astype(float)
    order, ends = divide_by_cost(costs, count)
    parts = [order[a:b].tolist() for a, b in itertools.pairwise(ends)]
    assert parts == _greedy([int(cost) for cost in costs], count)
    if length >= count:
        assert all(parts)


@pytest.mark.parametrize("seed", range(60))
def test_equal_rows_differ_by_at_most_one(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, length = int(draw.integers(1, 9)), int(draw.integers(0, 50))
    costs = draw.lognormal(0, 2, length)
    order, ends = divide_by_cost(costs, count, equal_rows=True)
    assert sorted(order) == list(range(length))
    counts = np.diff(ends)
    assert counts.max() - counts.min() <= 1
    for first, last in itertools.pairwise(ends):
        assert (np.diff(order[first:last]) > 0).all()


@pytest.mark.parametrize("equal_rows", [False, True])
def test_molecules_of_10_to_200_atoms_cost_replicas_nearly_the_same(
    equal_rows: bool,
) -> None:
    draw = np.random.default_rng(3)
    for _ in range(40):
        atoms = np.clip(draw.lognormal(np.log(45), 0.7, 8 * 32), 10, 200).round()
        sums = _sums(atoms, *divide_by_cost(atoms, 8, equal_rows=equal_rows))
        assert max(sums) <= 1.05 * np.mean(sums)
