"""The TensorFlow program in the guide has the results of the program below it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcstrat.testing.launcher import clean_environment
from tests.docs.page import blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from" / "tf-distribute.md"
ROWS = """
import numpy as np
x = np.random.default_rng(1).normal(size=(1000, 8))
y = x.sum(axis=1)
"""
TOLD = (
    "\nimport json\nprint(json.dumps([float(loss), *weights.numpy().ravel().tolist()]))"
)


def _numbers(code: str) -> list[float]:
    """Run a program, and return the numbers that it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code + TOLD],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        env=clean_environment({"PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow"}),
    )
    assert done.returncode == 0, done.stderr
    numbers: list[float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


@pytest.mark.framework("tensorflow")
def test_both_programs_compute_the_same() -> None:
    found = [b for b in blocks(PAGE.read_text()) if b.language == "python"]
    theirs, ours = found[:2]
    assert "tf.distribute" in theirs.code
    # TensorFlow's learning rate is a float32 number.
    np.testing.assert_allclose(
        _numbers(ours.code), _numbers(ROWS + theirs.code), rtol=1e-6
    )
