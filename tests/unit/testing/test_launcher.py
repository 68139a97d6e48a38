"""Search for mpirun, its options, and the environment of a job within a job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat.errors import HpcstratError
from hpcstrat.testing import launch_command
from hpcstrat.testing.launcher import clean_environment, find_launcher


def _fake(path: Path, version: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def test_launcher_beside_the_interpreter_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("beside", "path"):
        (tmp_path / name).mkdir()
        _fake(tmp_path / name / "mpirun", "any")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_launcher() != str(tmp_path / "beside" / "mpirun")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    assert find_launcher() == str(tmp_path / "beside" / "mpirun")


def test_missing_launcher_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(HpcstratError, match="install an MPI library"):
        find_launcher()


def test_open_mpi_is_told_to_share_cores(tmp_path: Path) -> None:
    mpirun = _fake(tmp_path / "mpirun", "mpirun (Open MPI) 5.0.11")
    command = launch_command(3, mpirun)
    assert command[0] == str(mpirun)
    assert command[-5:] == ["--oversubscribe", "--bind-to", "none", "-n", "3"]


def test_hydra_takes_no_options(tmp_path: Path) -> None:
    mpiexec = _fake(tmp_path / "mpiexec", "HYDRA build details:")
    assert launch_command(2, mpiexec) == [str(mpiexec), "-n", "2"]


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1 rank, found 0"):
        launch_command(0)


def test_settings_of_the_shell_stay_outside_of_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_MCA_pml", "ob1")
    assert clean_environment({"A_WORD": "b"})["OMPI_MCA_pml"] == "ob1"
    assert clean_environment({"A_WORD": "b"})["A_WORD"] == "b"


def test_traces_of_an_outer_job_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PRTE_JOB", "PMI_FD", "HYDI_X")
    for name in names:
        monkeypatch.setenv(name, "1")
    assert not set(names) & set(clean_environment())
