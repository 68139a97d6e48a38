"""`IndexedSlices`, gradients of some rows of an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpcstrat as hs

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=8)


@given(ROWS)
def test_dense_form_counts_every_row(rows: Any) -> None:
    indices = np.array([index for index, _ in rows], np.int64)
    values = np.array([[value, 2 * value] for _, value in rows], float).reshape(-1, 2)
    slices = hs.IndexedSlices(values, indices, (5, 2))
    expected = np.zeros((5, 2))
    for index, value in zip(indices, values, strict=True):
        expected[index] += value
    np.testing.assert_array_equal(slices.to_dense(), expected)
    assert slices.to_dense() is not slices.to_dense()


def test_parts_become_arrays_and_shapes_tuples() -> None:
    slices = hs.IndexedSlices([[1.0], [2.0]], [3, 0], np.array([4, 1]))
    assert slices.values.dtype == slices.dtype == np.float32
    assert slices.indices.dtype == np.int32
    assert slices.dense_shape == (4, 1)
    assert "dense_shape=(4, 1)" in repr(slices)


@pytest.mark.parametrize("code", ["i2", "f8", "c8"])
def test_dense_form_has_the_type_of_the_rows(code: str) -> None:
    assert hs.IndexedSlices(np.ones(1, code), [0], [2]).to_dense().dtype == code


@pytest.mark.parametrize(
    ("values", "indices"),
    [([1.0, 2.0], [0]), ([1.0], [[0]]), (1.0, [0]), ([1.0], 0), ([], [0])],
)
def test_one_index_is_wanted_for_each_row(values: Any, indices: Any) -> None:
    with pytest.raises(ValueError, match="one index for each row"):
        hs.IndexedSlices(values, indices, (3,))


@pytest.mark.parametrize("indices", [[0.5], [True], ["a"]])
def test_indices_are_integers(indices: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        hs.IndexedSlices([1.0], indices, (3,))


def test_dense_form_needs_a_shape() -> None:
    with pytest.raises(ValueError, match="dense_shape"):
        hs.IndexedSlices([1.0], [0]).to_dense()


@pytest.mark.parametrize("index", [-1, 3])
def test_rows_outside_of_the_shape_are_refused(index: int) -> None:
    with pytest.raises((ValueError, IndexError)):
        hs.IndexedSlices([1.0], [index], (3,)).to_dense()
