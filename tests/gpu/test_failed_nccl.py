"""A job does not hang where NCCL fails while a program waits for the GPU.

A whole program, launched with a hard limit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat.safety.watchdog.watchdog import EXIT_CODE
from hpcstrat.testing import launch_command
from tests.conftest import why_no_gpu
from tests.gpu.jobs import TRANSPORTS, environment
from tests.mpi.programs.started import run_command

PROGRAM = Path(__file__).parent / "programs/failed_nccl.py"


@pytest.mark.parametrize("n", [2, 3])
def test_the_watchdog_ends_a_job_whose_nccl_has_failed(n: int) -> None:
    """The main thread cannot: CUDA does not return to it."""
    if not why_no_gpu():
        pytest.skip("needs a GPU for each rank")
    env = environment({"HPCSTRAT_DEVICE": "gpu", **TRANSPORTS["nccl"]})
    command = [*launch_command(n), sys.executable, str(PROGRAM)]
    ended = run_command(command, f"{n} ranks", 60, env)
    assert ended.returncode == EXIT_CODE, str(ended)
    assert not ended.survivors, str(ended)
    assert ended.stdout.count("reduced") == n, str(ended)
    assert "ends the job: NCCL has failed" in ended.stderr, str(ended)
    assert "network error), and a kernel" in ended.stderr, str(ended)
    assert "NCCL_DEBUG=INFO" in ended.stderr, str(ended)
