"""The annotated program runs, and its types are right at run time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat import testing


@pytest.mark.parametrize("size", [1, 2])
def test_the_annotated_program_runs(size: int, tmp_path: Path) -> None:
    program = Path(__file__).with_name("program.py")
    command = [sys.executable, str(program), str(tmp_path)]
    done = testing.launch(size, command, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
