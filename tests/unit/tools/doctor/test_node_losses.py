"""The answer of the doctor to the loss of a node."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from hpcstrat.elastic.watching import claims
from hpcstrat.elastic.watching.claims import Generation
from hpcstrat.tools.doctor.node_losses import node_loss_words, stale_folders

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the job's script; a stand-in for scontrol prints it."""
    path, scontrol = tmp_path / "script", tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        f'#!/bin/sh\n[ "$*" = "write batch_script 7 -" ] && cat {path}\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    return path


def test_what_is_missing_is_named(script: Path) -> None:
    assert node_loss_words({}) == ""
    assert "never tried with PBS" in node_loss_words({"PBS_JOBID": "7.server"})
    assert "which has one node" in node_loss_words({**JOB, "SLURM_JOB_NUM_NODES": "1"})
    script.write_text("#!/bin/bash\n#SBATCH --requeue --kill\necho --no-kill\n")
    assert "has no #SBATCH --no-kill" in node_loss_words(JOB)
    for line in ("#SBATCH --requeue --no-kill", "#SBATCH -k"):
        script.write_text(f"#!/bin/bash\n{line}\n")
        assert "has no watchers" in node_loss_words(JOB)
    script.unlink()
    assert "has no watchers" in node_loss_words(JOB)


def test_spare_nodes_are_counted(tmp_path: Path, script: Path) -> None:
    watched = {**JOB, "HPCSTRAT_WATCH_FOLDER": str(tmp_path), "SBATCH_NO_KILL": "1"}
    assert "is survived: unknown spare nodes" in node_loss_words(watched)
    for number, members in ((1, ("a", "b", "c")), (2, ("b", "c"))):
        claims.create(tmp_path, Generation(number, "b", members, members[-1:]))
        words = f"is survived: {3 - number} spare node{'s' * (number == 1)}, "
        assert words in node_loss_words(watched)
    assert "MiB free in /dev/shm" in node_loss_words(watched)


def test_memory_of_ended_programs_is_named(tmp_path: Path) -> None:
    user = os.getuid()
    watched, alone = tmp_path / f"hpcstrat-watch-{user}-1-2", f"hpcstrat-{user}-3"
    others = f"hpcstrat-watch-{user + 1}-1-2", f"hpcstrat-{user + 1}-3", "hpcstrat-x"
    for name in (watched.name, alone, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_bytes(b"x" * (2 << 20))
    with (watched / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert stale_folders(tmp_path) == ()
    [(path, nbytes)] = stale_folders(tmp_path)
    assert path == str(watched)
    assert nbytes >= 2 << 20
    old = time.time() - 2 * 86400
    for path in (tmp_path / alone, tmp_path / alone / "lock"):
        os.utime(path, (old, old))
    assert [Path(path).name for path, _ in stale_folders(tmp_path)] == [
        alone,
        watched.name,
    ]
