"""Divisions of datasets into parts, compared with NumPy's own indexing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.checkpoint.file.division import Division, of_regions, of_rows

_SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def _divisions(draw: Any) -> Division:
    shape, itemsize = draw(_SHAPES), draw(st.sampled_from([1, 2, 8]))
    if draw(st.booleans()):
        return of_rows(shape, itemsize, range(shape[0]))
    axis, count = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 8))
    cuts = [k * shape[axis] // count for k in range(count + 1)]
    regions = []
    for low, high in itertools.pairwise(cuts):
        region = [slice(0, length) for length in shape]
        region[axis] = slice(low, high)
        regions.append(tuple(region))
    return of_regions(shape, itemsize, regions, count * draw(st.integers(1, 3)))


@given(division=_divisions(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_overlaps_are_those_of_numpy(division: Division, data: Any) -> None:
    total = int(np.prod(division.shape))
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    whole = np.arange(total).reshape(division.shape)
    piece, found = np.arange(start, stop), set()
    for part in division.holders:
        own = whole[division.box(part)]
        assert own.shape == division.part_shape(part)
        common: list[int] = []
        for overlap in division.overlaps(part, start, stop):
            there = piece[overlap.place].reshape(overlap.shape)[overlap.there]
            np.testing.assert_array_equal(there, own[overlap.here])
            common += there.reshape(-1).tolist()
        # Each common byte occurs once, in the order of the dataset.
        assert common == sorted({*own.reshape(-1).tolist()} & {*piece.tolist()})
        found |= {part} if common else set()
    assert sorted(division.parts_in(start, stop)) == sorted(found)


@given(division=_divisions())
@settings(max_examples=100, deadline=None)
def test_runs_and_nearest_ranks(division: Division) -> None:
    whole = np.arange(int(np.prod(division.shape))).reshape(division.shape)
    ranks = range(len(division.part_of))
    for part, holders in division.holders.items():
        own = whole[division.box(part)].reshape(-1)
        is_run = bool((np.diff(own) == 1).all())
        assert division.run(part) == ((own[0], own[-1] + 1) if is_run else None)
        for rank in ranks:
            nearest = division.nearest(part, rank)
            assert nearest in holders
            assert abs(nearest - rank) == min(abs(each - rank) for each in holders)
    without = {*ranks}.difference(*division.holders.values())
    assert {division.part_of[rank] for rank in without} <= {-1}
