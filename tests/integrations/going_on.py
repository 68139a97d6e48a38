"""The output of an elastic program, in one process and in a job with a killed rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat.testing import launch_command
from tests.mpi.programs.started import run_command

PROGRAMS = Path(__file__).parent / "programs"


def assert_goes_on(name: str) -> None:
    """Assert that two ranks of three print the same results as a single process.

    The results are the numbers of replicas and steps, the loss and the weights.
    """
    program = [sys.executable, str(PROGRAMS / name)]
    told = []
    for command in (program, [*launch_command(3, fault_tolerant=True), *program]):
        ended = run_command(command, name, 150, {})
        lines = [list(map(float, line.split())) for line in ended.stdout.splitlines()]
        told.append(lines)
        assert lines, ended
        assert not ended.survivors, ended
    [alone], left = told
    assert [line[0] for line in left] == [2, 2], told
    for line in left:
        assert line[1:] == pytest.approx(alone[1:], rel=1e-12)
