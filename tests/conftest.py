"""Configuration of all tests: options, skips, reproducible hypothesis runs."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
from importlib import metadata
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import turns
from tests.durations import Durations
from tests.lanes import LaneScheduling, num_lanes
from tests.reach import selection

_files = pytest.StashKey[list[str]]()
_longer = pytest.StashKey[list[str]]()

# All ranks must draw the same examples, and no test may fail on a slow machine.
hypothesis.settings.register_profile(
    "hpcstrat", derandomize=True, deadline=None, database=None, max_examples=50
)
hypothesis.settings.load_profile("hpcstrat")


# A shell ignores Ctrl-C in background processes. Programs that tests start and
# interrupt would inherit this, so that it is undone here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A run starts about two thousand processes. Without these settings, each process would
# compile the library and the rank tests, if byte code is not kept (as in some container
# images); wait one second in MPI_Init, in which Open MPI searches for libfabric
# networks; keep its core while it waits in MPI, unless its job has more ranks than
# cores; and start threads of linear algebra on cores that the other ranks need.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMPI_MCA_btl", "^ofi")
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Failing jobs would leave files in their working folder.
os.environ.setdefault("HPCSTRAT_HANG_FOLDER", "")
# For small programs, XLA's optimization takes longer than the programs run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# XLA's fusion emitters take half of the remaining time. Check the version, because
# other versions abort on an unknown flag.
if importlib.util.find_spec("jaxlib") and metadata.version("jaxlib") == "0.10.2":
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
# Select an installed backend, because Keras cannot be imported without one.
if importlib.util.find_spec("tensorflow") is None:
    os.environ.setdefault("KERAS_BACKEND", "torch")


def num_gpus() -> int:
    """Return the number of GPUs that CuPy finds on this machine."""
    if why_no_gpu():
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


@functools.cache
def why_no_gpu() -> str:
    """Return the reason why GPU tests cannot run here, or an empty text."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        return f"no CUDA device: {exc}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose GPU or framework is missing, with the reason."""
    if item.get_closest_marker("gpu") and why_no_gpu():
        pytest.skip(why_no_gpu())
    for mark in item.iter_markers("framework"):
        for name in mark.args:
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is not installed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command line options of these tests."""
    parser.addoption(
        "--short",
        action="store_true",
        help="run rank tests only at the sizes and in the layouts where they can fail",
    )
    parser.addoption(
        "--layout",
        help="run rank tests that have layouts in this one only; see their conftest.py",
    )
    parser.addoption(
        "--for",
        dest="modules",
        action="append",
        metavar="hpcstrat/PATH.py",
        help="run the tests of a module only: see tests/reach",
    )
    parser.addoption(
        "--keep-durations",
        action="store_true",
        help="write what tests took to tests/durations.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins for durations, and for selection by module."""
    config.pluginmanager.register(Durations(), "durations")
    try:
        turns.turn_of_environment()
    except ValueError as exc:
        raise pytest.UsageError(str(exc)) from None
    if modules := config.getoption("modules"):
        try:
            files = selection.files_for(modules)
        except ValueError as exc:
            raise pytest.UsageError(str(exc)) from None
        config.stash[_files] = files
        paths = map(selection.path_of, modules)
        jobs = {job for path in paths for job in selection.jobs_of(path)}
        config.stash[_longer] = sorted(jobs - {*files})
        config.args = selection.arguments_for(files)
        config.args_source = pytest.Config.ArgsSource.ARGS


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return header lines: a module's test files, the omitted slow files, the turn."""
    files, longer = config.stash.get(_files, []), config.stash.get(_longer, [])
    lines = [f"tests: {file}" for file in files]
    lines += [f"longer: {file}" for file in longer]
    if turn := turns.turn_of_environment():
        text = "turn {} of {} of the long tests; unset {} to run all"
        lines.append(text.format(*turn, turns.VARIABLE))
    return lines


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Deselect the rank tests of other modules, and long tests of other turns."""
    unwanted = set[pytest.Item]()
    if files := config.stash.get(_files, None):
        unwanted |= set(selection.unwanted(items, files))
    if turn := turns.turn_of_environment():
        names = turns.unwanted([item.nodeid for item in items], *turn)
        unwanted |= {item for item in items if item.nodeid in names}
    if unwanted:
        config.hook.pytest_deselected(items=list(unwanted))
        items[:] = [item for item in items if item not in unwanted]


def pytest_collection_finish() -> None:
    """Exclude all collected objects from garbage collection.

    These objects live until the end of the run, and each collection would visit them.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the whole suite in lanes."""
    return num_lanes(config)


def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Any
) -> LoadScopeScheduling | None:
    """Share tests among the lanes, unless ``--dist`` asks for something else."""
    automatic = config.option.dist == "load"
    return LaneScheduling(config, log) if automatic else None
