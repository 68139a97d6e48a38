"""Orders of shuffled rows: permutations, as random as documented, in little memory."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.data import order as orders
from hpcstrat.data.order import BlockOrder, BufferedOrder, Permutation, generator_of


@pytest.mark.parametrize("num_rows", [1, 2, 1000, 65536, 65537, 100_003, 1 << 17])
def test_a_permutation_has_each_row_once_and_an_order_of_each_epoch(
    num_rows: int,
) -> None:
    places = np.arange(num_rows)
    found = [Permutation(num_rows, 3, epoch).rows(places) for epoch in (0, 1)]
    for rows in found:
        np.testing.assert_array_equal(np.sort(rows), places)
    if num_rows > 2:
        assert (found[0] != found[1]).any()


def test_small_permutations_are_those_of_earlier_versions() -> None:
    key = np.random.SeedSequence((5, 2))
    expected = np.random.Generator(np.random.Philox(key)).permutation(1000)
    np.testing.assert_array_equal(
        Permutation(1000, 5, 2).rows(np.arange(1000)), expected
    )
    large = np.random.Generator(np.random.Philox(key)).permutation(70_000)
    exact = Permutation(70_000, 5, 2, exact=True)
    np.testing.assert_array_equal(exact.rows(np.arange(70_000)), large)


@given(st.integers(65_537, 1 << 40), st.integers(0, 9), st.data())
def test_any_places_give_the_rows_of_the_whole_order(
    num_rows: int, seed: int, data: Any
) -> None:
    permutation = Permutation(num_rows, seed, 1)
    start = data.draw(st.integers(0, num_rows - 1))
    places = np.arange(start, min(start + 300, num_rows))
    rows = permutation.rows(places)
    assert len(set(rows.tolist())) == len(places)
    assert 0 <= rows.min() <= rows.max() < num_rows
    shuffled = generator_of(seed).permutation(len(places))
    np.testing.assert_array_equal(permutation.rows(places[shuffled]), rows[shuffled])
    for index in (0, len(places) - 1):
        assert permutation.rows(places[index : index + 1])[0] == rows[index]


def _chi_square(counts: Any) -> float:
    """Return the deviation of a chi-square from its mean, in standard deviations."""
    expected = counts.mean()
    degrees = counts.size - 1
    return float(
        (((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5
    )


def test_large_permutations_are_uniform_over_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each position has each row equally often, and so do pairs of neighbors."""
    # Use the network for small sizes, too, for which many epochs can be counted.
    monkeypatch.setattr(orders, "_EXACT_ROWS", 0)
    num_rows, epochs = 1500, 600
    bins = 15
    places = np.arange(num_rows)
    positions, steps = np.zeros((bins, bins)), np.zeros(bins)
    for epoch in range(epochs):
        rows = Permutation(num_rows, 1, epoch).rows(places)
        np.add.at(positions, (places * bins // num_rows, rows * bins // num_rows), 1)
        # Count distances of neighbors, modulo the number of rows.
        steps += np.histogram(np.diff(rows) % num_rows, bins, (0, num_rows))[0]
    assert abs(_chi_square(positions)) < 4
    assert abs(_chi_square(steps)) < 4
    first = [Permutation(num_rows, 1, e).rows(places[:2]) for e in range(3000)]
    assert abs(_chi_square(np.histogram([f[0] for f in first], 30)[0])) < 4
    assert abs(_chi_square(np.histogram([f[1] for f in first], 30)[0])) < 4


def test_a_billion_rows_take_no_time_to_open_and_no_memory() -> None:
    tracemalloc.start()
    try:
        began = time.perf_counter()
        permutation = Permutation(10**9, 0, 0)
        seen = [permutation.rows(np.arange(256) + 256 * i) for i in range(2000)]
        seconds = time.perf_counter() - began
        del seen
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30e6
    assert seconds < 5


def _one_by_one(num_rows: int, size: int, order: BufferedOrder) -> list[int]:
    """Return the order of rows; check that a buffer of this size can produce it."""
    rows = order.rows(np.arange(num_rows)).tolist()
    buffer, coming = set(range(min(size, num_rows))), size
    for row in rows:
        assert row in buffer
        buffer.remove(row)
        if coming < num_rows:
            buffer.add(coming)
            coming += 1
    return [int(row) for row in rows]


@given(st.integers(2, 300), st.integers(1, 40), st.integers(0, 5), st.integers(1, 50))
def test_a_buffer_of_the_size_could_have_given_the_order(
    num_rows: int, size: int, seed: int, window: int
) -> None:
    size = min(size, num_rows - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "_WINDOW_ROWS", window)
        order = BufferedOrder(num_rows, size, seed, 0)
        rows = _one_by_one(num_rows, size, order)
        # Random access gives the same rows.
        for place in (0, num_rows - 1, num_rows // 2):
            assert order.rows(np.array([place]))[0] == rows[place]
        assert BufferedOrder(num_rows, 1, seed, 0).rows(np.arange(num_rows)).tolist()
    assert size > 1 or rows == list(range(num_rows))


def test_a_buffer_works_on_rows_without_an_end() -> None:
    rows = BufferedOrder(None, 10, 1, 0).rows(np.arange(1000))
    assert len(set(rows.tolist())) == 1000
    assert (rows <= np.arange(1000) + 9).all()


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 8), st.integers(0, 5))
def test_blocks_are_kept_together_within_windows(
    num_rows: int, block: int, window: int, seed: int
) -> None:
    order = BlockOrder(num_rows, block, window, seed, 0)
    rows = order.rows(np.arange(num_rows))
    np.testing.assert_array_equal(np.sort(rows), np.arange(num_rows))
    size = block * window
    for start in range(0, num_rows, size):
        blocks = np.unique(rows[start : start + size] // block)
        # A window may begin within a block, because of a short block in it or before
        # it.
        assert len(blocks) <= window + 1
    places = generator_of(seed).permutation(num_rows)
    np.testing.assert_array_equal(order.rows(places), rows[places])
