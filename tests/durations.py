"""Durations of tests: a table per folder, the slowest tests, and what grew since kept.

The seconds of the clock depend on what else the machine does, those of the processor
hardly: of this process, and of the jobs that it waited for. They are what is kept in
``durations.json``, which ``pytest --keep-durations`` writes anew.
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
# What is under this on both sides is not compared.
LEAST_SECONDS = 5.0
GROWN = 1.5
_started = pytest.StashKey[tuple[float, float]]()


def _now() -> tuple[float, float]:
    """Return seconds of the clock, and of the processor, ended children's included."""
    used = [resource.getrusage(resource.RUSAGE_SELF)]
    used.append(resource.getrusage(resource.RUSAGE_CHILDREN))
    return time.monotonic(), sum(one.ru_utime + one.ru_stime for one in used)


class Durations:
    """The plugin. Its figures come with the reports, also from other processes."""

    def __init__(self) -> None:
        # Of each test: seconds of the clock, of the processor.
        self.of_tests: dict[str, tuple[float, float]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note when a test starts, before any of its fixtures."""
        item.stash[_started] = _now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Write what a test took, fixtures included, into its last report."""
        report: Any = yield
        if call.when == "teardown":
            took = tuple(
                b - a for a, b in zip(item.stash[_started], _now(), strict=True)
            )
            report.user_properties.append(("took", took))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the figures of a test."""
        for name, value in report.user_properties:
            if name == "took" and report.when == "teardown":
                self.of_tests[report.nodeid] = (value[0], value[1])

    def pytest_terminal_summary(
        self, terminalreporter: Any, config: pytest.Config
    ) -> None:
        """Print the table, the slowest tests, and those that grew."""
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
            # What was run alone is renewed alone.
            whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
            all_took = now if whole else json.loads(KEPT.read_text()) | now
            long = {name: took for name, took in sorted(all_took.items()) if took >= 1}
            KEPT.write_text(json.dumps(long, indent=1) + "\n")
        elif KEPT.exists():
            for line in grown(self.of_tests, json.loads(KEPT.read_text())):
                write(line, yellow=True)


def grown(now: dict[str, tuple[float, float]], kept: dict[str, float]) -> Iterator[str]:
    """Yield a line for each test that takes the processor much longer than it did."""
    for name, (_, processor) in now.items():
        before = kept.get(name, 0.0)
        if processor > max(GROWN * before, before + LEAST_SECONDS):
            yield f"GREW from {before:.1f} to {processor:.1f} s: {name}"
