"""The largest order key belongs to the extreme of the values, bit by bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.engine.arrays.order_keys import from_keys, largest_along, to_keys
from hpcstrat.engine.options import ReduceOp
from tests.unit.kernel_sums import ORDERED, drawn, extreme

TYPES = [*ORDERED, np.dtype(bool)]


def _values(seed: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    draw, size = random.Random(seed), int(np.prod(shape))
    if dtype.kind == "b":
        values = drawn(draw, np.dtype(np.int8), size) > 0
    else:
        values = drawn(draw, dtype, size)
    return values.reshape(shape)


@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(TYPES),
    shape=st.sampled_from([(), (0,), (1,), (40,), (3, 5), (70_000,)]),
    op=st.sampled_from([ReduceOp.MAX, ReduceOp.MIN]),
    flipped=st.booleans(),
)
def test_the_largest_key_is_that_of_the_extreme(
    seed: int, dtype: np.dtype[Any], shape: Any, op: ReduceOp, flipped: bool
) -> None:
    parts = [_values(seed + i, dtype, shape) for i in range(3)]
    if flipped:
        parts = [part[..., ::-1].T if part.ndim else part for part in parts]
    before = [part.tobytes() for part in parts]
    keys = np.maximum.reduce([to_keys(part, op) for part in parts])
    found = from_keys(np.asarray(keys), dtype, op)
    wanted = extreme(parts, op.name)
    assert (found.dtype, found.shape) == (dtype, parts[0].shape)
    assert found.tobytes() == wanted.tobytes()
    assert [part.tobytes() for part in parts] == before


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN], ids=lambda op: op.name)
def test_an_extreme_along_axes_ignores_no_element(
    dtype: np.dtype[Any], op: ReduceOp
) -> None:
    array = _values(3, dtype, (4, 3, 5))
    rows = array.transpose(0, 2, 1).reshape(20, 3)
    assert largest_along(array, (0, 2), op).tobytes() == (
        extreme(list(rows), op.name).tobytes()
    )
    # Without elements the result changes no other value.
    neutral = largest_along(array[:0], (0, 2), op)
    assert neutral.dtype == dtype
    assert neutral.shape == (3,)
    for row in rows:
        keys = np.maximum(to_keys(neutral, op), to_keys(row, op))
        np.testing.assert_array_equal(
            from_keys(keys, dtype, op).astype(float), row.astype(float)
        )
