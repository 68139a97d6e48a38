"""Jobs of MPI with arrays on GPUs: CuPy's where there is a GPU, else the stand-in's."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcstrat import testing
from tests.conftest import why_no_gpu

ROOT = Path(__file__).parents[2]
TRANSPORTS = {
    # NCCL, with a GPU for each rank.
    "nccl": {"HPCSTRAT_STANDIN_DEVICES": "4"},
    # Through host memory, where NCCL refuses ranks with the same GPU.
    "host": {"HPCSTRAT_STANDIN_DEVICES": "1", "HPCSTRAT_SHARE_GPUS": "1"},
    # Between workers, by messages of MPI out of the memory of GPUs.
    "mpi": {
        "HPCSTRAT_STANDIN_DEVICES": "1",
        "HPCSTRAT_SHARE_GPUS": "1",
        "HPCSTRAT_MPI_READS_GPU": "yes",
    },
}


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings, and what programs need to find CuPy, or its stand-in."""
    env = {"HPCSTRAT_STANDIN_DELAY": "0.0001", **settings}
    if why_no_gpu():
        paths = [ROOT / "tests/gpu/standin", ROOT, os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, paths)))
        # What was found out with the stand-in, and its kernels, stay apart.
        cache = f"hpcstrat-standin-{os.getuid()}"
        env["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / cache)
    return env


def num_passed(
    n: int, files: Sequence[str], settings: Mapping[str, str], *more: str
) -> int:
    """Run rank tests on n ranks; return how many have passed, and none failed."""
    env = environment(settings)
    # The stand-in's kernels are slower by far than what the tests were made for.
    options = ["--color=no", "-rs", "-o", "faulthandler_timeout=400", *more]
    command = [sys.executable, "-m", "tests.mpi.ranks", *options, *files]
    finished = testing.launch(n, command, timeout=560, env={**os.environ, **env})
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, "a rank test failed; see the report below"
    found = re.search(r"(\d+) passed", finished.stdout)
    assert found is not None
    return int(found[1])
