"""Loss of nodes and of the launcher in a run with watchers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcstrat.testing import launch_command
from tests.cluster import rememberer
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm
from tests.cluster.watched import SlurmRun, WatchedRun

pytestmark = pytest.mark.skipif(
    "--oversubscribe" not in launch_command(1),
    reason="the options of mpirun are those of Open MPI",
)


def test_the_run_goes_on_after_the_loss_of_the_leaders_node(
    make_hosts: Callable[..., Hosts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, temporary = make_hosts(3), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    run = WatchedRun(hosts, tmp_path / "run", use=2, steps=300, nap=0.01)
    try:
        run.wait(lambda: run.first_step_after(0))
        # node1 has the leader, mpirun, and one of the two ranks.
        lost = time.time()
        hosts.switch_off("node1")
        run.wait(lambda: run.first_step_after(lost))
        statuses = {node: run.watchers[node].wait(60) for node in ("node2", "node3")}
        assert statuses == {"node2": 0, "node3": 0}, run.logs()
        assert [claim["leader"] for claim in run.claims()] == ["node1", "node2"]
        assert run.claims()[1]["nodes"] == ["node2", "node3"]
        assert run.problems() == []
        run.check_result()
        assert not hosts.processes()
        # A later daemon with the process number of a killed one would fail in its
        # session directory.
        assert not [*temporary.glob("*/pmix.*")]
    finally:
        run.end()


def test_a_spare_node_has_all_state_when_the_other_nodes_are_lost(
    make_hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    def is_done(address: Path) -> bool:
        return address.with_suffix(".done").exists()

    hosts, folder = make_hosts(3), tmp_path / "run"
    # After the first step, nothing is saved to the disk.
    program = rememberer.__file__, "numpy", "1000000"
    run = WatchedRun(hosts, folder, "--least", "1", use=2, program=program)
    try:
        run.wait(lambda: run.first_step_after(0))
        # The address of the spare node is beside each copy that has been sent.
        copies = (folder / "watch").glob
        run.wait(lambda: [p for p in copies("save-*.address") if is_done(p)])
        lost = time.time()
        for node in ("node1", "node2"):
            hosts.switch_off(node)
        run.wait(lambda: run.first_step_after(lost))
        newest = run.claims()[-1]
        assert newest["nodes"] == ["node3"]
        [source, *_] = folder.glob(f"source-{newest['number']}-*")
        assert "/memory/hpcstrat-" in source.read_text()
        assert run.problems() == []
    finally:
        run.end()


def test_a_stopped_run_lets_the_ranks_of_all_nodes_end(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The rank of the second node ends first; the other one has files to write."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, signal, sys, time\n"
        "folder, rank = sys.argv[1], os.environ['OMPI_COMM_WORLD_RANK']\n"
        "def stop(*_):\n"
        "    if rank == '0': time.sleep(2)\n"
        "    pathlib.Path(folder, f'written-{rank}').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "pathlib.Path(folder, f'begun-{rank}').touch()\n"
        "while True: time.sleep(0.1)\n"
    )
    run = WatchedRun(hosts, tmp_path / "run", program=[str(program)])
    try:
        run.wait(lambda: len([*run.folder.glob("begun-*")]) == 2)
        for pid, words in hosts.processes().items():
            if "hpcstrat watch" in words:
                os.kill(pid, signal.SIGTERM)
        statuses = [watcher.wait(60) for watcher in run.watchers.values()]
        assert (run.folder / "written-0").exists(), run.logs()
        assert statuses == [0, 0], run.logs()
        assert not hosts.processes()
    finally:
        run.end()


@pytest.mark.skipif(not Path("/bin/tcsh").exists(), reason="there is no tcsh")
def test_mpirun_starts_daemons_for_a_user_of_the_c_shell(
    hosts: Hosts, tmp_path: Path
) -> None:
    users = tmp_path / "passwd"
    users.write_text("root:x:0:0:root:/root:/bin/tcsh\n")
    hx = str(hosts.folder / "hx")
    names = "node1", "node2"
    for name in names:
        bind = [hx, name, "mount", "--bind", str(users), "/etc/passwd"]
        subprocess.run(bind, check=True)
    run = WatchedRun(hosts, tmp_path / "run", "--most-failures", "1", steps=3)
    try:
        assert run.watchers["node1"].wait(60) == 0, run.logs()
        run.check_result()
    finally:
        run.end()
        for name in names:
            subprocess.run([hx, name, "umount", "/etc/passwd"], check=True)


def test_fewer_nodes_run_more_ranks_than_they_have_cores(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRTE_MCA_hwloc_default_binding_policy", raising=False)
    each = str(len(os.sched_getaffinity(0)))
    options = "--least", "1", "--ranks-per-node", each
    run = WatchedRun(hosts, tmp_path / "run", *options, binds=True)
    try:
        run.wait(lambda: run.first_step_after(0))
        lost = time.time()
        run.watchers["node2"].kill()
        run.wait(lambda: run.first_step_after(lost))
        assert run.claims()[-1]["nodes"] == ["node1"]
    finally:
        run.end()


def test_a_newer_job_in_the_same_folder_ends_the_older_one(
    hosts: Hosts, tmp_path: Path
) -> None:
    """A requeued job may start while a node of the former one was cut off."""
    folder = tmp_path / "run"
    older = WatchedRun(hosts, folder, use=1, nodes=["node1"])
    try:
        older.wait(lambda: older.first_step_after(0))
        newer = WatchedRun(hosts, folder, use=1, nodes=["node2"], steps=30, nap=0.01)
        try:
            assert newer.watchers["node2"].wait(60) == 0, newer.logs()
            assert older.watchers["node1"].wait(60) == 76, older.logs()
            assert [claim["job"][-5:] for claim in newer.claims()] == ["node1", "node2"]
            assert newer.problems() == []
            assert not hosts.processes()
        finally:
            newer.end()
    finally:
        older.end()


@pytest.mark.slow
def test_a_job_of_slurm_goes_on_without_the_node_of_its_script(
    make_slurm: Callable[[int], Slurm], tmp_path: Path
) -> None:
    run = SlurmRun(make_slurm(4), tmp_path / "run", spare=2, steps=400, nap=0.01)
    try:
        for lost in ("node1", "node2"):
            run.wait(lambda: run.claims() and run.first_step_after(0))
            moment = time.time()
            run.hosts.switch_off(lost)
            run.wait(lambda m=moment: run.first_step_after(m))
        # Slurm has no status of a script that was on a lost node.
        assert run.job.wait_to_end() == "CANCELLED", run.logs()
        assert [claim["leader"] for claim in run.claims()] == [
            "node1",
            "node2",
            "node3",
        ]
        assert run.problems() == []
        run.check_result()
    finally:
        run.end()


@pytest.mark.slow
def test_each_start_without_the_first_node_of_a_slurm_job_succeeds(
    make_slurm: Callable[[int], Slurm], tmp_path: Path
) -> None:
    """Some such starts waited forever in MPI_Init; see `RunLaunch`."""
    run = SlurmRun(make_slurm(3), tmp_path / "run", spare=1)
    try:
        run.wait(lambda: run.claims() and run.first_step_after(0))
        moment = time.time()
        run.hosts.switch_off("node1")
        for _ in range(10):
            run.wait(lambda m=moment: run.first_step_after(m), 40)
            moment = time.time()
            os.kill(min(run.ranks()), signal.SIGKILL)
        assert run.problems() == []
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node1", "node2"])
def test_a_job_of_slurm_with_too_few_nodes_is_requeued(
    make_slurm: Callable[[int], Slurm], tmp_path: Path, lost: str
) -> None:
    slurm = make_slurm(3)
    run = SlurmRun(slurm, tmp_path / "run", spare=0, steps=300, nap=0.01, nodes=2)
    try:
        run.wait(lambda: run.claims() and run.first_step_after(0))
        slurm.switch_off(lost)
        run.job.start_again(1)
        assert run.job.wait_to_end() == "COMPLETED", run.logs()
        restarts = [claim["job"].split(".")[-2] for claim in run.claims()]
        assert restarts == ["0", "1"]
        assert run.problems() == []
        run.check_result()
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node1", "node2"])
def test_the_restart_script_is_requeued_when_a_node_is_lost(
    make_slurm: Callable[[int], Slurm], tmp_path: Path, lost: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\n"
        "import hpcstrat as hs\n"
        "strategy = hs.MultiWorkerMirroredStrategy()\n"
        "hs.print_once('begins')\n"
        "while not os.getenv('SLURM_RESTART_COUNT'):\n"
        "    strategy.reduce('sum', 1.0)\n"
        "    time.sleep(0.1)\n"
    )
    slurm = make_slurm(3)
    size = {"nodes": 2, "ntasks_per_node": 1}
    job = slurm.submit(tmp_path, "restart.sbatch", program, **size)
    job.wait_for_text("begins")
    slurm.switch_off(lost)
    job.start_again(1)
    assert job.wait_to_end() == "COMPLETED", job.output
