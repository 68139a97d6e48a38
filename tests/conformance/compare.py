"""Joining the observations of ranks, and comparing them with TensorFlow's results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.conformance.observe import OWN, UNION

__all__ = [
    "difference",
    "error_matches",
    "join",
    "local",
    "part_of",
    "project",
]

# The portable error classes; an expected error of any other class matches any error.
_PORTABLE_ERRORS = ("ValueError", "TypeError", "RuntimeError", "NotImplementedError")
_RELATIVE_TOLERANCE = 1e-6
_WRAPPERS = ("per_replica", "mirrored")


def _strip(value: Any) -> Any:
    """Remove the marks of this rank's own entries."""
    if isinstance(value, dict):
        if set(value) == {OWN}:
            return _strip(value[OWN])
        if set(value) == {UNION}:
            return _strip(value[UNION])
        return {key: _strip(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_strip(part) for part in value]
    return value


def local(value: Any) -> Any:
    """Return a rank's observation in the form for a single process.

    A distributed value with one local replica counts as its bare part.
    """
    value = _strip(value)
    if isinstance(value, dict):
        if len(value) == 1:
            (word, parts), *_ = value.items()
            if word in _WRAPPERS and isinstance(parts, list) and len(parts) == 1:
                return local(parts[0])
        return {key: local(part) for key, part in value.items()}
    if isinstance(value, list):
        return [local(part) for part in value]
    return value


def project(expected: Any, replica: int) -> Any:
    """Return one replica's part of a joined observation."""
    if isinstance(expected, dict):
        if len(expected) == 1:
            (word, parts), *_ = expected.items()
            if word in _WRAPPERS and replica < len(parts):
                return project(parts[replica], replica)
        return {key: project(part, replica) for key, part in expected.items()}
    if isinstance(expected, list):
        return [project(part, replica) for part in expected]
    return expected


def part_of(value: Any, index: int, count: int) -> Any:
    """Return the part of a rank's observation that belongs to one of its replicas.

    A list with an own entry for each of ``count`` replicas keeps only the entry of this
    replica.
    """
    if _is_own(value) and len(value) in (1, count):
        return [value[index if len(value) == count else 0]]
    if isinstance(value, dict):
        return {key: part_of(part, index, count) for key, part in value.items()}
    if isinstance(value, list):
        return [part_of(part, index, count) for part in value]
    return value


def _is_own(value: Any) -> bool:
    """Return whether ``value`` is a list of own entries of this rank."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, dict) and set(part) == {OWN} for part in value)
    )


def join(parts: Sequence[Any]) -> Any:
    """Join the observations of all replicas, in rank order.

    Lists of own entries become lists over the replicas. Everything else must be equal
    on all ranks; differences become ``{"@differs": [...]}``.
    """
    first = parts[0]
    if all(_is_own(part) for part in parts):
        return [_strip(entry[OWN]) for part in parts for entry in part]
    if all(isinstance(part, dict) and set(part) == set(first) for part in parts):
        if set(first) == {UNION}:
            return _union([part[UNION] for part in parts])
        return {key: join([part[key] for part in parts]) for key in first}
    if all(isinstance(part, list) and len(part) == len(first) for part in parts):
        return [join([part[i] for part in parts]) for i in range(len(first))]
    stripped = [_strip(part) for part in parts]
    if all(difference(stripped[0], part) is None for part in stripped[1:]):
        return stripped[0]
    return {"@differs": stripped}


def _union(lists: Sequence[list[Any]]) -> list[Any]:
    """Join lists of which each rank may know a part, or the same whole."""
    joined = list(lists[0])
    for entries in lists[1:]:
        joined += [entry for entry in entries if entry not in joined]
    return joined


def error_matches(expected: str, seen: Any, tags: Sequence[str]) -> bool:
    """Return whether a rank's observation is the expected error."""
    if not isinstance(seen, dict) or "error" not in seen or "interpreter" in seen:
        return False
    if expected not in _PORTABLE_ERRORS or "error_class" in tags:
        return True
    return expected in seen["classes"]


def _close(expected: float, seen: float, dtype: str) -> bool:
    """Return whether two numbers of tensors agree."""
    if math.isnan(expected):
        return math.isnan(seen)
    if dtype == "float32":
        return math.isclose(expected, seen, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-30)
    return expected == seen


def _numbers_differ(expected: Any, seen: Any, dtype: str, path: str) -> str | None:
    """Return the first difference between two tensors' nested lists, or None."""
    if isinstance(expected, list) or isinstance(seen, list):
        both = isinstance(expected, list) and isinstance(seen, list)
        if not both or len(expected) != len(seen):
            return f"{path}: expected {expected}, found {seen}"
        for i, (left, right) in enumerate(zip(expected, seen, strict=True)):
            found = _numbers_differ(left, right, dtype, f"{path}[{i}]")
            if found is not None:
                return found
        return None
    numbers = isinstance(expected, int | float) and isinstance(seen, int | float)
    same = _close(expected, seen, dtype) if numbers else expected == seen
    return None if same else f"{path}: expected {expected!r}, found {seen!r}"


def _tensors_differ(
    expected: dict[str, Any], seen: dict[str, Any], path: str
) -> str | None:
    """Return the first difference between two tensors, or None."""
    for key in ("dtype", "shape"):
        if expected[key] != seen[key]:
            return f"{path}.{key}: expected {expected[key]}, found {seen[key]}"
    return _numbers_differ(expected["tensor"], seen["tensor"], expected["dtype"], path)


def difference(expected: Any, seen: Any, path: str = "") -> str | None:
    """Return where two observations differ, or None if they agree.

    float32 numbers are compared within a relative tolerance of 1e-6. Everything else is
    compared exactly, including types and structure.
    """
    if type(expected) is not type(seen):
        return f"{path}: expected {_short(expected)}, found {_short(seen)}"
    if isinstance(expected, dict):
        if "tensor" in expected and "tensor" in seen:
            return _tensors_differ(expected, seen, path)
        if set(expected) != set(seen):
            return f"{path}: expected {_short(expected)}, found {_short(seen)}"
        keys: Sequence[Any] = list(expected)
    elif isinstance(expected, list):
        if len(expected) != len(seen):
            return f"{path}: expected {_short(expected)}, found {_short(seen)}"
        keys = range(len(expected))
    else:
        same = expected == seen or repr(expected) == repr(seen) == "nan"
        return None if same else f"{path}: expected {expected!r}, found {seen!r}"
    for key in keys:
        found = difference(expected[key], seen[key], f"{path}/{key}")
        if found is not None:
            return found
    return None


def _short(value: Any) -> str:
    """Return a value's repr, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 400 else text[:400] + " ..."
