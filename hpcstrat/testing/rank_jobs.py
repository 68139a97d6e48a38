"""Starts the MPI jobs of tests with the marker ``ranks``, and sets up their ranks."""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.errors import HpcstratError
from hpcstrat.testing import runner
from hpcstrat.testing.job import write_whole
from hpcstrat.testing.launcher import launch_command, line_to_run

__all__ = ["join", "refuse_ranks", "run_test"]

_IN_JOB = ("-m", "pytest", "--in-job")
_REPORT = "report.json"
_OPTIONS = "options.json"
_OF_PYTEST = re.compile(
    r"""^  File ".*/(?:_?pytest|pluggy)/.*\n|^  File "<.*\n""", re.M
)
# Seconds that a failed rank waits for the other ranks, which may report failures, too.
_PATIENCE_SECONDS = 5.0
# pytest's own options that a rank needs, besides options of the project's conftest.py.
_OPTIONS_OF_PYTEST = (
    "verbose",
    "tbstyle",
    "showlocals",
    "fulltrace",
    "capture",
    "assertmode",
    "runxfail",
    "log_level",
    "color",
)


def refuse_ranks() -> None:
    """Raise UsageError in an MPI job, whose ranks would each start all marked tests."""
    launch = launch_from_environment()
    if launch.size > 1:
        raise pytest.UsageError(
            "expected one process of pytest, which starts the ranks of marked tests, "
            f"found {launch.size} started by {launch.launcher}; run pytest by itself, "
            f"or its ranks by hand: {launch.launcher.split()[0]} ... python "
            f"{' '.join(_IN_JOB)}"
        )


def time_limit(item: pytest.Item) -> float:
    """Return the seconds that a marked test may take."""
    mark = item.get_closest_marker("ranks")
    limit = mark.kwargs.get("timeout") if mark else None
    return float(limit or item.config.getini("ranks_timeout"))


def _place(item: pytest.Item) -> str:
    """Return the argument by which pytest selects a test, with an absolute path."""
    return "::".join([str(item.path), *item.nodeid.split("::")[1:]])


class _OptionRecorder(argparse.ArgumentParser):
    """A substitute for pytest's parser that records the options of a conftest.py."""

    def addoption(self, *names: str, **attributes: Any) -> None:
        self.add_argument(*names, **attributes)

    def getgroup(self, *_: Any, **__: Any) -> _OptionRecorder:
        return self

    def addini(self, *_: Any, **__: Any) -> None:
        """Ignore the option, because ranks read the same configuration files."""


def _options_of_project(config: pytest.Config) -> Iterator[str]:
    """Yield the names of the options that the project's conftest.py files add."""
    recorder = _OptionRecorder(add_help=False)
    for plugin in config.pluginmanager.get_plugins():
        add = getattr(plugin, "pytest_addoption", None)
        if add and Path(getattr(plugin, "__file__", None) or "").name == "conftest.py":
            given = {"parser": recorder, "pluginmanager": config.pluginmanager}
            add(**{name: given[name] for name in inspect.signature(add).parameters})
    for action in recorder._actions:
        yield action.dest


def _options(config: pytest.Config) -> dict[str, Any]:
    """Return the values of options that tests may read, if JSON can represent them."""
    found = {}
    for name in (*_OPTIONS_OF_PYTEST, *_options_of_project(config)):
        value = getattr(config.option, name, None)
        if isinstance(value, str | int | float | list | None):
            found[name] = value
    return found


def _command(item: pytest.Item, n: int, folder: Path) -> list[str]:
    """Return the command line that runs a test on n ranks."""
    config = item.config
    words = [*launch_command(n), sys.executable, *_IN_JOB, f"--job-folder={folder}"]
    words += ["-p", "no:cacheprovider", f"--rootdir={config.rootpath}"]
    if config.inipath is not None:
        words += ["-c", str(config.inipath)]
    # Pass the options that take effect before conftest.py files are read, even if they
    # are from ``addopts`` in the configuration file. ``addopts`` is cleared below,
    # because it may also request more processes, or report files.
    for flag, values in (
        ("-p", config.option.plugins),
        ("-o", config.option.override_ini),
        ("-W", config.option.pythonwarnings),
    ):
        for value in values or ():
            words += [flag, value]
    words += ["-o", "addopts=", f"--import-mode={config.option.importmode}"]
    return [*words, _place(item)]


def run_test(item: pytest.Function, n: int) -> pytest.TestReport:
    """Run a marked test on n ranks; return their report, or a report that it failed."""
    with tempfile.TemporaryDirectory(prefix="hpcstrat-") as name:
        folder = Path(name)
        (folder / _OPTIONS).write_text(json.dumps(_options(item.config)))
        try:
            words = _command(item, n, folder)
            finished = runner.finish(words, folder, n, time_limit(item), None)
        except HpcstratError as error:
            return _failed(item, n, str(error))
        if item.config.option.capture == "no":
            sys.stdout.write(finished.stdout)
            sys.stderr.write(finished.stderr)
        if (folder / _REPORT).exists():
            data = json.loads((folder / _REPORT).read_text())
            hook = item.config.hook
            report: Any = hook.pytest_report_from_serializable(
                config=item.config, data=data
            )
            if isinstance(report.longrepr, list):  # A skip's reason is a tuple.
                report.longrepr = tuple(report.longrepr)
            if report.failed or finished.returncode == 0:
                kept: pytest.TestReport = report
                return kept
        return _failed(item, n, _said(folder, n, finished))


def _said(folder: Path, n: int, finished: runner.Finished) -> str:
    """Describe a job whose ranks wrote no report, or which failed after the report."""
    failures = runner.read_failures(folder)
    stacks = {
        int(path.stem): text
        for path in folder.glob("*.stacks")
        if (text := path.read_text(errors="replace"))
    }
    found = f"rank {sorted(failures)} failed" if failures else "the job ended early"
    return (
        f"expected {n} ranks to end the test, found that {found} (the launcher's exit "
        f"code is {finished.returncode}); read the ranks' reports"
        + runner.sections("traceback", failures)
        + runner.sections("stacks of a rank that was still in the test", stacks)
        + ("" if failures else f"\n--- output\n{finished.stdout}\n{finished.stderr}")
    )


def _failed(item: pytest.Item, n: int, text: str) -> pytest.TestReport:
    again = line_to_run(n, [*_IN_JOB, os.path.relpath(_place(item))])
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        # Leave out the frames of pytest, which called the test.
        longrepr=f"{_OF_PYTEST.sub('', text).rstrip()}\n\nAgain: {again}",
        when="call",
    )


class _KeptReport:
    """Writes the report of a job's only test, for the pytest that started the job."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self) -> None:
        """Write the report of a phase that failed or was skipped; else of the call."""
        others = [report for report in self.reports if not report.passed]
        calls = [report for report in self.reports if report.when == "call"]
        kept = sorted(others, key=lambda r: not r.failed) or calls
        data = self.config.hook.pytest_report_to_serializable(
            config=self.config, report=kept[0]
        )
        write_whole(self.folder / _REPORT, json.dumps(data).encode())


class _Limit:
    """Prints the stacks of a rank and ends it, if a test takes too long.

    Used in jobs that a user has started with mpirun; `run_test` limits other jobs."""

    def __init__(self, stderr: TextIO) -> None:
        self.stderr = stderr

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        limit = time_limit(item)
        faulthandler.dump_traceback_later(limit, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


def join(config: pytest.Config) -> None:
    """Set up pytest on this rank, to run marked tests together with the other ranks."""
    from hpcstrat.engine.topology.topology import Topology
    from hpcstrat.testing.in_step import RanksInStep

    comm = Topology.world().Dup()
    folder = Path(config.option.job_folder) if config.option.job_folder else None
    plugin = RanksInStep(comm, _IN_JOB, patience=_PATIENCE_SECONDS, folder=folder)
    config.pluginmanager.register(plugin, "hpcstrat-ranks-in-step")
    # Turn off pytest-xdist, which the configuration file may request.
    if hasattr(config.option, "numprocesses"):
        config.option.numprocesses, config.option.dist = 0, "no"
    # Give each rank its own folder, because pytest removes old temporary folders, which
    # other ranks may be using.
    if folder is None:
        own = tempfile.TemporaryDirectory(prefix="hpcstrat-rank-")
        config.add_cleanup(own.cleanup)
        config.option.basetemp = f"{own.name}/tmp"
        config.pluginmanager.register(_Limit(plugin.stderr))
    else:
        vars(config.option).update(json.loads((folder / _OPTIONS).read_text()))
        config.option.basetemp = str(folder / f"tmp-{comm.rank}")
        if comm.rank == 0:
            config.pluginmanager.register(_KeptReport(config, folder))
