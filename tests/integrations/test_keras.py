"""Run the rank tests of Keras' integration, with each backend in separate jobs."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.mpi.rank_files import RankFiles, names_in, rank_files

__all__ = ["rank_files"]

RANKS = Path(__file__).parent / "ranks"
pytestmark = pytest.mark.framework("keras")

# PyTorch, which compiles nothing, runs all tests on two ranks. The other jobs run only
# tests of code that differs between backends.
CHOSEN = {
    ("torch", 2): "",
    ("jax", 2): "fit_is or infinite or goes_on or in_a_scope_is or data_of_fit "
    "or py_datasets or arrays_begin",
    ("tensorflow", 2): "fit_is or own or infinite or mask or of_all or goes_on "
    "or in_a_scope_is or data_of_fit or py_datasets or targets_of_fit",
}


# The layout changes the strategy's code, which tests/mpi tests, but little of the
# integration's, so that each backend takes one.
LAYOUTS = {"torch": "one_worker", "jax": "one_replica_per_worker"}

# Tests of logical replicas run last, and need these limits on threads of XLA and
# TensorFlow from the start.
ENVIRONMENT = {"NPROC": "1", "TF_NUM_INTRAOP_THREADS": "1"}


@pytest.mark.parametrize("file", names_in(RANKS, "check_keras_*.py"))
@pytest.mark.parametrize(("backend", "n"), CHOSEN)
def test_rank_tests_pass(
    rank_files: RankFiles,
    request: pytest.FixtureRequest,
    backend: str,
    n: int,
    file: str,
) -> None:
    words = CHOSEN[backend, n]
    options = ["-m", "not slow and not full", *(["-k", words] if words else [])]
    layout = f"--layout={LAYOUTS.get(backend, 'one_worker')}"
    _pass(rank_files, request, backend, layout, *options)


@pytest.mark.full
@pytest.mark.parametrize("file", names_in(RANKS, "check_keras_*.py"))
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_rank_tests_pass_everywhere(
    rank_files: RankFiles,
    request: pytest.FixtureRequest,
    backend: str,
    n: int,
    file: str,
) -> None:
    _pass(rank_files, request, backend)


def _pass(
    rank_files: RankFiles, request: pytest.FixtureRequest, backend: str, *options: str
) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    env = ENVIRONMENT | {"KERAS_BACKEND": backend}
    rank_files.num_passed(request, RANKS, *options, env=env)


def test_the_library_loads_keras_only_when_asked() -> None:
    program = (
        "import sys, hpcstrat as hs; hs.ReduceOp; assert 'keras' not in sys.modules; "
        "import hpcstrat.integrations.frameworks; assert 'keras' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_scopes_change_no_import_of_programs_without_keras() -> None:
    program = (
        "import sys, hpcstrat as hs\n"
        "finders = [*sys.meta_path]\n"
        "strategy = hs.OneDeviceStrategy()\n"
        "with strategy.scope():\n"
        "    assert sys.meta_path == finders, sys.meta_path\n"
        "assert sys.meta_path == finders, sys.meta_path\n"
        "found = {n for n in sys.modules if n.startswith('hpcstrat.integrations')}\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
