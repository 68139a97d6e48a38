"""Scripts written by ``hpcstrat jobs new``."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpcstrat.cli.main import main
from hpcstrat.tools.job_scripts.writing import FRAMEWORKS, SCHEDULERS, JobPlan, write

HEADS = {
    "slurm": [
        *("#SBATCH --nodes=3", "#SBATCH --ntasks-per-node=2"),
        *("#SBATCH --time=01:30:00", "#SBATCH --account=ours", "#SBATCH --partition=q"),
    ],
    "pbs": [
        "#PBS -l select=3:ncpus=2:mpiprocs=2:ompthreads=1",
        *("#PBS -l walltime=01:30:00", "#PBS -A ours", "#PBS -q q"),
    ],
    "flux": [
        *("# flux: --nodes=3", "# flux: --nslots=6", "# flux: --time-limit=90m"),
        *("# flux: --bank=ours", "# flux: --queue=q"),
    ],
    "lsf": [
        *("#BSUB -n 6", '#BSUB -R "span[ptile=2]"', "#BSUB -W 1:30"),
        *("#BSUB -P ours", "#BSUB -q q"),
    ],
    "sge": ["#$ -pe mpi 6", "#$ -l h_rt=01:30:00", "#$ -P ours", "#$ -q q"],
}
GPUS = {
    "slurm": "#SBATCH --gpus-per-node=2",
    "pbs": "#PBS -l select=3:ncpus=2:mpiprocs=2:ngpus=2:ompthreads=1",
    "flux": "# flux: --gpus-per-slot=1",
    "lsf": '#BSUB -gpu "num=2"',
    "sge": "#$ -l gpu=1",
}
RESTARTS = {
    "slurm": "#SBATCH --requeue",
    "pbs": "#PBS -r y",
    "flux": 'export RUN_FOLDER="${RUN_FOLDER:-runs/restart-$(flux job id --to=dec '
    '"$(flux getattr jobid)")}"',
    "lsf": "#BSUB -Q 42",
    "sge": "#$ -r y",
}


def _plan(scheduler: str, **more: Any) -> JobPlan:
    size = {"nodes": 3, "ranks_per_node": 2, "minutes": 90}
    where = {"account": "ours", "queue": "q"}
    return JobPlan(scheduler, "my train.py --epochs 9", **{**size, **where, **more})


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_script_asks_for_what_was_planned(
    scheduler: str, device: str, restarts: bool
) -> None:
    lines = write(_plan(scheduler, device=device, restarts=restarts)).splitlines()
    expected = [*HEADS[scheduler]]
    if device == "gpu":
        expected.append(GPUS[scheduler])
        if scheduler == "pbs":
            expected.pop(0)
    elif GPUS[scheduler] in lines:
        raise AssertionError(lines)
    if restarts:
        expected.append(RESTARTS[scheduler])
    assert [line for line in expected if line not in lines] == []
    options = [line.partition("=")[0] for line in lines if line.startswith("#SBATCH")]
    assert len(options) == len(set(options))
    assert not any("Ran on" in line or "Not run" in line for line in lines)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is missing")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scripts_are_clean(scheduler: str, tmp_path: Path) -> None:
    choices = itertools.product(["cpu", "gpu"], FRAMEWORKS, [False, True])
    for number, (device, framework, restarts) in enumerate(choices):
        plan = _plan(scheduler, device=device, framework=framework, restarts=restarts)
        (tmp_path / f"{number}.sh").write_text(write(plan))
    paths = sorted(tmp_path.iterdir())
    words = ["shellcheck", "--severity=style", *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_programs_of_torch_distributed_are_wrapped(scheduler: str) -> None:
    assert "hpcstrat torch --replace gloo " in write(
        _plan(scheduler, framework="torch-ddp")
    )
    assert "hpcstrat torch --replace nccl " in write(
        _plan(scheduler, framework="torch-ddp", device="gpu")
    )
    jax = write(_plan(scheduler, framework="jax"))
    assert 'export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"' in jax


def _new(*words: str, folder: Path) -> Any:
    return CliRunner().invoke(main, ["jobs", "new", "--folder", str(folder), *words])


def test_the_command_writes_into_a_project(tmp_path: Path) -> None:
    words = ("--scheduler", "pbs", "--framework", "torch", "train.py --epochs 9")
    done = _new(*words, folder=tmp_path)
    assert done.exit_code == 0, done.output
    assert "qsub jobs/train.pbs" in done.output
    text = (tmp_path / "jobs/train.pbs").read_text()
    assert "${PROGRAM:-train.py --epochs 9}" in text
    site = tmp_path / "jobs/site.env"
    assert "site_launch()" in site.read_text()
    site.write_text("mine")
    again = _new(*words, folder=tmp_path)
    assert again.exit_code == 1
    assert "expected no file" in again.output
    assert _new("--force", *words, folder=tmp_path).exit_code == 0
    assert site.read_text() == "mine"


def test_the_scheduler_is_found_by_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    none = _new("train.py", folder=tmp_path)
    assert none.exit_code == 1
    assert "expected commands of a scheduler in the PATH, found none" in none.output
    (tmp_path / "qconf").write_text("")
    (tmp_path / "qconf").chmod(0o755)
    assert _new("train.py", folder=tmp_path).exit_code == 0
    assert (tmp_path / "jobs/train.sge").exists()
    assert not (tmp_path / "jobs/train.pbs").exists()


def test_what_is_not_given_is_asked_for_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hpcstrat.tools.job_scripts.commands._is_answered", lambda: True
    )
    words = ["jobs", "new", "--folder", str(tmp_path), "--nodes", "5", "train.py"]
    answers = "lsf\ngpu\ntorch-ddp\n4\n"
    done = CliRunner().invoke(main, words, input=answers)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "jobs/train.lsf").read_text()
    assert "#BSUB -n 20\n" in text
    assert '#BSUB -gpu "num=4"' in text
    assert "--replace nccl" in text
    assert "Nodes" not in done.output
