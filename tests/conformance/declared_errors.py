"""Errors that only one of TensorFlow and hpcstrat raises.

Each function checks a step that differs, and returns the id of the table row that
declares the difference, or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.conformance.compare import error_matches, local
from tests.conformance.model import array_of, flat_leaves, has_word
from tests.conformance.rules import NONE, SUM, Memory, fact, raises
from tests.conformance.views import View

__all__ = [
    "assign_on_read",
    "checkpoint_none",
    "error_class",
    "mismatch",
    "no_sum",
    "none_assign",
    "not_gathered",
    "one_fails",
    "over_axis",
    "per_replica_assign",
    "plain_aggregation",
    "single_process",
    "summed_mirrored",
    "update_per_replica",
    "wrong_type",
]


def none_assign(view: View, memory: Memory) -> str | None:
    """Declare the error for assignments to a variable without an aggregation."""
    if view.size < 2 or view.size != len(view.present):
        return None
    guilty = False
    for rank, events in enumerate(view.events("replica_assign")):
        if not events:
            # A replica that does not assign continues, or is notified by the other
            # replicas.
            error = view.errors[rank]
            if error is not None and "RuntimeError" not in error["classes"]:
                return None
            continue
        held, error = fact(view, rank, events[-1]["var"]), view.errors[rank]
        if held.get("class") != "mirrored" or held.get("aggregation") != NONE:
            return None
        if error is None or "ValueError" not in error["classes"]:
            return None
        guilty = True
    return "mirrored-none-assign" if guilty else None


def per_replica_assign(view: View, memory: Memory) -> str | None:
    """Declare the error for assigning a PerReplica to a variable as a whole."""
    errors = {"mirrored": "ValueError", "sync_on_read": "TypeError"}
    for events in view.events("cross_assign"):
        if not events or not has_word(events[-1]["value"], "per_replica"):
            return None
        kind = fact(view, 0, events[-1]["var"]).get("class")
        if kind not in errors or not raises(view, errors[kind]):
            return None
    return "per-replica-assign"


def update_per_replica(view: View, memory: Memory) -> str | None:
    """Declare the error for an argument of `update` that differs between replicas."""
    if view.size < 2 or not raises(view, "ValueError"):
        return None
    for events in view.events("update"):
        if not events or fact(view, 0, events[-1]["var"]).get("class") != "mirrored":
            return None
        # In replica context, every argument that is an array differs between replicas.
        words = ["per_replica"]
        words += ["tensor"] if events[-1]["mode"] == "replica" else []
        if not any(has_word(a, word) for a in events[-1]["args"] for word in words):
            return None
    return "update-per-replica"


def assign_on_read(view: View, memory: Memory) -> str | None:
    """Declare the error for assigning an ON_READ variable without aggregation."""
    for events in view.events("cross_assign"):
        source = events[-1]["value"].get("variable") if events else None
        held = fact(view, 0, source) if source else {}
        if held.get("class") != "sync_on_read" or held.get("aggregation") != NONE:
            return None
    return "assign-on-read-variable" if raises(view, "ValueError") else None


def checkpoint_none(view: View, memory: Memory) -> str | None:
    """Declare the save of an ON_READ variable without aggregation, with all rows."""
    if view.spec["op"] != "save" or not view.complete:
        return None
    if view.expected_error() != "ValueError":
        return None
    facts = [fact(view, 0, name) for name in view.spec["vars"]]
    none = any(f["class"] == "sync_on_read" and f["aggregation"] == NONE for f in facts)
    return "checkpoint-none" if none else None


def not_gathered(view: View, memory: Memory) -> str | None:
    """Declare a refused gather that TensorFlow accepts for one replica or one value."""
    events = [found[-1] for found in view.events("gather", "all_gather") if found]
    if len(events) != view.size or view.expected_error() is not None:
        return None
    if raises(view, "NotImplementedError"):
        rows = all(has_word(event["value"], "indexed_slices") for event in events)
        return "gather-refuses" if rows else None
    shared = not any(has_word(event["value"], "per_replica") for event in events)
    none = all(event["axis"] is None for event in events)
    refused = raises(view, "TypeError" if none else "ValueError")
    return "gather-refuses" if refused and (view.size == 1 or shared) else None


def no_sum(view: View, memory: Memory) -> str | None:
    """Declare the error for summing values that are not numbers."""
    if not raises(view, "ValueError"):
        return None
    for events in view.events("reduce", "all_reduce"):
        leaves = flat_leaves(local(events[-1]["value"])) if events else []
        arrays = [array_of(leaf) for leaf in leaves]
        texts = any(
            "py" in leaf and isinstance(leaf["py"], str | None) for leaf in leaves
        )
        kinds = {array.dtype.kind for array in arrays if array is not None}
        if not (texts or kinds & set("bUS")):
            return None
    return "no-sum"


def summed_mirrored(view: View, memory: Memory) -> str | None:
    """Declare the error for a sum of values that are equal on all replicas."""
    if view.size < 2 or not raises(view, "ValueError"):
        return None
    for events in view.events("reduce"):
        sums = [e["part"] for e in events if str(e["reduce_op"]).upper() == SUM]
        if not any(has_word(part, "mirrored") for part in sums):
            return None
    return "sum-of-mirrored"


def over_axis(view: View, memory: Memory) -> str | None:
    """Declare the error for a nest in a reduction over an axis."""
    events = [found[-1] for found in view.events("reduce") if found]
    if len(events) != view.size or any(event["axis"] is None for event in events):
        return None
    if all(has_word(event["value"], "indexed_slices") for event in events):
        return "gather-refuses" if raises(view, "ValueError") else None
    nested = all(
        any(word in event["value"] for word in ("list", "tuple", "dict"))
        for event in events
    )
    return "nested-values" if nested and raises(view, "TypeError") else None


def plain_aggregation(view: View, memory: Memory) -> str | None:
    """Declare the error for an aggregation of a variable made outside of the scope."""
    if view.size < 2 or not raises(view, "ValueError"):
        return None
    for rank, events in enumerate(view.events("replica_assign")):
        held = fact(view, rank, events[-1]["var"]) if events else {}
        if held.get("class") != "plain" or held.get("aggregation") == NONE:
            return None
    return "plain-aggregation"


def _assigned_value(view: View, rank: int) -> tuple[Any, Mapping[str, Any]]:
    """Return the value that a rank could not assign, and the variable's facts."""
    events = view.events("cross_assign", "replica_assign")[rank]
    if not events or "done" in events[-1]:
        return {}, {}
    return events[-1]["value"], fact(view, rank, events[-1]["var"])


def wrong_type(view: View, memory: Memory) -> str | None:
    """Declare the error if an ON_READ variable gets an array of another type."""
    if view.expected_error() is not None or not raises(view, "ValueError"):
        return None
    for rank in range(view.size):
        value, held = _assigned_value(view, rank)
        if held.get("class") != "sync_on_read" or held.get("aggregation") != SUM:
            return None
        if "tensor" not in value or value["dtype"] == held["dtype"]:
            return None
    return "on-read-types"


def _float_into_integers(view: View) -> bool:
    """Return whether each rank assigned a Python float to an integer variable."""
    for rank in range(view.size):
        value, held = _assigned_value(view, rank)
        if not isinstance(value.get("py"), float):
            return False
        if not held["dtype"].startswith(("int", "uint")):
            return False
    return True


def _no_axis(view: View) -> bool:
    """Return whether each rank gathered along the axis None."""
    rounds = view.events("gather", "all_gather")
    return all(found and found[-1]["axis"] is None for found in rounds)


def error_class(view: View, memory: Memory) -> str | None:
    """Declare an error with Python's usual class, which differs from TensorFlow's."""
    expected = view.expected_error()
    if expected == "TypeError" and raises(view, "ValueError"):
        return "error-class" if _float_into_integers(view) else None
    if expected == "ValueError" and raises(view, "TypeError"):
        return "error-class" if _no_axis(view) else None
    return None


def _shape_of_calls(record: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the parts of a rank's calls that must be equal on all ranks."""
    kinds = ("replica_assign", "all_reduce", "all_gather", "merge_call", "update")
    return [
        (event["kind"], event.get("var"), event.get("method"), event.get("reduce_op"))
        for event in record["events"]
        if event["kind"] in kinds
    ]


def mismatch(view: View, memory: Memory) -> str | None:
    """Declare the error of all ranks for calls that differ between ranks."""
    calls = [_shape_of_calls(record) for record in view.present]
    if all(call == calls[0] for call in calls) or not any(view.errors):
        return None
    # A rank that made fewer calls raises this error at its next call.
    for error in view.finals[: view.size]:
        if error is None or "CollectiveError" not in error["classes"]:
            return None
    merges = any(call[0] == "merge_call" for part in calls for call in part)
    return "merge-mismatch" if merges else "collective-mismatch"


def one_fails(view: View, memory: Memory) -> str | None:
    """Declare an exception of one replica, which others notice at their next call."""
    failed = view.events("raise")
    expected = view.expected_error()
    if expected is None or all(failed) or not any(failed):
        return None
    for error, events in zip(view.errors, failed, strict=True):
        if events:
            if not error_matches(expected, error, view.tags):
                return None
        elif error is not None and "CollectiveError" not in error["classes"]:
            return None
    return "error-on-one-replica"


def single_process(view: View, memory: Memory) -> str | None:
    """Declare effects that only a single process with all replicas can have."""
    if "single_process" not in view.tags or view.spec["op"] != "run":
        return None
    if raises(view, "CollectiveError"):
        return "single-process"
    # Other rules declare the results of these calls.
    ruled = view.events("reduce", "gather", "all_reduce", "replica_assign")
    refused = view.expected_error() is not None
    return "single-process" if refused and view.complete and not any(ruled) else None
