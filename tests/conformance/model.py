"""A model of hpcstrat's own rules, computed with NumPy from each rank's parts.

Declared differences are checked against this model: a result that differs from
TensorFlow's counts as declared only if it is the result of the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.conformance.compare import difference
from tests.conformance.observe import dtype_of, encode_tensor

__all__ = [
    "aggregate",
    "apply_assign",
    "array_of",
    "flat_leaves",
    "has_word",
    "logical_value",
    "same_tensor",
    "shares",
]

Array = np.ndarray[Any, Any]


def array_of(value: Any) -> Array | None:
    """Return the array of an observation, or None.

    Python numbers get the types that TensorFlow gives them.
    """
    if not isinstance(value, dict):
        return None
    if "tensor" in value:
        array = np.array(value["tensor"], dtype_of(value["dtype"]))
        return array.reshape(value["shape"])
    if "py" in value and isinstance(value["py"], bool | int | float):
        kinds = {bool: np.bool_, int: np.int32, float: np.float32}
        return np.asarray(value["py"], kinds[type(value["py"])])
    return None


def flat_leaves(value: Any) -> list[Any]:
    """Return the leaves of an observation in order."""
    if isinstance(value, dict) and len(value) == 1:
        (word, parts), *_ = value.items()
        if word in ("list", "tuple"):
            return [leaf for part in parts for leaf in flat_leaves(part)]
        if word == "dict":
            return [leaf for key in sorted(parts) for leaf in flat_leaves(parts[key])]
    return [value]


def has_word(value: Any, word: str) -> bool:
    """Return whether an observation contains a part of the kind ``word``."""
    if isinstance(value, dict):
        return word in value or any(has_word(part, word) for part in value.values())
    if isinstance(value, list):
        return any(has_word(part, word) for part in value)
    return False


def _sum(arrays: Sequence[Array]) -> Array:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def aggregate(how: str, arrays: Sequence[Array], axis: Any = None) -> Array:
    """Reduce all replicas' parts: SUM, MEAN, MAX, MIN or ONLY_FIRST_REPLICA."""
    how = str(how).upper()
    if how == "ONLY_FIRST_REPLICA":
        return arrays[0]
    if how in ("MAX", "MIN") and axis is None:
        return np.asarray((np.maximum if how == "MAX" else np.minimum).reduce(arrays))
    dtype = arrays[0].dtype
    parts = [np.asarray(a if axis is None else a.sum(axis, dtype)) for a in arrays]
    total = np.asarray(_sum(parts), dtype)
    if how == "SUM":
        return total
    count = len(arrays)
    if axis is not None:
        axes = axis if isinstance(axis, list | tuple) else [axis]
        count = sum(int(np.prod([a.shape[k] for k in axes])) for a in arrays)
    # The mean of integers is a float64.
    kind = dtype if dtype.kind in "fcV" else np.dtype(np.float64)
    return np.asarray(total.astype(kind) / kind.type(count), kind)


def apply_assign(before: Array, method: str, value: Array) -> Array:
    """Return a variable's value after an assignment."""
    value = value.astype(before.dtype)
    if method == "assign_add":
        return np.asarray(before + value)
    if method == "assign_sub":
        return np.asarray(before - value)
    return np.broadcast_to(value, before.shape)


def shares(total: Array, num_replicas: int) -> list[Array]:
    """Return the replicas' exact shares of an integer total."""
    quotient, rest = np.divmod(total, num_replicas)
    return [
        np.asarray(quotient + (replica < rest), total.dtype)
        for replica in range(num_replicas)
    ]


def logical_value(facts: Sequence[Mapping[str, Any]], name: str) -> Array | None:
    """Return the value of a variable over all ranks, or None."""
    parts = [array_of(fact[name]["value"]) for fact in facts]
    arrays = [part for part in parts if part is not None]
    kind, how = facts[0][name]["class"], facts[0][name]["aggregation"]
    if kind != "sync_on_read":
        return arrays[0]
    if how == "NONE":
        return None
    return aggregate(how, arrays)


def same_tensor(expected: Array | None, seen: Any) -> bool:
    """Return whether an observation is the tensor ``expected``."""
    if expected is None:
        return False
    return difference(encode_tensor(expected), seen) is None
