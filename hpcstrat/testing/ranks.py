"""A pytest plugin: ``@pytest.mark.ranks(2, 3)`` runs a test on 2 and on 3 ranks.

For a marked test, the pytest that a user starts runs an MPI job: ``rank_jobs`` starts
mpirun with pytest on each rank, and the ranks' report becomes the report of the test.
The test's fixtures are set up on the ranks only. With ``--in-job``, pytest runs on such
a rank.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.cluster_resolver import launch_from_environment

__all__ = ["job_tmp_path", "num_ranks"]

_TIMEOUT_SECONDS = 60.0
_REPORT = pytest.StashKey[pytest.TestReport]()
_MARKER = (
    "ranks(n, ..., timeout=seconds): run the test in an MPI job of n ranks, which "
    "pytest starts, once for each n"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options for marked tests."""
    group = parser.getgroup("hpcstrat", "tests on several MPI ranks (hpcstrat)")
    group.addoption(
        "--in-job",
        action="store_true",
        help="this process is a rank: run the tests marked with this job's number of "
        "ranks, in it (mpirun -n 3 python -m pytest --in-job)",
    )
    # The plugin passes this option to the ranks that it starts.
    group.addoption("--job-folder", help=argparse.SUPPRESS)
    parser.addini(
        "ranks_timeout",
        "seconds after which a test marked with ranks is ended, start included",
        default=str(_TIMEOUT_SECONDS),
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; on a rank, join the other ranks."""
    config.addinivalue_line("markers", _MARKER)
    if config.option.in_job:
        from hpcstrat.testing import rank_jobs

        rank_jobs.join(config)


def _counts(definition: pytest.Item) -> list[int]:
    """Return the numbers of ranks in a test's marker; an empty list without it."""
    mark = definition.get_closest_marker("ranks")
    if mark is None:
        return []
    unknown = mark.kwargs.keys() - {"timeout"}
    numbers = [n for n in mark.args if type(n) is int and n > 0]
    if not numbers or len(numbers) < len(mark.args) or unknown:
        words = [*map(repr, mark.args), *(f"{k}={v!r}" for k, v in mark.kwargs.items())]
        raise pytest.UsageError(
            "expected numbers of ranks, as in @pytest.mark.ranks(2, 3, timeout=60), "
            f"found @pytest.mark.ranks({', '.join(words)}) at {definition.nodeid}"
        )
    return numbers


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks in the marker."""
    if counts := _counts(metafunc.definition):
        if "num_ranks" not in metafunc.fixturenames:
            metafunc.fixturenames.append("num_ranks")
        ids = [f"{n}-ranks" for n in counts]
        metafunc.parametrize("num_ranks", counts, indirect=True, ids=ids)


def _size(item: pytest.Item) -> int:
    """Return the number of ranks on which a test runs; 0 without the marker."""
    if not _counts(item):
        return 0
    callspec = getattr(item, "callspec", None)
    if callspec is None or "num_ranks" not in callspec.params:
        raise pytest.UsageError(
            f"expected @pytest.mark.ranks at a function or a plain class, found it at "
            f"{item.nodeid}; tests of unittest.TestCase cannot run on ranks"
        )
    return int(callspec.params["num_ranks"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """On a rank, keep tests for its job's size; else drop fixtures of marked tests."""
    sizes = {item: _size(item) for item in items}
    if config.option.in_job:
        here = launch_from_environment().size
        config.hook.pytest_deselected(items=[i for i in items if sizes[i] != here])
        items[:] = [item for item in items if sizes[item] == here]
        return
    if any(sizes.values()):
        from hpcstrat.testing import rank_jobs

        rank_jobs.refuse_ranks()
    for item in items:
        if sizes[item]:
            # The ranks set up the fixtures, so this process must not.
            item.fixturenames.clear()  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test as a job, instead of calling its function here."""
    size = _size(pyfuncitem)
    if not size or pyfuncitem.config.option.in_job:
        return None
    from hpcstrat.testing import rank_jobs

    pyfuncitem.stash[_REPORT] = rank_jobs.run_test(pyfuncitem, size)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace this process's report of a marked test by the report of the ranks."""
    report = yield
    ranks = item.stash.get(_REPORT, None)
    if call.when != "call" or ranks is None:
        return report
    for name in ("outcome", "longrepr", "sections", "wasxfail", "user_properties"):
        if hasattr(ranks, name):
            setattr(report, name, getattr(ranks, name))
    return report


@pytest.fixture
def num_ranks(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks of a test; 1 without the marker."""
    return int(getattr(request, "param", 1))


@pytest.fixture
def job_tmp_path(
    request: pytest.FixtureRequest, num_ranks: int, tmp_path: Path
) -> Iterator[Path]:
    """Yield a folder for the test that all ranks of its job share, on one machine."""
    if num_ranks == 1:
        yield tmp_path
        return
    plugin: Any = request.config.pluginmanager.get_plugin("hpcstrat-ranks-in-step")
    comm = plugin.comm
    name = tempfile.mkdtemp(prefix="hpcstrat-") if comm.rank == 0 else None
    path = Path(comm.bcast(name))
    yield path
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
