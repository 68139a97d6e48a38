"""Results that rightly differ from TensorFlow's: what the rows of the table promise.

Each function looks at a step that differs, and returns the id of the row that declares
the difference, or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.conformance.compare import difference, join, local
from tests.conformance.model import (
    aggregate,
    array_of,
    flat_leaves,
    has_word,
    same_tensor,
)
from tests.conformance.rules import (
    FIRST,
    SUM,
    Memory,
    assign_follows_rule,
    assigned,
    equal_on_all,
    fact,
    own_assign_follows_rule,
    reductions_follow_rule,
)
from tests.conformance.views import View

__all__ = [
    "attributes",
    "captured",
    "component_values",
    "container",
    "contributions",
    "empty_batch",
    "first_of_all",
    "objects",
    "run_result",
    "static_tail",
    "structure",
    "update_on_read",
]


def _wrapped(seen: Any) -> bool:
    """Return whether every leaf of a result is wrapped, or one that stays bare."""
    if not isinstance(seen, dict) or len(seen) != 1:
        return False
    (word, parts), *_ = seen.items()
    if word in ("list", "tuple"):
        return all(_wrapped(part) for part in parts)
    if word == "dict":
        return all(_wrapped(part) for part in parts.values())
    return word in ("per_replica", "mirrored", "variable") or seen == {"py": None}


def run_result(view: View, memory: Memory) -> str | None:
    """Equal objects of several replicas are not one object."""
    if not view.complete or view.expected_error() is not None:
        return None
    same = all(
        difference(view.expected_of(rank), view.seen(rank)) is None
        for rank in range(view.size)
    )
    if not same:
        return None
    if view.spec["op"] in ("run", "recall"):
        wrapped = all(_wrapped(record["seen"]) for record in view.present)
        return "run-result" if wrapped else None
    shared = view.spec["op"] == "update" and "identity" in view.tags
    return "identity" if shared else None


def _wanted_reductions(events: Sequence[dict[str, Any]]) -> list[Any] | None:
    """Return the leaves that a reduction or gathering of all ranks' values gives."""
    leaves = [flat_leaves(local(event["value"])) for event in events]
    wanted = []
    for i in range(len(leaves[0])):
        arrays = [array_of(part[i]) for part in leaves if i < len(part)]
        parts = [part for part in arrays if part is not None]
        if len(parts) != len(events):
            return None
        if events[0]["kind"] == "gather":
            wanted.append(np.concatenate(parts, events[0]["axis"]))
        else:
            how, axis = events[0]["reduce_op"], events[0]["axis"]
            wanted.append(aggregate(how, parts, axis))
    return wanted


def _row_of_contributions(view: View, value: Any) -> str | None:
    """Return the row for a value whose combination differs from TensorFlow's."""
    error = view.expected_error() is not None
    reduces = [event["reduce_op"].upper() for event in view.events("reduce")[0]]
    if set(reduces) == {"MEAN"} and _only_types_differ(view):
        return "mean-of-integers"
    if error and view.size == 1 and has_word(value, "variable"):
        return "sum-of-mirrored" if set(reduces) == {SUM} else None
    if error and "per_replica" in value and has_word(value, "py"):
        return "python-numbers"
    if any(word in value for word in ("list", "tuple", "dict")):
        stacked = view.per_worker and "tensor" in view.expected_of(0)
        first = not view.per_worker and view.spec["op"] == "gather"
        return "nested-values" if error or stacked or first else None
    # Several workers of TensorFlow have our rule; one gives the value back, or raises.
    if view.per_worker or not ("tensor" in value or "py" in value):
        return None
    back = error or difference(view.expected_of(0), value) is None
    return "plain-contribution" if back else None


def contributions(view: View, memory: Memory) -> str | None:
    """Plain values are contributions, structures are combined leaf by leaf."""
    rounds = view.events("reduce", "gather")
    if not view.complete or not rounds[0]:
        return None
    if len({len(events) for events in rounds}) != 1:
        return None
    row = None
    for events in zip(*rounds, strict=True):
        wanted = _wanted_reductions(events)
        if wanted is None:
            continue
        for event in events:
            seen = flat_leaves(local(event["result"]))
            if len(seen) != len(wanted):
                return None
            if not all(same_tensor(*pair) for pair in zip(wanted, seen, strict=True)):
                return None
        row = row or _row_of_contributions(view, events[0]["value"])
    return row


def _sums(view: View) -> bool:
    """Return whether the step sums what the replicas contribute."""
    reduces = [event["reduce_op"] for event in view.events("all_reduce")[0]]
    held = [fact(view, 0, name).get("aggregation") for name in assigned(view)]
    return SUM in [word.upper() for word in reduces] + held


def objects(view: View, memory: Memory) -> str | None:
    """Python numbers and shared objects are contributions like any other."""
    rounds = view.events("all_reduce", "replica_assign")
    if not view.complete or not rounds[0] or view.per_worker:
        return None
    if not reductions_follow_rule(view):
        return None
    if not all(assign_follows_rule(view, name) for name in assigned(view)):
        return None
    if "identity" in view.tags:
        return "same-object" if _sums(view) else None
    if _only_types_differ(view) and all(
        event["reduce_op"].upper() == "MEAN" for event in view.events("all_reduce")[0]
    ):
        return "mean-of-integers"
    refused = view.expected_error() is not None
    if (
        refused
        and _sums(view)
        and any(has_word(e["value"], "variable") for e in rounds[0])
    ):
        return "same-object"
    numbers = any(has_word(event["value"], "py") for event in rounds[0])
    return "python-numbers" if numbers and refused else None


def _numbers(value: Any) -> Any:
    """Return an observation without the types of its tensors."""
    if isinstance(value, dict):
        return {k: _numbers(part) for k, part in value.items() if k != "dtype"}
    return [_numbers(part) for part in value] if isinstance(value, list) else value


def _only_types_differ(view: View) -> bool:
    """Return whether every rank saw the numbers that are expected, in other types."""
    return view.expected_error() is None and all(
        _numbers(view.expected_of(rank)) == _numbers(view.seen(rank))
        for rank in range(view.size)
    )


def update_on_read(view: View, memory: Memory) -> str | None:
    """What an update makes of copies that may differ is a PerReplica."""
    if view.spec["op"] != "update" or not view.complete or view.per_worker:
        return None
    if fact(view, 0, view.spec["var"]).get("class") != "sync_on_read":
        return None
    wanted = {"per_replica": view.expected.get("mirrored")}
    same = difference(wanted, join([record["seen"] for record in view.present]))
    return "update-on-read" if same is None else None


def attributes(view: View, memory: Memory) -> str | None:
    """Names and shapes are Python's own."""
    if view.spec["op"] != "attr" or not view.complete:
        return None
    seen, name = view.seen(0), view.spec["name"]
    if name == "name":
        same = view.expected_of(0) == {"py": f"{seen.get('py')}:0"}
        return "variable-attributes" if same else None
    shape = name == "shape" and view.expected_of(0) == {"object": "TensorShape"}
    return "variable-attributes" if shape and "tuple" in seen else None


def _with_component_values(view: View, expected: Any, rank: int) -> Any:
    """Put the values of copies in the place of the copies."""
    if isinstance(expected, dict):
        if set(expected) == {"component"}:
            spec = expected["component"]
            owner = rank if view.per_worker else spec["replica"]
            return fact(view, owner, spec["var"]).get("value")
        return {
            key: _with_component_values(view, part, rank)
            for key, part in expected.items()
        }
    if isinstance(expected, list):
        return [_with_component_values(view, part, rank) for part in expected]
    return expected


def component_values(view: View, memory: Memory) -> str | None:
    """What is a copy of a variable in TensorFlow is the copy's value here."""
    means = [
        event
        for event in view.events("reduce")[0]
        if event["reduce_op"].upper() == "MEAN" and has_word(event["value"], "mirrored")
    ]
    if not view.complete or not (means or has_word(view.expected, "component")):
        return None
    local_results = view.spec["op"] == "local_results"
    if view.spec["op"] == "attr" and not view.per_worker:
        wanted = _with_component_values(view, view.expected, 0)
        seen = join([record["seen"] for record in view.present])
        return "component-objects" if difference(wanted, seen) is None else None
    for rank in range(view.size):
        wanted = _with_component_values(view, view.expected_of(rank), rank)
        if difference(wanted, view.seen(rank)) is not None:
            return None
    return "component-objects" if local_results else "mean-of-variable"


def container(view: View, memory: Memory) -> str | None:
    """A component is an array, which knows of no variable."""
    if view.spec["op"] != "value_container" or not view.complete:
        return None
    name = view.spec["var"]
    held = [before[name]["value"] for before in view.before]
    return equal_on_all(view, held, "component-objects")


def empty_batch(view: View, memory: Memory) -> str | None:
    """Nothing to reduce gives nothing."""
    if view.spec["op"] != "batch_reduce_to" or view.spec["pairs"]:
        return None
    if not view.complete:
        return None
    return equal_on_all(view, [{"list": []}] * view.size, "empty-batch-reduce")


def captured(view: View, memory: Memory) -> str | None:
    """A PerReplica captured by a replica function stands for the own part."""
    names = {
        event["var"]
        for events in view.events("replica_assign")
        for event in events
        if has_word(event["value"], "per_replica")
    }
    if not view.complete or not names or view.expected_error() is None:
        return None
    for name in names:
        kind = fact(view, 0, name).get("class")
        if kind != "sync_on_read" or not own_assign_follows_rule(view, name):
            return None
    return "captured-per-replica"


def _skeleton(value: Any) -> Any:
    """Return the structure of an observation without its leaves."""
    if isinstance(value, dict) and len(value) == 1:
        (word, parts), *_ = value.items()
        if word in ("list", "tuple"):
            return [word, *(_skeleton(part) for part in parts)]
        if word == "dict":
            return [word, *((key, _skeleton(parts[key])) for key in sorted(parts))]
    return None


def structure(view: View, memory: Memory) -> str | None:
    """Every replica keeps the structure that its function returned."""
    if view.spec["op"] != "run" or not view.complete or view.size < 2:
        return None
    returned = [events[-1]["value"] for events in view.events("return") if events]
    if len(returned) != view.size or view.expected_error() is None:
        return None
    if all(_skeleton(value) == _skeleton(returned[0]) for value in returned):
        return None
    return equal_on_all(view, returned, "structure-per-rank")


def first_of_all(view: View, memory: Memory) -> str | None:
    """The first replica is replica 0 of all, not of each worker."""
    names = assigned(view)
    if not (view.per_worker and view.complete and names) or view.expected_error():
        return None
    if {fact(view, 0, name).get("aggregation") for name in names} != {FIRST}:
        return None
    if not all(assign_follows_rule(view, name) for name in names):
        return None
    first = view.expected_of(0)
    same = all(difference(first, view.seen(rank)) is None for rank in range(view.size))
    return "only-first-replica" if same else None


def _one_shape(spec: Mapping[str, Any]) -> bool:
    """Return whether all elements of a step's data set have one shape."""
    if "per_replica_batch_of" in spec or "ragged_batches" in spec["source"]:
        return False
    batches = [part for part in spec.get("transforms", []) if "batch" in part]
    return not batches or bool(batches[-1].get("drop_remainder"))


def _has_one_step_more(expected: Any, seen: Any) -> bool:
    """Return whether a data set has one more step than expected, and is else equal."""
    steps = expected["elements"]
    if not steps or steps[-1] != "end":
        return False
    known = {**expected, "elements": steps[:-1]}
    found = {**seen, "elements": seen["elements"][: len(steps) - 1]}
    rest = seen["elements"][len(steps) - 1 :]
    one_more = bool(rest) and rest[0] != "end" and rest[1:] in ([], ["end"])
    return one_more and difference(known, found) is None


def static_tail(view: View, memory: Memory) -> str | None:
    """The last step is given to the replicas that there are batches for."""
    if view.spec["op"] != "dataset_from_function" or not _one_shape(view.spec):
        return None
    if not view.complete or view.expected_error() is not None:
        return None
    seen = [record["seen"] for record in view.present]
    pairs = [(view.expected, join(seen))]
    if view.per_worker:
        pairs = [(view.expected_of(r), view.seen(r)) for r in range(view.size)]
    declared = all(_has_one_step_more(*pair) for pair in pairs)
    return "dataset-fn-static-tail" if declared else None
