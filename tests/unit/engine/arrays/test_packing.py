"""Packing restores any arrays from their buckets, with one buffer per type."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from hpcstrat.engine.arrays.packing import cut, pack, plan, unpack, wire_dtype

DTYPES = st.sampled_from([np.dtype(code) for code in "bHiqefdFD?"])
ARRAYS = st.lists(
    DTYPES.flatmap(
        lambda dtype: nps.arrays(
            dtype, nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
        )
    ),
    max_size=8,
)


def signatures(arrays: list[Any]) -> Any:
    return tuple((array.dtype, array.shape) for array in arrays)


@given(ARRAYS)
def test_arrays_come_back_in_their_shapes(arrays: list[Any]) -> None:
    results: list[Any] = [None] * len(arrays)
    for bucket in plan(signatures(arrays)).buckets:
        flat = pack(bucket, arrays, np.empty(bucket.size, bucket.dtype))
        assert flat.shape == (bucket.size,)
        assert flat.flags.c_contiguous
        for index, part in zip(bucket.indices, unpack(bucket, flat), strict=True):
            assert np.shares_memory(part, flat) or not part.size
            results[index] = part
    for array, result in zip(arrays, results, strict=True):
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array)


@given(ARRAYS)
def test_each_type_has_one_bucket_in_order_of_appearance(arrays: list[Any]) -> None:
    packing = plan(signatures(arrays))
    dtypes = [bucket.dtype for bucket in packing.buckets]
    assert dtypes == list(dict.fromkeys(array.dtype for array in arrays))
    indices = [index for bucket in packing.buckets for index in bucket.indices]
    assert sorted(indices) == list(range(len(arrays)))
    for bucket in packing.buckets:
        ends = [0, *(end for _, end, _ in bucket.parts)]
        assert [start for start, _, _ in bucket.parts] == ends[:-1]
        assert ends[-1] == bucket.size


@given(ARRAYS, st.sampled_from(["F", "T", "reversed"]))
def test_memory_order_of_the_input_does_not_matter(arrays: Any, order: str) -> None:
    change = {
        "F": np.asfortranarray,
        "T": np.transpose,
        "reversed": lambda a: a[::-1] if a.ndim else a,
    }[order]
    views = [change(array).reshape(change(array).shape) for array in arrays]
    for bucket in plan(signatures(views)).buckets:
        parts = unpack(bucket, pack(bucket, views, np.empty(bucket.size, bucket.dtype)))
        for index, part in zip(bucket.indices, parts, strict=True):
            np.testing.assert_array_equal(part, views[index])


def test_packing_casts_to_the_type_of_the_buffer() -> None:
    arrays = [np.array([1, 2], np.int16), np.array(3, np.int16)]
    (bucket,) = plan(signatures(arrays)).buckets
    flat = pack(bucket, arrays, np.empty(bucket.size))
    assert flat.dtype == np.float64
    np.testing.assert_array_equal(flat, [1, 2, 3])


def test_equal_signatures_share_a_plan() -> None:
    first = [np.ones((2, 3)), np.int32(1)]
    second = [np.zeros((2, 3)), np.int32(7)]
    assert plan(signatures(first)) is plan(signatures(second))
    assert hash(plan(signatures(first))) == hash(plan(signatures(second)))


def test_nothing_is_planned_for_no_arrays() -> None:
    assert plan(()).buckets == ()


@given(ARRAYS, st.booleans(), st.sampled_from([64, 128, 200, 4096]))
def test_pieces_hold_every_element_once_and_apart(
    arrays: list[Any], means: bool, piece_bytes: int
) -> None:
    arrays = [array for array in arrays if array.dtype.kind != "b"]
    found = [np.zeros(array.size, bool) for array in arrays]
    for piece in cut(signatures(arrays), means, piece_bytes):
        assert piece
        end = 0
        for run in piece:
            size = run.dtype.itemsize
            assert run.start * size >= end
            assert run.start * size % 64 == 0
            end = (run.start + run.size) * size
            assert end <= piece_bytes
            at = run.start
            for index, start, stop, where in run.spans:
                assert run.dtype == wire_dtype(arrays[index].dtype, means)[0]
                assert (start < stop, where) == (True, at)
                assert not found[index][start:stop].any()
                found[index][start:stop] = True
                at += stop - start
            assert at == run.start + run.size
    assert all(elements.all() for elements in found)


def test_pieces_are_as_large_as_they_may_be() -> None:
    arrays = [np.zeros(1000, np.float32), np.zeros(24, np.float32), np.zeros(1)]
    pieces = list(cut(signatures(arrays), False, 4096))
    assert [[run.size for run in piece] for piece in pieces] == [[1024], [1]]
