"""Steps after which variables have a declared value instead of TensorFlow's.

Each function here checks this value against the rule of its row. Later steps that show
the variable are then compared with the values on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.conformance.compare import difference, local
from tests.conformance.model import (
    aggregate,
    apply_assign,
    array_of,
    logical_value,
    same_tensor,
    shares,
)
from tests.conformance.observe import encode_tensor
from tests.conformance.rules import (
    FIRST,
    NONE,
    SUM,
    Memory,
    assign_follows_rule,
    assigned,
    equal_on_all,
    fact,
    own_assign_follows_rule,
    raises,
)
from tests.conformance.views import View

__all__ = ["TAINT", "explain_assignment", "explain_state", "rows_complaint"]


def _on_read_source(view: View, memory: Memory) -> dict[str, str]:
    """Mark mirrored variables that got the aggregated value of an ON_READ variable."""
    tainted = {}
    for event in view.events("cross_assign")[0]:
        source, name = event["value"].get("variable"), event["var"]
        if source is None or "done" not in event:
            continue
        target = fact(view, 0, name)
        if target["class"] != "mirrored":
            continue
        if fact(view, 0, source)["class"] != "sync_on_read":
            continue
        value, before = logical_value(view.before, source), array_of(target["value"])
        if value is None or before is None:
            continue
        wanted = apply_assign(before, event["method"], value)
        if all(same_tensor(wanted, after[name]["value"]) for after in view.after):
            tainted[name] = "assign-on-read-variable"
    return tainted


def _totals(view: View, memory: Memory) -> dict[str, Any]:
    """Return the totals that the step assigns to variables as a whole."""
    totals: dict[str, Any] = {}
    for event in view.events("cross_assign")[0]:
        if event["method"] == "assign" and "done" in event:
            source = event["value"].get("variable")
            shared = fact(view, 0, source).get("class") == "sync_on_read"
            totals[event["var"]] = (
                logical_value(view.before, source)
                if shared
                else array_of(local(event["part"]))
            )
    if view.spec["op"] == "restore":
        for name, variable in view.spec["map"].items():
            totals[variable] = array_of(memory.saved.get(name))
    return totals


def _exact_shares(view: View, memory: Memory) -> dict[str, str]:
    """Mark ON_READ variables whose replicas hold exact shares of an integer total."""
    tainted = {}
    for name, total in _totals(view, memory).items():
        held = fact(view, 0, name)
        if held.get("class") != "sync_on_read" or held["aggregation"] != SUM:
            continue
        if total is None or not held["dtype"].startswith(("int", "uint")):
            continue
        parts = shares(total.astype(held["dtype"]), view.size)
        exact = all(
            same_tensor(part, view.after[rank][name]["value"])
            for rank, part in enumerate(parts)
        )
        if exact and bool(np.any(total % view.size)):
            tainted[name] = "int-sum-shares"
    return tainted


def _differ(parts: Sequence[Any]) -> bool:
    """Return whether observations of several ranks differ."""
    return any(difference(parts[0], part) is not None for part in parts[1:])


def _first_of_all(view: View, memory: Memory) -> dict[str, str]:
    """Mark variables that have the value of replica 0 on several workers."""
    if not view.per_worker or view.size < 2:
        return {}
    tainted = {}
    for name, held in view.after[0].items():
        if held["aggregation"] != FIRST:
            continue
        if held["class"] == "sync_on_read":
            differ = _differ([after[name]["value"] for after in view.after])
        else:
            values = [
                [local(event["part"]) for event in events if event["var"] == name]
                for events in view.events("replica_assign")
            ]
            differ = _differ(values) and assign_follows_rule(view, name)
        if differ:
            tainted[name] = "only-first-replica"
    return tainted


def _plain(view: View, memory: Memory) -> dict[str, str]:
    """Mark plain variables outside of the scope, which each rank has separately."""
    return {
        name: "plain-variable-per-rank"
        for name in assigned(view)
        if view.size > 1
        and fact(view, 0, name).get("class") == "plain"
        and own_assign_follows_rule(view, name)
    }


def _checkpoint(view: View, memory: Memory) -> dict[str, str]:
    """Mark restored variables whose saved value was marked."""
    tainted = {}
    if view.spec["op"] == "save":
        for name in view.spec["vars"]:
            value = logical_value(view.before, name)
            memory.saved[name] = None if value is None else encode_tensor(value)
            if value is None:
                rows = [before[name]["value"] for before in view.before]
                memory.saved_rows[name] = rows
            memory.saved_tainted.pop(name, None)
            if name in memory.tainted:
                memory.saved_tainted[name] = memory.tainted[name]
    elif view.spec["op"] == "restore":
        for name, variable in view.spec["map"].items():
            memory.tainted.pop(variable, None)
            if name in memory.saved_tainted:
                tainted[variable] = memory.saved_tainted[name]
    return tainted


Taint = Callable[[View, Memory], dict[str, str]]

# These functions run after every step that all replicas have finished.
TAINT: Sequence[Taint] = (
    _checkpoint,
    _on_read_source,
    _exact_shares,
    _first_of_all,
    _plain,
)


def _wanted_reduction(view: View, name: str) -> Any:
    """Return the expected reduction of a variable's components."""
    parts = [array_of(held[name]["value"]) for held in view.before]
    arrays = [part for part in parts if part is not None]
    how, axis = view.spec["reduce_op"], view.spec.get("axis")
    return encode_tensor(aggregate(how, arrays, axis))


def _first_differs(view: View) -> bool:
    """Return whether the first worker's observation differs from TensorFlow's."""
    return difference(view.expected_of(0), view.seen(0)) is not None


def explain_state(view: View, memory: Memory) -> str | None:
    """Declare a step that shows a variable with a declared value of an earlier step."""
    op = view.spec["op"]
    if not view.complete:
        return None
    if op == "checkpoint_value":
        name = view.spec["name"]
        wanted = [memory.saved.get(name)] * view.size
        return equal_on_all(view, wanted, memory.saved_tainted.get(name))
    value = view.spec.get("value")
    reads = value.get("var") or value.get("read") if isinstance(value, dict) else None
    name = view.spec.get("var") or reads
    if not isinstance(name, str) or name not in memory.tainted:
        return None
    row = memory.tainted[name]
    if row == "only-first-replica" and _first_differs(view):
        return None
    held = [before[name]["value"] for before in view.before]
    if op == "components":
        return equal_on_all(view, [{"list": [v]} for v in held], row)
    if op == "reduce":
        wanted = [_wanted_reduction(view, name)] * view.size
        return equal_on_all(view, wanted, row)
    if op in ("read_value", "value", "numpy", "to_tensor", "eval"):
        logical = logical_value(view.before, name)
        plain = view.before[0][name]["class"] == "plain"
        if logical is not None and not plain:
            held = [encode_tensor(logical)] * view.size
        return equal_on_all(view, held, row)
    return None


def explain_assignment(view: View, memory: Memory) -> str | None:
    """Declare an assignment whose result is the declared value of the variable."""
    assigns = ("assign", "assign_add", "assign_sub")
    if view.spec["op"] not in assigns or not view.complete:
        return None
    name = view.spec["var"]
    wanted = [after[name]["value"] for after in view.after]
    total = logical_value(view.after, name)
    if fact(view, 0, name).get("class") == "sync_on_read" and total is not None:
        wanted = [encode_tensor(total)] * view.size
    tainted = {**_exact_shares(view, memory), **_on_read_source(view, memory)}
    return equal_on_all(view, wanted, tainted.get(name))


def _rows_seen(view: View, rows: list[Any]) -> bool:
    """Return whether every rank saw the saved rows as one array."""
    arrays = [array for array in map(array_of, rows) if array is not None]
    return all(same_tensor(np.stack(arrays), view.seen(r)) for r in range(view.size))


def rows_complaint(view: View, memory: Memory) -> str | None:
    """Return a problem of a step after a save that TensorFlow refuses, or None."""
    if view.spec["op"] == "checkpoint_value":
        rows = memory.saved_rows.get(view.spec["name"])
        if rows is not None and not (view.complete and _rows_seen(view, rows)):
            return f"expected the rows {rows} of all replicas in the checkpoint"
    if view.spec["op"] != "restore":
        return None
    for name, variable in view.spec["map"].items():
        rows = memory.saved_rows.get(name)
        held = fact(view, 0, variable)
        if rows is None or held["class"] != "sync_on_read":
            continue
        if held["aggregation"] != NONE:
            continue
        if len(rows) != view.size:
            if not raises(view, "CheckpointError"):
                return f"expected an error that names {variable!r} on every rank"
        elif not view.complete or rows != [a[variable]["value"] for a in view.after]:
            return f"expected its own row of {rows} on every replica"
    return None
