"""Gathers, broadcasts, sparse rows and reductions to one rank, compared with NumPy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.arrays.recycling import Recycler
from tests.mpi.ranks.outcomes import (
    assert_only_one_failed,
    assert_same_bits,
    assert_usable,
    outcome,
)
from tests.mpi.ranks.sums import (
    VIEWS,
    all_reduce,
    assert_sum,
    both_ways,
    is_writable,
    random_parts,
)

pytestmark = pytest.mark.algorithm


DTYPES = ("b", "H", "i8", "f2", "f4", "f8", "g", "F", "?", "U3", "S2", "M8[s]", ">i4")


def all_gather(strategy: Any, value: Any, axis: Any) -> Any:
    """Gather a value in replica context."""

    def step() -> Any:
        return hs.get_replica_context().all_gather(value, axis)

    return strategy.local_value(strategy.run(step))


def gathered(strategy: Any, value: Any, axis: int) -> Iterator[Any]:
    """Gather a value in cross-replica context, then in replica context."""
    yield strategy.gather(value, axis)
    yield all_gather(strategy, value, axis)


def uneven_parts(seed: int, size: int, dtype: Any) -> tuple[list[Any], int]:
    """Return arrays that differ in one dimension, and this dimension."""
    rng = np.random.default_rng(seed)
    shape = rng.integers(0, 4, int(rng.integers(1, 5)))
    axis, parts = int(rng.integers(shape.size)), []
    for _ in range(size):
        shape[axis] = rng.integers(0, 5)
        numbers = rng.integers(0, 100, shape)
        parts.append(numbers.astype(dtype))
    return parts, axis


def test_gather_is_concatenation_of_uneven_parts(strategy: Any, job: Any) -> None:
    for case in range(2 * len(DTYPES)):
        dtype = np.dtype(DTYPES[case % len(DTYPES)])
        parts, axis = uneven_parts(case, job.size, dtype)
        own = parts[job.rank]
        before = own.copy()
        expected = np.concatenate(parts, axis)
        for whole in gathered(strategy, own, axis):
            assert whole.dtype == dtype.newbyteorder("="), f"case {case}"
            np.testing.assert_array_equal(whole, expected, err_msg=f"case {case}")
            assert whole.flags.c_contiguous
            assert is_writable(whole)
            assert not np.shares_memory(whole, own)
        np.testing.assert_array_equal(own, before)


def test_nothing_but_empty_parts_gives_an_empty_array(strategy: Any, job: Any) -> None:
    for whole in gathered(strategy, np.zeros((2, 0, 3), np.int16), 1):
        assert whole.shape == (2, 0, 3)
        assert whole.dtype == np.int16


def test_gather_of_large_parts(strategy: Any, job: Any) -> None:
    parts = [random_parts(r, 1, (r * 100_003,), np.int64)[0] for r in range(job.size)]
    np.testing.assert_array_equal(
        strategy.gather(parts[job.rank], axis=0), np.concatenate(parts)
    )


def test_gather_of_views_in_any_memory_order(strategy: Any, job: Any) -> None:
    wholes = random_parts(5, job.size, (4, 7, 3), np.float64)
    for name, view in VIEWS.items():
        parts = [np.atleast_1d(view(whole)) for whole in wholes]
        for axis in range(parts[0].ndim):
            found = strategy.gather(np.atleast_1d(view(wholes[job.rank])), axis)
            np.testing.assert_array_equal(found, np.concatenate(parts, axis), name)


def test_nests_are_gathered_leaf_by_leaf(strategy: Any, job: Any) -> None:
    rows = [np.full((rank, 2), rank) for rank in range(job.size)]
    own = {"b": rows[job.rank], "a": (np.array([job.rank * 0.5], np.float32), [])}
    for whole in gathered(strategy, own, 0):
        np.testing.assert_array_equal(whole["b"], np.concatenate(rows))
        assert whole["a"][0].dtype == np.float32
        np.testing.assert_array_equal(whole["a"][0], np.arange(job.size) / 2)
        assert whole["a"][1] == []


GATHER_MISTAKES = {
    "scalar": (np.float64(1), 0, ValueError),
    "axis too large": (np.ones((1, 1)), 2, ValueError),
    "negative axis": (np.ones((1, 1)), -1, ValueError),
    "no axis": (np.ones((1, 1)), None, TypeError),
    "slices": (hs.IndexedSlices(np.ones((1, 1)), [0], [3, 1]), 0, NotImplementedError),
    "objects": (np.array([[None, 1]]), 0, ValueError),
}


def test_gather_mistakes_on_one_rank_fail_on_all(strategy: Any, job: Any) -> None:
    for case, (bad, axis, kind) in enumerate(GATHER_MISTAKES.values()):
        faulty = case % job.size
        own = (bad, axis) if job.rank == faulty else (np.ones((1, 1)), 0)
        for gather in (strategy.gather, lambda *a: all_gather(strategy, *a)):
            assert_only_one_failed(outcome(gather, *own), kind, faulty, job)
            assert type(outcome(gather, bad, axis)) is kind
    assert_usable(strategy, job)


def test_parts_that_do_not_fit_are_a_mismatch_on_every_rank(
    strategy: Any, job: Any
) -> None:
    good = np.ones((2, 3))
    for bad in (np.ones((2, 4)), np.ones((2, 3), np.float32), np.ones((2, 3, 1))):
        own = bad if job.rank == job.size - 1 else good
        error = outcome(strategy.gather, own, axis=0)
        assert (type(error) is hs.CollectiveError) == (job.size > 1)
    error = outcome(strategy.gather, good, axis=job.rank % 2)
    assert (type(error) is hs.CollectiveError) == (job.size > 1)
    assert_usable(strategy, job)


OBJECTS = [
    None,
    {"a": [1, "two", 3.0], "b": {4}},
    b"x" * ((3 << 20) + 1),
    np.arange(5, dtype=">f8"),
    ValueError("as an object"),
    print,
]


def test_broadcast_object_from_every_root(strategy: Any, job: Any) -> None:
    for root in range(job.size):
        for value in OBJECTS:
            own = value if job.rank == root else object()
            found = strategy.broadcast_object(own, root)
            assert type(found) is type(value)
            assert repr(found) == repr(value)
            assert job.rank != root or found is own


def test_object_that_does_not_pickle_fails_on_all(strategy: Any, job: Any) -> None:
    for root in range(job.size):
        # Ranks other than the root pass an object that is ignored.
        error = outcome(strategy.broadcast_object, threading.Lock(), root)
        if job.size == 1:
            assert error is None
            continue
        assert_only_one_failed(error, TypeError, root, job)
    assert_usable(strategy, job)


def test_root_out_of_range_or_different_fails_on_all(strategy: Any, job: Any) -> None:
    assert type(outcome(strategy.broadcast_object, 1, job.size)) is ValueError
    assert type(outcome(strategy.broadcast_object, 1, -1)) is ValueError
    root = -1 if job.rank == job.size - 1 else 0
    error = outcome(strategy.broadcast_object, 1, root)
    assert_only_one_failed(error, ValueError, job.size - 1, job)
    if job.size > 1:
        error = outcome(strategy.broadcast_object, 1, int(job.rank > 0))
        assert type(error) is hs.CollectiveError
        assert "root=0" in str(error)
        assert "root=1" in str(error)
    assert_usable(strategy, job)


def test_broadcast_to_gives_all_the_first_replicas_arrays(
    strategy: Any, job: Any
) -> None:
    for case, code in enumerate(DTYPES):
        parts = random_parts(case, job.size, (3, 2), np.int8)
        own = np.asfortranarray(parts[job.rank]).astype(code)
        found = strategy.extended.broadcast_to(own)
        assert isinstance(found, hs.Mirrored)
        local = strategy.local_value(found)
        assert local.dtype == np.dtype(code).newbyteorder("=")
        np.testing.assert_array_equal(local, parts[0].astype(code))
        assert not np.shares_memory(local, own)


def test_broadcast_of_arrays_from_every_root(strategy: Any, job: Any) -> None:
    # Arrays of 1, 120, 4, 7 and 0 bytes, of several types in one call.
    shapes = [((), "?"), ((3, 5), "f8"), ((), "f4"), ((7,), "u1"), ((0, 2), "i4")]
    rng = np.random.default_rng(3)
    parts = [
        [np.asarray(rng.integers(0, 2, shape)).astype(code) for shape, code in shapes]
        for _ in range(job.size)
    ]
    for root in range(job.size):
        given = [array.copy() for array in parts[job.rank]]
        found = strategy.collectives.broadcast(given, root, "parts")
        for array, wanted in zip(found, parts[root], strict=True):
            assert array.dtype == wanted.dtype
            np.testing.assert_array_equal(array, wanted)


def test_broadcasts_that_differ_are_a_mismatch(strategy: Any, job: Any) -> None:
    if job.size == 1:
        return
    own = np.zeros(3 + (job.rank == job.size - 1))
    error = outcome(strategy.extended.broadcast_to, own)
    assert type(error) is hs.CollectiveError
    assert "float64[3]" in str(error)
    assert "float64[4]" in str(error)
    assert_usable(strategy, job)


@pytest.mark.parametrize("more", [0, 1], ids=["equal lengths", "unequal lengths"])
def test_gather_for_which_one_rank_has_no_memory(
    strategy: Any, job: Any, monkeypatch: Any, more: int
) -> None:
    if job.size == 1:
        return
    faulty = job.size - 1

    def no_memory(*_: Any) -> Any:
        raise MemoryError("no room for the rows")

    with monkeypatch.context() as patch:
        if job.rank == faulty:
            patch.setattr(Recycler, "arrays", no_memory)
        # Smaller results are allocated by the kernel.
        rows = np.ones((100_000 + more * job.rank, 3))
        error = outcome(strategy.gather, rows, 0)
    assert_only_one_failed(error, MemoryError, faulty, job)
    assert_usable(strategy, job)


def _dense(parts: list[hs.IndexedSlices]) -> Any:
    return np.add.reduce([part.to_dense() for part in parts], axis=0)


def _random_slices(seed: int, size: int) -> list[hs.IndexedSlices]:
    rng = np.random.default_rng(seed)
    shape = (7, *rng.integers(1, 4, rng.integers(0, 3)))
    slices = []
    for _ in range(size):
        count = rng.integers(0, 6)
        rows = rng.integers(-9, 9, (count, *shape[1:])).astype(np.float64)
        slices.append(hs.IndexedSlices(rows, rng.integers(0, 7, count), shape))
    return slices


def test_slices_are_concatenated_in_replica_order(strategy: Any, job: Any) -> None:
    for case in range(10):
        parts = _random_slices(case, job.size)
        rows = np.concatenate([part.values for part in parts])
        indices = np.concatenate([part.indices for part in parts])
        for op, factor in (("sum", 1), ("mean", job.size)):
            for total in both_ways(strategy, op, parts[job.rank]):
                assert total.dense_shape == parts[0].dense_shape
                np.testing.assert_array_equal(total.indices, indices)
                np.testing.assert_array_equal(total.values, rows / factor)
                dense = _dense(parts) / factor
                np.testing.assert_allclose(total.to_dense(), dense, 1e-15, 1e-14)


def test_slices_and_arrays_share_a_nest(strategy: Any, job: Any) -> None:
    parts = _random_slices(3, job.size)
    nest = {"x": np.arange(3), "s": [parts[job.rank], np.float32(2)], "n": ()}
    for total in both_ways(strategy, "sum", nest):
        np.testing.assert_array_equal(total["x"], np.arange(3) * job.size)
        np.testing.assert_array_equal(total["s"][0].to_dense(), _dense(parts))
        assert total["s"][1] == 2 * job.size
        assert total["n"] == ()


def test_mean_of_integer_slices_is_float64(strategy: Any, job: Any) -> None:
    own = hs.IndexedSlices(np.array([[1, 2]]), [job.rank], (job.size, 2))
    mean = all_reduce(strategy, "mean", own)
    assert mean.values.dtype == np.float64
    np.testing.assert_allclose(
        mean.to_dense(), [[1 / job.size, 2 / job.size]] * job.size
    )


def test_slices_whose_rows_have_no_sum_are_refused(strategy: Any, job: Any) -> None:
    for rows in (np.array([True]), np.array(["a"]), np.array(["2020"], "M8[Y]")):
        bad = hs.IndexedSlices(rows, [0], [3])
        error = outcome(strategy.reduce, "sum", bad, axis=None)
        assert type(error) is ValueError, rows.dtype
        good = hs.IndexedSlices([1.0], [0], [3])
        own = bad if job.rank == 0 else good
        error = outcome(strategy.reduce, "sum", own, axis=None)
        assert_only_one_failed(error, ValueError, 0, job)
    assert_usable(strategy, job)


@pytest.mark.parametrize("other", ["dense_shape", "row shape", "dtype", "array"])
def test_slices_that_do_not_fit_are_a_mismatch(
    strategy: Any, job: Any, other: str
) -> None:
    others = {
        "dense_shape": hs.IndexedSlices(np.ones((1, 2)), [0], [4, 2]),
        "row shape": hs.IndexedSlices(np.ones((1, 3)), [0], [3, 2]),
        "dtype": hs.IndexedSlices(np.ones((1, 2), np.float32), [0], [3, 2]),
        "array": np.ones((3, 2)),
    }
    good = hs.IndexedSlices(np.ones((1, 2)), [0], [3, 2])
    own = others[other] if job.rank == 0 else good
    error = outcome(strategy.reduce, "sum", own, axis=None)
    assert (type(error) is hs.CollectiveError) == (job.size > 1)
    assert_usable(strategy, job)


def test_gathered_floats_have_the_same_bits_on_all_ranks(
    strategy: Any, job: Any
) -> None:
    own = random_parts(8, job.size, (5, 3), np.float64)[job.rank]
    own[0, 0] = np.nan
    own[0, 1] = -0.0
    assert_same_bits(job, *gathered(strategy, own, 1))


def test_reduction_to_one_device_adds_in_replica_order(
    make_strategy: Any, job: Any
) -> None:
    for root in range(job.size):
        ops = hs.ReductionToOneDevice(root or None)
        with make_strategy(cross_device_ops=ops) as strategy:
            for dtype in (np.float32, np.int64, np.float16, np.complex128):
                parts = random_parts(root, job.size, (3, 7), dtype)
                for total in both_ways(strategy, "sum", parts[job.rank]):
                    assert_sum(total, parts)
                    assert_same_bits(job, total)
            parts = random_parts(root, job.size, ((1 << 17) + 5,), np.float64)
            exact = parts[0].copy()
            for part in parts[1:]:
                exact += part
            total = strategy.reduce("sum", parts[job.rank], axis=None)
            np.testing.assert_array_equal(total, exact)
            assert strategy.reduce("mean", np.zeros((0, 2)), axis=None).shape == (0, 2)


def test_accumulation_functions_take_all_parts_in_replica_order(
    make_strategy: Any, job: Any
) -> None:
    def accumulate(parts: list[Any]) -> Any:
        assert [part[0] for part in parts] == list(range(job.size))
        for part in parts:
            np.add(part, 1, out=part)
        return np.maximum.reduce(parts)

    ops = hs.ReductionToOneDevice(f"CPU:{job.size - 1}", accumulate)
    with make_strategy(cross_device_ops=ops) as strategy:
        own = np.array([job.rank, -job.rank], np.int64)
        for total in both_ways(strategy, "sum", own):
            np.testing.assert_array_equal(
                total, own if job.size == 1 else [job.size, 1]
            )
        np.testing.assert_array_equal(own, [job.rank, -job.rank])


@pytest.mark.parametrize("mistake", ["raises", "shape", "no array"])
def test_accumulation_that_fails_on_the_root_fails_on_every_rank(
    make_strategy: Any, job: Any, mistake: str
) -> None:
    def accumulate(parts: list[Any]) -> Any:
        if parts[0][0] >= 0:
            return np.add.reduce(parts)
        if mistake == "raises":
            raise ArithmeticError("cannot add")
        return None if mistake == "no array" else parts[0][:1]

    for root in range(job.size):
        ops = hs.ReductionToOneDevice(root, accumulate)
        with make_strategy(cross_device_ops=ops) as strategy:
            for _ in range(2):
                error = outcome(strategy.reduce, "sum", np.full(2, -1.0), axis=None)
                if job.size > 1:
                    assert type(error) is ValueError
                    assert mistake != "raises" or "cannot add" in str(error)
                total = strategy.reduce("sum", np.ones(2), axis=None)
                np.testing.assert_array_equal(total, [job.size] * 2)


def test_reduction_to_a_replica_that_is_not_there_fails_on_every_rank(
    make_strategy: Any, job: Any
) -> None:
    with make_strategy(cross_device_ops=hs.ReductionToOneDevice(job.size)) as strategy:
        for _ in range(2):
            error = outcome(strategy.reduce, "sum", 1.0, axis=None)
            assert (type(error) is ValueError) == (job.size > 1)
