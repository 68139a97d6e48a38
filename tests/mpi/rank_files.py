"""Files of rank tests as tests of pytest: a job for many files, a test for each file.

Starting a short MPI job takes most of its time. Therefore all selected files that a
test function has in its parameter ``file`` run in one job, for each value of its other
parameters. Each test waits for its own file only, and reports the failures of this
file.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpcstrat import testing
from tests.lanes import job_of
from tests.mpi import outcome_lines

__all__ = ["RankFiles", "names_in", "rank_files", "sizes_of"]

# Limit for a whole job; a single test that hangs ends its job within two minutes.
_MOST_SECONDS = 3000.0
_POLL_SECONDS = 0.1
_NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)
# The numbers of ranks at which a test with a mark can fail: see ranks/conftest.py.
_SIZES = {"rule": {1, 2, 3}, "files": {1, 3}, "algorithm": {3, 4}}
_SIZES |= {"calls": {3}, "once": {3}}


def names_in(folder: Path, pattern: str = "check_*.py") -> list[str]:
    """Return the names of files of rank tests, such as ``checkpoint/check_saving``."""
    found = (path.relative_to(folder) for path in folder.rglob(pattern))
    return sorted(os.fspath(path.with_suffix("")) for path in found)


def sizes_of(folder: Path, name: str) -> set[int]:
    """Return the numbers of ranks at which tests of a file can fail, by its marks."""
    text = (folder / f"{name}.py").read_text()
    of_all = re.search(r"^pytestmark = (\[.*?^\]|.*?$)", text, re.M | re.S)
    if not of_all or not _marks(of_all[1]):
        return {1, 2, 3, 4}
    return {size for mark in _marks(text) for size in _SIZES[mark]}


def _marks(text: str) -> set[str]:
    return set(re.findall(r"pytest\.mark\.(\w+)", text)) & _SIZES.keys()


class _Job:
    """A job of some files, and the outcomes of its tests so far."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        n: int,
        files: Sequence[Path],
        options: Sequence[str],
        env: Mapping[str, str],
        told: Path,
    ) -> None:
        self._told = told
        settings = [f"{name}={value}" for name, value in env.items()]
        self._again = f"Again: {shlex.join(['env', *settings])} " if env else "Again: "
        words = ["-m", "tests.mpi.ranks", "--color=no", *options, *map(str, files)]
        self._ended: Future[testing.Finished] = pool.submit(
            testing.launch,
            n,
            [sys.executable, *words],
            timeout=_MOST_SECONDS,
            env={**env, outcome_lines.VARIABLE: os.fspath(told)},
        )

    def num_passed(self, file: Path) -> int:
        """Wait for the tests of a file; return how many passed, or fail.

        If the job breaks, the files that it has not reached fail, too.
        """
        while True:
            over = self._ended.done()
            lines = outcome_lines.read(self._told)
            own = [line[1:] for line in lines if line[0] == str(file)]
            count = sum(int(text) for event, text in own if event == "collected")
            started = sum(event == "started" for event, _ in own)
            # The test that started last has not ended yet.
            left = count - started + (bool(lines) and lines[-1][0] == str(file))
            if over or (lines and not left):
                break
            time.sleep(_POLL_SECONDS)
        if failures := [text for event, text in own if event == "failed"]:
            said = "\n\n".join(failures).replace("Again: ", self._again)
            pytest.fail(said, pytrace=False)
        if over:
            self._check_end(lines, file, left=left > 0)
        if not count:
            pytest.skip("this job has none of its tests")
        return sum(event == "passed" for event, _ in own)

    def _check_end(
        self, lines: list[tuple[str, str, str]], file: Path, *, left: bool
    ) -> None:
        """Fail if the job broke, and this file has tests left or was running."""
        finished = self._ended.result()
        failed = any(event == "failed" for _, event, _ in lines)
        if finished.returncode in ((1,) if failed else (0, _NO_TESTS)):
            return
        last, event, text = lines[-1] if lines else (str(file), "started", "")
        if left or last == str(file):
            message = f"exit code {finished.returncode} of the job: {event} {text}"
            if last == str(file):
                message += f"\n{finished.stdout}\n{finished.stderr}"
            pytest.fail(message, pytrace=False)


class RankFiles:
    """The jobs of a module's selected tests, which run one at a time."""

    def __init__(self, pool: ThreadPoolExecutor, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._jobs: dict[str, _Job] = {}

    def num_passed(
        self,
        request: pytest.FixtureRequest,
        folder: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        alone: bool = False,
    ) -> int:
        """Run the files of a test's job, once; return how many of its own tests passed.

        The test has the parameters ``n``, the number of ranks, and ``file``, a name in
        the folder. The test fails if a rank test of this file fails, or if the job
        breaks. ``alone`` runs the file in its own job.
        """
        own = request.node.nodeid if alone else job_of(request.node.nodeid)
        alike = [
            item
            for item in request.session.items
            if own in (item.nodeid, job_of(item.nodeid))
        ]
        files = [_path(folder, item) for item in alike]
        if own not in self._jobs:
            told = self._folder / f"{len(self._jobs)}.jsonl"
            n = request.node.callspec.params["n"]
            self._jobs[own] = _Job(self._pool, n, files, options, env or {}, told)
        return self._jobs[own].num_passed(_path(folder, request.node))


def _path(folder: Path, item: Any) -> Path:
    return folder / f"{item.callspec.params['file']}.py"


@pytest.fixture(scope="module")
def rank_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankFiles]:
    """Yield the jobs of a module's tests; wait at the end until all have ended."""
    with ThreadPoolExecutor(1) as pool:
        yield RankFiles(pool, tmp_path_factory.mktemp("jobs"))
