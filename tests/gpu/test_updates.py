"""Run the tests of optimizers on a GPU, or with the stand-in for CuPy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.jobs import environment

ROOT = Path(__file__).parents[2]


def test_optimizers_on_a_gpu_or_its_stand_in() -> None:
    options = ["-q", "-p", "no:cacheprovider", "--color=no"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/check_updates.py"]
    done = subprocess.run(
        *(command,),
        cwd=ROOT,
        env=os.environ | environment({}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
