"""The code blocks of the page about GPUs, on the stand-in for CuPy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcstrat import testing
from hpcstrat.testing.launcher import clean_environment
from tests.docs.page import runnable

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"
STANDIN = ROOT / "tests" / "gpu" / "standin"


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_run(size: int, tmp_path: Path) -> None:
    assert len(runnable(PAGE, size, "gpu")) >= 4
    words = ["-m", "tests.docs.page", str(tmp_path), str(size), "gpu", str(PAGE)]
    command = [sys.executable, *words]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(STANDIN), str(ROOT)]),
        "HPCSTRAT_STANDIN_DEVICES": "2",
        # Skip the MPI trial, which tests/gpu/test_probe.py covers.
        "HPCSTRAT_MPI_READS_GPU": "no",
    }
    if size > 1:
        done = testing.launch(size, command, timeout=60, env=environment)
    else:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environment(environment),
        )
    assert done.returncode == 0, done.stderr
