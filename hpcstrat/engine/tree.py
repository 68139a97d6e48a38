"""Functions for nested structures (trees), based on optree.

Lists, tuples, named tuples and mappings are nodes. Everything else is a leaf, including
``None``, sets, arrays, distributed values and variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from hpcstrat.engine.typing import Tree

__all__ = ["flatten", "is_leaf", "tree_map", "unflatten"]

# Types that are nodes in any case: a shortcut past optree's registry.
_NODES = (list, tuple, dict)


def is_leaf(tree: Tree) -> bool:
    """Return whether a value is a leaf, not a node of a tree."""
    return not isinstance(tree, _NODES) and optree.tree_is_leaf(tree, none_is_leaf=True)


def flatten(tree: Tree) -> tuple[list[Any], Any]:
    """Return the leaves of a tree in a fixed order, and its structure.

    Mappings are ordered by key. The structure is hashable, and its text is the same in
    every process.
    """
    # None is a leaf, as in tf.nest.
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, structure


def unflatten(structure: Any, leaves: list[Any]) -> Tree:
    """Rebuild a tree from the results of `flatten`, with the original containers."""
    return optree.tree_unflatten(structure, leaves)


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return a tree of the results of applying a function to every leaf."""
    if is_leaf(tree):
        return function(tree)
    return optree.tree_map(function, tree, none_is_leaf=True)
