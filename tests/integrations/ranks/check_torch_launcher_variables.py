"""Variables of launchers that programs read, set from the ranks of MPI, or hidden."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from hpcstrat import _launchers
from hpcstrat.cluster_resolver import (
    SlurmClusterResolver,
    batch_job_from_environment,
    launch_from_environment,
)
from hpcstrat.integrations.torch import replacements
from hpcstrat.integrations.torch.environment import init_env
from hpcstrat.integrations.torch.launcher_variables import change_variables


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the environment after each test."""
    before = dict(os.environ)
    monkeypatch.setattr(_launchers, "_kept", {})
    monkeypatch.setattr(replacements, "_told", set())
    init_env()
    yield
    os.environ.clear()
    os.environ.update(before)


def test_variables_of_slurm_describe_the_ranks_of_mpi(job: Any) -> None:
    # A batch script of Slurm passes its own number to all ranks of mpirun.
    os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = "0"
    launch, batch = launch_from_environment(), batch_job_from_environment()
    change_variables([], ["slurm"])
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().num_tasks("worker") == job.size
    assert resolver.task_id == job.rank
    assert int(os.environ["SLURM_LOCALID"]) == int(os.environ["LOCAL_RANK"])
    assert int(os.environ["SLURM_NTASKS"]) == job.size
    # hpcstrat itself still sees the launcher, and no job of Slurm.
    assert launch_from_environment() == launch
    assert batch_job_from_environment() == batch


def test_variables_of_open_mpi_describe_the_ranks(job: Any) -> None:
    change_variables(["mpi"], ["openmpi"])
    found = launch_from_environment(os.environ)
    assert (found.launcher, found.rank, found.size) == (
        "mpirun of Open MPI",
        job.rank,
        job.size,
    )
    assert found.local_rank == int(os.environ["LOCAL_RANK"])


def test_hidden_variables_are_hidden_from_the_program_only(job: Any) -> None:
    os.environ["SLURM_JOB_ID"], os.environ["SLURM_NTASKS"] = "7", "9"
    launch, batch = launch_from_environment(), batch_job_from_environment()
    change_variables(["mpi", "slurm"], [])
    assert not launch_from_environment(os.environ).launcher
    assert batch_job_from_environment(os.environ) is None
    assert launch_from_environment() == launch
    assert batch_job_from_environment() == batch


def test_torchrun_is_recognized(job: Any) -> None:
    import torch.distributed as dist

    assert not dist.is_torchelastic_launched()
    change_variables([], ["torchrun"])
    assert dist.is_torchelastic_launched()


@pytest.mark.parametrize("explains", [False, True])
def test_rank_0_prints_what_was_set_and_hidden(
    job: Any, capfd: pytest.CaptureFixture[str], explains: bool
) -> None:
    os.environ["SLURM_CONF"] = "/etc/slurm.conf"
    change_variables(["slurm"], ["openmpi"], explains=explains)
    told = [line for line in capfd.readouterr().err.splitlines() if "torch:" in line]
    assert len(told) == (2 if job.rank == 0 else 0)
    if job.rank == 0:
        assert ("SLURM_CONF" in told[0]) == explains
        size = f"OMPI_COMM_WORLD_SIZE={job.size}"
        assert (size in told[1]) == explains
