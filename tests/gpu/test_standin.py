"""The stand-in for CuPy behaves as documented, and has no names that CuPy lacks.

Every check runs in a process that has the stand-in on its path, so that no other test
of the suite imports it.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

STANDIN = pathlib.Path(__file__).parent / "standin"
COMPARISON = STANDIN / "standin_checks" / "comparison.py"
TIMEOUT = 60.0


def start(checks, **variables):
    """Start checks in a process that has the stand-in on its path."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("HPCSTRAT_STANDIN") and key != "CUDA_VISIBLE_DEVICES"
    }
    environment |= {"PYTHONPATH": str(STANDIN), **variables}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "standin_checks", *checks],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*checks, **variables):
    """Run checks; return the output of the process."""
    process = start(checks, **variables)
    try:
        output = process.communicate(timeout=TIMEOUT)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


CHECKS = [
    "poison",
    "streams",
    "legacy_stream",
    "events",
    "errors_of_work",
    "loading_waits",
    "freed_memory",
    "copies",
    "refusals",
    "functions",
    "indexing",
    "interfaces",
    "memory",
    "kernels",
]


@pytest.fixture(scope="module")
def outcomes():
    """Run the checks that need no separate process; return the failure of each."""
    return json.loads(run(*CHECKS).splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_one_process(check, outcomes):
    assert not outcomes[check], outcomes[check]


def test_devices():
    run("devices", HPCSTRAT_STANDIN_DEVICES="4", CUDA_VISIBLE_DEVICES="2,0")


def test_a_machine_without_devices_and_nccl():
    run("nothing", HPCSTRAT_STANDIN_NO_DEVICE="1", HPCSTRAT_STANDIN_NCCL="0")


def test_nccl_between_processes():
    run("nccl_first", HPCSTRAT_STANDIN_DEVICES="2")


def test_nccl_refuses_two_ranks_on_one_device():
    run("nccl_shared_device")


def test_nothing_but_what_cupy_has():
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("compares with CuPy itself, which is not installed here")
    described = run("describe")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(COMPARISON)],
        input=described,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_fault_ends_the_context():
    run("death_of_a_context")
