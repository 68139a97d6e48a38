"""A job with arrays on GPUs ends even if GPUs fail or hang.

Each case is a whole program, launched with a hard time limit.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.safety.watchdog.watchdog import EXIT_CODE
from hpcstrat.testing import launch_command
from tests.conftest import why_no_gpu
from tests.gpu.jobs import TRANSPORTS, environment
from tests.mpi.programs.started import run_command

PROGRAMS = Path(__file__).parent / "programs"


def _run(n: int, program: str, **settings: str) -> Any:
    """Run a program with NCCL on the stand-in, with some settings."""
    if not why_no_gpu():
        pytest.skip("the program tells the stand-in what its GPUs do")
    env = environment({"HPCSTRAT_DEVICE": "gpu", **TRANSPORTS["nccl"], **settings})
    command = [*launch_command(n), sys.executable, str(PROGRAMS / program)]
    return run_command(command, f"{program}, {n} ranks", 60, env)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 3])
def test_the_watchdog_ends_a_job_whose_nccl_has_failed(n: int) -> None:
    """Only the watchdog can end the job: CUDA does not return to the main thread."""
    ended = _run(n, "failed_nccl.py")
    assert ended.returncode == EXIT_CODE, str(ended)
    assert not ended.survivors, str(ended)
    assert ended.stdout.count("reduced") == n, str(ended)
    assert "ends the job: NCCL has failed" in ended.stderr, str(ended)
    assert "network error), and a kernel" in ended.stderr, str(ended)
    assert "NCCL_DEBUG=INFO" in ended.stderr, str(ended)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_rank_leaves_when_its_gpu_has_done_its_work(n: int) -> None:
    """Each rank waits for its kernels, which other ranks need; then all free NCCL."""
    ended = _run(n, "plain_end.py")
    assert ended.returncode == 0, str(ended)
    assert not ended.survivors, str(ended)
    assert ended.stdout == "sum right: True, NCCL freed: True\n", str(ended)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 3])
def test_the_watchdog_ends_a_job_whose_kernels_stand_still(n: int) -> None:
    """NCCL reports no error, because it checks only networks."""
    ended = _run(n, "stuck_kernel.py")
    assert ended.returncode == EXIT_CODE, str(ended)
    assert not ended.survivors, str(ended)
    assert ended.stdout.count("reduced") == n, str(ended)
    found = r"\d+ s after all ranks had begun it, a call of NCCL has not ended on this "
    found += r"rank's GPU \(last call: reduce.*\)"
    assert re.search(found + "; the job ends after", ended.stderr), str(ended)
    end = r"ends the job: " + found + "; look at the processes and GPUs"
    assert re.search(end, ended.stderr), str(ended)


def test_a_gpu_that_has_failed_ends_the_job_of_a_program_that_has_ended() -> None:
    """The job must fail, because the program's last results may be wrong."""
    ended = _run(2, "fault_at_end.py")
    assert ended.returncode not in (0, None), str(ended)
    assert not ended.survivors, str(ended)
    failed = "ends the job: .*misaligned address"
    assert re.search(failed, ended.stderr), str(ended)
