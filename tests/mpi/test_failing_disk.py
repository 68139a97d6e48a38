"""Disk failures on one rank: all ranks raise, and older checkpoints remain."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mpi.programs.started import start

_SOURCE = Path(__file__).parents[1] / "faults" / "failing.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a compiled library that makes chosen system calls fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: calls of the system cannot be made to fail")
    path = tmp_path_factory.mktemp("library") / "failing.so"
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(_SOURCE), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the C compiler does not make libraries: {done.stderr}")
    return path


# The least number of failures: writes of blocks, flushes of parts and of the file, and
# the calls that only replica 0 makes.
@pytest.mark.parametrize(
    ("how", "least"), [("wait", 18), ("go", 18), ("restore", 8), ("limit", 4)]
)
def test_failing_calls_of_one_rank_are_errors_of_all(
    how: str, least: int, library: Path, tmp_path: Path
) -> None:
    words = (tmp_path / "checkpoints", library, how)
    ended = start(2, "failing_disk.py", *words, limit=300, LD_PRELOAD=str(library))
    assert ended.returncode == 0, ended
    *problems, last = ended.stdout.splitlines()
    assert problems == [], ended
    assert int(last.removeprefix("failures ")) >= least, ended
