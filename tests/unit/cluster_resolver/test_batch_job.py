"""Jobs of PBS, Flux, LSF and SGE, as read from their commands and environments.

The inputs were recorded from Grid Engine 8.1.9 (SGE), OpenPBS 23 and flux-core 0.88.
The inputs of LSF, which is proprietary, follow its manual ("Environment variables set
for job execution", "bjobs -WL").
"""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.cluster_resolver import (
    BatchJob,
    FluxClusterResolver,
    Launch,
    LSFClusterResolver,
    PBSClusterResolver,
    SGEClusterResolver,
    batch_job_from_environment,
    launch_from_environment,
)

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def rank(number: int, **more: str) -> dict[str, str]:
    """Return the environment of a rank of Open MPI's mpirun, two on each host."""
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": str(number % 2)}
    return {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(number), **local, **more}


def addresses(resolver: Any) -> list[str]:
    """Return the workers' addresses without ports."""
    found = resolver.cluster_spec().as_dict()["worker"]
    return [address.partition(":")[0] for address in found]


# Tests of lists of hosts


def pbs_nodes(folder: Path, text: str) -> dict[str, str]:
    """Write a PBS node file, and return the environment that names it."""
    path = folder / "nodes"
    path.write_text(text)
    return {"PBS_NODEFILE": str(path)}


def test_pbs_has_a_line_for_each_rank(tmp_path: Path) -> None:
    env = pbs_nodes(tmp_path, "node1\nnode1\nnode2\nnode2\n")
    resolver = PBSClusterResolver(host="node2.site", variables=rank(3, **env))
    spec = resolver.cluster_spec()
    assert spec.job_tasks("worker") == [
        *("node1:8888", "node1:8889"),
        *("node2:8888", "node2:8889"),
    ]
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.num_accelerators() == {}


def test_the_same_number_of_ranks_on_each_host_may_be_below_the_slots(
    tmp_path: Path,
) -> None:
    """``mpiexec -n 4 -ppn 2`` starts ranks in this way on hosts with more slots."""
    env = pbs_nodes(tmp_path, "node1\n" * 8 + "node2\n" * 8)
    resolver = PBSClusterResolver(host="node2", variables=rank(2, **env))
    assert addresses(resolver) == ["node1", "node1", "node2", "node2"]


def test_unequal_hosts_are_filled_by_slots(tmp_path: Path) -> None:
    env = pbs_nodes(tmp_path, "node1\nnode2\nnode2\nnode2\n")
    resolver = PBSClusterResolver(host="node2", variables=rank(3, **env))
    assert addresses(resolver) == ["node1", "node2", "node2", "node2"]


def test_a_rank_on_another_host_is_an_error(tmp_path: Path) -> None:
    """With ``mpirun --map-by node``, the resolver's addresses would be wrong."""
    env = pbs_nodes(tmp_path, "node1\nnode1\nnode2\nnode2\n")
    with pytest.raises(RuntimeError, match=r"rank 1 on host node1.*found it on node2"):
        PBSClusterResolver(host="node2", variables=rank(1, **env))


def test_more_ranks_than_slots_are_an_error(tmp_path: Path) -> None:
    env = pbs_nodes(tmp_path, "node1\n")
    with pytest.raises(RuntimeError, match=r"at most 1 ranks.*found 4"):
        PBSClusterResolver(host="node1", variables=rank(0, **env))


@pytest.mark.parametrize(
    ("kind", "variables", "words"),
    [
        (PBSClusterResolver, rank(0), "job of PBS, found no PBS_NODEFILE"),
        (SGEClusterResolver, rank(0), "job of SGE, found no PE_HOSTFILE"),
        (LSFClusterResolver, rank(0), "job of LSF, found no LSB_MCPU_HOSTS"),
        (LSFClusterResolver, {"LSB_MCPU_HOSTS": "n1 1"}, "no launcher has started"),
        (PBSClusterResolver, rank(0, PBS_NODEFILE="/nowhere"), "/nowhere, found: No"),
        (FluxClusterResolver, {"FLUX_JOB_ID": "f1"}, "task of a Flux job"),
    ],
)
def test_other_environments_are_named(kind: Any, variables: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        kind(variables=variables)


def test_lsf_says_hosts_and_slots() -> None:
    env = rank(2, LSB_MCPU_HOSTS="node1 2 node2 2")
    assert addresses(LSFClusterResolver(host="node2", variables=env)) == [
        *("node1", "node1", "node2", "node2")
    ]
    with pytest.raises(ValueError, match="found 'node1 2 node2'"):
        LSFClusterResolver(variables=rank(0, LSB_MCPU_HOSTS="node1 2 node2"))


def test_the_host_from_which_jsrun_starts_has_no_ranks() -> None:
    """Jobs on Summit have a batch host, and hosts with 42 mostly unused slots."""
    numbers = {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}
    env = {f"JSM_NAMESPACE_{name}": str(number) for name, number in numbers.items()}
    assert launch_from_environment(env) == Launch("jsrun", 3, 4, 1, 2)
    env["LSB_MCPU_HOSTS"] = "batch5 1 a35n03 42 a35n04 42"
    resolver = LSFClusterResolver(host="a35n04", variables=env)
    assert addresses(resolver) == ["a35n03", "a35n03", "a35n04", "a35n04"]


def test_launchers_that_speak_the_protocol_of_mpich_are_told_apart() -> None:
    pals = {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_RANKID": "5"}
    pals |= {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
    expected = Launch("mpiexec of Cray PALS", 5, 8, 1, 4)
    assert launch_from_environment(pals) == expected
    flux = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_TASK_LOCAL_ID": "0"}
    assert launch_from_environment(flux) == Launch("flux run", 0, 1, 0, None)
    # A task of Flux has started mpiexec, whose rank numbers count.
    inner = {**flux, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
    assert launch_from_environment(inner).launcher == "mpiexec of MPICH"
    assert launch_from_environment({**inner, "PMI_RANK": "0"}).rank == 0


SGE_HOSTS = """node1 2 all.q@node1 UNDEFINED
node2 1 all.q@node2 UNDEFINED
node2 1 more.q@node2 UNDEFINED
"""


def test_sge_says_slots_of_each_queue(tmp_path: Path) -> None:
    path = tmp_path / "pe_hostfile"
    path.write_text(SGE_HOSTS)
    env = rank(3, PE_HOSTFILE=str(path), CUDA_VISIBLE_DEVICES="0,1,2,3")
    jobs = {"chief": 1, "worker": 3}
    resolver = SGEClusterResolver(jobs, host="node2", variables=env)
    assert resolver.task_id == 2
    assert resolver.cluster_spec().as_dict() == {
        "chief": ["node1:8888"],
        "worker": ["node1:8889", "node2:8888", "node2:8889"],
    }
    assert resolver.num_accelerators() == {"GPU": 2}
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_gpu_that_a_task_has_alone_stays_its_own(tmp_path: Path) -> None:
    env = rank(1, **pbs_nodes(tmp_path, "node1\nnode1\nnode2\nnode2\n"))
    env["CUDA_VISIBLE_DEVICES"] = "1"
    resolver = PBSClusterResolver(host="node1", variables=env)
    resolver.cluster_spec()
    assert resolver.num_accelerators() == {"GPU": 1}
    assert env["CUDA_VISIBLE_DEVICES"] == "1"


# Tests of the end of a job, as commands of schedulers report it


def answer(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str) -> None:
    """Put a command into PATH that prints a text for this line, and else fails."""
    command, _, words = line.partition(" ")
    path = folder / command
    begin = path.read_text() if path.exists() else "#!/bin/sh\n"
    begin = begin.removesuffix("exit 3\n")
    asked = f'if [ "$LC_ALL $*" = {shlex.quote(f"C {words}")} ]; then'
    path.write_text(f"{begin}{asked} cat <<'END'\n{text}\nEND\nexit\nfi\nexit 3\n")
    path.chmod(0o755)
    if str(folder) not in os.environ["PATH"]:
        # Hide real commands of this name, such as one in a virtual environment.
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


SGE_RUNNING = """<?xml version='1.0'?>
<job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd">
  <queue_info>
    <job_list state="running">
      <JB_job_number>1</JB_job_number>
      <JAT_prio>0.50000</JAT_prio>
      <JB_name>probe</JB_name>
      <JB_owner>root</JB_owner>
      <state>r</state>
      <JAT_start_time>2026-11-26T17:30:44</JAT_start_time>
      <queue_name>all.q@node1</queue_name>
      <slots>4</slots>
      <full_job_name>probe</full_job_name>
      <requested_pe name="mpi">4</requested_pe>
      <granted_pe name="mpi">4</granted_pe>
      <hard_request name="h_rt" resource_contribution="0.000000">600</hard_request>
      <hard_request name="s_rt" resource_contribution="0.000000">500</hard_request>
      <binding>NONE</binding>
    </job_list>
  </queue_info>
  <job_info>
  </job_info>
</job_info>"""
SGE_ASKS = "qstat -xml -r -s r -u *"


def test_sge_tells_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(tmp_path, monkeypatch, SGE_ASKS, SGE_RUNNING)
    began = time.mktime((2026, 11, 26, 17, 30, 44, 0, 0, -1))
    assert BatchJob("SGE", "1").end() == began + 600
    assert BatchJob("SGE", "2").end() is None


def test_sge_knows_tasks_of_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SGE_RUNNING.replace("<slots>4", "<tasks>3</tasks>\n<slots>4")
    answer(tmp_path, monkeypatch, SGE_ASKS, text)
    assert BatchJob("SGE", "1.3").end()
    assert BatchJob("SGE", "1.4").end() is None


@pytest.mark.parametrize(
    ("said", "minutes"),
    [
        ("1:58 L", 118),
        # An estimate by bsub -We, and a job without a limit, have no end.
        ("1:58 E", None),
        ("0:00 X", None),
        ("-", None),
    ],
)
def test_lsf_tells_how_much_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, minutes: int | None
) -> None:
    answer(tmp_path, monkeypatch, "bjobs -noheader -o time_left 7", said)
    end = BatchJob("LSF", "7").end()
    assert (
        end == pytest.approx(time.time() + 60 * minutes, abs=5)
        if minutes
        else (end is None)
    )


PBS_RUNNING = """Job Id: 11.node1
    Job_Name = probe
    Job_Owner = root@node1
    job_state = R
    queue = workq
    server = node1
    Checkpoint = u
    ctime = Thu Nov 26 18:18:57 2026
    exec_host = node1/0*2+node2/0*2
    exec_vnode = (node1:ncpus=2)+(node2:ncpus=2)
    mtime = Thu Nov 26 18:18:57 2026
    qtime = Thu Nov 26 18:18:57 2026
    Resource_List.mpiprocs = 4
    Resource_List.place = scatter
    Resource_List.select = 2:ncpus=2:mpiprocs=2:ompthreads=1
    Resource_List.walltime = 00:10:00
    schedselect = 2:ncpus=2:mpiprocs=2:ompthreads=1
    stime = Thu Nov 26 18:18:57 2026
    substate = 41
    Variable_List = PBS_O_HOME=/root,
\tPBS_O_PATH=/opt/pbs/bin:/opt/pbs/sbin:/usr/sbin:/usr/bin:/sbin:/bin,
\tPBS_O_SYSTEM=Linux,PBS_O_QUEUE=workq,PBS_O_HOST=node1
    comment = Job run at Thu Nov 26 at 18:18 on (node1:ncpus=2)+(node2:ncpus=2)
\t
    etime = Thu Nov 26 18:18:57 2026
    run_count = 1
"""


def test_pbs_tells_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(tmp_path, monkeypatch, "qstat -f 11.node1", PBS_RUNNING)
    began = time.mktime((2026, 11, 26, 18, 18, 57, 0, 0, -1))
    assert BatchJob("PBS", "11.node1").end() == began + 600
    unlimited = PBS_RUNNING.replace("    Resource_List.walltime = 00:10:00\n", "")
    answer(tmp_path, monkeypatch, "qstat -f 12", unlimited)
    assert BatchJob("PBS", "12").end() is None
    # The output format of Torque, from its manual.
    left = "Job Id: 13\n    start_time = Thu\n    Walltime.Remaining = 3421\n"
    answer(tmp_path, monkeypatch, "qstat -f 13", left)
    assert BatchJob("PBS", "13").end() == pytest.approx(time.time() + 3421, abs=5)


FLUX_R = """{"version": 1, "execution": {"R_lite":
[{"rank": "0-1", "children": {"core": "0"}}],
"starttime": 1795716508.0886457, "expiration": 1795720105.2929177, "nslots": 2,
"nodelist": ["node[3-4]"]}}"""
FLUX = {
    "FLUX_JOB_ID": "f21vGTZq",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "18",
}


@pytest.mark.parametrize(
    ("task_map", "expected"),
    [
        ("[[0,2,2,1]]", ["node3:8888", "node3:8889", "node4:8888", "node4:8889"]),
        # Ranks are placed on the nodes in turn.
        ("[[0,2,1,2]]", ["node3:8888", "node4:8888", "node3:8889", "node4:8889"]),
        (
            "[[0,1,3,1],[1,1,1,1]]",
            ["node3:8888", "node3:8889", "node3:8890", "node4:8888"],
        ),
    ],
)
def test_flux_tells_nodes_and_places(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task_map: str,
    expected: list[str],
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    answer(tmp_path, monkeypatch, "flux job info f21vGTZq R", FLUX_R)
    answer(tmp_path, monkeypatch, "flux job taskmap f21vGTZq", task_map)
    env = {**os.environ, **FLUX}
    assert launch_from_environment(FLUX) == Launch("flux run", 3, 4, 1, None)
    resolver = FluxClusterResolver(variables=env)
    assert resolver.cluster_spec().job_tasks("worker") == expected
    assert resolver.get_task_info() == ("worker", 3)
    assert resolver.num_accelerators() == {}


def test_flux_deals_out_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = FLUX_R.replace('"core": "0"', '"core": "0-3", "gpu": "0-1"')
    answer(tmp_path, monkeypatch, "flux job info f21vGTZq R", gpus)
    answer(tmp_path, monkeypatch, "flux job taskmap f21vGTZq", "[[0,2,2,1]]")
    env = {**os.environ, **FLUX}
    resolver = FluxClusterResolver(variables=env)
    resolver.cluster_spec()
    assert resolver.num_accelerators() == {"GPU": 1}
    assert env["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(("said", "left"), [("3598", 3598), ("4294967295", None)])
def test_flux_tells_how_much_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, left: int | None
) -> None:
    answer(tmp_path, monkeypatch, "flux job timeleft", said)
    end = BatchJob("Flux", "f1").end()
    if left is None:
        assert end is None
    else:
        assert end == pytest.approx(time.time() + left, abs=5)


@pytest.mark.parametrize(("said", "found"), [("99", 99.0), ("NONE", None)])
def test_slurm_tells_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, found: float | None
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    words = "squeue --noheader --jobs 7 --format=%e"
    answer(tmp_path, monkeypatch, words, said)
    assert BatchJob("Slurm", "7").end() == found
    assert BatchJob("Slurm", "8").end() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "55")
    assert BatchJob("Slurm", "8").end() == 55.0


@pytest.mark.parametrize("scheduler", ["Slurm", "PBS", "Flux", "LSF", "SGE"])
def test_a_scheduler_that_cannot_be_asked_tells_nothing(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert BatchJob(scheduler, "7").end() is None


@pytest.mark.parametrize(
    ("env", "job"),
    [
        ({}, None),
        ({"JOB_ID": "of something else"}, None),
        ({"SLURM_JOB_ID": "17"}, ("Slurm", "17")),
        ({"PBS_JOBID": "3.server"}, ("PBS", "3.server")),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "0"}, ("LSF", "5")),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "2"}, ("LSF", "5[2]")),
        ({"JOB_ID": "1", "SGE_TASK_ID": "undefined"}, ("SGE", "1")),
        ({"JOB_ID": "1", "SGE_TASK_ID": "4"}, ("SGE", "1.4")),
        ({"FLUX_JOB_ID": "f2", "SLURM_JOB_ID": "17"}, ("Flux", "f2")),
        ({"FLUX_ENCLOSING_ID": "f1"}, ("Flux", "f1")),
    ],
)
def test_the_job_is_that_of_the_innermost_scheduler(
    env: dict[str, str], job: tuple[str, str] | None
) -> None:
    found = batch_job_from_environment(env)
    assert found == (None if job is None else BatchJob(*job))


@pytest.mark.parametrize(
    ("state", "requeued"),
    [
        ("RUNNING None", True),
        ("COMPLETING TimeLimit", True),
        ("PENDING BeginTime", True),
        ("COMPLETING None", False),
    ],
)
def test_a_cancelled_job_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, requeued: bool
) -> None:
    words = "squeue --noheader --states=all --jobs 7 --format=%T %r"
    answer(tmp_path, monkeypatch, words, state)
    answer(tmp_path, monkeypatch, "scontrol requeue 7", "done")
    if requeued:
        BatchJob("Slurm", "7").requeue()
    else:
        with pytest.raises(RuntimeError, match=r"job 7 to run .* it was cancelled"):
            BatchJob("Slurm", "7").requeue()


def test_requeueing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in ("scontrol requeue 7", "brequeue 7", "qmod -rj 7"):
        answer(tmp_path, monkeypatch, line, "done")
    for scheduler in ("Slurm", "LSF", "SGE"):
        BatchJob(scheduler, "7").requeue()
        with pytest.raises(RuntimeError, match=r"to requeue job 8.*requeue it by hand"):
            BatchJob(scheduler, "8").requeue()
    with pytest.raises(RuntimeError, match=r"found PBS; submit.*jobs/pbs/ shows"):
        BatchJob("PBS", "7").requeue()
