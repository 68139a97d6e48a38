"""The benchmarks on GPUs run, check their sums, and write only real figures.

The tests use the stand-in for CuPy, so the printed times have no meaning.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcstrat import testing
from hpcstrat.testing.launcher import clean_environment, find_launcher

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests" / "gpu" / "standin"
BENCHMARKS = ROOT / "benchmarks"


ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(STANDIN), str(ROOT)]),
    "HPCSTRAT_SHARE_GPUS": "1",
    # The stand-in's device memory is host memory, which any MPI can read.
    "HPCSTRAT_MPI_READS_GPU": "yes",
    "HPCSTRAT_STANDIN_DELAY": "0.0001",
    # The version of the extras, which can let ranks share a GPU, but is not set to do
    # so.
    "HPCSTRAT_STANDIN_NCCL_VERSION": "23203",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.parametrize(
    ("name", "options", "gpus", "expected"),
    [
        # With a GPU for each rank, NCCL is available.
        (
            "allreduce",
            ["--sizes", "4KiB,300KiB"],
            2,
            ["nccl, by CuPy  ", "hpcstrat: by nccl: NCCL", "hpcstrat, Staging"],
        ),
        ("fused", [], 1, ["12 gradients on GPUs"]),
        ("step", ["--gradients", "20KiB"], 1, ["overhead (goal 5%)"]),
        ("checkpoint", ["--size", "256KiB", "--folder", "."], 1, ["until durable"]),
    ],
)
def test_a_trial_runs_on_two_ranks_and_writes_nothing(
    name: str,
    options: list[str],
    gpus: int,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = BENCHMARKS / f"bench_{name}.py"
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, str(script), "--device", "--smoke", *options]
    environment = {**ENVIRONMENT, "HPCSTRAT_STANDIN_DEVICES": str(gpus)}
    done = testing.launch(2, command, timeout=60, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [text for text in expected if text not in done.stdout] == []
    assert f"{gpus} x Stand-in" in done.stdout
    assert not list(tmp_path.rglob("*.json"))


def _alone(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = BENCHMARKS / "bench_allreduce.py"
    return subprocess.run(
        [sys.executable, str(script), "--device", *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=clean_environment(ENVIRONMENT),
    )


def test_figures_of_the_stand_in_are_refused(tmp_path: Path) -> None:
    done = _alone(tmp_path, "--json", "figures.json")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "stand-in" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_trial_that_is_to_write_is_refused(tmp_path: Path) -> None:
    done = _alone(tmp_path, "--smoke", "--results", "here")
    assert done.returncode == 2
    assert "expected --smoke alone" in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCSTRAT_STANDIN_NO_DEVICE", "1")
    done = _alone(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("expected a GPU, found no CUDA device")
    assert done.stderr.count("\n") == 1


def test_one_rank_measures_nccl_alone(tmp_path: Path) -> None:
    done = _alone(tmp_path, "--smoke", "--sizes", "4KiB")
    assert done.returncode == 0, done.stderr
    assert "nccl, by CuPy" in done.stdout


def test_questions_for_a_machine_with_gpus_are_settled_on_the_stand_in() -> None:
    """NCCL joins, is left out if it cannot sum, and programs may end without close."""
    script = str(BENCHMARKS / "device_questions.py")
    only = ("connect", "small_shm", "plain_end")
    options = [f"--only={name}" for name in only]
    done = subprocess.run(
        [sys.executable, script, "--ranks", "2", "--smoke", *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env=clean_environment({**ENVIRONMENT, "HPCSTRAT_STANDIN_DEVICES": "2"}),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by nccl: NCCL" in done.stdout
    assert "by messages of MPI" in done.stdout
    assert "SYSTEM_ERROR" in done.stdout
    assert "3 of 3 questions settled" in done.stdout


def _all(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run device.sh on two GPUs."""
    return subprocess.run(
        ["bash", str(BENCHMARKS / "device.sh"), str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
        env=clean_environment(
            {
                **ENVIRONMENT,
                "HPCSTRAT_STANDIN_DEVICES": "2",
                "PYTHON": sys.executable,
                "MPIRUN": find_launcher(),
                **settings,
            }
        ),
    )


def test_a_step_of_all_that_fails_or_takes_too_long_stops_no_other(
    tmp_path: Path,
) -> None:
    """The file of results names both steps, but has no figures of the stand-in."""
    python = tmp_path / "python"
    stuck = 'case "$*" in *bench_fused*) sleep 100 ;; esac'
    python.write_text(f'#!/bin/sh\n{stuck}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    results = tmp_path / "results"
    steps = "fused checkpoint doctor"
    done = _all(results, PYTHON=str(python), STEPS=steps, LIMIT="20")
    assert done.returncode == 1, done.stdout + done.stderr
    [file] = results.iterdir()
    told = file.read_text()
    assert told.count("== ") == 3
    assert "NCCL" in told
    end = told.splitlines()[-3:]
    assert end[0] == "1 of 3 steps done"
    assert end[1] == "failed: fused on 2 ranks: not done after 20 seconds"
    assert end[2].startswith("failed: checkpoint on 2 ranks: status ")


@pytest.mark.full
def test_steps_of_all_are_tried_on_the_stand_in(tmp_path: Path) -> None:
    done = _all(tmp_path / "results", STEPS="probe fused", SMOKE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "2 of 2 steps done"
    assert not list(tmp_path.iterdir())


def test_figures_of_a_shared_gpu_say_how_it_is_shared() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_allreduce.py"), "--device"]
    command += ["--smoke", "--sizes", "4KiB"]
    environment = {**ENVIRONMENT, "GPU_SHARING": "MPS", "HPCSTRAT_STANDIN_DEVICES": "1"}
    done = testing.launch(2, command, timeout=60, env=environment)
    assert "1 x Stand-in" in done.stdout
    assert "shared by MPS" in done.stdout
