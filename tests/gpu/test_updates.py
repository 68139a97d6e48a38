"""Runs the tests of optimizers on a GPU with the stand-in; compiles their kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcstrat.engine.gpu.optimizer_steps import update_kernels
from tests.gpu.jobs import environment
from tests.gpu.machine_code import ADDED, FLUSHES

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


@pytest.mark.parametrize("architecture", ["70", "90"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32", "F64"])
def test_nvrtc_compiles_the_kernels(kind: str, architecture: str) -> None:
    cuda = pytest.importorskip("cupy.cuda", exc_type=ImportError)
    nvrtc = getattr(cuda, "nvrtc", None)
    try:
        version = nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"there is no NVRTC here: {error}")
    if architecture == "70" and version >= (13, 0):
        pytest.skip("CUDA 13 knows no such GPUs any more")
    program = nvrtc.createProgram(update_kernels.source(kind), "updates.cu", (), ())
    options = (*update_kernels.OPTIONS, ADDED, f"--gpu-architecture=sm_{architecture}")
    try:
        nvrtc.compileProgram(program, options)
    except Exception:
        pytest.fail(nvrtc.getProgramLog(program))
    assert len(nvrtc.getCUBIN(program)) > 10_000
    code = nvrtc.getPTX(program).decode()
    assert not FLUSHES.search(code), "subnormal numbers are taken for zero"
