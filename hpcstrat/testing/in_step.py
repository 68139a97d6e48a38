"""A pytest plugin that synchronizes the ranks after each phase and joins their reports.

After each phase of a test, the ranks exchange its outcome over the plugin's own
communicator. A test that fails on some ranks fails on all ranks, with the reports of
all ranks; equal reports are shown once. A test that only some ranks skip fails, too. If
a test fails on one rank while other ranks hang in it, the failed rank waits
``patience`` seconds, shows its report and the other ranks' stacks, and aborts the job.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from mpi4py import MPI

from hpcstrat.testing.job import note_rank, write_whole
from hpcstrat.testing.launcher import line_to_run

__all__ = ["RanksInStep"]

_NAP_SECONDS = 0.0005
_FAILED_PATIENCE_SECONDS = 15.0
_KEY_LENGTH = 200
_OUTCOMES = ("passed", "skipped", "failed")
FAILED = _OUTCOMES.index("failed")
_ADDRESS = re.compile("0x[0-9a-f]+")


class RanksInStep:
    """The pytest plugin of a rank; no other code may communicate over ``comm``.

    ``command`` has the arguments of ``python`` that run pytest on a rank. ``folder`` is
    the job's folder, in which the process that started the job looks for failures.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        command: Sequence[str],
        *,
        patience: float = _FAILED_PATIENCE_SECONDS,
        folder: Path | None = None,
    ) -> None:
        self.comm = comm
        self.command = tuple(command)
        self.patience = patience
        self.folder = folder
        self.pids = comm.allgather(os.getpid())
        # Keep the file descriptor of standard error, which pytest replaces in tests.
        self.stderr = os.fdopen(os.dup(2), "w")
        if folder is None:
            faulthandler.register(signal.SIGUSR1, file=self.stderr, all_threads=True)
        else:
            note_rank(folder, comm.rank)

    def _say(self, text: str) -> None:
        lines = text.rstrip().splitlines()
        self.stderr.write(
            "".join(f"[rank {self.comm.rank}] {line}\n" for line in lines)
        )
        self.stderr.flush()

    def _abort(self, text: str) -> NoReturn:
        self._say(text)
        self.comm.Abort(1)
        raise SystemExit(1)

    def _exchange(
        self, outcome: int, key: str, late: Callable[[list[int]], NoReturn]
    ) -> set[int]:
        """Return the set of all ranks' outcomes; all ranks must pass the same ``key``.

        If this rank has failed and other ranks have not arrived after ``self.patience``
        seconds, ``late`` is called with their numbers. This method polls and sleeps, so
        that waiting ranks leave the cores to other ranks.
        """
        own = np.array([outcome, zlib.crc32(key.encode())], dtype=np.int64)
        peers = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        theirs = {rank: np.empty_like(own) for rank in peers}
        sends = [self.comm.Isend(own, rank) for rank in peers]
        waiting = {rank: self.comm.Irecv(theirs[rank], rank) for rank in peers}
        deadline = time.monotonic() + self.patience
        while waiting:
            waiting = {
                k: request for k, request in waiting.items() if not request.Test()
            }
            if waiting:
                if outcome == FAILED and time.monotonic() > deadline:
                    late(sorted(waiting))
                time.sleep(_NAP_SECONDS)
        MPI.Request.Waitall(sends)
        if any(other[1] != own[1] for other in theirs.values()):
            place = key if len(key) < _KEY_LENGTH else f"{key[:_KEY_LENGTH]}..."
            self._abort(f"the ranks are not at the same test; this one is at: {place}")
        return {outcome, *(int(other[0]) for other in theirs.values())}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Show why a test file could not be collected, before the job ends."""
        if report.failed:
            self._say(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Abort the job if the ranks did not find the same tests."""
        names = " ".join(item.nodeid for item in session.items)
        key = f"{len(session.items)} tests: {names}"

        def late(ranks: list[int]) -> NoReturn:
            self._abort(f"rank {ranks} did not finish collecting tests")

        self._exchange(FAILED if session.testsfailed else 0, key, late)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Let only rank 0 print and write cache files; no rank if there is a folder."""
        if self.comm.rank or self.folder is not None:
            manager = session.config.pluginmanager
            for name in ("lfplugin", "nfplugin", "stepwiseplugin"):
                if manager.has_plugin(name):
                    manager.unregister(name=name)
            reporter = manager.get_plugin("terminalreporter")
            if reporter is not None:
                reporter._tw._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a phase of a test after all ranks have finished the phase.

        A rank that fails in a test therefore does not enter the teardown, which may
        close a strategy, while other ranks still communicate in the test.
        """
        report = yield
        own = _text(report) if report.failed else ""

        def late(ranks: list[int]) -> NoReturn:
            self._say(f"{item.nodeid} failed here; rank {ranks} still in it:\n{own}")
            self._say(f"Again: {self._again(item)}")
            if self.folder is not None:
                name = f"{self.comm.rank}.failure"
                write_whole(self.folder / name, own.encode())
            for rank in ranks:
                os.kill(self.pids[rank], signal.SIGUSR1)
                time.sleep(0.3)  # Keep the ranks' lines apart.
            self._abort("the other ranks' stacks are shown above")

        mine = _OUTCOMES.index(report.outcome)
        outcomes = self._exchange(mine, f"{report.when} {item.nodeid}", late)
        if outcomes == {mine} and not own:
            return report
        if FAILED not in outcomes:
            own = f"({report.when})\n{report.outcome} on this rank, not on all"
        texts = self.comm.allgather((own, _title(report) if report.failed else ""))
        whole = "\n\n".join(
            f"=== {ranks} of {self.comm.size}{title}\n{text}"
            for ranks, (text, title) in _joined(texts)
        )
        report.outcome = "failed"
        report.longrepr = f"{whole}\n\nAgain: {self._again(item)}"
        report.sections = []
        vars(report).pop("wasxfail", None)
        return report

    def _again(self, item: pytest.Item) -> str:
        """Return the command that runs one test again."""
        _, *names = item.nodeid.split("::")
        place = "::".join([os.path.relpath(item.path), *names])
        return line_to_run(self.comm.size, [*self.command, place])

    def pytest_internalerror(self, excrepr: Any) -> None:
        """End the job, because the other ranks would wait for this one."""
        self._abort(f"pytest broke:\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        """End the job, because the other ranks would wait for this one."""
        self._abort(f"interrupted:\n{excinfo}")


def _text(report: pytest.TestReport) -> str:
    """Return pytest's report of a failed phase of a test."""
    sections = (f"--- {title}\n{content}" for title, content in report.sections)
    return "\n".join([f"({report.when})", report.longreprtext, *sections])


def _joined(texts: Sequence[tuple[str, str]]) -> list[tuple[str, tuple[str, str]]]:
    """Return ranks and their report, once for ranks whose reports are equal.

    Addresses of objects, which differ between processes, do not count. The report of a
    rank is its text, empty if the rank has none, and its title.
    """
    found: dict[str, tuple[list[int], tuple[str, str]]] = {}
    for rank, report in enumerate(texts):
        if report[0]:
            key = _ADDRESS.sub("", "\n".join(report))
            found.setdefault(key, ([], report))[0].append(rank)
    return [
        (f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}", report)
        for ranks, report in found.values()
    ]


def _title(report: pytest.TestReport) -> str:
    """Return the error message of a report in one line, if there is one."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return f": {crash.message.splitlines()[0]}" if crash and crash.message else ""
