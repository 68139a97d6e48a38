"""Evaluation of the programs' expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.conformance.observe import Opaque, dtype_of, own_component
from tests.conformance.session import (
    Frame,
    InvalidArgumentError,
    Session,
    VocabularyError,
    replica_context,
)

__all__ = ["as_tensor", "constant", "evaluate", "indexed_slices", "lookup"]


def constant(value: Any, dtype: str | None = None) -> np.ndarray[Any, Any]:
    """Return a new array; numbers are float32 unless ``dtype`` is given.

    A float for an integer type is an error, as in TensorFlow.
    """
    array = np.array(value, dtype_of(dtype or "float32"))
    if array.size and array.dtype.kind in "iu" and np.asarray(value).dtype.kind == "f":
        raise TypeError(f"{value!r} does not fit {dtype}")
    return array


def as_tensor(value: Any) -> Any:
    """Convert a value to an array, with TensorFlow's types for Python numbers."""
    if isinstance(value, bool | int | float):
        kinds = {bool: np.bool_, int: np.int32, float: np.float32}
        return np.asarray(value, kinds[type(value)])
    if isinstance(value, list | tuple) and not any(
        isinstance(item, hs.DistributedValues) for item in value
    ):
        parts = [as_tensor(part) for part in value]
        typed = [p for p, v in zip(parts, value, strict=True) if hasattr(v, "dtype")]
        dtype = typed[0].dtype if typed else None
        return np.stack(parts, dtype=dtype) if parts else np.zeros(0, np.float32)
    array = np.asarray(value)
    if array.dtype.kind == "O":
        raise ValueError(f"{value!r} is no tensor")
    return array


def indexed_slices(spec: dict[str, Any]) -> Any:
    """Return the IndexedSlices of a literal."""
    return hs.IndexedSlices(
        constant(spec["values"], spec.get("dtype")),
        np.array(spec["indices"], np.int64),
        tuple(spec["dense_shape"]) if spec.get("dense_shape") is not None else None,
    )


def lookup(session: Session, frame: Frame, name: str) -> Any:
    """Return the value that an earlier step or instruction saved under ``name``."""
    if name in frame.names:
        return frame.names[name]
    if name in session.names:
        return session.names[name]
    raise VocabularyError(f"nothing was saved under the name {name!r}")


def _dtype(value: Any) -> np.dtype[Any] | None:
    """Return the type of a tensor, variable or Mirrored; None for other values."""
    if isinstance(value, hs.Mirrored) and not isinstance(value, hs.Variable):
        value = own_component(value)
    typed = isinstance(value, np.ndarray | np.generic | hs.Variable)
    return np.dtype(value.dtype) if typed else None


def check_dtypes(left: Any, right: Any) -> None:
    """Raise, like TensorFlow, for arithmetic on tensors of two types."""
    types = [_dtype(left), _dtype(right)]
    if None not in types and types[0] != types[1]:
        raise InvalidArgumentError(f"types {types[0]} and {types[1]}")


def arithmetic(op: str, left: Any, right: Any) -> Any:
    """Return the sum or the product of two values."""
    check_dtypes(left, right)
    return left + right if op == "add" else left * right


def item(value: Any, key: Any) -> Any:
    """Return an item of a value."""
    return value[key]


def _per_replica(session: Session, frame: Frame, make: Callable[[int], Any]) -> Any:
    """Return this replica's entry, or outside of replicas a distributed value."""
    if frame.mode == "replica":
        return make(replica_context().replica_id_in_sync_group)
    return session.strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


def _mirrored(session: Session, frame: Frame, value: Any) -> Any:
    """Return a Mirrored of equal arrays; in a replica, return this replica's array."""
    array = value if isinstance(value, np.ndarray) else constant(value)
    if frame.mode == "replica":
        return array
    extended = session.strategy.extended
    return extended.broadcast_to(array, extended.parameter_devices)


def _eval_const(session: Session, frame: Frame, expr: dict[str, Any]) -> Any:
    return constant(expr["const"], expr.get("dtype"))


def _eval_per_replica(session: Session, frame: Frame, expr: dict[str, Any]) -> Any:
    entries, dtype = expr["per_replica"], expr.get("dtype")
    return _per_replica(session, frame, lambda r: constant(entries[r], dtype))


def _eval_per_replica_py(session: Session, frame: Frame, expr: dict[str, Any]) -> Any:
    entries = expr["per_replica_py"]
    return _per_replica(session, frame, lambda r: entries[r])


def _eval_mirrored(session: Session, frame: Frame, expr: dict[str, Any]) -> Any:
    return _mirrored(session, frame, constant(expr["mirrored"], expr.get("dtype")))


def _eval_replica_id(session: Session, frame: Frame, expr: dict[str, Any]) -> Any:
    replica_id = replica_context().replica_id_in_sync_group
    if expr["replica_id"] == "tensor":
        return np.asarray(replica_id, np.int32)
    return replica_id


def _eval_arithmetic(session: Session, frame: Frame, expr: dict[str, Any]) -> Any:
    op = "add" if "add" in expr else "mul"
    left, right = (evaluate(session, frame, part) for part in expr[op])
    event = session.log("arithmetic", op=op, value=[left, right])
    result = arithmetic(op, left, right)
    event["result"] = session.encode(result)
    return result


def _eval_slices(session: Session, frame: Frame, expr: dict[str, Any]) -> Any:
    spec = expr["indexed_slices"]
    if "per_replica" in spec:
        rows = spec["per_replica"]
        return _per_replica(session, frame, lambda r: indexed_slices(rows[r]))
    return indexed_slices(spec)


def _eval_per_replica_return(
    session: Session, frame: Frame, expr: dict[str, Any]
) -> Any:
    replica_id = replica_context().replica_id_in_sync_group
    return evaluate(session, frame, expr["per_replica_return"][replica_id])


_Evaluator = Callable[[Session, Frame, dict[str, Any]], Any]

_EVALUATORS: dict[str, _Evaluator] = {
    "const": _eval_const,
    "py": lambda session, frame, expr: expr["py"],
    "numpy": lambda session, frame, expr: np.array(expr["numpy"], np.float32),
    "per_replica": _eval_per_replica,
    "per_replica_py": _eval_per_replica_py,
    "mirrored": _eval_mirrored,
    "arg": lambda session, frame, expr: item(frame.args, expr["arg"]),
    "kwarg": lambda session, frame, expr: item(frame.kwargs, expr["kwarg"]),
    "uarg": lambda session, frame, expr: item(frame.args, expr["uarg"]),
    "ukwarg": lambda session, frame, expr: item(frame.kwargs, expr["ukwarg"]),
    "self": lambda session, frame, expr: np.array(frame.component),
    "replica_id": _eval_replica_id,
    "num_replicas": lambda session, frame, expr: replica_context().num_replicas_in_sync,
    "var": lambda session, frame, expr: session.variables[expr["var"]],
    "read": lambda session, frame, expr: session.variables[expr["read"]].read_value(),
    "ref": lambda session, frame, expr: lookup(session, frame, expr["ref"]),
    "outer_ref_tensor": lambda session, frame, expr: np.asarray(
        lookup(session, frame, expr["outer_ref_tensor"])
    ),
    "item": lambda session, frame, expr: item(
        evaluate(session, frame, expr["of"]), expr["item"]
    ),
    "list": lambda session, frame, expr: [
        evaluate(session, frame, part) for part in expr["list"]
    ],
    "tuple": lambda session, frame, expr: tuple(
        evaluate(session, frame, part) for part in expr["tuple"]
    ),
    "dict": lambda session, frame, expr: {
        key: evaluate(session, frame, part) for key, part in expr["dict"].items()
    },
    "add": _eval_arithmetic,
    "mul": _eval_arithmetic,
    "fresh_object": lambda session, frame, expr: Opaque(expr["fresh_object"]),
    "shared_object": lambda session, frame, expr: session.object_with(
        expr["shared_object"]
    ),
    "indexed_slices": _eval_slices,
    "per_replica_return": _eval_per_replica_return,
}


def evaluate(session: Session, frame: Frame, expr: Any) -> Any:
    """Return the value of an expression; a plain JSON value is its own value."""
    if not isinstance(expr, dict):
        return expr
    for word, evaluator in _EVALUATORS.items():
        if word in expr:
            return evaluator(session, frame, expr)
    raise VocabularyError(f"unknown expression {expr}")
