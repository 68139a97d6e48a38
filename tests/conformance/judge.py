"""The verdict on a case: passed, failed, declared or not built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.divergences import EXPLAIN
from tests.conformance.launch import Outcome
from tests.conformance.rules import Memory
from tests.conformance.taints import TAINT, rows_complaint
from tests.conformance.views import View, expected_end, views_of

__all__ = ["Verdict", "judge", "missing_part"]

# The strategies of programs that hpcstrat can run.
_STRATEGIES = (
    *("mirrored", "multi_worker", "one_device", "default", "preemption"),
    *("parameter_server", "central_storage"),
)


@dataclass
class Verdict:
    """The verdict on a case, with details and the declared rows."""

    status: str  # passed | failed | declared | not built
    detail: str = ""
    rows: list[str] = field(default_factory=list)


def missing_part(case: dict[str, Any]) -> str | None:
    """Return the strategy that a case needs and hpcstrat lacks, or None."""
    kind = case["strategy"]
    if kind in _STRATEGIES:
        return None
    return f"the strategy {kind}"


def _unsettled(view: View, memory: Memory) -> tuple[str | None, str | None]:
    """Return a step's difference from TensorFlow's, and the row that declares it."""
    mismatch = view.mismatch()
    if mismatch is None or "interpreter failed" in mismatch:
        return mismatch, None
    for explain in EXPLAIN:
        row = explain(view, memory)
        if row is not None:
            return mismatch, row
    return mismatch, None


def _verdict_on_rest(views: Sequence[View], memory: Memory, rows: list[str]) -> Verdict:
    """Return the verdict after the last step that TensorFlow executed.

    hpcstrat may continue, because it can save variables that TensorFlow cannot save;
    the remaining steps must then be as documented.
    """
    if "checkpoint-none" in rows:
        for view in views:
            complaint = rows_complaint(view, memory) if view.present else None
            if complaint is not None:
                text = f"step {view.number} ({view.spec['op']}): {complaint}"
                return Verdict("failed", text)
    return Verdict("declared" if rows else "passed", rows=rows)


def _judge_steps(views: Sequence[View], case: dict[str, Any]) -> Verdict:
    """Compare step by step; stop at the first difference that no row declares."""
    memory = Memory()
    rows: list[str] = []
    for view in views:
        mismatch, row = _unsettled(view, memory)
        text = f"step {view.number} ({view.spec['op']}): {mismatch}"
        if mismatch is not None and row is None:
            return Verdict("failed", text)
        if row is not None and row not in rows:
            rows.append(row)
        # The results after an error are unspecified in TensorFlow and hpcstrat.
        for taint in TAINT:
            memory.tainted.update(taint(view, memory) if view.complete else {})
        ended = any(view.errors) or len(view.present) < view.size
        ended = ended or expected_end(case, view.number)
        # Programs of a coordinator may ask to continue after an error.
        if ended and not view.spec.get("continue_after_error"):
            return _verdict_on_rest(views[view.number + 1 :], memory, rows)
    last = len(views)
    if _still_expected(case, last):
        return Verdict("failed", f"step {last}: no rank executed it")
    return Verdict("declared" if rows else "passed", rows=rows)


def _still_expected(case: dict[str, Any], number: int) -> bool:
    """Return whether TensorFlow executed a step that no rank executed."""
    workers = case.get("expected_per_worker") or [case.get("expected")]
    return any(worker is not None and number < len(worker) for worker in workers)


def judge(case: dict[str, Any], outcome: Outcome) -> Verdict:
    """Return the verdict on a replayed case."""
    for record in outcome.records:
        if "not_built" in record:
            return Verdict("not built", record["not_built"])
    if outcome.failure is not None:
        return Verdict("failed", outcome.failure)
    for rank, record in enumerate(outcome.records):
        if "broken" in record:
            broken = record["broken"]
            text = broken.get("interpreter", f"{broken['error']}: {broken['message']}")
            return Verdict("failed", f"rank {rank} could not start: {text}")
    return _judge_steps(views_of(case, outcome.records), case)
