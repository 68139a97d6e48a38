"""A restart after a preemption notice that may differ from TensorFlow's."""

from __future__ import annotations

from typing import Any

from tests.conformance.rules import Memory
from tests.conformance.views import View

__all__ = ["counted_right"]


def _repeats_nothing(expected: dict[str, Any], seen: dict[str, Any]) -> bool:
    """Return whether a worker continues after its last step; TensorFlow repeats it."""
    begin = expected["total_run_calls_at_start"] + 1
    executed = seen["executed_steps"]
    known = {**expected, "total_run_calls_at_start": begin}
    known["executed_steps"] = [*range(begin, begin + len(executed))]
    if expected["executed_steps"]:
        # The amount that one step of all workers adds.
        gained = expected["last_value"] - expected["value_at_start"]
        each = gained / len(expected["executed_steps"])
        known["last_value"] = expected["value_at_start"] + each * len(executed)
    if expected["finished"]:
        known["executed_steps"] = expected["executed_steps"][1:]
    return known == seen


def counted_right(view: View, memory: Memory) -> str | None:
    """Declare that a step is counted before its save, so a restart repeats none."""
    spec = view.spec
    if spec.get("api") != "save_checkpoint_if_preempted" or not view.number:
        return None
    pairs = list(zip(view.expected, view.present[0]["seen"], strict=True))
    declared = all(_repeats_nothing(*pair) for pair in pairs)
    return "preemption-count" if declared else None
