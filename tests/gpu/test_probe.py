"""The trial of MPI, and the doctor, as real programs on the stand-in for CuPy.

With the stand-in, GPU memory is host memory, so every MPI library can move it. A
program that crashes or hangs in the call simulates a library without support.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcstrat.engine.gpu.probe.launching import scrubbed
from hpcstrat.testing import launch_command

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 150

# The real program, with MPI calls that crash or hang like an unsupported call.
FAULTY = """
import ctypes, sys, time
from hpcstrat.engine.gpu.probe import probe_program
from hpcstrat.engine.gpu.probe.probe_program import _TrialRank

def crash(trial, nbytes):
    return ctypes.string_at(0) if nbytes > 8 else ""

def wrong(trial, nbytes):
    memory = trial._device(trial._pattern(nbytes, 0))
    return trial._compare(memory, trial._pattern(nbytes, 1))

def wait(trial, nbytes):
    # The other rank waits in its call, this one does not come.
    return time.sleep(60) if trial._rank else real(trial, nbytes)

real = _TrialRank._broadcast
_TrialRank._broadcast = wait
_TrialRank._sendrecv = wrong
_TrialRank._allreduce = crash
probe_program._LIMIT_SECONDS = 3.0
sys.exit(probe_program.main())
"""

REPORT = """
import json, sys
from hpcstrat.engine.gpu.probe.probe import probe, save
from hpcstrat.engine.gpu.probe.probe_program import library_version
options = {"program": sys.argv[1:]} if sys.argv[1:] else {}
report = probe(library_version(), **options)
assert save(report) == ""
answers = {name: [a.ok, a.reason] for name, a in report.answers.items()}
print(json.dumps([report.how, answers]))
"""

STRATEGY = """
import cupy, logging, sys
import hpcstrat as hs
from hpcstrat.engine.gpu.capabilities import gather
with hs.MultiWorkerMirroredStrategy() as strategy:
    able = gather(strategy.topology)
    assert able.num_gpus == strategy.num_replicas_in_sync
    place = strategy.device, cupy.cuda.Device().id, strategy.topology.gpu.pci_bus_id
    places = strategy.collectives.all_gather_object(place, "test")
    hs.print_once(places)
    hs.print_once(able.explain())
"""


# Print the GPU of each rank when MPI starts, and later whether it is the same.
EARLY = """
import cupy, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import hpcstrat as hs
early = []

import hpcstrat.engine.topology.starting
start = hpcstrat.engine.topology.starting._initialize

def initialize(*arguments):
    early.append(cupy.cuda.Device().id)
    start(*arguments)

hpcstrat.engine.topology.starting._initialize = initialize
with hs.MultiWorkerMirroredStrategy() as strategy:
    place = early, cupy.cuda.Device().id
    hs.print_once(strategy.collectives.all_gather_object(place, "test"))
"""

# Simulate two packages of CuPy, without the headers that its kernels include.
BROKEN = """
from hpcstrat.cli import main
from hpcstrat.tools.doctor import examination
version = examination._version
examination._version = lambda name: "14.2" if "cupy-" in name else version(name)
examination._KERNELS = (
    "raise ValueError('half.cuh(19): catastrophic error: cannot open\\\\nterminated.')"
)
main()
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a command with the stand-in and a separate cache."""

    def start(
        *command: str, devices: int = 2, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(ROOT / "tests" / "gpu" / "standin"), str(ROOT)])
        return subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            env={
                **scrubbed(os.environ),
                "PYTHONPATH": paths,
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                "HPCSTRAT_STANDIN_DEVICES": str(devices),
                **variables,
            },
        )

    return start


Run = Callable[..., subprocess.CompletedProcess[str]]
PYTHON = (sys.executable, "-c")
DOCTOR = (sys.executable, "-c", "from hpcstrat.cli import main; main()", "doctor")


def test_every_operation_is_tried_by_two_ranks(run: Run, tmp_path: Path) -> None:
    done = run(*PYTHON, REPORT)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 2 GPUs of one host" in done.stdout
    assert done.stdout.count("[true, ") == 6
    assert len(list((tmp_path / "cache" / "hpcstrat").iterdir())) == 1


def test_crash_hang_and_wrong_contents_are_answers(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "faulty.py"
    program.write_text(FAULTY)
    done = run(*PYTHON, REPORT, str(program))
    assert done.returncode == 0, done.stderr
    assert "ended by SIGSEGV in Allreduce of 64 KiB" in done.stdout
    assert "the process hung in Bcast of 8 B" in done.stdout
    assert "(Sendrecv of 8 B)" in done.stdout
    assert '"exchange": [false, "not tried, because sendrecv failed"]' in done.stdout
    assert '"send": [true, ' in done.stdout


def test_first_strategy_of_a_job_tries_mpi_before_it_starts(
    run: Run, tmp_path: Path
) -> None:
    # A child that acts as a rank of the job would make all ranks hang.
    done = run(*launch_command(2), *PYTHON, STRATEGY)
    assert done.returncode == 0, done.stderr
    assert "mpi_allreduce: yes, tried on" in done.stdout
    assert "('GPU:0', 0, '0000:01:00.0'), ('GPU:1', 1, '0000:02:00.0')" in done.stdout
    kept = list((tmp_path / "cache" / "hpcstrat").iterdir())
    assert len(kept) == 1
    before = kept[0].stat().st_mtime_ns
    again = run(*launch_command(2), *PYTHON, STRATEGY)
    assert again.returncode == 0, again.stderr
    assert kept[0].stat().st_mtime_ns == before


def test_ranks_have_their_gpus_when_mpi_starts(run: Run) -> None:
    command = [*launch_command(2), *PYTHON, EARLY]
    done = run(*command, HPCSTRAT_MPI_READS_GPU="no")
    assert done.returncode == 0, done.stderr
    assert "[([0], 0), ([1], 1)]" in done.stdout
    # The GPU that the program chose stays selected.
    chosen = "import cupy; cupy.cuda.Device(1).use()\n"
    settings = {"HPCSTRAT_MPI_READS_GPU": "no", "HPCSTRAT_SHARE_GPUS": "1"}
    done = run(*launch_command(2), *PYTHON, chosen + EARLY, **settings)
    assert done.returncode == 0, done.stderr
    assert "[([1], 1), ([1], 1)]" in done.stdout
    named = EARLY.replace("MultiWorker", "").replace(
        "Strategy()", "Strategy(['GPU:1', 'GPU:0'])"
    )
    done = run(*launch_command(2), *PYTHON, named, HPCSTRAT_MPI_READS_GPU="no")
    assert done.returncode == 0, done.stderr
    assert "[([1], 1), ([0], 0)]" in done.stdout


def test_setting_comes_before_the_trial(run: Run, tmp_path: Path) -> None:
    done = run(*launch_command(2), *PYTHON, STRATEGY, HPCSTRAT_MPI_READS_GPU="no")
    assert done.returncode == 0, done.stderr
    assert "mpi_sendrecv: no, the setting mpi_reads_gpu is 'no'" in done.stdout
    assert not (tmp_path / "cache").exists()


def test_ranks_that_share_a_gpu_are_refused_or_meant_to(run: Run) -> None:
    refused = run(*launch_command(2), *PYTHON, STRATEGY, devices=1)
    assert refused.returncode != 0
    assert "found that ranks 0 and 1 on host" in refused.stderr
    shared = run(
        *launch_command(2), *PYTHON, STRATEGY, devices=1, HPCSTRAT_SHARE_GPUS="1"
    )
    assert shared.returncode == 0, shared.stderr
    assert "ranks with GPUs: 2, some shared" in shared.stdout


def _narrow(text: str) -> bool:
    """Return whether all lines without a path have at most 80 columns."""
    return all(len(line) <= 80 or "/" in line for line in text.splitlines())


def test_doctor_alone(run: Run) -> None:
    first = run(*DOCTOR)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "testing what MPI can do" in first.stderr
    assert "GPU 0000:02:00.0" in first.stdout
    assert "yes, contents compared, 8 B, 64 KiB, 4 MiB" in first.stdout
    assert first.stdout.endswith("no problems found\n")
    assert _narrow(first.stdout)
    assert "testing" not in run(*DOCTOR).stderr


@pytest.mark.full
def test_doctor_tries_again_when_asked(run: Run) -> None:
    assert "testing" in run(*DOCTOR).stderr
    assert "testing" in run(*DOCTOR, "--fresh").stderr


def test_doctor_under_mpirun_ends_on_every_rank(run: Run) -> None:
    done = run(*launch_command(2), *DOCTOR)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no problems found") == 1
    assert "sums of arrays on GPUs" in done.stdout
    assert "rank 1 " in done.stdout
    assert _narrow(done.stdout)


def test_doctor_names_a_problem_of_the_ranks(run: Run) -> None:
    done = run(*launch_command(2), *DOCTOR, devices=1)
    assert done.returncode != 0
    words = " ".join(done.stdout.split())
    assert "problems 1. expected a GPU for each rank, found that ranks 0 and 1" in words
    assert "no problems" not in done.stdout


def test_doctor_without_a_gpu(run: Run) -> None:
    done = run(*DOCTOR, HPCSTRAT_STANDIN_NO_DEVICE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this process has no GPU" in " ".join(done.stdout.split())
    assert "memory of GPUs in calls of MPI" not in done.stdout


def test_doctor_with_a_driver_for_an_earlier_cuda(run: Run) -> None:
    done = run(*DOCTOR, HPCSTRAT_STANDIN_DRIVER="11080")
    assert done.returncode == 1, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    assert "found a driver for CUDA 11.8, too old for this CuPy" in words
    done = run(*DOCTOR, HPCSTRAT_STANDIN_DRIVER="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no driver of NVIDIA" in " ".join(done.stdout.split())


def test_doctor_finds_what_keeps_cupy_from_computing(run: Run) -> None:
    done = run(*PYTHON, BROKEN, "doctor")
    assert done.returncode == 1, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    assert "found cupy-cuda12x and cupy-cuda13x, which overwrite each other" in words
    assert "half.cuh(19): catastrophic error: cannot open" in words
    assert "pip install 'cupy-cuda12x[ctk]'" in words


def test_doctor_finds_wrong_settings(run: Run) -> None:
    done = run(*DOCTOR, HPCSTRAT_DEVICES="gpu")
    assert done.returncode == 1
    assert "write HPCSTRAT_DEVICE" in " ".join(done.stdout.split())


def test_doctor_finds_separate_programs(run: Run) -> None:
    # Simulate the mpirun of another library, where each process sees two ranks.
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    done = run(*DOCTOR, **variables)
    if "Open MPI" not in done.stdout:
        pytest.skip("MPICH would wait for its launcher")
    assert done.returncode == 1
    assert "found 2 separate programs" in " ".join(done.stdout.split())
