"""The functions that programs execute: replica, merge and update functions."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat.engine.context import own_index
from tests.conformance.expressions import evaluate
from tests.conformance.observe import own
from tests.conformance.session import (
    Frame,
    InvalidArgumentError,
    Session,
    VocabularyError,
    replica_context,
    variable_kind,
)

__all__ = [
    "context_of",
    "keyword_values",
    "op_run",
    "op_update",
    "raise_error",
    "values_of",
]

_ASSIGNS = ("assign", "assign_add", "assign_sub")


def context_of(session: Session) -> dict[str, Any]:
    """Return the visible properties of the current context."""
    strategy = hs.get_strategy()
    current = hs.get_replica_context()
    kind = "none"
    if current is not None:
        kind = "replica" if hs.has_strategy() else "default"
    seen = {
        "has_strategy": hs.has_strategy(),
        "in_cross_replica_context": hs.in_cross_replica_context(),
        "replica_context": kind,
        "strategy_is_current": strategy is session.strategy,
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
    }
    if current is not None:
        seen["replica_id"] = current.replica_id_in_sync_group
    return seen


def raise_error(name: str) -> None:
    """Raise the error that the program names."""
    error = getattr(builtins, name, InvalidArgumentError)
    raise error(f"the program raises {name} here")


def values_of(session: Session, frame: Frame, exprs: Any) -> Any:
    """Evaluate a list of arguments; evaluate any other expression as one value."""
    if exprs is None:
        return ()
    if isinstance(exprs, list):
        return tuple(evaluate(session, frame, expr) for expr in exprs)
    return evaluate(session, frame, exprs)


def keyword_values(session: Session, frame: Frame, exprs: Any) -> dict[str, Any]:
    """Evaluate keyword arguments."""
    return {k: evaluate(session, frame, expr) for k, expr in (exprs or {}).items()}


def _do_assign(session: Session, frame: Frame, do: dict[str, Any]) -> Any:
    variable = session.variables[do["var"]]
    value = evaluate(session, frame, do["value"])
    event = session.log("replica_assign", method=do["do"], var=do["var"], value=value)
    result = getattr(variable, do["do"])(value)
    event["done"] = True
    return result


def _do_all_reduce(session: Session, frame: Frame, do: dict[str, Any]) -> Any:
    value = evaluate(session, frame, do["value"])
    event = session.log("all_reduce", reduce_op=do["reduce_op"], value=value)
    result = replica_context().all_reduce(do["reduce_op"], value)
    event["result"] = session.encode(result)
    return result


def _do_all_gather(session: Session, frame: Frame, do: dict[str, Any]) -> Any:
    value = evaluate(session, frame, do["value"])
    event = session.log("all_gather", axis=do["axis"], value=value)
    result = replica_context().all_gather(value, do["axis"])
    event["result"] = session.encode(result)
    return result


def _do_merge_call(session: Session, frame: Frame, do: dict[str, Any]) -> Any:
    """Run the instruction's body as a merge function."""

    def merge(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        inner = Frame("cross", dict(frame.names), args, kwargs, nested=True)
        if "record" in do:
            seen = [session.encode(arg) for arg in args]
            if kwargs:
                seen.append(session.encode(dict(kwargs)))
            session.recalls[do["record"]] = {"list": seen}
        for step in do.get("body", []):
            session.run_step(inner, step)
        return evaluate(session, inner, do["return"]) if "return" in do else None

    session.log("merge_call")
    args = values_of(session, frame, do.get("args"))
    kwargs = keyword_values(session, frame, do.get("kwargs"))
    return replica_context().merge_call(merge, args=args, kwargs=kwargs)


def _do_update(session: Session, frame: Frame, do: dict[str, Any]) -> Any:
    """Update a variable's component with this replica's arguments."""
    args = values_of(session, frame, do.get("args"))
    variable = session.variables[do["var"]]
    session.log(
        "update",
        mode=frame.mode,
        var=do["var"],
        args=[session.encode(arg) for arg in args],
    )

    def apply(component: Any, *values: Any) -> Any:
        return getattr(component, do["method"])(*values)

    return session.strategy.extended.update(variable, apply, args=args)


def _do_only(session: Session, frame: Frame, do: dict[str, Any]) -> Any:
    if replica_context().replica_id_in_sync_group in do["replicas"]:
        run_body(session, frame, do["body"])


def _do_raise(session: Session, frame: Frame, do: dict[str, Any]) -> Any:
    replica_id = replica_context().replica_id_in_sync_group
    if replica_id in do.get("replicas", [replica_id]):
        session.log("raise", error=do["error"])
        raise_error(do["error"])


_Instruction = Callable[[Session, Frame, dict[str, Any]], Any]

_INSTRUCTIONS: dict[str, _Instruction] = {
    **dict.fromkeys(_ASSIGNS, _do_assign),
    "read": lambda session, frame, do: session.variables[do["var"]].read_value(),
    "all_reduce": _do_all_reduce,
    "all_gather": _do_all_gather,
    "merge_call": _do_merge_call,
    "update": _do_update,
    "context": lambda session, frame, do: context_of(session),
    "raise": _do_raise,
    "only": _do_only,
    "cross_op": lambda session, frame, do: session.run_step(frame, do["step"]),
    "return": lambda session, frame, do: evaluate(session, frame, do["value"]),
}


def run_body(session: Session, frame: Frame, body: Sequence[Mapping[str, Any]]) -> None:
    """Execute the instructions of a replica function."""
    for do in body:
        instruction = _INSTRUCTIONS.get(do["do"])
        if instruction is None:
            raise VocabularyError(f"unknown instruction {do}")
        value = instruction(session, frame, dict(do))
        if "as" in do:
            frame.names[do["as"]] = value


def op_run(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    """Run the step's body on each replica."""

    def replica_function(*args: Any, **kwargs: Any) -> Any:
        inner = Frame("replica", dict(frame.names), args, kwargs, nested=True)
        run_body(session, inner, step.get("body", []))
        result = evaluate(session, inner, step["return"]) if "return" in step else None
        session.log("return", value=result)
        return result

    args = values_of(session, frame, step.get("args"))
    kwargs = keyword_values(session, frame, step.get("kwargs"))
    if "options" in step:
        return session.strategy.run(
            replica_function, args, kwargs, hs.RunOptions(**(step["options"] or {}))
        )
    return session.strategy.run(replica_function, args=args, kwargs=kwargs)


def _run_update(
    session: Session, component: Any, do: dict[str, Any], frame: Frame
) -> Any:
    """Execute one instruction of an update function."""
    word = do["do"]
    if word in _ASSIGNS:
        return getattr(component, word)(evaluate(session, frame, do["value"]))
    if word == "outer_assign":
        value = evaluate(session, frame, do["value"])
        return getattr(session.variables[do["var"]], do["method"])(value)
    if word == "return":
        return evaluate(session, frame, do["value"])
    if word == "context":
        return context_of(session)
    if word == "read":
        name = do.get("var")
        return session.variables[name].read_value() if name else np.array(component)
    raise VocabularyError(f"unknown update instruction {do}")


def op_update(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    """Run the step's update function once for each component."""
    variable = session.variables[step["var"]]
    args = values_of(session, frame, step.get("args"))
    kwargs = keyword_values(session, frame, step.get("kwargs"))

    def update(component: Any, *values: Any, **named: Any) -> Any:
        inner = Frame("update", {}, values, named, component, nested=True)
        result = None
        for do in step["fn"]:
            result = _run_update(session, component, do, inner)
            if "as" in do:
                # Names in update functions are global, with one entry for each
                # component.
                session.names[do["as"]] = result
                count = len(session.strategy.local_replicas)
                found = [own(session.encode(result))]
                if variable_kind(variable) == "mirrored":
                    # One call updates the components of all replicas of a rank.
                    found *= count
                elif count > 1 and own_index():
                    found = [*session.recalls[do["as"]]["list"], *found]
                session.recalls[do["as"]] = {"list": found}
        return result

    session.log(
        "update",
        mode=frame.mode,
        var=step["var"],
        target=variable_kind(variable),
        # The call itself refuses arguments that are not a tuple.
        args=[session.encode(arg) for arg in (args, *kwargs.values())],
    )
    return session.strategy.extended.update(
        variable, update, args=args, kwargs=kwargs, group=step.get("group", True)
    )
