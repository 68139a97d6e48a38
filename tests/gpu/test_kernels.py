"""The kernels compared with NumPy, on a GPU or its stand-in, and compiled by NVRTC."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcstrat.engine.gpu import kernels
from tests.gpu.jobs import environment
from tests.gpu.machine_code import ADDED, FLUSHES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAIRS = [
    *[("float32", "float32"), ("float64", "float64"), ("float16", "float32")],
    *[("bfloat16", "float32"), ("complex64", "complex64")],
    *[("complex128", "complex128"), ("int8", "int32"), ("uint16", "int32")],
    *[("int32", "int32"), ("uint64", "uint64"), ("int64", "float64")],
    *[("float16", "float16"), ("bfloat16", "bfloat16")],
]
COMPILE = """
import sys
from cupy_backends.cuda.libs import nvrtc

program = nvrtc.createProgram(sys.stdin.read(), "kernels.cu", [], [])
try:
    nvrtc.compileProgram(program, sys.argv[1:])
finally:
    print(nvrtc.getProgramLog(program).strip("\\0 \\n"), file=sys.stderr)
print(nvrtc.getPTX(program).decode())
"""


@pytest.mark.parametrize(
    "options",
    [["--short"], pytest.param([], marks=pytest.mark.full)],
    ids=["short", "whole"],
)
def test_kernels_agree_with_numpy(options: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    cases = str(HERE / "kernel_cases.py")
    finished = subprocess.run(
        [*command, "--color=no", *options, cases],
        *(),
        cwd=ROOT,
        env=os.environ | environment({}),
        capture_output=True,
        text=True,
        check=False,
        timeout=560,
    )
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, "a test of the kernels failed; see the report"
    assert " passed" in finished.stdout


def nvrtc_version() -> int:
    """Return NVRTC's major version; skip the test if NVRTC cannot be called."""
    if importlib.util.find_spec("cupy_backends") is None:
        pytest.skip("CuPy, through which NVRTC is called, is not installed")
    loads = "from cupy_backends.cuda.libs.nvrtc import *; print(getVersion()[0])"
    found = subprocess.run(
        [sys.executable, "-c", loads], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"NVRTC cannot be loaded: {found.stderr.strip().splitlines()[-1]}")
    return int(found.stdout)


def compiled(stored: str, wire: str, architecture: str) -> str:
    """Return the compiled PTX; allow no warning except for old architectures."""
    options = [*kernels.OPTIONS, ADDED, f"-arch={architecture}"]
    finished = subprocess.run(
        [sys.executable, "-c", COMPILE, *options],
        *(),
        input=kernels.source(stored, wire),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    told = [line for line in finished.stderr.splitlines() if line.strip()]
    assert not [line for line in told if "Architectures prior to" not in line]
    return finished.stdout


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_nvrtc_compiles_for(architecture: str, stored: str) -> None:
    if nvrtc_version() >= 13 and architecture == "sm_70":
        pytest.skip("NVRTC of CUDA 13 knows sm_70 no more")
    compiled(stored, "float32", architecture)


@pytest.mark.parametrize(("stored", "wire"), PAIRS)
def test_nvrtc_compiles_all_types(stored: str, wire: str) -> None:
    nvrtc_version()
    # Compile only to PTX, which takes a fraction of the time.
    code = compiled(stored, wire, "compute_80")
    assert not FLUSHES.search(code), "subnormal numbers are taken for zero"
    assert "st.global.v4" in code, "words of 16 bytes are not stored as such"
