"""Execution of one program on one rank, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.checkpoints import CHECKPOINT_STEPS
from tests.conformance.inputs import INPUT_STEPS, PLAIN_INPUT_STEPS
from tests.conformance.session import (
    Frame,
    NotBuiltError,
    Session,
    VocabularyError,
    describe_error,
)
from tests.conformance.steps import NULL_STEPS, PLAIN_STEPS, STEPS, Shown

__all__ = ["run_program"]

_STEPS = {**STEPS, **INPUT_STEPS, **CHECKPOINT_STEPS}
_PLAIN = PLAIN_STEPS | PLAIN_INPUT_STEPS
# Steps that also involve ranks outside of the current strategy.
_FOR_ALL = {"new_strategy", "other_strategy"}


def _run_nested(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    """Execute a step inside of a function; return its value."""
    value = _execute(session, frame, step)
    if isinstance(value, Shown):
        value = value.value
    if "as" in step:
        frame.names[step["as"]] = value
    return value


def _execute(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    """Execute a step in the scope that the step names."""
    function = _STEPS.get(step["op"])
    if function is None:
        raise VocabularyError(f"unknown step {step}")
    # Inside of a function, a step runs in the function's context.
    place = step.get("where", "outside" if frame.nested else "scope")
    if step["op"] in _FOR_ALL:
        return function(session, frame, step)
    with session.where(place):
        return function(session, frame, step)


def _run_step(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    """Execute a step of the top level; return its observation."""
    value = _execute(session, frame, step)
    observation: Any = None
    if isinstance(value, Shown):
        value, observation = value.value, value.observation
    elif step["op"] in _PLAIN:
        observation = value
    else:
        observation = session.encode(value)
    if "as" in step:
        session.names[step["as"]] = value
    hidden = step.get("observe") is False or step["op"] in NULL_STEPS
    return None if hidden else observation


def _not_built(error: BaseException) -> str | None:
    """Return the missing part of hpcstrat that an exception names, or None."""
    if isinstance(error, NotBuiltError):
        return str(error)
    # A replica may see another replica's failure only as text in an error.
    if "not built" in str(error):
        return str(error)
    if isinstance(error, AttributeError) and "module 'hpcstrat" in str(error):
        return str(error)
    return None


def _run_recorded(
    session: Session, frame: Frame, step: dict[str, Any], record: dict[str, Any]
) -> bool:
    """Execute a step, and record it; return whether the program continues."""
    session.events = []
    record.update(before=session.facts(), events=session.events)
    try:
        record["seen"] = _run_step(session, frame, step)
    except Exception as error:
        missing = _not_built(error)
        if missing is not None:
            record["not_built"] = missing
        else:
            record["seen"] = describe_error(error)
        return False
    finally:
        record["after"] = session.facts()
        record["replicas"] = session.replicas
        record["local"] = session.num_local
    return True


def _still_together(session: Session, going_on: bool, result: dict[str, Any]) -> bool:
    """Return whether all ranks' programs continue; called before the strategy changes.

    Some ranks are only in the old strategy, and some only in the new one, so without
    this call one could wait for the other. The barrier notifies replicas of another
    replica's failure.
    """
    if going_on and session.active:
        try:
            session.strategy.barrier()
        except RuntimeError as error:
            result["late"] = describe_error(error)
            going_on = False
    return session.agree(going_on)


def run_program(session: Session, announce: Callable[[int], None]) -> dict[str, Any]:
    """Execute the session's program; return a record of each step.

    ``announce`` gets the number of each step when the step begins.
    """
    session.run_step = lambda frame, step: _run_nested(session, frame, step)
    frame = Frame()
    records: list[dict[str, Any]] = []
    result: dict[str, Any] = {"steps": records}
    going_on = True
    for number, step in enumerate(session.case["program"]):
        announce(number)
        if step["op"] in _FOR_ALL and not _still_together(session, going_on, result):
            break
        if not going_on:
            continue
        record: dict[str, Any] = {}
        records.append(record)
        if not session.active and step["op"] not in _FOR_ALL:
            record["skipped"] = True
        else:
            going_on = _run_recorded(session, frame, step, record)
    if records and "not_built" in records[-1]:
        result["not_built"] = records[-1]["not_built"]
    return result
