"""The implementation of ``Strategy.reduce`` for each kind of value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import rounded
from hpcstrat.engine.arrays.kinds import as_array, is_device, is_half, to_reducible
from hpcstrat.engine.arrays.order_keys import largest_along
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.tree import flatten, is_leaf, unflatten
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.engine.values import Mirrored
from hpcstrat.strategies.local_replicas import LocalReplicas

Combine = Callable[..., Tree]
"""Function with the parameters of `LocalReplicas.reduce_parts`, up to ``out``."""


def reduce(
    replicas: LocalReplicas,
    reduce_op: Any,
    value: Tree,
    axis: Any = None,
    out: Tree = None,
    *,
    combine: Combine | None = None,
) -> Tree:
    """Reduce the replicas' values; see `Strategy.reduce`.

    Collective over ``topology.replica_comm``. ``combine`` replaces the strategy's sum.
    """
    combine = combine or replicas.reduce_parts
    op = ReduceOp.parse(reduce_op)
    if axis is not None:
        arrays, axes = _checked(replicas, op, value, axis)
        if out is not None:
            raise ValueError(
                f"expected no out in a reduction over axis {axis!r}, found one; leave "
                "it out"
            )
        return _over_axes(combine, op, arrays, axes)
    if is_leaf(value) and not isinstance(value, Mirrored):
        return combine(op, replicas.parts(value), "reduce", out)
    return _structure(replicas, op, value, out, combine)


def _structure(
    replicas: LocalReplicas, op: ReduceOp, value: Tree, out: Tree, combine: Combine
) -> Tree:
    leaves, structure = flatten(value)
    mirrored = [isinstance(leaf, Mirrored) for leaf in leaves]
    if not any(mirrored):
        return combine(op, replicas.parts(value), "reduce", out)
    if out is not None:
        raise ValueError(
            "expected values that differ between replicas in a reduction with an out, "
            "found a Mirrored value; leave out away"
        )
    count = replicas.num_replicas
    if op is ReduceOp.SUM and any(mirrored) and count > 1:
        raise ValueError(
            "expected a value for each replica in the SUM over replicas, found a "
            f"Mirrored value, which is the same on all {count}; use MEAN, "
            "or multiply it by the number of replicas"
        )
    # Mirrored values are not sent: the mean of equal values is the value itself, and
    # so are the results of the operations that compare elements.
    rest = [i for i in range(len(leaves)) if not mirrored[i]]
    if rest:
        parts = replicas.parts([leaves[i] for i in rest])
        for index, array in zip(rest, combine(op, parts, "reduce"), strict=True):
            leaves[index] = array
    for index, same in enumerate(mirrored):
        if same:
            local = leaves[index].values[0]
            if not op.adds:
                to_reducible(local, op)
            leaves[index] = local.copy() if is_device(local) else np.array(local)
    return unflatten(structure, leaves)


def _checked(
    replicas: LocalReplicas, op: ReduceOp, value: Tree, axis: Any
) -> tuple[list[Array], tuple[int, ...]]:
    """Return the arrays of this rank's replicas, and the axes as numbers from 0."""
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
    arrays = [to_reducible(part, op) for part in replicas.parts(value)]
    array = arrays[0]
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
    return arrays, positive


def _over_axes(
    combine: Combine, op: ReduceOp, arrays: list[Array], axes: tuple[int, ...]
) -> Array:
    dtype = arrays[0].dtype
    label = f"reduce({op.name}, axis={axes if len(axes) > 1 else axes[0]})"
    if not op.adds:
        largest: Array = combine(
            op, [largest_along(array, axes, op) for array in arrays], label
        )
        return largest
    # float16 and bfloat16 arrays are summed in float32, and rounded once.
    wide = np.dtype(np.float32) if is_half(dtype) else dtype
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        wide = np.dtype(np.float64)
    with np.errstate(all="ignore"):
        sums = [as_array(array.sum(axis=axes, dtype=wide)) for array in arrays]
    if op is ReduceOp.SUM:
        sums = [rounded(own, dtype) for own in sums]
        total: Array = combine(ReduceOp.SUM, sums, label)
        return total
    # The lengths of the axes may differ between replicas, so the mean of all elements
    # needs their number: sums and counts are added over the replicas, in one message.
    counts = [np.prod([a.shape[i] for i in axes], dtype=np.int64) for a in arrays]
    parts = [[own, np.int64(n)] for own, n in zip(sums, counts, strict=True)]
    total, count = combine(ReduceOp.SUM, parts, label)
    with np.errstate(all="ignore"):
        mean = as_array(total / int(count) if count else total * np.nan)
    return rounded(mean, dtype if is_half(dtype) else wide)
