"""``hpcstrat torch`` with programs for GPUs and other launchers, in jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat import testing
from hpcstrat.testing import launch_command
from tests.docs.said import assert_said
from tests.mpi.programs.started import run_command

pytestmark = pytest.mark.framework("torch")

CLI = "from hpcstrat.cli import main; main()"
PROGRAM = str(Path(__file__).parent / "programs" / "for_gpus.py")


def command(*words: str) -> list[str]:
    """Return a command that runs the program by ``hpcstrat torch``."""
    return [sys.executable, "-c", CLI, "torch", *words]


def test_a_program_for_gpus_and_slurm_runs_on_cpus() -> None:
    options = "--make-group", "--on-cpus", "--hide", "mpi", "--set", "slurm"
    words = command(*options, "--explain", PROGRAM)
    finished = testing.launch(2, words, timeout=150)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    # Both ranks have the same weights.
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert lines[0].startswith("True False ")
    # One rank prints what took place.
    for part in (
        "set RANK=0, WORLD_SIZE=2, ",
        "hid the variables of mpi from the program: ",
        "set the variables of slurm: SLURM_PROCID=0, ",
        "made the process group of 2 ranks",
        "ignored device_ids=[0] of DistributedDataParallel",
        "computed torch.nn.SyncBatchNorm on CPUs",
    ):
        assert finished.stderr.count(f"hpcstrat torch: {part}") == 1, finished.stderr


@pytest.mark.full
def test_a_program_for_gpus_trains_like_one_process() -> None:
    found = []
    for n in (1, 2, 3):
        words = command("--make-group", "--on-cpus", "--set", "slurm", PROGRAM)
        finished = testing.launch(n, words, timeout=150)
        assert finished.returncode == 0, finished.stderr
        found.append(float(finished.stdout.split()[2]))
    assert found == pytest.approx([found[0]] * 3, rel=1e-10)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        pytest.param(
            [PROGRAM, "alone"],
            [
                "expected a process group by which the 2 ranks train together, found "
                "no process group in the first step of an optimizer",
                "add --separate to hpcstrat torch",
            ],
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--set", "slurm", PROGRAM],
            ["Default process group has not been initialized", "add --make-group"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--make-group", PROGRAM],
            ["expected a program that needs no variable 'SLURM_PROCID'", "--set slurm"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--make-group", "--set", "slurm", PROGRAM],
            ["DistributedDataParallel device_ids", "; add --on-cpus"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--make-group", PROGRAM, "second"],
            ["found backend='nccl'; add --replace nccl"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_program_that_cannot_run_is_told_the_option(
    words: list[str], parts: list[str]
) -> None:
    ended = run_command([*launch_command(2), *command(*words)], "option", 150, {})
    assert ended.returncode, str(ended)
    assert not ended.survivors, str(ended)
    for part in parts:
        assert part in ended.stderr, str(ended)


def test_ranks_that_wait_for_their_group_name_the_others() -> None:
    """Without this, rank 1 would wait in torch's rendezvous for half an hour."""
    limits = {"HPCSTRAT_WARN_SECONDS": "2", "HPCSTRAT_LIMIT_SECONDS": "10"}
    words = command("--replace", "nccl", PROGRAM, "gathers")
    ended = run_command([*launch_command(2), *words], "gathers", 150, limits)
    assert ended.returncode, str(ended)
    assert not ended.survivors, str(ended)
    assert "rank 1 has waited" in ended.stderr, str(ended)
    assert_said("waits-for-group", ended.stderr)
    assert "in main (for_gpus.py:" in ended.stderr, str(ended)
    assert "stack of rank 0:" in ended.stderr, str(ended)
