"""A pytest plugin that keeps the ranks of a job in step and joins their reports.

After each test the ranks exchange its outcome over a communicator of the plugin's own.
A test that failed on some ranks fails on all of them, with the reports of all ranks.
Where a test fails on one rank while others hang in it, that rank waits a while, shows
its report and the others' stacks, and aborts the job.
"""

from __future__ import annotations

import faulthandler
import os
import shlex
import signal
import time
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
from _pytest.runner import call_and_report
from mpi4py import MPI

_NAP_SECONDS = 0.0005
_FAILED_PATIENCE_SECONDS = 15.0
_KEY_LENGTH = 200


class RanksInStep:
    """The plugin; ``comm`` is used by nothing else."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.pids = comm.allgather(os.getpid())
        # pytest takes the file descriptor of standard error during tests.
        self.stderr = os.fdopen(os.dup(2), "w")
        faulthandler.register(signal.SIGUSR1, file=self.stderr, all_threads=True)

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
        self, flag: bool, key: str, late: Callable[[list[int]], NoReturn]
    ) -> bool:
        """Agree on whether a flag is set on any rank; all must be at the same key.

        ``late`` is called with the ranks that have not come, if this rank's flag is
        set and its patience ends. Polling, so that waiting ranks leave the cores alone.
        """
        own = np.array([flag, zlib.crc32(key.encode())], dtype=np.int64)
        peers = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        theirs = {rank: np.empty_like(own) for rank in peers}
        sends = [self.comm.Isend(own, rank) for rank in peers]
        waiting = {rank: self.comm.Irecv(theirs[rank], rank) for rank in peers}
        deadline = time.monotonic() + _FAILED_PATIENCE_SECONDS
        while waiting:
            waiting = {
                k: request for k, request in waiting.items() if not request.Test()
            }
            if waiting:
                if flag and time.monotonic() > deadline:
                    late(sorted(waiting))
                time.sleep(_NAP_SECONDS)
        MPI.Request.Waitall(sends)
        if any(other[1] != own[1] for other in theirs.values()):
            place = key if len(key) < _KEY_LENGTH else f"{key[:_KEY_LENGTH]}..."
            self._abort(f"the ranks are not at the same test; this one is at: {place}")
        return flag or any(other[0] for other in theirs.values())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Show why a file could not be read, before the job ends."""
        if report.failed:
            self._say(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Stop where the ranks did not find the same tests."""
        names = " ".join(item.nodeid for item in session.items)
        key = f"{len(session.items)} tests: {names}"

        def late(ranks: list[int]) -> NoReturn:
            self._abort(f"rank {ranks} did not finish collecting tests")

        self._exchange(session.testsfailed > 0, key, late)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool:
        """Run a test as pytest does, but report it only when all ranks have run it."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = self._run(item, nextitem)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        """Run the phases as ``_pytest.runner.runtestprotocol`` does, in step.

        The ranks meet before the teardown, where a strategy is closed: a rank that
        failed must not enter that while others still communicate in the test.
        """
        if not item._request:
            item._initrequest()
        reports = [call_and_report(item, "setup", log=False)]
        if reports[0].passed:
            reports.append(call_and_report(item, "call", log=False))
        self._join(item, reports)
        if item.session.shouldfail or item.session.shouldstop:
            nextitem = None
        teardown = [call_and_report(item, "teardown", log=False, nextitem=nextitem)]
        self._join(item, teardown)
        item._request = False
        item.funcargs = None
        return reports + teardown

    def _join(self, item: pytest.Item, reports: list[pytest.TestReport]) -> None:
        """Make the outcome that of all ranks together."""
        own = "\n".join(_text(report) for report in reports if report.failed)

        def late(ranks: list[int]) -> NoReturn:
            again = self._again(item.nodeid)
            self._say(f"{item.nodeid} failed here; rank {ranks} still in it:\n{own}")
            self._say(f"Again: {again}")
            for rank in ranks:
                os.kill(self.pids[rank], signal.SIGUSR1)
                time.sleep(0.3)  # One after the other, so that the lines do not mix.
            self._abort("the other ranks' stacks are shown above")

        if not self._exchange(bool(own), item.nodeid, late):
            return
        texts = self.comm.allgather(own)
        whole = "\n\n".join(
            f"=== rank {rank} of {self.comm.size}\n{text}"
            for rank, text in enumerate(texts)
            if text
        )
        for report in reports:
            if report.failed:
                report.outcome = "passed"
        # One phase stands for all, so that every rank counts one failure.
        joint = reports[-1]
        joint.outcome = "failed"
        joint.longrepr = f"{whole}\n\nAgain: {self._again(item.nodeid)}"
        joint.sections = []
        vars(joint).pop("wasxfail", None)

    def _again(self, nodeid: str) -> str:
        """Return the command that runs one test again, from the repository's root."""
        start = ["mpirun", "--oversubscribe", "-n", str(self.comm.size)]
        return shlex.join([*start, "python", "-m", "tests.mpi.ranks", nodeid])

    def pytest_internalerror(self, excrepr: Any) -> None:
        """End the job, because the other ranks would wait for this one."""
        self._abort(f"pytest broke:\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        """End the job, because the other ranks would wait for this one."""
        self._abort(f"interrupted:\n{excinfo}")


def _text(report: pytest.TestReport) -> str:
    """Return what pytest would show of a failed phase of a test."""
    sections = (f"--- {title}\n{content}" for title, content in report.sections)
    return "\n".join([f"({report.when})", report.longreprtext, *sections])
