"""Trees: flattening and unflattening preserve structures of any containers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.tree import flatten, is_leaf, tree_map, unflatten
from hpcstrat.engine.values import Mirrored, PerReplica

Point = namedtuple("Point", "x y")

LEAVES = st.none() | st.integers() | st.text(max_size=2) | st.booleans()
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)


@given(TREES)
def test_trees_come_back_as_they_were(tree: Any) -> None:
    leaves, structure = flatten(tree)
    again = unflatten(structure, leaves)
    assert again == tree
    assert repr(again) == repr(tree)


@given(TREES)
def test_map_replaces_every_leaf(tree: Any) -> None:
    count = len(flatten(tree)[0])
    seen: list[Any] = []
    boxed = tree_map(lambda leaf: seen.append(leaf) or (lambda: leaf), tree)
    assert len(seen) == count
    assert tree_map(lambda box: box(), boxed) == tree


@given(TREES)
def test_a_leaf_is_its_own_only_leaf(tree: Any) -> None:
    assert is_leaf(tree) == (not isinstance(tree, (list, tuple, dict)))


def test_mappings_are_walked_by_sorted_key() -> None:
    first, second = {"b": 1, "a": 2}, {"a": 2, "b": 1}
    assert flatten(first)[0] == flatten(second)[0] == [2, 1]
    assert flatten(first)[1] == flatten(second)[1]
    assert list(tree_map(str, first)) == ["b", "a"]


def test_text_of_structures_is_the_same_for_equal_trees() -> None:
    texts = {str(flatten({"a": [1, (2, None)], "b": Point(i, {})})[1]) for i in "xy"}
    assert len(texts) == 1


@pytest.mark.parametrize(
    "leaf",
    [None, np.ones((2, 2)), {1, 2}, "text", b"x", 1.5, np.float32(1), range(3), object],
)
def test_everything_but_containers_is_a_leaf(leaf: Any) -> None:
    assert is_leaf(leaf)
    assert flatten(leaf)[0] == [leaf] or flatten(leaf)[0][0] is leaf


def test_distributed_values_and_slices_are_leaves() -> None:
    for leaf in (
        PerReplica([1, 2]),
        Mirrored(np.ones(2)),
        IndexedSlices([1.0], [0], [2]),
    ):
        assert is_leaf(leaf)
        found = flatten({"x": [leaf]})[0]
        assert len(found) == 1
        assert found[0] is leaf


@pytest.mark.parametrize(
    "tree",
    [OrderedDict(b=1, a=2), defaultdict(list, {"a": 1}), deque([1, 2]), Point(1, 2)],
)
def test_other_containers_keep_their_types(tree: Any) -> None:
    mapped = tree_map(lambda leaf: leaf + 1, tree)
    assert type(mapped) is type(tree)
    assert is_leaf(tree) is False
    assert flatten(mapped)[0] == [leaf + 1 for leaf in flatten(tree)[0]]
