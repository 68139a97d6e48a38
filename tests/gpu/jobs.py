"""Jobs of MPI with arrays on GPUs: CuPy's where there is a GPU, else the stand-in's."""

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
    # Through host memory.
    "host": {**_SHARED, "HPCSTRAT_MPI_READS_GPU": "no"},
    # By messages of MPI out of the memory of GPUs.
    "mpi": {**_SHARED, "HPCSTRAT_MPI_READS_GPU": "yes"},
}


def why_not(transport: str, n: int, gpus: int, *, standin: bool = False) -> str:
    """Say why a transport cannot serve n ranks on so many GPUs, if it cannot."""
    if transport == "nccl" and gpus < n:
        return f"NCCL needs a GPU for each of {n} ranks, found {gpus}"
    told = os.environ.get("HPCSTRAT_MPI_READS_GPU") == "yes"
    if transport == "mpi" and not (standin or told):
        # A library that cannot would end the tests.
        return "needs an MPI that reads the memory of GPUs: HPCSTRAT_MPI_READS_GPU=yes"
    return ""


def require(transport: str, n: int) -> None:
    """Skip a test of n ranks where a transport cannot serve them on this machine."""
    # Where there is no GPU, the stand-in has what each needs.
    if num_gpus() and (reason := why_not(transport, n, num_gpus())):
        pytest.skip(reason)


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings, and what programs need to find CuPy, or its stand-in."""
    env = {"HPCSTRAT_STANDIN_DELAY": "0.0001", **settings}
    if not num_gpus():
        paths = [ROOT / "tests/gpu/standin", ROOT, os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, paths)))
        # What was found out with the stand-in, and its kernels, stay apart.
        cache = f"hpcstrat-standin-{os.getuid()}"
        env["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / cache)
    return env


def job_of_ranks(
    n: int, settings: Mapping[str, str], *more: str
) -> tuple[dict[str, str], list[str]]:
    """Return the environment, and the options, of a job of rank tests."""
    env = environment(settings)
    if 0 < num_gpus() < n:
        env.setdefault("HPCSTRAT_SHARE_GPUS", "1")
    # The stand-in's kernels are slower by far than what the tests were made for.
    return env, ["-rs", "-o", "faulthandler_timeout=400", *more]


def num_passed(
    n: int, files: Sequence[str], settings: Mapping[str, str], *more: str
) -> int:
    """Run rank tests on n ranks; return how many have passed, and none failed."""
    env, options = job_of_ranks(n, settings, *more)
    words = [sys.executable, "-m", "tests.mpi.ranks", "--color=no", *options, *files]
    finished = testing.launch(n, words, timeout=560, env={**os.environ, **env})
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, "a rank test failed; see the report below"
    found = re.search(r"(\d+) passed", finished.stdout)
    assert found is not None
    return int(found[1])
