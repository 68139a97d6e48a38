"""MPI jobs with arrays on GPUs: CuPy's if there is a GPU, else the stand-in's."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hpcstrat import testing
from tests.conftest import num_gpus

ROOT = Path(__file__).parents[2]
_SHARED = {
    "HPCSTRAT_STANDIN_DEVICES": "1",
    "HPCSTRAT_SHARE_GPUS": "1",
    "HPCSTRAT_NCCL": "0",
}
TRANSPORTS = {
    # NCCL, with a GPU for each rank.
    "nccl": {"HPCSTRAT_STANDIN_DEVICES": "4"},
    # Copies through host memory.
    "host": {**_SHARED, "HPCSTRAT_MPI_READS_GPU": "no"},
    # MPI messages directly from GPU memory.
    "mpi": {**_SHARED, "HPCSTRAT_MPI_READS_GPU": "yes"},
}


def why_not(transport: str, n: int, gpus: int, *, standin: bool = False) -> str:
    """Return why a transport cannot serve n ranks on so many GPUs, or ""."""
    if transport == "nccl" and gpus < n:
        return f"NCCL needs a GPU for each of {n} ranks, found {gpus}"
    told = os.environ.get("HPCSTRAT_MPI_READS_GPU") == "yes"
    if transport == "mpi" and not (standin or told):
        # An MPI library without this ability would crash the tests.
        return "needs an MPI that reads the memory of GPUs: HPCSTRAT_MPI_READS_GPU=yes"
    return ""


def require(transport: str, n: int) -> None:
    """Skip a test of n ranks if a transport cannot serve them on this machine."""
    # Without a GPU, the stand-in has all devices that the transports need.
    if num_gpus() and (reason := why_not(transport, n, num_gpus())):
        pytest.skip(reason)


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings and variables with which programs find CuPy, or its stand-in."""
    env = {"HPCSTRAT_STANDIN_DELAY": "0.0001", **settings}
    if not num_gpus():
        paths = [ROOT / "tests/gpu/standin", ROOT, os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, paths)))
        # Keep the stand-in's probe results and kernels in a separate cache.
        cache = f"hpcstrat-standin-{os.getuid()}"
        env["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / cache)
    return env


def job_of_ranks(
    n: int, settings: Mapping[str, str], *more: str
) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the options of a job of rank tests."""
    env = environment(settings)
    if 0 < num_gpus() < n:
        env.setdefault("HPCSTRAT_SHARE_GPUS", "1")
    # The stand-in's kernels are much slower than the GPU kernels the tests assume.
    return env, ["-rs", "-o", "faulthandler_timeout=400", *more]


def num_passed(
    n: int, files: Sequence[str], settings: Mapping[str, str], *more: str
) -> int:
    """Run rank tests on n ranks; return how many passed, or fail if one failed."""
    env, options = job_of_ranks(n, settings, *more)
    words = [sys.executable, "-m", "tests.mpi.ranks", "--color=no", *options, *files]
    finished = testing.launch(n, words, timeout=560, env={**os.environ, **env})
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, "a rank test failed; see the report below"
    found = re.search(r"(\d+) passed", finished.stdout)
    assert found is not None
    return int(found[1])
