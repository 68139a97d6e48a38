"""Run the tests of optimizers on a GPU, or with the stand-in for CuPy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.jobs import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "options",
    [["--short"], pytest.param([], marks=pytest.mark.full)],
    ids=["short", "whole"],
)
def test_optimizers_on_a_gpu_or_its_stand_in(options: list[str]) -> None:
    words = ["-q", "-p", "no:cacheprovider", "--color=no", *options]
    command = [sys.executable, "-m", "pytest", *words, "tests/gpu/check_updates.py"]
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
