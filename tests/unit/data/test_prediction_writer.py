"""Predictions of a program that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcstrat.data import Dataset, PredictionWriter
from hpcstrat.strategies import get_strategy

KILLED = """
import os, signal, sys
import numpy as np
from hpcstrat.data import PredictionWriter
from hpcstrat.strategies import get_strategy
writer = PredictionWriter(get_strategy(), 9, np.zeros(2), sys.argv[1])
writer.add([3, 1], np.full((2, 2), 7.0))
writer.flush()
writer.add([5], np.full((1, 2), 8.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("name", ["predictions.h5", "predictions.zarr"])
def test_a_killed_program_goes_on_with_the_rows_that_are_left(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert done.returncode == -signal.SIGKILL
    writer = PredictionWriter(get_strategy(), 9, np.zeros(2), path)
    # Row 5 may be in the file, but only a flush promises it.
    assert writer.remaining.tolist() == [0, 2, 4, 5, 6, 7, 8]
    for rows in Dataset(writer.remaining).batch(4):
        writer.add(rows, np.stack([rows, -rows], axis=1).astype(float))
    assert writer.result() is None
    found = next(iter(Dataset.from_files(path, columns="predictions").batch(9)))
    expected = np.stack([np.arange(9.0), -np.arange(9.0)], axis=1)
    expected[[1, 3]] = 7
    np.testing.assert_array_equal(found, expected)
