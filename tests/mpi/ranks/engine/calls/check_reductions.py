"""Reductions equal NumPy's results in one process, for all types, shapes and nests."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import (
    assert_only_one_failed,
    assert_same_bits,
    assert_usable,
    outcome,
)
from tests.mpi.ranks.sums import (
    FAMILIES,
    NATIVE,
    VIEWS,
    all_reduce,
    assert_sum,
    both_ways,
    is_writable,
    lock,
    random_parts,
)

# Two ranks have special algorithms, and a special rule for a majority.
pytestmark = [pytest.mark.rule, pytest.mark.algorithm]


try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize("family", FAMILIES)
def test_sum_and_mean_agree_with_numpy(strategy: Any, job: Any, family: str) -> None:
    # Integers have the full range, so that sums wrap around. The arrays have different
    # lengths, because MPI libraries have several kernels for different lengths.
    for dtype in FAMILIES[family]:
        parts = random_parts(1, job.size, (5, 13), dtype)
        own = parts[job.rank]
        before = own.copy()
        for op in ("sum", "mean"):
            for result in both_ways(strategy, op, own):
                assert_sum(result, parts, op, str(dtype))
        np.testing.assert_array_equal(own.view(np.uint8), before.view(np.uint8))


def test_byte_order_of_one_rank_does_not_matter(strategy: Any, job: Any) -> None:
    own = np.arange(3.0).astype(">f8" if job.rank == 0 else "<f8")
    for value in (own, [own]):
        for total in both_ways(strategy, "sum", value):
            np.testing.assert_array_equal(np.ravel(total), np.arange(3.0) * job.size)


def test_mean_of_integers_is_float64(strategy: Any, job: Any) -> None:
    for dtype in "bBhHiIlLqQ":
        for mean in both_ways(strategy, "MEAN", np.arange(3, dtype=dtype) + job.rank):
            assert mean.dtype == np.float64
            expected = np.arange(3) + (job.size - 1) / 2
            np.testing.assert_allclose(mean, expected, rtol=1e-15)


def test_half_types_are_summed_in_float32(strategy: Any, job: Any) -> None:
    # Each 1 would be lost if the running sum had only the 11 bits of float16.
    values = np.array([2048.0] + [1.0] * (job.size - 1), np.float16)
    for total in both_ways(strategy, "sum", values[job.rank]):
        assert total == np.float16(2048 + job.size - 1)
    for mean in both_ways(strategy, "mean", np.float16(60000)):
        assert mean == np.float16(60000)


def test_lengths_around_the_number_of_replicas_and_past_a_piece(
    strategy: Any, job: Any
) -> None:
    p = job.size
    for length in (0, 1, p - 1, p, p + 1, 2 * p + 1, (1 << 18) + 7):
        parts = random_parts(length, p, (length,), np.int32)
        for total in both_ways(strategy, "sum", parts[job.rank]):
            assert_sum(total, parts, note=f"length {length}")
    parts = random_parts(3, p, ((1 << 17) + 3,), np.float64)
    total = strategy.reduce("sum", parts[job.rank], axis=None)
    assert_sum(total, parts)
    assert_same_bits(job, total)


def test_pieces_of_any_size_give_the_same_sum(strategy: Any, job: Any) -> None:
    for bytes_per_pack in (1, 7, 16, 1000):
        options = hs.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        for dtype in (np.int32, np.complex128):
            parts = random_parts(4, job.size, (29,), dtype)
            assert_sum(all_reduce(strategy, "sum", parts[job.rank], options), parts)


def test_types_that_begin_in_the_middle_of_a_piece_are_added_whole(
    strategy: Any, job: Any
) -> None:
    # A piece of 256 bytes holds the first array and some elements of the second, which
    # are added in float32. The next piece holds only elements of the second array.
    options = hs.CommunicationOptions(bytes_per_pack=256)
    parts = [
        random_parts(5, job.size, (20,), np.float64),
        random_parts(6, job.size, (100,), np.float16),
    ]
    own = [part[job.rank] for part in parts]
    for op in ("sum", "mean"):
        results = all_reduce(strategy, op, own, options)
        for result, every in zip(results, parts, strict=True):
            assert_sum(result, every, op)


def test_memory_order_does_not_matter(strategy: Any, job: Any) -> None:
    for dtype in (np.int32, np.float64, np.float16):
        wholes = random_parts(5, job.size, (4, 7, 3), dtype)
        for name, view in VIEWS.items():
            parts = [view(whole) for whole in wholes]
            for total in both_ways(strategy, "sum", parts[job.rank]):
                assert_sum(total, parts, note=name)


def test_random_nests_keep_structure_types_and_values(strategy: Any, job: Any) -> None:
    rng = np.random.default_rng(6)
    for case in range(12):
        count = int(rng.integers(1, 8))
        columns = [
            random_parts(
                100 * case + i,
                job.size,
                tuple(rng.integers(0, 4, rng.integers(0, 4))),
                NATIVE[rng.integers(len(NATIVE))],
            )
            for i in range(count)
        ]
        own = [column[job.rank] for column in columns]
        nest = {"z": own[0], "a": [Pair(tuple(own[1:]), own[0])], "e": ((), {}, [])}
        for total in both_ways(strategy, "sum", nest):
            assert list(total) == ["z", "a", "e"]
            assert total["e"] == ((), {}, [])
            (pair,) = total["a"]
            assert type(pair) is Pair
            found = [total["z"], *pair.left, pair.right]
            for array, parts in zip(found, [*columns, columns[0]], strict=True):
                assert_sum(array, parts, note=f"case {case}, {parts[0].dtype}")


def test_results_are_fresh_and_inputs_stay_as_they_were(
    strategy: Any, job: Any
) -> None:
    own = random_parts(7, job.size, (40,), np.float32)[job.rank]
    lock(own)
    before = own.copy()
    for op in ("sum", "mean"):
        nest = [own, own]
        for results in both_ways(strategy, op, nest):
            for result in results:
                assert is_writable(result)
                result[:] = -1
            assert nest[0] is own
            assert not any(np.shares_memory(result, own) for result in results)
            assert not np.shares_memory(*results)
    np.testing.assert_array_equal(own, before)


def test_floats_have_the_same_bits_on_all_ranks(strategy: Any, job: Any) -> None:
    for seed in range(4):
        for dtype in (np.float32, np.float64, np.longdouble):
            own = random_parts(seed, job.size, (1001,), dtype)[job.rank]
            nest = [own[:1], own, own[3:40]]
            # Convert to float64, because padding bytes of long doubles have no meaning.
            results = [r.astype(np.float64) for r in all_reduce(strategy, "mean", nest)]
            assert_same_bits(job, *results)


def test_python_numbers_become_int64_and_float32(strategy: Any, job: Any) -> None:
    for total in both_ways(strategy, "sum", [job.rank, 0.5, [1, 2]]):
        assert [part.dtype for part in total[:2]] == [np.int64, np.float32]
        assert total[0] == sum(range(job.size))
        assert total[1] == job.size / 2
        assert total[2] == [job.size, 2 * job.size]


def test_values_that_run_returned_are_reduced(strategy: Any, job: Any) -> None:
    def step() -> Any:
        rank = hs.get_replica_context().replica_id_in_sync_group
        return {"x": np.full(2, rank, np.int64), "y": np.float64(1)}

    total = strategy.reduce("sum", strategy.run(step), axis=None)
    np.testing.assert_array_equal(total["x"], [sum(range(job.size))] * 2)
    assert total["y"] == job.size


REFUSED = {
    "bool": np.array([True, False]),
    "Python bool": True,
    "str": np.array(["a", "b"]),
    "Python str": "a",
    "bytes": b"a",
    "object": np.array([1, None]),
    "None": None,
    "set": {1, 2},
    "datetime": np.array(["2020-01-01"], "datetime64[D]"),
    "timedelta": np.array([1], "timedelta64[s]"),
    "record": np.zeros(2, [("x", "i4"), ("y", "f8")]),
    "int past int64": 1 << 70,
    "ragged": np.array([[1], [2, 3]], dtype=object),
}
if ml_dtypes is not None:
    REFUSED["float8"] = np.zeros(2, ml_dtypes.float8_e5m2)
    REFUSED["int4"] = np.zeros(2, ml_dtypes.int4)


def _refuses(strategy: Any, job: Any, bad: Any, faulty: int) -> bool:
    """Return whether a value is an error if all ranks pass it, and if one rank does."""
    refused = True
    for value in (bad, {"good": np.ones(3), "bad": (bad,)}):
        own = value if job.rank == faulty else np.ones(2)
        kind = ValueError if job.rank == faulty else hs.ReplicaError
        for call in (strategy.reduce, lambda *a, **k: all_reduce(strategy, *a)):
            refused &= type(outcome(call, "sum", value, axis=None)) is ValueError
            refused &= isinstance(outcome(call, "sum", own, axis=None), kind)
    return refused


def test_types_without_a_sum_are_refused(strategy: Any, job: Any) -> None:
    accepted = [
        name
        for i, (name, bad) in enumerate(REFUSED.items())
        if not _refuses(strategy, job, bad, i % job.size)
    ]
    assert accepted == []
    assert_usable(strategy, job)


def test_unknown_operation_on_one_rank_fails_on_all(strategy: Any, job: Any) -> None:
    for faulty in range(job.size):
        op = "median" if job.rank == faulty else "sum"
        for call in (strategy.reduce, lambda *a, **k: all_reduce(strategy, *a)):
            error = outcome(call, op, np.ones(2), axis=None)
            assert_only_one_failed(error, ValueError, faulty, job)
    assert_usable(strategy, job)


def _uneven(seed: int, size: int, dtype: Any) -> tuple[list[np.ndarray[Any, Any]], Any]:
    """Return arrays that differ in some dimensions, and these dimensions."""
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(1, 4))
    axes = rng.permutation(ndim)[: rng.integers(1, ndim + 1)]
    shape = rng.integers(1, 4, ndim)
    parts = []
    for rank in range(size):
        shape[axes] = rng.integers(0, 4, axes.size)
        parts += random_parts(100 * seed + rank, 1, tuple(shape), dtype)
    axis = tuple(int(a) - ndim * int(rng.integers(2)) for a in axes)
    return parts, axis if len(axis) > 1 else axis[0]


def _count(parts: list[np.ndarray[Any, Any]], axis: Any) -> int:
    axes = axis if isinstance(axis, tuple) else (axis,)
    return sum(int(np.prod([part.shape[a] for a in axes])) for part in parts)


def test_reduction_over_uneven_axes(strategy: Any, job: Any) -> None:
    for case in range(25):
        dtype = ("int32", "int64", "float32", "float64", "complex64")[case % 5]
        parts, axis = _uneven(case, job.size, dtype)
        total = strategy.reduce("sum", parts[job.rank], axis=axis)
        sums = [np.asarray(part.sum(axis=axis, dtype=dtype)) for part in parts]
        assert_sum(total, sums, note=f"case {case}")
        mean = strategy.reduce("mean", parts[job.rank], axis=axis)
        count = _count(parts, axis)
        wide = np.float64 if dtype.startswith("int") else np.dtype(dtype)
        assert mean.dtype == wide
        assert mean.shape == total.shape
        if not count:
            assert np.isnan(mean).all()
            continue
        exact = sum(part.sum(axis=axis, dtype=np.complex128) for part in parts) / count
        largest = max(abs(part.astype(wide)).max(initial=0) for part in parts)
        bound = 4 * count * np.finfo(wide).eps * largest
        assert np.all(abs(mean - exact) <= bound), f"case {case}"


def test_mean_over_an_axis_weighs_rows_equally(strategy: Any, job: Any) -> None:
    own = np.full(job.rank, float(job.rank))
    mean = strategy.reduce("mean", own, axis=0)
    ranks = np.arange(job.size)
    if job.size == 1:
        assert np.isnan(mean)
    else:
        assert mean == pytest.approx((ranks**2).sum() / ranks.sum(), rel=1e-15)


@pytest.mark.parametrize("axis", [2, (0, -3), (0, -2), "x"])
def test_wrong_axis_on_one_rank_fails_on_all(
    strategy: Any, job: Any, axis: Any
) -> None:
    kind = TypeError if axis == "x" else ValueError
    assert isinstance(outcome(strategy.reduce, "sum", np.ones((2, 3)), axis=axis), kind)
    for faulty in range(job.size):
        own = axis if job.rank == faulty else 0
        error = outcome(strategy.reduce, "sum", np.ones((2, 3)), axis=own)
        assert_only_one_failed(error, kind, faulty, job)
    assert_usable(strategy, job)


def test_sums_of_python_integers_do_not_overflow(strategy: Any) -> None:
    value, size = 2**40 + 1, strategy.num_replicas_in_sync
    for total in both_ways(strategy, "sum", [value]):
        assert total[0].dtype == np.int64
        assert total[0] == size * value
    with pytest.raises(ValueError, match="fit int64"):
        strategy.reduce("sum", 2**70)
