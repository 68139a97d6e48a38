"""Run the rank tests of tests/mpi with arrays on GPUs in MPI jobs of 1 to 4 ranks.

With a GPU, CuPy runs on the GPUs of this machine, which the ranks share if there are
fewer GPUs than ranks. Without a GPU, the stand-in for CuPy runs. Tests without a
meaning for arrays on GPUs are listed in tests/gpu/ranks/exceptions.py, and skipped with
the reason. By default a sample runs; after a change to a transport, run all of it: ``-m
full -k nccl``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcstrat.errors import HpcstratError
from hpcstrat.testing.launcher import find_launcher
from tests.gpu.jobs import TRANSPORTS, job_of_ranks, num_passed, require
from tests.mpi.rank_files import RankFiles, rank_files

__all__ = ["rank_files"]

HERE = Path(__file__).parent
RANKS = HERE.parent / "mpi/ranks"
OWN = HERE / "ranks"

# Files that make no arrays, or that test types only NumPy has.
WITHOUT_ARRAYS = {"arrivals", "elastic", "equal", "harness", "settings", "topology"}
WITHOUT_ARRAYS |= {"central_storage", "variables_as_arrays"}
# Files about arrays in host memory, or NumPy's arithmetic; see check_results.py.
WITHOUT_ARRAYS |= {"arrays", "casting", "errstate", "order"}
# See check_device_logical.py; optimizers do not divide the state of GPU variables.
WITHOUT_ARRAYS |= {"logical", "sharded"}
FILES = {path.stem.removeprefix("check_"): path for path in RANKS.rglob("check_*.py")}
EVERYTHING = sorted(FILES.keys() - WITHOUT_ARRAYS)


@pytest.fixture(autouse=True)
def launcher() -> str:
    """Return the path of mpirun, or skip the test if there is no mpirun."""
    try:
        return find_launcher()
    except HpcstratError as exc:
        pytest.skip(str(exc))


def _passed(n: int, transport: str, files: list[str], *options: str) -> int:
    """Run files on n ranks; return how many tests passed, or fail if one failed."""
    require(transport, n)
    # Make variables on the GPU, even from Python numbers.
    arrays = {"HPCSTRAT_TEST_ARRAYS": "gpu", "HPCSTRAT_DEVICE": "gpu"}
    arrays |= {"HPCSTRAT_TEST_TRANSPORT": transport, **TRANSPORTS[transport]}
    return num_passed(n, files, arrays, *options)


def _paths(names: list[str]) -> list[str]:
    return [str(FILES[name]) for name in names]


FULL = pytest.mark.full
# The layouts in which a job uses each transport.
NEAR = "--short", "--layout=one_worker"
APART = ("--layout=one_replica_per_worker",)
UNEVEN = "--short", "--layout=two_replicas_per_worker"


@pytest.mark.parametrize(
    ("n", "transport", "options", "names"),
    [
        (1, "host", NEAR, ["contexts", "optimizers"]),
        pytest.param(2, "nccl", NEAR, ["reductions", "optimizers"], marks=FULL),
        pytest.param(2, "mpi", APART, ["contexts"], marks=FULL),
        (2, "host", NEAR, ["metrics"]),
        pytest.param(3, "host", UNEVEN, ["checkpoint"], marks=FULL),
        pytest.param(3, "host", UNEVEN, ["non_finite"], marks=FULL),
    ],
    ids=lambda value: value[-1][9:] if isinstance(value, tuple) else None,
)
def test_a_sample_of_the_rank_tests_passes_on_gpus(
    n: int, transport: str, options: tuple[str, ...], names: list[str]
) -> None:
    assert _passed(n, transport, _paths(names), *options) >= len(names)


@pytest.mark.parametrize(
    ("n", "transport"),
    [
        (2, "nccl"),
        pytest.param(1, "host", marks=FULL),
        pytest.param(3, "mpi", marks=FULL),
    ],
)
def test_arrays_of_the_rank_tests_are_on_gpus(n: int, transport: str) -> None:
    files = sorted(str(path) for path in OWN.glob("check_*.py"))
    assert _passed(n, transport, files) >= len(files)


# Tests whose subject exists only with arrays on GPUs.
TRANSPORT_TESTS = [
    f"check_{name}"
    for name in (
        "results",
        "borrowing",
        "ring",
        "nccl",
        "staging",
        "moves",
        "frameworks",
    )
]
# These tests keep strategies with special settings open, so each file needs a job.
DEVICE_TESTS = [
    f"check_{name}"
    for name in (
        "binding",
        "device_checkpoints",
        "device_data",
        "device_jax",
        "device_logical",
        "device_metrics",
        "device_optimizers",
        "device_torch",
    )
]


def _pass(rank_files: RankFiles, request: pytest.FixtureRequest, *options: str) -> None:
    """Assert that the tests of a file pass, in a separate job if the file needs one."""
    n, file = (request.node.callspec.params[name] for name in ("n", "file"))
    env, words = job_of_ranks(n, {}, *options)
    alone = file in DEVICE_TESTS
    rank_files.num_passed(request, HERE, *words, env=env, alone=alone)


@pytest.mark.parametrize(
    ("n", "file"),
    [
        *[(2, file) for file in TRANSPORT_TESTS],
        (3, "check_ring"),
        pytest.param(3, "check_staging", marks=FULL),
    ],
)
def test_transport_tests_pass(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    _pass(rank_files, request, "--short")


@pytest.mark.parametrize(
    ("n", "file"),
    [
        *[(2, file) for file in DEVICE_TESTS],
        pytest.param(1, "check_binding", marks=FULL),
        pytest.param(1, "check_device_checkpoints", marks=FULL),
    ],
)
def test_device_tests_pass(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    # Layouts matter little on one GPU; the tests of transports have their own layouts.
    layout = NEAR[1:] if file != "check_binding" else ()
    _pass(rank_files, request, "--short", *layout)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_frameworks_compute_on_gpus(n: int, library: str) -> None:
    module = pytest.importorskip(library)
    if not (module.cuda.is_available() if library == "torch" else _jax_has_gpu()):
        pytest.skip(f"{library} was built without CUDA")
    files = [str(HERE / f"check_{library}_on_gpu.py")]
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert num_passed(n, files, env, *NEAR[1:]) >= 5


def _jax_has_gpu() -> bool:
    """Return whether JAX computes on a GPU, asked in a process of its own."""
    words = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return said.strip() == "gpu"


@pytest.mark.full
@pytest.mark.parametrize("file", [*TRANSPORT_TESTS, *DEVICE_TESTS])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_device_tests_pass(
    rank_files: RankFiles, request: pytest.FixtureRequest, n: int, file: str
) -> None:
    _pass(rank_files, request)


@pytest.mark.full
@pytest.mark.parametrize("part", range(7))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_rank_tests_pass_on_gpus(n: int, transport: str, part: int) -> None:
    assert _passed(n, transport, _paths(EVERYTHING[part::7]))
