"""Helpers for rules of declared differences, over one step of a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.conformance.compare import difference, local
from tests.conformance.model import (
    aggregate,
    apply_assign,
    array_of,
    flat_leaves,
    same_tensor,
)
from tests.conformance.observe import encode_tensor
from tests.conformance.views import View

__all__ = [
    "FIRST",
    "NONE",
    "SUM",
    "Memory",
    "assign_follows_rule",
    "assigned",
    "combinations_follow_rule",
    "combined",
    "equal_on_all",
    "fact",
    "own_assign_follows_rule",
    "raises",
]

SUM, NONE, FIRST = "SUM", "NONE", "ONLY_FIRST_REPLICA"


@dataclass
class Memory:
    """State of a case that earlier steps leave for later steps."""

    # Variables whose state may differ from TensorFlow's, with the row that says this.
    tainted: dict[str, str] = field(default_factory=dict)
    # Values in the checkpoint by name, with the rows that declare their differences.
    saved: dict[str, Any] = field(default_factory=dict)
    saved_tainted: dict[str, str] = field(default_factory=dict)
    # Each replica's value of saved variables that have no combined value.
    saved_rows: dict[str, list[Any]] = field(default_factory=dict)


def raises(view: View, name: str) -> bool:
    """Return whether every rank raised an error of the class ``name``."""
    return len(view.present) == view.size and all(
        error is not None and "interpreter" not in error and name in error["classes"]
        for error in view.errors
    )


def fact(view: View, rank: int, name: str) -> Mapping[str, Any]:
    """Return the facts that a rank knew of a variable before the step."""
    found: Mapping[str, Any] = view.before[rank].get(name, {})
    return found


def _sequence(view: View, name: str) -> list[list[dict[str, Any]]]:
    """Return each rank's assignments to a variable in replica context."""
    return [
        [event for event in events if event["var"] == name]
        for events in view.events("replica_assign")
    ]


def assigned(view: View) -> set[str]:
    """Return the variables that any rank assigned in replica context."""
    return {e["var"] for events in view.events("replica_assign") for e in events}


def assign_follows_rule(view: View, name: str) -> bool:
    """Return whether aggregated assignments left the value of the rule."""
    sequences = _sequence(view, name)
    if len({len(events) for events in sequences}) != 1 or not sequences[0]:
        return False
    how = fact(view, 0, name).get("aggregation", NONE)
    value = array_of(fact(view, 0, name).get("value"))
    if value is None or how == NONE:
        return False
    for events in zip(*sequences, strict=True):
        arrays = [array_of(local(event["part"])) for event in events]
        parts = [part.astype(value.dtype) for part in arrays if part is not None]
        if len(parts) != view.size:
            return False
        value = apply_assign(value, events[0]["method"], aggregate(how, parts))
    return all(same_tensor(value, after[name]["value"]) for after in view.after)


def own_assign_follows_rule(view: View, name: str) -> bool:
    """Return whether each rank's assignments changed only its own value."""
    for rank, events in enumerate(_sequence(view, name)):
        value = array_of(fact(view, rank, name).get("value"))
        for event in events:
            part = array_of(local(event["part"]))
            if value is None or part is None:
                return False
            value = apply_assign(value, event["method"], part)
        if not same_tensor(value, view.after[rank][name]["value"]):
            return False
    return True


def _combined_leaf(event: Mapping[str, Any], leaves: Sequence[Any]) -> Any:
    """Return the combination of the replicas' parts of one leaf, or None."""
    slices = [leaf.get("indexed_slices") for leaf in leaves]
    if all(slices) and event["kind"] == "reduce":
        return _combined_slices(event["reduce_op"], slices)
    arrays = [array_of(leaf) for leaf in leaves]
    parts = [array for array in arrays if array is not None]
    if len(parts) != len(leaves):
        return None
    if event["kind"] in ("gather", "all_gather"):
        return encode_tensor(np.concatenate(parts, event["axis"]))
    return encode_tensor(aggregate(event["reduce_op"], parts, event.get("axis")))


def _combined_slices(how: str, slices: Sequence[Mapping[str, Any]]) -> Any:
    """Return all replicas' sparse rows, one after the other."""
    columns = [
        [array_of(part[key]) for part in slices] for key in ("values", "indices")
    ]
    values, indices = (
        np.concatenate([array for array in column if array is not None])
        for column in columns
    )
    if str(how).upper() == "MEAN":
        values = np.asarray(values / values.dtype.type(len(slices)))
    rows = {
        "values": encode_tensor(values),
        "indices": encode_tensor(indices),
        "dense_shape": slices[0]["dense_shape"],
    }
    return {"indexed_slices": rows}


def combined(events: Sequence[dict[str, Any]]) -> list[Any] | None:
    """Return the leaves of a reduction or gather of all ranks' values.

    Return None if the model knows no combination of a leaf.
    """
    leaves = [flat_leaves(local(event["part"])) for event in events]
    if len({len(part) for part in leaves}) != 1:
        return None
    wanted = [_combined_leaf(events[0], parts) for parts in zip(*leaves, strict=True)]
    return None if None in wanted else wanted


def combinations_follow_rule(view: View, *kinds: str) -> bool:
    """Return whether every call of these kinds combined all contributions."""
    rounds = view.events(*kinds)
    if len({len(events) for events in rounds}) != 1:
        return False
    for events in zip(*rounds, strict=True):
        if not all("result" in event for event in events):
            return False
        wanted = combined(events)
        for event in events:
            if wanted is None or difference(wanted, _leaves(event["result"])):
                return False
    return True


def _leaves(result: Any) -> list[Any]:
    """Return the leaves of one rank's result."""
    return flat_leaves(local(result))


def equal_on_all(view: View, wanted: Sequence[Any], row: str | None) -> str | None:
    """Return ``row`` if every rank saw its value in ``wanted``."""
    same = all(
        difference(local(part), view.seen(rank)) is None
        for rank, part in enumerate(wanted)
    )
    return row if same else None
