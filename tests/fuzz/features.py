"""Features that a program combines, and combinations that are known to fail."""

from __future__ import annotations

from tests.fuzz.oracle import is_plain
from tests.fuzz.program import Op, Program

__all__ = ["GATES", "features"]

GATES: dict[str, str] = {
    "halves in groups": "sums that overflow in half precision are not the oracle's",
}
"""Features whose programs the tests leave out, with the reason; see `features`."""


def features(program: Program) -> set[str]:
    """Return the names of the features that a program uses."""
    found = {str(op.fault[0]) for op in _every(program) if op.fault}
    found -= {"ValueError", "FloatingPointError", "OSError", "BadBatchError"}
    for op in _every(program):
        found |= _of(op)
    strategy = program.ops[0]
    if strategy.on_error != "raise" and any(_fails(op) for op in program.of("run")):
        found.add("caught")
    if strategy.way == "groups" and "clipped halves" in found:
        found.add("halves in groups")
    accumulates = any(
        op.options.get("accumulate_steps", 1) > 1 for op in program.of("optimizer")
    )
    if accumulates and program.of("restart"):
        found.add("accumulation restored")
    if accumulates and any(_fails(op) or op.fault for op in _every(program)):
        found.add("accumulation and errors")
    lacks = [op for op in program.of("apply") if op.lacks or None in op.gradients]
    if accumulates and lacks:
        found.add("accumulation and missing gradients")
    return found


def _every(program: Program) -> list[Op]:
    return [one for op in program.ops for one in (op, *(op.body or ()))]


def _fails(op: Op) -> bool:
    return op.kind == "run" and len(op.fault or ()) > 2


def _of(op: Op) -> set[str]:
    found = set()
    if op.way:
        found.add(str(op.way))
    if op.kind == "threads":
        found.add("two threads at once")
    if op.kind == "dataset" and op.form == "shuffling":
        found.add("unseeded shuffling")
    if op.kind == "optimizer" and op.unnamed:
        found.add("unnamed variables")
    if op.kind == "errors" and op.all == "raise":
        found.add("numpy raises")
    if op.kind == "state" and not is_plain(op.value):
        found.add("types of plain state")
    if op.out == "overlap":
        found.add("overlapping outputs")
    if op.kind in ("rows", "scatter") and op.value.dtype == "float64":
        found.add("scattered floats")
    if op.kind == "apply" and any(
        draw is not None and draw.style == "half" for draw in op.gradients
    ):
        found.add("clipped halves")
    return found
