"""Nested structures, by optree.

Lists, tuples, named tuples and mappings are nodes; everything else is a leaf, ``None``,
sets, arrays, distributed values and variables included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from hpcstrat.engine.typing import Tree

__all__ = ["flatten", "is_leaf", "tree_map", "unflatten"]

# Nodes that need not be looked up in the registry of optree.
_NODES = (list, tuple, dict)


def is_leaf(tree: Tree) -> bool:
    """Return whether a value is a leaf."""
    return not isinstance(tree, _NODES) and optree.tree_is_leaf(tree, none_is_leaf=True)


def flatten(tree: Tree) -> tuple[list[Any], Any]:
    """Return the leaves in a fixed order, mappings by sorted key, and the structure.

    The structure is hashable, and its text the same in every process.
    """
    # None is a leaf, as in tf.nest.
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, structure


def unflatten(structure: Any, leaves: list[Any]) -> Tree:
    """Rebuild a tree, with the original types of containers, from `flatten`."""
    return optree.tree_unflatten(structure, leaves)


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply a function to every leaf."""
    if is_leaf(tree):
        return function(tree)
    return optree.tree_map(function, tree, none_is_leaf=True)
