"""The printed table, the list of failures, and the report in JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.conformance.judge import Verdict

__all__ = ["STATUSES", "print_report", "summary", "write_report"]

STATUSES = ("passed", "failed", "declared", "not built")

Result = tuple[dict[str, Any], Verdict]


def summary(results: Sequence[Result]) -> str:
    """Return the last line of the report."""
    counts = Counter(verdict.status for _, verdict in results)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES)


def _table(results: Sequence[Result]) -> Table:
    """Return a table of counts by topic."""
    table = Table()
    table.add_column("topic")
    for status in STATUSES:
        table.add_column(status, justify="right")
    topics: dict[str, Counter[str]] = {}
    for case, verdict in results:
        topic = str(case.get("topic", ""))
        topics.setdefault(topic, Counter())[verdict.status] += 1
    for topic, counts in topics.items():
        table.add_row(topic, *(str(counts[status] or "") for status in STATUSES))
    return table


def print_report(results: Sequence[Result]) -> None:
    """Print the table, the failures, and the declared and missing parts."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for case, verdict in results:
        if verdict.status == "failed":
            console.print(f"FAILED {case['id']}: {verdict.detail}")
    missing = Counter(
        verdict.detail for _, verdict in results if verdict.status == "not built"
    )
    for part, count in missing.most_common():
        console.print(f"not built ({count}): {part}")
    rows = Counter(row for _, verdict in results for row in verdict.rows)
    for row, count in sorted(rows.items()):
        console.print(f"declared in docs/divergences.md ({count}): {row}")
    console.print(_table(results))
    console.print(summary(results))


def write_report(results: Sequence[Result], path: Path) -> None:
    """Write every verdict as JSON."""
    cases = [
        {
            "id": case["id"],
            "topic": case.get("topic"),
            "status": verdict.status,
            "rows": verdict.rows,
            "detail": verdict.detail,
        }
        for case, verdict in results
    ]
    report = {"summary": summary(results), "cases": cases}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
