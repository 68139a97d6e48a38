"""Watchers of one node: the end of a program, bad input, and requests of ranks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcstrat.elastic.watching.watch_command import watch
from hpcstrat.elastic.watching.watcher import STATUSES
from tests.unit.elastic.watching.local_watcher import (
    SECONDS,
    environment,
    open_mpi,
    result,
    wait_for,
    watched,
)


@open_mpi
def test_a_program_that_ends_is_complete(tmp_path: Path) -> None:
    status, said = result(tmp_path, "pass", "--ranks-per-node", "2")
    assert status == STATUSES["complete"], said
    assert json.loads((tmp_path / "done").read_text())["generation"] == 1
    # A run after the marker has nothing to do.
    status, said = result(tmp_path, "raise SystemExit(1)")
    assert status == STATUSES["complete"], said
    assert not (tmp_path / "watch/gen-2").exists()


@open_mpi
def test_a_program_that_fails_each_time_is_given_up(tmp_path: Path) -> None:
    status, said = result(tmp_path, "raise SystemExit(3)", "--most-failures", "2")
    assert status == STATUSES["no_progress"], said
    assert "found 2 starts in a row without it" in said
    assert "generation 1 ended with status 3" in said
    assert not (tmp_path / "done").exists()
    assert not (tmp_path / "watch/gen-3").exists()


@open_mpi
def test_progress_and_checkpoints_allow_further_starts(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, hpcstrat.elastic as e\n"
        "n = int(os.environ['HPCSTRAT_WATCH_GENERATION'])\n"
        "if n == 1: e.report_progress(10)\n"
        f"elif n == 2: pathlib.Path({str(tmp_path)!r}, 'a.h5').touch()\n"
        "raise SystemExit(1)"
    )
    status, said = result(tmp_path, program, "--most-failures", "1")
    assert status == STATUSES["no_progress"], said
    assert "generation 3 ended" in said
    assert not (tmp_path / "watch/gen-4").exists()


@open_mpi
def test_a_killed_rank_is_no_success_and_leaves_no_memory(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from mpi4py import MPI\n"
        "folder = os.environ['OMPI_MCA_btl_sm_backing_directory']\n"
        "assert os.listdir(folder), 'Open MPI has its shared memory elsewhere'\n"
        "if os.environ['HPCSTRAT_WATCH_GENERATION'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "beside = os.listdir(os.path.dirname(folder))\n"
        "assert [n for n in beside if n.startswith('mpi')] == ['mpi-2'], beside\n"
    )
    status, said = result(tmp_path, program, "--ranks-per-node", "2")
    assert status == STATUSES["complete"], said
    assert "generation 1 ended with status 137" in said
    assert json.loads((tmp_path / "done").read_text())["generation"] == 2
    assert not [*Path("/dev/shm").glob("hpcstrat-watch-*/mpi-*")]


@open_mpi
def test_a_start_in_which_a_rank_does_not_come_is_repeated(tmp_path: Path) -> None:
    program = (
        "import os, time, hpcstrat as hs\n"
        "is_first = os.environ['HPCSTRAT_WATCH_GENERATION'] == '1'\n"
        "if is_first and os.environ['OMPI_COMM_WORLD_RANK'] == '1': time.sleep(60)\n"
        "hs.MultiWorkerMirroredStrategy()\n"
    )
    options = "--ranks-per-node", "2", "--start-seconds", "10"
    status, said = result(tmp_path, program, *options)
    assert status == STATUSES["complete"], said
    assert json.loads((tmp_path / "done").read_text())["generation"] == 2
    [output] = (tmp_path / "watch").glob("output-*")
    assert "s in creation of Multi" in output.read_text()


@open_mpi
def test_a_launcher_that_does_not_start_all_ranks_is_ended(tmp_path: Path) -> None:
    # A shell starts the rank, or waits in its place.
    script = 'test $OMPI_COMM_WORLD_RANK = 0 || sleep 60; exec "$@"'
    options = "--ranks-per-node", "2", "--start-seconds", "2", "--most-failures", "1"
    shell = f"--launch-options=sh -c '{script}' -"
    program = "import time; time.sleep(60)"
    status, said = result(tmp_path, program, *options, shell)
    assert status == STATUSES["no_progress"], said
    assert "expected 2 ranks in time, found that the launcher has started 1" in said


@open_mpi
@pytest.mark.parametrize("status", [0, 213])
def test_mpirun_gets_output_and_status_of_a_command_on_another_node(
    tmp_path: Path, status: int
) -> None:
    program = (
        "import pathlib, socket, subprocess, sys\n"
        "words = sys.executable, '-m', 'hpcstrat.elastic.watching.launch_agent'\n"
        f"line = socket.gethostname(), 'printf \"some text\"; exit {status}'\n"
        "done = subprocess.run([*words, *line], stdout=-1)\n"
        "found = f'{done.returncode} {done.stdout}'\n"
        f"pathlib.Path({str(tmp_path)!r}, 'found').write_text(found)\n"
    )
    assert result(tmp_path, program)[0] == STATUSES["complete"]
    assert (tmp_path / "found").read_text() == f"{status} {b'some text'}"


@open_mpi
def test_ssh_options_spaces_and_a_users_session_directory_are_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = tmp_path / ".prte/mca-params.conf"
    parameters.parent.mkdir()
    parameters.write_text(f"prte_tmpdir_base = {tmp_path / 'sessions'}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    program = (
        "import os, socket, subprocess, sys\n"
        "words = sys.executable, '-m', 'hpcstrat.elastic.watching.launch_agent'\n"
        "words += '-q', '-o', 'ConnectTimeout=9', socket.gethostname()\n"
        "assert subprocess.run([*words, 'exit 7']).returncode == 7\n"
        # hydra passes a path in the run's folder.
        "path = f'/it\\'s a \"folder\"'\n"
        "said = subprocess.run([*words, '\"echo\"', path], stdout=-1).stdout\n"
        "assert said.decode() == f'{path}\\n', said\n"
        f"assert os.environ['TMPDIR'] == {str(tmp_path / 'missing')!r}\n"
    )
    status, said = result(tmp_path, program, "--most-failures", "1")
    assert status == STATUSES["complete"], said


@open_mpi
def test_mpirun_in_a_job_of_a_scheduler_takes_the_watchers_nodes_and_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks see the same job; the name of a folder of snapshots has its number."""
    nodes = tmp_path / "nodes"
    nodes.write_text(f"{socket.gethostname()}\n")
    for name, value in (("ENVIRONMENT", "PBS_BATCH"), ("NODEFILE", str(nodes))):
        monkeypatch.setenv(f"PBS_{name}", value)
    for name in ("PBS_JOBID", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "elsewhere")
    program = "import os\nassert os.environ['SLURM_JOB_ID'] == '7'"
    options = "--ranks-per-node", "2", "--most-failures", "1"
    status, said = result(tmp_path, program, *options)
    assert status == STATUSES["complete"], said


@open_mpi
def test_a_launcher_that_outlives_its_ranks_is_ended(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "with open(f'/proc/{os.getppid()}/stat') as stat:\n"
        "    launcher = int(stat.read().rpartition(')')[2].split()[1])\n"
        "os.kill(launcher, signal.SIGSTOP)\n"
    )
    status, said = result(tmp_path, program, "--start-seconds", "3")
    assert status == STATUSES["complete"], said
    assert "expected the launcher to end after its ranks" in said


@open_mpi
def test_a_program_that_has_saved_is_not_started_again(tmp_path: Path) -> None:
    status, said = result(tmp_path, "raise SystemExit(42)")
    assert status == STATUSES["saved"], said
    assert not (tmp_path / "watch/gen-2").exists()


@open_mpi
def test_ranks_have_their_nodes_folder_and_their_saves_outlive_them(
    tmp_path: Path,
) -> None:
    program = (
        "import os, stat, numpy as np, hpcstrat as hs\n"
        "memory = os.environ['HPCSTRAT_WATCH_MEMORY']\n"
        "assert stat.S_IMODE(os.stat(memory).st_mode) == 0o700\n"
        "folder = os.path.dirname(os.environ['HPCSTRAT_WATCH_SOCKET'])\n"
        "assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700\n"
        "assert os.path.exists(os.environ['HPCSTRAT_WATCH_FOLDER'] + '/gen-1')\n"
        "assert int(os.environ['HPCSTRAT_WATCH_RUN'], 16)\n"
        "strategy = hs.MultiWorkerMirroredStrategy()\n"
        "with strategy.scope(): weights = hs.Variable(np.arange(99.0))\n"
        "options = hs.CheckpointOptions(memory=1)\n"
        f"folder = {str(tmp_path / 'c')!r}\n"
        "manager = hs.CheckpointManager(folder, options=options, w=weights)\n"
        "manager.save(7, asynchronous=True)\n"
        # The file is written later, and the watcher waits for it.
        "assert not manager.checkpoints"
    )
    status, said = result(tmp_path, program, "--ranks-per-node", "2")
    assert status == STATUSES["complete"], said
    [path] = (tmp_path / "c").iterdir()
    # The ranks have not waited for the save.
    assert not list((tmp_path / "watch").glob("save-*"))
    with h5py.File(path) as file:
        assert file.attrs["step"] == 7
        assert (file["variables/w"][()] == np.arange(99.0)).all()


@open_mpi
@pytest.mark.parametrize("end", ["no progress", "stopped"])
def test_the_newest_snapshot_is_saved_before_the_end(tmp_path: Path, end: str) -> None:
    program = (
        "import pathlib, time, numpy as np, hpcstrat as hs\n"
        "strategy = hs.MultiWorkerMirroredStrategy()\n"
        "with strategy.scope(): weights = hs.Variable(np.arange(99.0))\n"
        "options = hs.CheckpointOptions(memory=1, every=100)\n"
        f"folder = {str(tmp_path / 'c')!r}\n"
        "manager = hs.CheckpointManager(folder, options=options, w=weights)\n"
        "for step in range(1, 6):\n"
        "    weights.assign(np.arange(99.0) + step)\n"
        "    manager.save_if_due(step)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'begun').write_text('yes')\n"
        f"time.sleep({0 if end == 'no progress' else 60})\n"
        "raise SystemExit(3)"
    )
    options = "--ranks-per-node", "2", "--most-failures", "1"
    if end == "no progress":
        # The first start makes progress.
        status, said = result(tmp_path, program, *options)
        assert status == STATUSES["no_progress"], said
        assert not list((tmp_path / "watch").glob("held-*"))
    else:
        with watched(tmp_path, program, *options) as watcher:
            wait_for(tmp_path / "begun")
            watcher.terminate()
            said = watcher.communicate(timeout=SECONDS)[1]
            assert watcher.returncode == STATUSES["stopped"], said
    assert "saves the newest snapshot" in said
    newest = max(path for path in (tmp_path / "c").iterdir())
    assert newest.name == "ckpt-0000000005.h5"
    with h5py.File(newest) as file:
        assert (file["variables/w"][()] == np.arange(99.0) + 5).all()


@open_mpi
def test_a_folder_that_is_gone_for_some_time_is_waited_for(tmp_path: Path) -> None:
    program = (
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / 'begun').write_text('yes')\n"
        "while not (folder / 'go').exists(): time.sleep(0.01)"
    )
    watch_folder, away = tmp_path / "watch", tmp_path / "away"
    with watched(tmp_path, program) as watcher:
        wait_for(tmp_path / "begun")
        watch_folder.rename(away)
        assert watcher.stderr is not None
        for line in watcher.stderr:
            if "expected the run's folder" in line:
                break
        # The end of the program is judged when the folder is back.
        (tmp_path / "go").touch()
        with pytest.raises(subprocess.TimeoutExpired):
            watcher.wait(1)
        away.rename(watch_folder)
        assert watcher.wait(SECONDS) == STATUSES["complete"]
    assert (tmp_path / "done").exists()


def test_the_command_refuses_bad_input(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", environment()["PATH"])
    name = socket.gethostname()

    def said(*words: str) -> str:
        assert watch(words) == 2
        return capsys.readouterr().err

    folder = ["--folder", str(tmp_path)]
    assert "expected a program" in said(*folder)
    assert "expected the folder of the run" in said("--", "true")
    program = ["--", "true"]
    assert "expected the nodes of a job" in said(*folder, *program)
    nodes = ["--nodes", f"{name},{name}.other"]
    assert "use --job with a name" in said(*folder, *nodes, *program)
    assert "--least 1, --use 3 and 2 nodes" in said(
        *folder, *nodes, "--use", "3", "--least", "1", *program
    )
    assert "expected this node to be one of" in said(
        *folder, "--nodes", "elsewhere", *program
    )
    nodes = ["--nodes", name, "--job", "7", "--launcher", "mpirun"]
    assert "Not a directory" in said("--folder", "/dev/null", *nodes, *program)
    secret = tmp_path / "watch/secret"
    secret.parent.mkdir(0o700)
    secret.write_text("x" * 64)
    secret.chmod(0o644)
    assert "found mode 644" in said(*folder, *nodes, *program)
    secret.parent.chmod(0o770)
    assert "that only you can write, found mode 770" in said(*folder, *nodes, *program)


def test_a_watcher_loads_neither_numpy_nor_mpi() -> None:
    """Under srun, too, whose variables would make it a rank."""
    program = (
        "import sys\n"
        "sys.argv = ['/somewhere/hpcstrat', 'watch']\n"
        "from hpcstrat.__main__ import start\n"
        "import hpcstrat.elastic.watching.watch_command\n"
        "assert start() == 2\n"
        "print(*sys.modules)"
    )
    env = {**environment(), "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"numpy", "mpi4py", "h5py", "click", "rich"}
    assert "hpcstrat.safety" not in done.stdout.split()
