"""The layouts of workers that each rank test runs in, with their strategies."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.cluster_resolver import launch_from_environment
from tests.spins import keep_spins_short


@dataclass(frozen=True)
class Layout:
    """The division of a job's ranks into workers; with None, all are one worker."""

    name: str
    replicas_per_worker: int | None

    def make_strategy(self, **options: Any) -> Any:
        """Return a new strategy over all ranks; collective over the job."""
        import hpcstrat as hs

        if self.replicas_per_worker is None:
            return hs.MirroredStrategy(**options)
        return hs.MultiWorkerMirroredStrategy(
            replicas_per_worker=self.replicas_per_worker, **options
        )

    def make_topology(self, **options: Any) -> Any:
        """Return a new topology over all ranks; collective over the job."""
        from hpcstrat.engine.topology.topology import Topology

        return Topology(replicas_per_worker=self.replicas_per_worker, **options)


MOST_LONELY_WORKERS = 3
LAYOUTS = (
    Layout("one_worker", None),
    Layout("one_replica_per_worker", 1),
    Layout("two_replicas_per_worker", 2),
)


# For each marker of a test: the numbers of ranks at which the test can fail in a new
# way, and the layouts to run there (None: all). A "rule" of values needs one replica, a
# worker of 2 replicas, and workers of unequal size. An "algorithm", a header or a wait
# needs first, last and middle ranks and workers, which exist from 3 ranks on, and
# workers of several ranks, which exist at 4. Tests of "calls", errors and waits of any
# algorithm need one worker, and workers of 2 replicas and of one. A "files" test needs
# one replica, and workers of 2 replicas and of one. A test that takes seconds and fails
# everywhere, if it fails, runs "once".
CAN_FAIL: dict[str, dict[int, tuple[str, ...] | None]] = {
    "rule": {1: None, 2: ("one_worker",), 3: ("two_replicas_per_worker",)},
    "files": {1: None, 3: ("two_replicas_per_worker",)},
    "algorithm": {
        3: ("one_worker", "one_replica_per_worker"),
        4: ("two_replicas_per_worker",),
    },
    "calls": {3: ("one_worker", "two_replicas_per_worker")},
    "once": {3: ("two_replicas_per_worker",)},
}


def _layout(item: pytest.Item) -> str | None:
    """Return the name of a test's layout, if it has one."""
    callspec = getattr(item, "callspec", None)
    layout = callspec.params.get("topology_layout") if callspec else None
    return layout and layout.name


def _can_fail(item: pytest.Item, size: int) -> bool:
    """Return whether a test can fail in a new way at this size and in its layout."""
    kinds = {mark.name for mark in item.iter_markers()} & CAN_FAIL.keys()
    if "once" in kinds:
        kinds = {"once"}
    layout = _layout(item)
    for kind in kinds:
        layouts = CAN_FAIL[kind].get(size, ())
        if layouts is None or (layout in layouts if layout else layouts):
            return True
    return not kinds


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """With ``--short``, deselect tests that cannot fail in a new way at this size."""
    kept, size = items, launch_from_environment().size
    if config.getoption("short"):
        kept = [item for item in kept if _can_fail(item, size)]
    if wanted := config.getoption("layout"):
        kept = [item for item in kept if _layout(item) in (None, wanted)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
    items[:] = kept


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize ``topology_layout`` with the layouts that differ at this size."""
    if "topology_layout" not in metafunc.fixturenames:
        return
    size = launch_from_environment().size
    # A layout whose single worker has all ranks equals the first layout.
    layouts = [one for one in LAYOUTS if (one.replicas_per_worker or 0) < size]
    if size > MOST_LONELY_WORKERS:
        # 2 and 3 workers of one replica find as many errors as more workers, in less
        # time.
        layouts = [one for one in layouts if one.replicas_per_worker != 1]
    # Use function scope: with session scope, pytest would reorder the tests by layout.
    metafunc.parametrize(
        "topology_layout", layouts, ids=lambda layout: layout.name, scope="function"
    )


@pytest.fixture(scope="session", autouse=True)
def short_spins(request: pytest.FixtureRequest) -> None:
    """With ``--short``, make ranks sleep soon instead of spinning (tests/spins.py)."""
    if request.config.getoption("short"):
        keep_spins_short()


@pytest.fixture(scope="session")
def kept_strategies() -> Iterator[dict[str, Any]]:
    """Yield the shared strategies of the layouts, and close them after all tests."""
    strategies: dict[str, Any] = {}
    yield strategies
    for strategy in strategies.values():
        strategy.close()


@pytest.fixture
def strategy(topology_layout: Layout, kept_strategies: dict[str, Any]) -> Any:
    """Return the strategy of the layout, which tests share and must leave usable."""
    if topology_layout.name not in kept_strategies:
        kept_strategies[topology_layout.name] = topology_layout.make_strategy()
    return kept_strategies[topology_layout.name]


@pytest.fixture
def topology(topology_layout: Layout) -> Iterator[Any]:
    """Yield a topology of the layout, and close it after the test."""
    topology = topology_layout.make_topology()
    yield topology
    topology.close()


@pytest.fixture(scope="session")
def job() -> Any:
    """Return the communicator of all ranks of the job, for the tests' own calls."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def make_strategy(topology_layout: Layout) -> Callable[..., Any]:
    """Return a function that makes more strategies of the layout."""
    return topology_layout.make_strategy


@pytest.fixture
def folder(job: Any) -> Iterator[Path]:
    """Yield a folder that all ranks can see, and remove it at the end."""
    name = tempfile.mkdtemp(prefix="hpcstrat-") if job.rank == 0 else None
    path = Path(job.bcast(name))
    yield path
    job.Barrier()
    if job.rank == 0:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def strategies(job: Any) -> Iterator[dict[int, Any]]:
    """Yield strategies over the first k ranks, for each k that includes this rank."""
    import hpcstrat

    made, parts = {}, []
    for count in range(1, job.size + 1):
        part = job.Split(int(job.rank >= count), job.rank)
        parts.append(part)
        if job.rank < count:
            made[count] = hpcstrat.MultiWorkerMirroredStrategy(comm=part)
    yield made
    for strategy in made.values():
        strategy.close()
    for part in parts:
        part.Free()
