"""One step of a case, as all its replicas saw it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.conformance.compare import (
    difference,
    error_matches,
    join,
    local,
    part_of,
    project,
)

__all__ = ["MISSING", "View", "expected_end", "views_of"]

# The mark of a missing expectation: the program ended earlier in TensorFlow.
MISSING = object()


def _error_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the error that a rank saw, or None."""
    seen = record.get("seen")
    return seen if isinstance(seen, dict) and "error" in seen else None


@dataclass
class View:
    """One step: its text, TensorFlow's result, and each replica's record.

    ``records`` has an entry for each replica of the strategy at this step, in rank
    order; the entry is None if the rank's program had ended before. ``expected`` is the
    joined observation, or a list of observations if there are several workers.
    """

    case: dict[str, Any]
    number: int
    records: list[dict[str, Any] | None]
    expected: Any
    # The error with which each rank's program ended, at this step or later.
    finals: list[dict[str, Any] | None]

    @property
    def spec(self) -> dict[str, Any]:
        """The text of the step."""
        return dict(self.case["program"][self.number])

    @property
    def per_worker(self) -> bool:
        """Whether each rank has a separate expectation."""
        return "expected_per_worker" in self.case

    @property
    def tags(self) -> Sequence[str]:
        """The tags of the case."""
        return list(self.case.get("tags", []))

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self.records)

    @cached_property
    def present(self) -> list[dict[str, Any]]:
        """The records of the ranks that executed the step."""
        return [record for record in self.records if record is not None]

    @cached_property
    def errors(self) -> list[dict[str, Any] | None]:
        """Each rank's error at this step."""
        return [_error_of(record) for record in self.present]

    @property
    def complete(self) -> bool:
        """Whether all ranks executed the step, and no rank raised."""
        return len(self.present) == self.size and not any(self.errors)

    @property
    def before(self) -> list[dict[str, Any]]:
        """Each rank's facts about all variables before the step."""
        return [record["before"] for record in self.present]

    @property
    def after(self) -> list[dict[str, Any]]:
        """Each rank's facts about all variables after the step."""
        return [record["after"] for record in self.present]

    def events(self, *kinds: str) -> list[list[dict[str, Any]]]:
        """Return each rank's events of these kinds, in order."""
        return [
            [event for event in record["events"] if event["kind"] in kinds]
            for record in self.present
        ]

    def seen(self, rank: int) -> Any:
        """Return a rank's observation in the form for a single process."""
        return local(self.present[rank].get("seen"))

    def expected_of(self, rank: int) -> Any:
        """Return one rank's part of the expectation."""
        if self.expected is MISSING:
            return MISSING
        if self.per_worker:
            return local(self.expected[rank])
        return project(self.expected, rank)

    def expected_error(self) -> str | None:
        """Return the error that TensorFlow raised on any worker, or None."""
        parts = self.expected if self.per_worker else [self.expected]
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict) and "error" in part:
                return str(part["error"])
        return None

    def mismatch(self) -> str | None:
        """Return how the step differs from TensorFlow's, or None."""
        if self.expected is MISSING:
            return None
        if len(self.present) < self.size:
            return "the program had ended on some ranks"
        for seen in self.errors:
            if seen is not None and "interpreter" in seen:
                return f"the interpreter failed: {seen['interpreter']}"
        if self.per_worker:
            return self._mismatch_of_workers()
        error = self.expected_error()
        if error is not None:
            return self._error_mismatch(error)
        return self._unexpected_error() or difference(
            self.expected, join([record.get("seen") for record in self.present])
        )

    def _mismatch_of_workers(self) -> str | None:
        """Return how any rank differs from its own expectation, or None."""
        for rank in range(self.size):
            expected = self.expected[rank]
            if expected is MISSING:
                continue
            seen = self.present[rank].get("seen")
            if isinstance(expected, dict) and "error" in expected:
                if not error_matches(expected["error"], seen, self.tags):
                    return f"worker {rank}: expected {expected}, found {_text(seen)}"
                continue
            if self.errors[rank] is not None:
                return f"worker {rank}: {_text(seen)}"
            found = difference(local(expected), local(seen))
            if found is not None:
                return f"worker {rank}: {found}"
        return None

    def _error_mismatch(self, error: str) -> str | None:
        """Return a text about a rank that did not see the expected error, or None."""
        seen = [record.get("seen") for record in self.present]
        fits = [error_matches(error, part, self.tags) for part in seen]
        # One process with all replicas raises once, whichever replica failed.
        if all(fits) or ("single_process" in self.tags and any(fits)):
            return None
        rank = fits.index(False)
        return f"expected {error} on every rank, found on {rank}: {_text(seen[rank])}"

    def _unexpected_error(self) -> str | None:
        """Return a text about the first unexpected error, or None."""
        for rank, error in enumerate(self.errors):
            if error is not None:
                return (
                    f"expected {_text(self.expected)}, found on rank {rank}: "
                    f"{_text(error)}"
                )
        return None


def _text(seen: Any) -> str:
    """Return an observation as text, cut to a readable length."""
    if isinstance(seen, dict) and "error" in seen and "message" in seen:
        return f"{seen['error']}: {seen['message'][:400]} [{seen['at']}]"
    text = repr(local(seen))
    return text if len(text) <= 300 else text[:300] + " ..."


def _expectation(case: dict[str, Any], number: int) -> Any:
    """Return the expectation of a step."""
    if "expected_per_worker" not in case or case["expected_per_worker"] is None:
        expected = case["expected"]
        return expected[number] if number < len(expected) else MISSING
    workers = case["expected_per_worker"]
    parts = [
        worker[number] if worker is not None and number < len(worker) else MISSING
        for worker in workers
    ]
    return MISSING if all(part is MISSING for part in parts) else parts


def expected_end(case: dict[str, Any], number: int) -> bool:
    """Return whether TensorFlow raised at this step, on any worker."""
    workers = case.get("expected_per_worker") or [case.get("expected")]
    for worker in workers:
        if worker is None or number >= len(worker):
            continue
        part = worker[number]
        if isinstance(part, dict) and "error" in part:
            return True
    return False


def _final_error(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the error with which a rank's program ended, or None."""
    last = _error_of(record["steps"][-1]) if record["steps"] else None
    return last or record.get("late")


def _by_replica(step: dict[str, Any] | None) -> list[dict[str, Any] | None]:
    """Return a rank's record of a step, divided into a record for each replica."""
    count = 1 if step is None else step.get("local", 1)
    if step is None or count < 2:
        return [step if step is None else part_of(step, 0, 1) | _own_facts(step, 0)]
    return [
        {
            **part_of(step, index, count),
            **_own_facts(step, index),
            "events": [
                part_of(event, index, count)
                for event in step["events"]
                if event.get("replica") in (None, index)
            ],
        }
        for index in range(count)
    ]


def _own_facts(step: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a replica's facts about all variables, before and after a step."""
    found: dict[str, Any] = {}
    for when in ("before", "after"):
        if when in step:
            found[when] = {
                name: {**fact, "value": _entry(fact["value"], index)}
                for name, fact in step[when].items()
            }
    return found


def _entry(entries: Any, index: int) -> Any:
    # Plain variables have one value for all replicas.
    return local(entries[index] if index < len(entries) else entries[0])


def views_of(case: dict[str, Any], records: Sequence[dict[str, Any]]) -> list[View]:
    """Return the views of all steps that any rank executed."""
    views = []
    finals = [_final_error(record) for record in records]
    for number in range(max(len(record["steps"]) for record in records)):
        steps = [
            one
            for record in records
            for one in _by_replica(
                record["steps"][number] if number < len(record["steps"]) else None
            )
        ]
        # Ranks outside of a smaller strategy are not part of its steps.
        inside = [step for step in steps if step is None or "skipped" not in step]
        replicas = next((s["replicas"] for s in inside if s is not None), 0)
        if case["program"][number]["op"] in ("new_strategy", "other_strategy"):
            replicas = len(inside)
        expected = _expectation(case, number)
        views.append(View(case, number, inside[:replicas], expected, finals))
    return views
