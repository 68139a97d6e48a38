"""Only one job at a time saves in a folder; a dead job blocks no other job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.keep import folder
from hpcstrat.testing.launcher import clean_environment
from tests.docs.said import assert_said

ROOT = str(Path(hs.__file__).parents[1])
_SAVES = """
import sys
import hpcstrat as hs
manager = hs.CheckpointManager(sys.argv[1], x=hs.Variable(1.0))
manager.save(1)
print("saved", flush=True)
sys.stdin.readline()
manager.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@contextmanager
def _other_job(folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Yield another job, which has saved step 1 and waits for a line on its input."""
    job = subprocess.Popen(
        [sys.executable, "-c", _SAVES, str(folder)],
        env=clean_environment(
            {"PYTHONPATH": ROOT, "PMIX_NAMESPACE": "theirs", **environment}
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "saved\n"
        yield job
    finally:
        job.kill()
        job.communicate(timeout=60)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process a job id that differs from those of the other processes."""
    monkeypatch.setenv("PMIX_NAMESPACE", "ours")


@pytest.mark.usefixtures("job")
def test_a_second_job_is_told_who_saves_there(tmp_path: Path) -> None:
    with _other_job(tmp_path) as other:
        value = hs.Variable(0.0)
        with hs.CheckpointManager(tmp_path, x=value) as manager:
            # A process that only reads is allowed.
            assert manager.restore() == 1
            assert value.numpy() == 1.0
            with pytest.raises(hs.CheckpointError) as told:
                manager.save(2)
            assert f"found another job (process {other.pid} on" in str(told.value)
            assert_said("two-jobs", str(told.value))
            assert str(tmp_path) in str(told.value)
            assert len(manager.checkpoints) == 1
            # After the other job has ended, even by a signal, this job can save.
            other.kill()
            other.wait(60)
            manager.save(2)
    assert not (tmp_path / folder.OWNER).exists()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("step", [0, 1])
def test_a_second_job_is_named_before_advice_to_overwrite(
    tmp_path: Path, step: int
) -> None:
    """The other job has saved step 1: this step and earlier ones need a decision."""
    manager = hs.CheckpointManager(tmp_path, x=hs.Variable(0.0))
    with _other_job(tmp_path) as other:
        with pytest.raises(hs.CheckpointError, match=f"process {other.pid} on") as told:
            manager.save(step)
        assert "overwrite" not in str(told.value)
    with pytest.raises(hs.CheckpointError, match="overwrite=True"):
        manager.save(step)
    # A refused save keeps no other job out.
    assert not (tmp_path / folder.OWNER).exists()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}),
        (
            {"SLURM_JOB_ID": "7", "PMIX_NAMESPACE": "a"},
            {"SLURM_JOB_ID": "7", "PMIX_NAMESPACE": "b"},
        ),
    ],
)
def test_programs_that_one_script_starts_are_separate_jobs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    theirs: dict[str, str],
    ours: dict[str, str],
) -> None:
    """They have the same parent process, or the same batch job."""
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    with _other_job(tmp_path, **{"PMIX_NAMESPACE": "", **theirs}) as other:
        manager = hs.CheckpointManager(tmp_path, x=hs.Variable(0.0))
        with pytest.raises(hs.CheckpointError, match=f"process {other.pid} on"):
            manager.save(2)


@pytest.mark.usefixtures("job")
def test_a_job_that_has_closed_its_manager_leaves_the_folder(tmp_path: Path) -> None:
    with (
        _other_job(tmp_path) as other,
        hs.CheckpointManager(tmp_path, x=hs.Variable(0.0)) as manager,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "closed\n"
        manager.save(2)


@pytest.mark.parametrize(
    "names",
    [
        {"SLURM_JOB_ID": "7", "PMIX_NAMESPACE": "a"},
        {"PMIX_NAMESPACE": "a"},
        {"PMIX_NAMESPACE": "", "PALS_APID": "b"},
    ],
)
def test_processes_of_one_job_may_save_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, str]
) -> None:
    """After a loss, another replica of the same job may save."""
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with _other_job(tmp_path, **names):
        hs.CheckpointManager(tmp_path, x=hs.Variable(0.0)).save(2)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"])
def test_a_requeued_job_may_save_although_a_lost_host_has_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A server of NFS keeps the locks of a crashed host for a time."""
    monkeypatch.setenv(name, "7")
    with _other_job(tmp_path, **{name: "7"}):
        record = json.loads((tmp_path / folder.OWNER).read_text())
        record["host"] = "lost"
        (tmp_path / folder.OWNER).write_text(json.dumps(record))
        hs.CheckpointManager(tmp_path, x=hs.Variable(0.0)).save(2)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"pid": 1}'])
def test_what_the_file_says_does_not_matter(tmp_path: Path, content: bytes) -> None:
    (tmp_path / folder.OWNER).write_bytes(content)
    with hs.CheckpointManager(tmp_path, x=hs.Variable(0.0)) as manager:
        manager.save(1)
        record = json.loads((tmp_path / folder.OWNER).read_text())
        assert record["pid"] == os.getpid()
    with _other_job(tmp_path / "b"):
        (tmp_path / "b" / folder.OWNER).write_bytes(content)
        with pytest.raises(hs.CheckpointError, match="found another job"):
            hs.CheckpointManager(tmp_path / "b", x=hs.Variable(0.0)).save(2)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("code", [38, 95, 37])
def test_file_systems_without_locks_serve_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, "not supported")

    monkeypatch.setattr(folder.fcntl, "lockf", refuse)
    with _other_job(tmp_path):
        hs.CheckpointManager(tmp_path, x=hs.Variable(0.0)).save(2)


def test_managers_of_one_process_share_a_folder(tmp_path: Path) -> None:
    managers = [hs.CheckpointManager(tmp_path, x=hs.Variable(0.0)) for _ in range(2)]
    for step, manager in enumerate(managers):
        manager.save(step)
    managers[0].close()
    assert (tmp_path / folder.OWNER).exists()
    managers[1].close()
    assert not (tmp_path / folder.OWNER).exists()
    managers[0].save(5)
    del managers, manager
    assert not (tmp_path / folder.OWNER).exists()
