"""The pytest plugin that runs tests with a mark on the marked numbers of ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcstrat.testing.launcher import clean_environment, launch_command

CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--word", default="none")

@pytest.fixture(autouse=True)
def only_on_ranks(request, num_ranks):
    from hpcstrat.cluster_resolver import launch_from_environment

    assert launch_from_environment().size == num_ranks
    print("made on", launch_from_environment().rank)

@pytest.fixture
def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD
"""
# Ranks that wait for long do so in naps, so that other jobs have their cores.
TESTS = """
import os
import time

import pytest

pytestmark = pytest.mark.ranks(2)


def nap_until_all_come(comm):
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("factor", [2])
def test_sum(comm, num_ranks, factor, request):
    assert request.config.option.word == "given"
    assert comm.allreduce(factor) == num_ranks * factor


class TestFolders:
    def test_folders(self, comm, job_tmp_path, tmp_path):
        (job_tmp_path / str(comm.rank)).touch()
        comm.Barrier()
        assert len(list(job_tmp_path.iterdir())) == 2
        assert len(set(comm.allgather(tmp_path))) == 2


def test_one_is_wrong(comm):
    print("printed by", comm.rank)
    assert comm.rank == 0, "a wrong rank"


def test_one_raises_and_one_waits(comm):
    if comm.rank == 1:
        raise ValueError("a broken rank")
    nap_until_all_come(comm)


@pytest.mark.ranks(2, timeout=25)
def test_one_stays_away(comm):
    if comm.rank == 1:
        time.sleep(600)
    nap_until_all_come(comm)


def test_one_dies(comm):
    if comm.rank == 1:
        os._exit(3)
    comm.Barrier()


def test_some_skip(comm):
    if comm.rank == 1:
        pytest.skip("not here")


@pytest.fixture
def broken(comm):
    assert comm.rank == 1, "a broken fixture"


def test_fixture_breaks(broken):
    pass


def test_all_skip():
    pytest.skip("nowhere")


@pytest.mark.skipif(True, reason="of the mark")
def test_no_job():
    raise AssertionError


@pytest.mark.xfail(strict=True)
def test_expected_to_fail(comm):
    assert comm.rank == 2
"""
OUTCOMES = {
    "test_sum[1-ranks-2]": "PASSED",
    "test_sum[3-ranks-2]": "PASSED",
    "TestFolders::test_folders[2-ranks]": "PASSED",
    "test_one_is_wrong[2-ranks]": "FAILED",
    "test_one_raises_and_one_waits[2-ranks]": "FAILED",
    "test_one_stays_away[2-ranks]": "FAILED",
    "test_one_dies[2-ranks]": "FAILED",
    "test_some_skip[2-ranks]": "FAILED",
    "test_fixture_breaks[2-ranks]": "FAILED",
    "test_all_skip[2-ranks]": "SKIPPED",
    "test_no_job[2-ranks]": "SKIPPED",
    "test_expected_to_fail[2-ranks]": "XFAIL",
}
PLUGIN = ("-p", "hpcstrat.testing.ranks", "-p", "no:zarr")


def _pytest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *PLUGIN, *words]
    return _done(folder, command)


def _done(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env=clean_environment(),
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a project of tests, which run in several processes."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -n 2 --strict-markers -rA\n"
    )
    (folder / "test_on_ranks.py").write_text(TESTS)
    return folder


@pytest.fixture(scope="module")
def run(project: Path) -> subprocess.CompletedProcess[str]:
    """Run the project's tests once."""
    return _pytest(project, "--word=given", "-v", "--color=no")


Section = Callable[[str], str]


@pytest.fixture
def section(run: subprocess.CompletedProcess[str]) -> Section:
    """Return a function that finds pytest's report of a failed test."""

    def find(name: str) -> str:
        found = re.search(
            rf"^_+ {name}\[2-ranks\] _+\n(.*?)^(?:_{{5}}|={{5}})",
            run.stdout,
            re.M | re.S,
        )
        assert found, run.stdout
        return found[1]

    return find


def test_each_test_has_the_outcome_of_its_ranks(
    run: subprocess.CompletedProcess[str],
) -> None:
    found = re.findall(
        r"(PASSED|FAILED|SKIPPED|XFAIL) test_on_ranks.py::(.*?) *$",
        re.sub(r"^\[gw\d\] \[ *\d+%\] ", "", run.stdout, flags=re.M),
        re.M,
    )
    outcomes = {name.split(" - ")[0]: outcome for outcome, name in found}
    assert outcomes == OUTCOMES, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "test_one_is_wrong",
            (
                "=== rank 1 of 2: AssertionError: a wrong rank",
                "printed by 1",
                "made on 1",
            ),
        ),
        (
            "test_one_raises_and_one_waits",
            (
                "rank [1] failed",
                "ValueError: a broken",
                "rank 0: stacks",
                "in test_one_raises_and_one_waits",
            ),
        ),
        (
            "test_one_stays_away",
            (
                "within 25 s",
                "rank 0: stacks",
                "rank 1: stacks",
                "in test_one_stays_away",
            ),
        ),
        ("test_one_dies", ("exit code is 3",)),
        ("test_some_skip", ("passed on this rank", "skipped on this rank")),
        ("test_fixture_breaks", ("rank 0 of 2: AssertionError: a broken fixture",)),
    ],
)
def test_a_failure_is_shown_with_its_rank_and_how_to_run_it_again(
    section: Section, name: str, expected: tuple[str, ...]
) -> None:
    text = section(name)
    for words in expected:
        assert words in text
    assert f"-n 2 python -m pytest --in-job 'test_on_ranks.py::{name}[2-ranks]'" in text
    assert "_pytest/runner.py" not in text


def test_ranks_started_by_hand_run_the_tests_of_their_number(project: Path) -> None:
    words = [sys.executable, "-m", "pytest", "--in-job", *PLUGIN, "--word=given"]
    words += ["--color=no"]
    done = _done(project, [*launch_command(3), *words])
    assert "1 passed, 11 deselected" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("test session starts") == 1


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("@pytest.mark.ranks\ndef test_none(): pass", "expected numbers of ranks"),
        ("@pytest.mark.ranks(0)\ndef test_zero(): pass", "mark.ranks(0)"),
        ("@pytest.mark.ranks(2, limit=1)\ndef test_limit(): pass", "limit=1"),
        (
            "import unittest\n@pytest.mark.ranks(2)\n"
            "class TestCase(unittest.TestCase):\n    def test_it(self): pass",
            "unittest.TestCase cannot",
        ),
    ],
)
def test_a_wrong_mark_is_an_error_at_collection(
    tmp_path: Path, test: str, words: str
) -> None:
    (tmp_path / "test_wrong.py").write_text(f"import pytest\n{test}\n")
    done = _pytest(tmp_path)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr


def test_ranks_of_a_job_do_not_start_jobs_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.ranks(2)\ndef test_it(): pass\n"
    )
    words = [*launch_command(2), sys.executable, "-m", "pytest", *PLUGIN]
    done = _done(tmp_path, words)
    assert done.returncode != 0
    assert "mpirun ... python -m pytest --in-job" in done.stdout + done.stderr
