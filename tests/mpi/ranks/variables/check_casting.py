"""One rule decides which values a variable accepts, for all ways to assign them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_told, assert_usable, outcome

pytestmark = pytest.mark.rule


# Type of the variable, value, and whether the variable accepts this value.
GIVEN: list[tuple[str, Any, bool]] = [
    ("int32", 3, True),
    ("int32", 0.9, False),
    ("int32", 1e30, False),
    ("int32", float("nan"), False),
    ("int32", 1 << 31, False),
    ("int32", np.int32(3), True),
    ("int32", np.float32(1), False),
    ("int32", np.int64(1), False),
    ("int8", 300, False),
    ("uint8", -1, False),
    ("uint8", 255, True),
    ("int32", 1j, False),
    ("float32", 1, True),
    ("float32", 0.1, True),
    ("float32", 1e39, False),
    ("float32", float("inf"), True),
    ("float32", float("nan"), True),
    ("float32", np.float64(1), False),
    ("float16", 70_000, False),
    ("float16", 1e-30, True),
    ("float64", 0.1, True),
    ("float64", 1e300, True),
    ("float64", np.float32(1), False),
    ("complex64", 0.5, True),
    ("float64", "a", False),
    ("float64", None, False),
    ("float64", np.ma.masked_array(1.0), False),
    ("float64", np.ma.masked, False),
]
METHODS = [
    *("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub"),
    *("scatter_mul", "scatter_div", "scatter_min", "scatter_max", "scatter_update"),
]


@pytest.mark.parametrize("method", METHODS)
def test_values_are_taken_as_they_are_or_refused(
    strategy: Any, job: Any, method: str
) -> None:
    if job.size > 2:
        pytest.skip("two ranks show it")
    scatters = method.startswith("scatter")
    with strategy.scope():
        variables = {
            dtype: hs.Variable(
                np.ones(2, dtype), aggregation="only_first_replica", name=dtype
            )
            for dtype in sorted({dtype for dtype, _, _ in GIVEN})
        }
    plain = {dtype: hs.Variable(np.ones(2, dtype)) for dtype in variables}
    for dtype, number, taken in GIVEN:
        typed = hasattr(number, "dtype")
        value = np.stack([number]) if typed else [number, number][: 2 - scatters]
        if typed and not scatters:
            value = np.stack([number, number])
        if np.ma.isMaskedArray(number):
            value = np.ma.array(value, mask=True)

        def update(variable: Any, value: Any = value) -> Any:
            # Wrong rows are refused when they are made, or when they are used.
            return getattr(variable, method)(
                hs.IndexedSlices(value, [1]) if scatters else value
            )

        # Rows of plain numbers are float32 before they belong to a variable.
        fits = taken and not (scatters and number == 1e300)
        divides = method == "scatter_div" and dtype.startswith(("int", "uint"))
        orders = method in ("scatter_min", "scatter_max") and dtype == "complex64"
        for call in (
            lambda d=dtype: update(plain[d]),
            lambda d=dtype: update(variables[d]),
            lambda d=dtype: strategy.run(update, (variables[d],)),
        ):
            before = variables[dtype].numpy()
            error = outcome(call)
            note = f"{method} of {number!r} to {dtype}: {error!r}"
            if fits and not (divides or orders):
                assert error is None, note
            elif not orders:
                assert isinstance(error, ValueError), note
                np.testing.assert_array_equal(variables[dtype], before)
    assert_usable(strategy, job)
    exact = hs.Variable(np.zeros(2))
    getattr(exact, method)(hs.IndexedSlices([0.1], [0]) if scatters else [0.1, 0.1])
    if method in ("assign_add", "scatter_add", "scatter_update"):
        assert exact[0] == 0.1


def test_rows_that_one_rank_may_not_cast_fail_on_all(strategy: Any, job: Any) -> None:
    with strategy.scope():
        counts = hs.Variable(np.zeros(3, np.int32), aggregation="sum", name="counts")
    for values in ([0.9], [np.nan], np.array([1.0]), np.array([1e30], np.float32)):
        own = np.array([1], np.int32) if job.rank else values
        rows = hs.IndexedSlices(own, [2])
        error = outcome(strategy.run, counts.scatter_add, (rows,))
        assert_told(error, ValueError, job.rank == 0, "int32")
        np.testing.assert_array_equal(counts, [0, 0, 0])
    strategy.run(counts.scatter_add, (hs.IndexedSlices([1], [2]),))
    np.testing.assert_array_equal(counts, [0, 0, job.size])
    plain = hs.Variable(np.zeros(2), aggregation="sum", name="forgotten")
    if job.size > 1:
        rows = hs.IndexedSlices([1.0], [0])
        error = outcome(strategy.run, plain.scatter_add, (rows,))
        assert "scope" in str(error)


def test_first_values_are_cast_by_the_same_rule(strategy: Any) -> None:
    for dtype, number, taken in GIVEN:
        # If a type is requested, arrays are cast to it, too.
        fits = taken or (
            isinstance(number, np.generic)
            and (np.dtype(dtype).kind == "f" or number.dtype.kind == "i")
        )
        with strategy.scope():
            error = outcome(hs.Variable, number, dtype=dtype)
        assert (error is None) == fits, f"{number!r} as {dtype}: {error!r}"
        assert error is None or isinstance(error, ValueError)
