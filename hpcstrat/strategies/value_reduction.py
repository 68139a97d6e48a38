"""``Strategy.reduce``: the rules for each kind of value."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.arrays.casting import rounded
from hpcstrat.arrays.kinds import as_array, is_device, is_half, to_reducible
from hpcstrat.options import ReduceOp
from hpcstrat.reduction.replica_collectives import Collectives
from hpcstrat.tree import flatten, is_leaf, tree_map, unflatten
from hpcstrat.typing import Array, Tree
from hpcstrat.values import DistributedValues, Mirrored

__all__ = ["contributions", "reduce"]


def contributions(tree: Tree) -> Tree:
    """Return this rank's part of each value, also of variables."""
    return tree_map(
        lambda leaf: leaf._local if isinstance(leaf, DistributedValues) else leaf, tree
    )


def reduce(
    collectives: Collectives, reduce_op: Any, value: Tree, axis: Any, out: Tree = None
) -> Tree:
    """Combine the replicas' values; see `Strategy.reduce`.

    Collective over ``topology.replica_comm``.
    """
    op = ReduceOp.parse(reduce_op)
    if axis is not None:
        array, axes = _checked(value, axis)
        if out is not None:
            raise ValueError(
                f"expected no out in a reduction over axis {axis!r}, found one; leave "
                "it out"
            )
        return _over_axes(collectives, op, array, axes)
    # One value needs no list of leaves.
    if is_leaf(value) and not isinstance(value, Mirrored):
        part = value._local if isinstance(value, DistributedValues) else value
        return collectives.reduce_inside(op, part, "reduce", out=out)
    return _structure(collectives, op, value, out)


def _structure(collectives: Collectives, op: ReduceOp, value: Tree, out: Tree) -> Tree:
    leaves, structure = flatten(value)
    mirrored = [isinstance(leaf, Mirrored) for leaf in leaves]
    if not any(mirrored):
        return collectives.reduce_inside(op, contributions(value), "reduce", out=out)
    if out is not None:
        raise ValueError(
            "expected values that differ between replicas in a reduction with an out, "
            "found a Mirrored value; leave out away"
        )
    if op is ReduceOp.SUM and any(mirrored) and collectives.size > 1:
        raise ValueError(
            "expected a value for each replica in the SUM over replicas, found a "
            f"Mirrored value, which is the same on all {collectives.size}; use MEAN, "
            "or multiply it by the number of replicas"
        )
    # Only what may differ travels: the mean of equal values is one of them.
    rest = [i for i in range(len(leaves)) if not mirrored[i]]
    if rest:
        parts = [contributions(leaves[i]) for i in rest]
        for index, array in zip(
            rest, collectives.batch_reduce(op, parts, "reduce"), strict=True
        ):
            leaves[index] = array
    for index, same in enumerate(mirrored):
        if same:
            local = leaves[index]._local
            leaves[index] = local.copy() if is_device(local) else np.array(local)
    return unflatten(structure, leaves)


def _checked(value: Tree, axis: Any) -> tuple[Array, tuple[int, ...]]:
    """Return this rank's array and the axes, all of them from 0."""
    if not is_leaf(value):
        raise TypeError(
            "expected one distributed value for a reduction over an axis, found a "
            f"{type(value).__name__}; reduce its leaves one by one"
        )
    axes = axis if isinstance(axis, tuple) else (axis,)
    if not axes or not all(
        isinstance(a, (int, np.integer)) and not isinstance(a, bool) for a in axes
    ):
        raise TypeError(
            f"expected an integer or a tuple of integers as axis, found {axis!r}; "
            "change it"
        )
    array = to_reducible(contributions(value))
    if not all(-array.ndim <= a < array.ndim for a in axes):
        raise ValueError(
            f"expected an axis of an array of {array.ndim} dimensions, found {axis!r}; "
            + ("use axis=None for scalars" if array.ndim == 0 else "change it")
        )
    positive = tuple(int(a) % array.ndim for a in axes)
    if len(set(positive)) != len(positive):
        raise ValueError(
            f"expected different axes, found {axis!r}; name each of them once"
        )
    return array, positive


def _over_axes(
    collectives: Collectives, op: ReduceOp, array: Array, axes: tuple[int, ...]
) -> Array:
    dtype = array.dtype
    label = f"reduce({op.name}, axis={axes if len(axes) > 1 else axes[0]})"
    # Halves are added up in float32, and rounded once.
    wide = np.dtype(np.float32) if is_half(dtype) else dtype
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        wide = np.dtype(np.float64)
    # As in `hpcstrat.arrays.casting.quietly`.
    with np.errstate(all="ignore"):
        own = as_array(array.sum(axis=axes, dtype=wide))
    if op is ReduceOp.SUM:
        own = rounded(own, dtype)
        total: Array = collectives.batch_reduce(ReduceOp.SUM, own, label)
        return total
    # Lengths may differ between replicas: sum and count travel in one message, and
    # the mean is that of all elements, not of the replicas' means.
    count = np.int64(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    total, count = collectives.batch_reduce(ReduceOp.SUM, [own, count], label)
    with np.errstate(all="ignore"):
        mean = as_array(total / int(count) if count else total * np.nan)
    return rounded(mean, dtype if is_half(dtype) else wide)
