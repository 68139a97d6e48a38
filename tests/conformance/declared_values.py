"""Results that may differ from TensorFlow's, by the rows of the table.

Each function checks a step that differs, and returns the id of the table row that
declares the difference, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tests.conformance.observe import dtype_of, encode_tensor
from tests.conformance.rules import (
    FIRST,
    SUM,
    Memory,
    assign_follows_rule,
    assigned,
    combinations_follow_rule,
    equal_on_all,
    fact,
    own_assign_follows_rule,
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
    "initial_cast",
    "logical_components",
    "more_operations",
    "more_types",
    "objects",
    "run_result",
    "structure",
    "update_on_read",
]


# Steps with a value that TensorFlow sometimes returns as a variable.
_VALUES = ("reduce", "reduce_to", "batch_reduce_to", "gather")
# Types that TensorFlow's collectives can add.
_TYPES_OF_COLLECTIVES = {
    *("float16", "bfloat16", "float32", "float64"),
    *("int32", "int64", "complex64", "complex128"),
}


def _wrapped(seen: Any) -> bool:
    """Return whether every leaf of a result is wrapped, or must stay bare."""
    if not isinstance(seen, dict) or len(seen) != 1:
        return False
    (word, parts), *_ = seen.items()
    if word in ("list", "tuple"):
        return all(_wrapped(part) for part in parts)
    if word == "dict":
        return all(_wrapped(part) for part in parts.values())
    return word in ("per_replica", "mirrored", "variable") or seen == {"py": None}


def run_result(view: View, memory: Memory) -> str | None:
    """Declare a PerReplica for equal objects of several replicas."""
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
    ungrouped = not view.spec.get("group", True)
    shared = view.spec["op"] == "update" and ("identity" in view.tags or ungrouped)
    return "identity" if shared else None


def _refused_types(events: Sequence[dict[str, Any]]) -> bool:
    """Return whether calls combine types that TensorFlow's collectives refuse."""
    types: dict[str, set[str]] = {}
    for event in events:
        arrays = [array_of(leaf) for leaf in flat_leaves(local(event["part"]))]
        names = {array.dtype.name for array in arrays if array is not None}
        types.setdefault(event["kind"], set()).update(names)
    reduced, gathered = types.get("all_reduce", set()), types.get("gather", set())
    gathered |= types.get("all_gather", set())
    mixed = len(types.get("reduce", set())) > 1
    return mixed or "bool" in gathered or bool(reduced - _TYPES_OF_COLLECTIVES)


def more_types(view: View, memory: Memory) -> str | None:
    """Declare the combination of more types of numbers, and of several in one call."""
    kinds = ("reduce", "all_reduce", "gather", "all_gather")
    rounds = view.events(*kinds)
    if not view.complete or view.expected_error() is None or not rounds[0]:
        return None
    if not _refused_types(rounds[0]) or not combinations_follow_rule(view, *kinds):
        return None
    return "more-types"


def _row_of_contributions(view: View, value: Any) -> str | None:
    """Return the row for a value whose combination differs from TensorFlow's."""
    error = view.expected_error() is not None
    reduces = {str(event["reduce_op"]).upper() for event in view.events("reduce")[0]}
    if reduces == {"MEAN"} and _only_types_differ(view):
        return "mean-of-integers"
    mirrored = has_word(value, "variable") or has_word(view.spec, "mirrored")
    if error and view.size == 1 and mirrored and SUM in reduces:
        return "sum-of-mirrored"
    if error and "per_replica" in value and has_word(value, "py"):
        return "python-numbers"
    if any(word in value for word in ("list", "tuple", "dict")):
        stacked = view.per_worker and "tensor" in view.expected_of(0)
        first = not view.per_worker and view.spec["op"] == "gather"
        return "nested-values" if error or stacked or first else None
    # With several workers, TensorFlow has this rule, too. A single worker of TensorFlow
    # returns the value unchanged, or raises.
    plain = any(word in value for word in ("tensor", "py", "indexed_slices"))
    if view.per_worker or not plain:
        return None
    back = error or difference(view.expected_of(0), value) is None
    return "plain-contribution" if back else None


def contributions(view: View, memory: Memory) -> str | None:
    """Declare that plain values are contributions, and structures combine by leaves."""
    rounds = view.events("reduce", "gather")
    if not view.complete or not rounds[0]:
        return None
    if not combinations_follow_rule(view, "reduce", "gather"):
        return None
    rows = (_row_of_contributions(view, event["value"]) for event in rounds[0])
    return next((row for row in rows if row is not None), None)


def more_operations(view: View, memory: Memory) -> str | None:
    """Declare the result of an operation that TensorFlow does not have."""
    kinds = "reduce", "all_reduce"
    events = [event for found in view.events(*kinds) for event in found]
    if not view.complete or view.expected_error() is None or not events:
        return None
    if any(str(event["reduce_op"]).upper() not in ("MAX", "MIN") for event in events):
        return None
    return "more-operations" if combinations_follow_rule(view, *kinds) else None


def _sums(view: View) -> bool:
    """Return whether the step sums the contributions of replicas."""
    reduces = [event["reduce_op"] for event in view.events("all_reduce")[0]]
    held = [fact(view, 0, name).get("aggregation") for name in assigned(view)]
    return SUM in [str(word).upper() for word in reduces] + held


def objects(view: View, memory: Memory) -> str | None:
    """Declare that Python numbers and shared objects are contributions, too."""
    rounds = view.events("all_reduce", "replica_assign")
    refused = view.expected_error() is not None
    if not view.complete or not rounds[0] or (view.per_worker and not refused):
        return None
    if not combinations_follow_rule(view, "all_reduce"):
        return None
    if not all(assign_follows_rule(view, name) for name in assigned(view)):
        return None
    if "identity" in view.tags and _sums(view) and not view.per_worker:
        return "same-object"
    if _only_types_differ(view) and all(
        str(event["reduce_op"]).upper() == "MEAN"
        for event in view.events("all_reduce")[0]
    ):
        return "mean-of-integers"
    values = [event["value"] for event in rounds[0]]
    if refused and _sums(view) and has_word(values, "variable"):
        return "same-object"
    if refused and all(flat_leaves(local(value)) == [] for value in values):
        return "empty-batch-reduce"
    numbers = has_word(values, "py") or has_word(view.spec, "numpy")
    return "python-numbers" if numbers and refused else None


def _numbers(value: Any) -> Any:
    """Return an observation with the type of all tensors changed to float32."""
    if isinstance(value, dict):
        same = {"dtype": "float32"} if "tensor" in value else {}
        return {k: _numbers(part) for k, part in value.items()} | same
    return [_numbers(part) for part in value] if isinstance(value, list) else value


def _only_types_differ(view: View) -> bool:
    """Return whether every rank saw the expected numbers, but in other types."""
    pairs = [(view.expected_of(rank), view.seen(rank)) for rank in range(view.size)]
    return (
        view.expected_error() is None
        and all(difference(_numbers(a), _numbers(b)) is None for a, b in pairs)
        and any(difference(a, b) is not None for a, b in pairs)
    )


def update_on_read(view: View, memory: Memory) -> str | None:
    """Declare a PerReplica as the result of updating copies that may differ."""
    if view.spec["op"] != "update" or not view.complete or view.per_worker:
        return None
    if fact(view, 0, view.spec["var"]).get("class") != "sync_on_read":
        return None
    wanted = {"per_replica": view.expected.get("mirrored")}
    same = difference(wanted, join([record["seen"] for record in view.present]))
    return "update-on-read" if same is None else None


def attributes(view: View, memory: Memory) -> str | None:
    """Declare names and shapes of variables that are plain Python values."""
    if view.spec["op"] != "attr" or not view.complete:
        return None
    seen, name = view.seen(0), view.spec["name"]
    if name == "name":
        same = view.expected_of(0) == {"py": f"{seen.get('py')}:0"}
        return "variable-attributes" if same else None
    shape = name == "shape" and view.expected_of(0) == {"object": "TensorShape"}
    return "variable-attributes" if shape and "tuple" in seen else None


def _with_component_values(view: View, expected: Any, rank: int) -> Any:
    """Replace the copies of a variable in an expectation by the copies' values."""
    if isinstance(expected, dict):
        if set(expected) == {"variable"} and view.spec["op"] in _VALUES:
            return fact(view, rank, expected["variable"]).get("value")
        if set(expected) == {"component"}:
            spec = expected["component"]
            if view.spec["op"] == "update":
                return {"variable": spec["var"]}
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
    """Declare the value of a copy, instead of the copy that TensorFlow returns."""
    means = [
        event
        for event in view.events("reduce")[0]
        if str(event["reduce_op"]).upper() == "MEAN"
        and has_word(event["value"], "mirrored")
    ]
    handles = view.spec["op"] in _VALUES and has_word(view.expected, "variable")
    copies = handles or has_word(view.expected, "component")
    if not view.complete or not (means or copies):
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
    objects_there = local_results or view.spec["op"] == "update"
    return "component-objects" if objects_there else "mean-of-variable"


def container(view: View, memory: Memory) -> str | None:
    """Declare that a component is an array, without a reference to its variable."""
    if view.spec["op"] != "value_container" or not view.complete:
        return None
    name = view.spec["var"]
    held = [before[name]["value"] for before in view.before]
    return equal_on_all(view, held, "component-objects")


def empty_batch(view: View, memory: Memory) -> str | None:
    """Declare the empty result of reducing an empty list."""
    if view.spec["op"] != "batch_reduce_to" or view.spec["pairs"]:
        return None
    if not view.complete:
        return None
    return equal_on_all(view, [{"list": []}] * view.size, "empty-batch-reduce")


def _own_arithmetic(view: View) -> bool:
    """Return whether all arithmetic used only this replica's part of PerReplicas."""
    rounds = view.events("arithmetic")
    for events in rounds:
        for event in events:
            left, right = map(array_of, local(event["part"])["list"])
            if left is None or right is None or "result" not in event:
                return False
            wanted = left + right if event["op"] == "add" else left * right
            if not same_tensor(np.asarray(wanted), local(event["result"])):
                return False
    return all(has_word(events, "per_replica") for events in rounds)


def captured(view: View, memory: Memory) -> str | None:
    """Declare that a PerReplica captured by a replica function is its own part."""
    refused = view.expected_error() is not None
    if view.spec["op"] == "run" and view.complete and refused and _own_arithmetic(view):
        returned = [events[-1]["value"] for events in view.events("return")]
        return equal_on_all(view, returned, "captured-per-replica")
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
    """Declare results of replicas that have different structures."""
    if view.spec["op"] != "run" or not view.complete or view.size < 2:
        return None
    returned = [events[-1]["value"] for events in view.events("return") if events]
    if len(returned) != view.size or view.expected_error() is None:
        return None
    if all(_skeleton(value) == _skeleton(returned[0]) for value in returned):
        return None
    return equal_on_all(view, returned, "structure-per-rank")


def logical_components(view: View, memory: Memory) -> str | None:
    """Declare that components of logical replicas are restored unchanged."""
    spec, program = view.spec, view.case["program"]
    restored = any(step["op"] == "restore" for step in program[: view.number])
    if spec["op"] != "components" or "ranks" not in view.case or not restored:
        return None
    held = fact(view, 0, spec["var"])
    if held.get("class") != "sync_on_read" or not view.complete:
        return None
    seen = [array_of(after[spec["var"]]["value"]) for after in view.after]
    wanted = [array_of(part) for part in view.expected["list"]]
    how = held["aggregation"]
    same = same_tensor(aggregate(how, seen), encode_tensor(aggregate(how, wanted)))
    return "logical-components" if same else None


def first_of_all(view: View, memory: Memory) -> str | None:
    """Declare that the first replica is replica 0 of all, not of each worker."""
    names = assigned(view)
    if not (view.per_worker and view.complete and names) or view.expected_error():
        return None
    for name in names:
        held = fact(view, 0, name)
        own = held.get("class") == "sync_on_read"
        follows = own_assign_follows_rule if own else assign_follows_rule
        if held.get("aggregation") != FIRST or not follows(view, name):
            return None
    first = view.expected_of(0)
    same = all(difference(first, view.seen(rank)) is None for rank in range(view.size))
    return "only-first-replica" if same else None


def initial_cast(view: View, memory: Memory) -> str | None:
    """Declare that an initial array is cast to the requested type of its variable."""
    spec, const = view.spec, view.spec.get("init")
    if spec["op"] != "variable" or not isinstance(const, dict) or "const" not in const:
        return None
    dtype = spec.get("dtype", "float32")
    if view.expected_error() is None or dtype == const.get("dtype", "float32"):
        return None
    wanted = np.array(const["const"], dtype_of(dtype))
    held = [after[spec["name"]]["value"] for after in view.after if view.complete]
    same = bool(held) and all(same_tensor(wanted, value) for value in held)
    return "initial-cast" if same else None
