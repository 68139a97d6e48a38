"""Durations of tests: a table per folder, the slowest tests, and slowdowns.

CPU seconds, of this process and of its ended jobs, depend less on the machine's load
than clock seconds. ``pytest --keep-durations`` writes the CPU seconds to
``durations.json``, with which later runs are compared.
"""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KEPT = Path(__file__).parent / "durations.json"
NUM_SLOWEST = 20
# Tests below this duration, before and now, are not compared.
LEAST_SECONDS = 5.0
GROWN = 1.5
_started = pytest.StashKey[tuple[float, float]]()


def _now() -> tuple[float, float]:
    """Return clock seconds, and CPU seconds including ended child processes."""
    used = [resource.getrusage(resource.RUSAGE_SELF)]
    used.append(resource.getrusage(resource.RUSAGE_CHILDREN))
    return time.monotonic(), sum(one.ru_utime + one.ru_stime for one in used)


class Durations:
    """The pytest plugin; durations are part of reports, also from other processes."""

    def __init__(self) -> None:
        # For each test: clock seconds and CPU seconds.
        self.of_tests: dict[str, tuple[float, float]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record the start of a test, before its fixtures."""
        item.stash[_started] = _now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Add a test's duration, including fixtures, to its last report."""
        report: Any = yield
        if call.when == "teardown":
            took = tuple(
                b - a for a, b in zip(item.stash[_started], _now(), strict=True)
            )
            report.user_properties.append(("took", took))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the duration of a test from its report."""
        for name, value in report.user_properties:
            if name == "took" and report.when == "teardown":
                self.of_tests[report.nodeid] = (value[0], value[1])

    def pytest_terminal_summary(
        self, terminalreporter: Any, config: pytest.Config
    ) -> None:
        """Print the table, the slowest tests, and tests that became slower."""
        if len(self.of_tests) <= NUM_SLOWEST:
            return
        folders: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for name, took in self.of_tests.items():
            file = name.partition("::")[0]
            folders[
                file if config.option.verbose > 0 else str(Path(file).parent)
            ].append(took)
        write = terminalreporter.write_line
        terminalreporter.section("seconds of the clock, of the processor")
        for folder, all_took in sorted(folders.items()):
            clock, processor = (sum(values) for values in zip(*all_took, strict=True))
            write(f"{clock:8.1f} {processor:8.1f}  {folder}: {len(all_took)} tests")
        write("")
        order = sorted(self.of_tests.items(), key=lambda one: one[1], reverse=True)
        for name, (clock, processor) in order[:NUM_SLOWEST]:
            write(f"{clock:8.1f} {processor:8.1f}  {name}")
        if config.getoption("keep_durations"):
            now = {name: round(took[1], 1) for name, took in self.of_tests.items()}
            # If only some tests have run, update only their durations.
            whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
            all_took = now if whole else json.loads(KEPT.read_text()) | now
            long = {name: took for name, took in sorted(all_took.items()) if took >= 1}
            KEPT.write_text(json.dumps(long, indent=1) + "\n")
        elif KEPT.exists():
            for line in grown(self.of_tests, json.loads(KEPT.read_text())):
                write(line, yellow=True)


def grown(now: dict[str, tuple[float, float]], kept: dict[str, float]) -> Iterator[str]:
    """Yield a line for each test whose CPU seconds have grown much."""
    for name, (_, processor) in now.items():
        before = kept.get(name, 0.0)
        if processor > max(GROWN * before, before + LEAST_SECONDS):
            yield f"GREW from {before:.1f} to {processor:.1f} s: {name}"
