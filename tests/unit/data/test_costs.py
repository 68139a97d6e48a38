"""Costs of rows: how they are given, and batches up to a cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcstrat.data import Dataset, MeasuredCosts, mix
from hpcstrat.strategies import get_strategy


def _batches(costs: list[float], limit: float, size: int) -> list[list[int]]:
    """Return the rows of batches, filled one row after another."""
    found: list[list[int]] = []
    total = np.inf
    for row, cost in enumerate(costs):
        if total + cost > limit or len(found[-1]) == size:
            found.append([])
            total = 0.0
        found[-1].append(row)
        total += cost
    return found


@pytest.mark.parametrize("seed", range(40))
def test_batches_are_filled_up_to_a_cost(seed: int) -> None:
    draw = np.random.default_rng(seed)
    length, limit = int(draw.integers(0, 900)), int(draw.integers(9, 3000))
    costs = draw.integers(0, 10, length)
    size = None if draw.integers(2) else int(draw.integers(1, 400))
    rows = Dataset(np.arange(length)).shuffle(seed=seed).repeat(2)
    chain = rows.batch(size, costs=costs, max_cost=limit)
    for epoch in range(2):
        order = [int(row) for row in rows]
        wanted = _batches([costs[row] for row in order], limit, size or length * 2)
        found = [batch.tolist() for batch in chain]
        assert found == [[order[i] for i in batch] for batch in wanted]
        chain.epoch = rows.epoch = epoch + 1


class Graphs:
    """Pairs of an array of one row per atom, and the number of atoms."""

    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        return np.ones((self.sizes[index], 2)), self.sizes[index]


def _values(chain: Any) -> list[float]:
    """Return the costs of the rows of epoch 3, in order."""
    costs = chain.stage.costs
    count = chain.num_rows
    return [float(cost) for cost in costs.of(slice(0, count), 3)]


def test_columns_functions_and_arrays_give_the_same_costs(tmp_path: Path) -> None:
    sizes = np.arange(40)[::-1].copy()
    columns = {"at": {"n": sizes}, "x": np.ones((40, 3))}
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["at/n"], file["x"] = sizes, columns["x"]
    items = Graphs(sizes)
    given: list[tuple[Dataset, Any]] = [
        (Dataset(columns), sizes),
        (Dataset(columns), "at/n"),
        (Dataset(columns), lambda row: row["at"]["n"]),
        (Dataset.from_files(tmp_path / "rows.h5"), "at/n"),
        (Dataset(items), lambda graph, _: len(graph)),
        (Dataset(items), "1"),
        (Dataset(items).map(lambda graph, _: {"g": graph}), lambda row: len(row["g"])),
        (Dataset(columns).take(40), "at/n"),
        (Dataset(columns).cache(), MeasuredCosts(sizes * (sizes.sum() / 40))),
    ]
    order = [int(row) for row in _epoch(Dataset(sizes).shuffle(seed=4), 3)]
    for rows, costs in given:
        chain = rows.shuffle(seed=4).batch(7, costs=costs)
        found = np.array(_values(chain))
        np.testing.assert_allclose(found / found.sum(), np.array(order) / sizes.sum())


def _epoch(dataset: Dataset, epoch: int) -> Any:
    dataset.epoch = epoch
    return iter(dataset)


def test_a_column_is_read_without_the_other_columns() -> None:
    class Counted:
        reads = 0
        shape, dtype = (9, 2), np.dtype(float)

        def __len__(self) -> int:
            return 9

        def __getitem__(self, row: Any) -> Any:
            Counted.reads += 1
            return np.zeros((9, 2))[row]

    chain = Dataset({"n": np.arange(9), "big": Counted()}).batch(3, costs="n")
    assert _values(chain) == list(range(9))
    assert Counted.reads == 0


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([1, 2, -3, 4], "found -3 for row 2; correct"),
        ([1, np.nan, np.nan, 4], "found nan for row 1, the first of 2 such rows"),
        ([1, 2, 3, np.inf], "found inf for row 3"),
        ([1, 2, 3], r"one cost for each of 4 rows, found costs of shape \(3,\)"),
        ([1, 2, 3, 9], "at most max_cost=8, found 9 for row 3"),
        (["a", "b", "c", "d"], "array of numbers, the name of a column"),
        ("no", "the column 'no' for costs, found n, text"),
        ("text", "a number for each row from column 'text'"),
        (lambda row: np.ones(2), "found an array of shape"),
    ],
)
def test_wrong_costs_are_errors_before_the_first_batch(costs: Any, words: str) -> None:
    rows = Dataset({"n": np.arange(4), "text": np.array(list("abcd"))})
    chain = rows.batch(2, costs=costs, max_cost=8)
    with pytest.raises(ValueError, match=words):
        next(iter(chain))
    with pytest.raises(ValueError, match=words):
        get_strategy().experimental_distribute_dataset(chain)


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (lambda d: d.batch(), "expected batch_size, or costs and max_cost"),
    "no size": (lambda d: d.batch(costs="n"), "expected batch_size, or costs"),
    "no costs": (lambda d: d.batch(max_cost=3), "expected costs with max_cost"),
    "equal": (lambda d: d.batch(2, equal_rows=True), "expected costs with max_cost"),
    "zero": (lambda d: d.batch(2, costs="n", max_cost=0), "a positive, finite"),
    "full": (lambda d: d.batch(2, True, costs="n", max_cost=9), "no drop_remainder"),
    "stream": (lambda d: d.filter(bool).batch(2, costs="n"), "read at random"),
    "batches": (lambda d: d.batch(2).batch(2, costs="n"), "read at random"),
    "mix": (lambda d: mix([d, d]).batch(2, costs="n"), "rows with an end"),
    "take": (lambda d: d.shuffle().take(3).batch(2, costs="n"), "keep their numbers"),
    "zip": (lambda d: d.zip(d.shuffle(), d).batch(2, costs="n"), "their numbers"),
    "batches taken": (lambda d: d.batch(costs="n", max_cost=9).take(1), "before batch"),
    "measured": (
        lambda d: d.batch(costs=MeasuredCosts([1] * 4), max_cost=9),
        "known before the first step",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_arguments_that_do_not_fit_are_refused(kind: str) -> None:
    make, words = REFUSED[kind]
    with pytest.raises(ValueError, match=words):
        make(Dataset({"n": np.arange(4)}))


def test_measured_costs_are_fitted_to_the_times_of_steps() -> None:
    draw = np.random.default_rng(2)
    sizes = draw.uniform(1, 50, (300, 2))
    costs = MeasuredCosts(sizes)
    for step in range(200):
        rows = draw.choice(300, 16, replace=False)
        seconds = 16 * 1e-4 + 3e-5 * float(sizes[rows, 1].sum())
        # The first step compiles, and counts for nothing.
        costs.add(rows, seconds * draw.uniform(0.99, 1.01) + 10 * (step == 0))
    costs.fit(get_strategy())
    np.testing.assert_allclose(costs.values, 1e-4 + 3e-5 * sizes[:, 1], rtol=0.2)
    before = costs.values
    costs.fit(get_strategy())
    np.testing.assert_allclose(costs.values, before)


@pytest.mark.parametrize("sizes", [[-1.0, 2], [np.nan, 1], np.ones((2, 2, 2))])
def test_wrong_sizes_are_refused(sizes: Any) -> None:
    with pytest.raises(ValueError, match="expected sizes >= 0"):
        MeasuredCosts(sizes)
