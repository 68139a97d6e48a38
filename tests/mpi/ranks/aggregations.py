"""The aggregations of variables, with the value that NumPy computes for each.

The tests of variables, checkpoints, elastic restores and logical replicas try each
aggregation that this module names, on hosts and on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

AGGREGATIONS = ("none", "sum", "mean", "only_first_replica")
# Those with which each replica has a part of the value, not the whole value.
DIVIDED = ("sum",)

_UNORDERED = "scatter_min", "scatter_max", "scatter_update"
# For each aggregation that combines values: the methods of variables that it refuses.
REFUSED = {"sum": _UNORDERED, "mean": _UNORDERED, "only_first_replica": ()}


def combined(aggregation: str, parts: Sequence[Any]) -> Any:
    """Return the value of a variable; ``parts`` has an array for each replica."""
    rows = np.stack(parts)
    if aggregation == "none":
        return rows
    if aggregation == "sum":
        return rows.sum(axis=0, dtype=rows.dtype)
    if aggregation == "mean":
        return rows.mean(axis=0, dtype=rows.dtype)
    assert aggregation == "only_first_replica", "add the value that NumPy computes"
    return rows[0]


def part_of(aggregation: str, value: Any, count: int, replica: int) -> Any:
    """Return the component that a replica of ``count`` gets of a combined value."""
    if aggregation not in DIVIDED:
        return value
    assert aggregation == "sum", "add the part that NumPy computes"
    if np.asarray(value).dtype.kind in "fc":
        return value / count
    return value // count + (replica < value % count)


def signs(*shape: int) -> Any:
    """Return factors 1 and -1 in turn, for values that grow with the replica.

    Then neither the first nor the last replica has all of the least or largest values.
    """
    return np.where(np.arange(np.prod(shape)) % 2, -1, 1).reshape(shape)
