"""Event lines that a job of rank tests writes into a file while it runs.

Each line is a JSON list: the test file, the event, and a text. The events are
``collected`` (the text is the number of tests), ``started``, ``passed`` and ``skipped``
(the name of the test), and ``failed`` (the name of the test and its traceback).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

__all__ = ["VARIABLE", "OutcomeLines", "read"]

VARIABLE = "HPCSTRAT_TEST_OUTCOMES"
_ROOT = Path(__file__).parents[2]


class OutcomeLines:
    """A pytest plugin that writes the event lines into a file; rank 0 has it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def _write(self, nodeid: str, event: str, text: str) -> None:
        path = str(_ROOT / nodeid.partition("::")[0])
        with self._path.open("a") as file:
            file.write(json.dumps([path, event, text]) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the number of tests of each file."""
        files = Counter(item.nodeid.partition("::")[0] for item in session.items)
        for name, count in files.items():
            self._write(name, "collected", str(count))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test starts."""
        self._write(nodeid, "started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of a test, with the traceback if it failed."""
        if report.failed:
            text = f"FAILED {report.nodeid}\n{report.longreprtext}"
            self._write(report.nodeid, "failed", text)
        elif report.when == "call" or report.skipped:
            self._write(report.nodeid, report.outcome, report.nodeid)


def read(path: Path) -> list[tuple[str, str, str]]:
    """Return the complete lines that the file contains so far."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [tuple(json.loads(line)) for line in whole.splitlines()]
