"""The declared differences: the rows of ``docs/divergences.md``, as code.

Each rule belongs to a row of this table. A rule checks the steps of a program, never
the id of the case, and checks that the result is the one that the row documents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.conformance import (
    declared_coordinator,
    declared_errors,
    declared_inputs,
    declared_preemption,
    declared_values,
)
from tests.conformance.rules import Memory
from tests.conformance.taints import explain_assignment, explain_state
from tests.conformance.views import View

__all__ = ["EXPLAIN", "ROWS", "TABLE", "check_rows", "documented_rows"]

TABLE = Path(__file__).resolve().parents[2] / "docs" / "divergences.md"


def documented_rows(path: Path = TABLE) -> set[str]:
    """Return the ids of the rows in the documentation."""
    text = path.read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([a-z0-9-]+)` \|", text, flags=re.MULTILINE))


Explain = Callable[[View, Memory], str | None]

# The rules are tried in this order for a step that differs; the first match counts.
EXPLAIN: Sequence[Explain] = (
    explain_state,
    explain_assignment,
    declared_values.run_result,
    declared_values.component_values,
    declared_values.container,
    declared_errors.none_assign,
    declared_errors.per_replica_assign,
    declared_errors.update_per_replica,
    declared_errors.assign_on_read,
    declared_values.contributions,
    declared_values.empty_batch,
    declared_values.captured,
    declared_values.objects,
    declared_values.more_operations,
    declared_values.more_types,
    declared_values.first_of_all,
    declared_values.logical_components,
    declared_values.update_on_read,
    declared_values.attributes,
    declared_errors.not_gathered,
    declared_errors.no_sum,
    declared_errors.over_axis,
    declared_errors.summed_mirrored,
    declared_errors.plain_aggregation,
    declared_errors.wrong_type,
    declared_errors.error_class,
    declared_errors.checkpoint_none,
    declared_errors.mismatch,
    declared_values.structure,
    declared_values.initial_cast,
    declared_inputs.static_tail,
    declared_inputs.pipeline_per_replica,
    declared_preemption.counted_right,
    declared_coordinator.any_function,
    declared_errors.one_fails,
    declared_errors.single_process,
)


ROWS = {
    "assign-on-read-variable",
    "captured-per-replica",
    "checkpoint-none",
    "collective-mismatch",
    "component-objects",
    "data-padding-type",
    "data-seeds",
    "data-split",
    "data-unbatched",
    "dataset-fn-static-tail",
    "empty-batch-reduce",
    "error-class",
    "error-on-one-replica",
    "gather-refuses",
    "identity",
    "initial-cast",
    "logical-components",
    "int-sum-shares",
    "mean-of-integers",
    "mean-of-variable",
    "merge-mismatch",
    "mirrored-none-assign",
    "more-types",
    "nested-values",
    "no-sum",
    "on-read-types",
    "only-first-replica",
    "per-replica-assign",
    "pipeline-per-replica",
    "plain-aggregation",
    "plain-contribution",
    "plain-variable-per-rank",
    "preemption-count",
    "python-numbers",
    "run-result",
    "schedule-any-function",
    "same-object",
    "single-process",
    "structure-per-rank",
    "sum-of-mirrored",
    "update-on-read",
    "update-per-replica",
    "variable-attributes",
}


def check_rows() -> None:
    """Raise an error unless every row in the code is documented."""
    missing = ROWS - documented_rows()
    if missing:
        raise LookupError(
            f"expected rows in {TABLE} for {', '.join(sorted(missing))}, found none; "
            "document them or take the rules away"
        )
