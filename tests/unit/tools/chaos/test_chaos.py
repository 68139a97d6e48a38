"""Chaos draws reproducible acts, finds ranks, and touches no other process."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.cli import main
from hpcstrat.tools.chaos import disturbing
from hpcstrat.tools.chaos.processes import ProcessHandle

NOBODY = 65534
PATIENCE_SECONDS = 60
COMMAND = [sys.executable, "-c", "from hpcstrat.cli import main; main()", "chaos"]


@given(st.sets(st.integers(0, 200), min_size=1))
def test_ranks_are_read_as_they_are_written(ranks: set[int]) -> None:
    assert disturbing.parse_ranks(",".join(map(str, ranks))) == sorted(ranks)
    low, high = min(ranks), max(ranks)
    assert disturbing.parse_ranks(f" {low}-{high}") == list(range(low, high + 1))


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1-2-3", "1.5"])
def test_other_texts_are_no_ranks(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        disturbing.parse_ranks(text)


@given(
    st.sets(st.integers(0, 20), min_size=1),
    st.lists(st.sampled_from(disturbing.KINDS), min_size=1),
    st.integers(1, 30),
    st.integers(0, 2**32),
)
def test_a_seed_draws_the_same_again(
    ranks: set[int], kinds: list[str], count: int, seed: int
) -> None:
    def drawn() -> list[disturbing.Act]:
        return disturbing.draw(list(ranks), kinds, every=2.0, count=count, seed=seed)

    acts = drawn()
    assert acts == drawn()
    killed: set[int] = set()
    for act in acts:
        assert act.rank in ranks - killed
        assert act.kind in kinds
        assert act.wait_seconds >= 0
        killed |= {act.rank} if act.kind == "kill" else set()
    assert len(acts) == count or killed == ranks


def test_waits_have_the_mean_that_was_asked_for_and_all_ranks_come() -> None:
    acts = disturbing.draw(range(4), ["stop", "delay"], every=3.0, count=4000, seed=1)
    mean = sum(act.wait_seconds for act in acts) / len(acts)
    assert 2.8 < mean < 3.2
    for rank in range(4):
        assert 850 < sum(act.rank == rank for act in acts) < 1150
    other = disturbing.draw(range(4), ["stop", "delay"], every=3.0, count=4000, seed=2)
    assert acts != other


@pytest.mark.parametrize(
    "change",
    [{"ranks": []}, {"kinds": []}, {"kinds": ["tickle"]}, {"every": 0}, {"count": 0}],
)
def test_nothing_is_drawn_from_nothing(change: dict[str, Any]) -> None:
    options = {"ranks": [0], "kinds": ["kill"], "every": 1.0, "count": 1} | change
    ranks, kinds = options.pop("ranks"), options.pop("kinds")
    with pytest.raises(ValueError, match="expected"):
        disturbing.draw(ranks, kinds, seed=1, **options)


@pytest.mark.parametrize(
    "values", [{"stop_seconds": 0}, {"delay_seconds": float("nan")}, {"factor": 1}]
)
def test_strength_out_of_range_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        disturbing.Strength(**values)


class Machine:
    """A fake /proc."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self, pid: int, parent: int, name: str, *, mpi: bool = False, **env: str
    ) -> None:
        folder = self.folder / str(pid)
        folder.mkdir()
        rest = " ".join(["0"] * 17)
        (folder / "stat").write_text(f"{pid} ({name}) S {parent} {rest} {1000 + pid}")
        pairs = [f"{key}={value}" for key, value in env.items()]
        (folder / "environ").write_text("\0".join(pairs))
        (folder / "cmdline").write_text(f"{name}\0--option")
        (folder / "maps").write_text("/usr/lib/libmpi.so.40" if mpi else "/bin/x")

    def jobs(self, **options: Any) -> dict[str, list[tuple[int, int]]]:
        found = disturbing.find_jobs(proc=self.folder, **options)
        return {j.name: [(p.rank, p.pid) for p in j.ranks] for j in found}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_ranks_of_each_launcher_are_found(machine: Machine) -> None:
    machine.add(10, 1, "prterun")
    for rank in range(2):
        env = {"PMIX_NAMESPACE": "prterun-a@1", "OMPI_COMM_WORLD_RANK": str(rank)}
        machine.add(11 + rank, 10, "python", PMIX_RANK=str(rank), **env)
    machine.add(20, 1, "mpiexec.hydra")
    machine.add(21, 20, "hydra_pmi_proxy")
    for rank in range(2):
        machine.add(22 + rank, 21, "python", PMI_RANK=str(rank))
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    machine.add(30, 1, "slurmstepd")
    machine.add(31, 30, "python", SLURM_PROCID="4", **step)
    assert machine.jobs() == {
        "mpiexec.hydra-20": [(0, 22), (1, 23)],
        "prterun-a@1": [(0, 11), (1, 12)],
        "slurm-77.0": [(4, 31)],
    }


def test_what_is_no_rank_is_left_alone(machine: Machine) -> None:
    # Add the script of a batch job, and a daemon that Slurm has started.
    slurm = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0"}
    machine.add(30, 1, "bash", **slurm)
    machine.add(31, 30, "mpirun", **slurm)
    machine.add(32, 1, "prted", SLURM_STEP_ID="1", **slurm)
    machine.add(33, 1, "python", PMI_RANK="none")
    machine.add(34, 1, "python")
    assert machine.jobs() == {}
    # For processes of that daemon, mpirun's own rank numbers count.
    rank = {"PMIX_NAMESPACE": "prterun-b@1", "OMPI_COMM_WORLD_RANK": "3"}
    machine.add(35, 32, "python", SLURM_STEP_ID="1", **slurm, **rank)
    assert machine.jobs() == {"prterun-b@1": [(3, 35)]}
    assert machine.jobs(uid=os.geteuid() + 1) == {}


def test_a_rank_is_the_process_that_has_mpi(machine: Machine) -> None:
    rank = {"PMIX_NAMESPACE": "job", "PMIX_RANK": "0"}
    machine.add(11, 1, "bash", **rank)
    machine.add(12, 11, "python", **rank)
    assert machine.jobs() == {"job": [(0, 11)]}
    machine.add(13, 12, "python", mpi=True, **rank)
    # A forked child of the rank has loaded the library, too, but is no rank.
    machine.add(14, 13, "python", mpi=True, **rank)
    assert machine.jobs() == {"job": [(0, 13)]}


def test_jobs_are_chosen_by_name_or_by_the_only_one_of_slurm() -> None:
    jobs = [
        disturbing.JobRanks(n, s, ()) for n, s in [("a", "7"), ("b", "7"), ("c", "8")]
    ]
    assert disturbing.choose(jobs, "a").name == "a"
    assert disturbing.choose(jobs, "8").name == "c"
    for name in ("7", "", "d"):
        with pytest.raises(disturbing.NoSuchRankError, match="expected one job"):
            disturbing.choose(jobs, name)


@pytest.fixture
def make_rank() -> Iterator[Callable[..., disturbing.JobRanks]]:
    """Yield a function that starts processes that look like ranks of a separate job."""
    started = []

    def make(count: int = 1, **options: Any) -> disturbing.JobRanks:
        name = f"test-{secrets.token_hex(8)}"
        for rank in range(count):
            env = {"PMIX_NAMESPACE": name, "PMIX_RANK": str(rank)}
            process = subprocess.Popen(["sleep", "600"], env=env, **options)
            started.append(process)
            # The environment of a process is empty until its program has been loaded.
            wait_for_environment(process.pid)
        own = {process.pid for process in started}
        found = [j for j in disturbing.find_jobs() if j.name == name]
        assert all(p.pid in own for job in found for p in job.ranks)
        return found[0] if found else disturbing.JobRanks(name, "", ())

    yield make
    for process in started:
        process.kill()
        process.wait()


def wait_for_environment(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while b"PMIX_RANK" not in Path(f"/proc/{pid}/environ").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def state(process: disturbing.RankProcess) -> str:
    text = Path(f"/proc/{process.pid}/stat").read_text()
    return text.rpartition(")")[2].split()[0]


RUNS, STANDS, IS_DEAD = "SRD", "T", "Z"


def wait_for(process: disturbing.RankProcess, states: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while state(process) not in states:
        assert time.monotonic() < deadline, state(process)
        time.sleep(0.01)


def test_only_the_rank_that_was_drawn_is_touched(make_rank: Any) -> None:
    job, other = make_rank(3), make_rank(3)
    told = []
    acts = [
        disturbing.Act(0, "stop", 1),
        disturbing.Act(0, "kill", 1),
        disturbing.Act(0, "stop", 1),
    ]
    strength = disturbing.Strength(stop_seconds=0.2)
    done = disturbing.disturb(
        job, acts, strength, lambda act, p, text: told.append((p.rank, text))
    )
    assert done == 2
    texts = ["stopped", "goes on", "killed", "has ended"]
    assert told == [(1, text) for text in texts]
    wait_for(job.ranks[1], IS_DEAD)
    untouched = job.ranks[0], job.ranks[2], *other.ranks
    assert all(state(process) in RUNS for process in untouched)


def test_a_delayed_rank_stands_still_most_of_the_time(make_rank: Any) -> None:
    job = make_rank()
    seen: list[str] = []

    def look(act: Any, process: Any, text: str) -> None:
        seen.append(text)

    begin = time.monotonic()
    strength = disturbing.Strength(delay_seconds=0.5, factor=5)
    assert disturbing.disturb(job, [disturbing.Act(0, "delay", 0)], strength, look) == 1
    assert time.monotonic() - begin >= 0.5
    assert seen == ["slowed down", "goes on"]
    wait_for(job.ranks[0], RUNS)


def test_a_rank_of_another_job_is_refused(make_rank: Any) -> None:
    with pytest.raises(disturbing.NoSuchRankError, match=r"one of \[0\], found 1"):
        disturbing.disturb(make_rank(), [disturbing.Act(0, "kill", 1)])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts others' processes")
def test_processes_of_others_are_never_touched(make_rank: Any) -> None:
    job = make_rank(user=NOBODY)
    # Even root must not disturb ranks of other users.
    assert job.ranks == ()
    process = subprocess.Popen(["sleep", "600"], user=NOBODY)
    try:
        started = Path(f"/proc/{process.pid}/stat").read_text().split()[21]
        rank = disturbing.RankProcess(0, process.pid, started, "sleep")
        with pytest.raises(disturbing.NoSuchRankError):
            ProcessHandle(rank)
    finally:
        process.kill()
        process.wait()


def test_a_number_that_is_used_again_is_refused(make_rank: Any) -> None:
    rank = make_rank().ranks[0]
    ProcessHandle(rank).close()
    before = disturbing.RankProcess(
        0, rank.pid, str(int(rank.started) - 1), rank.command
    )
    with pytest.raises(disturbing.NoSuchRankError, match="has ended"):
        ProcessHandle(before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("kind", ["--stop", "--delay"])
def test_a_stopped_rank_goes_on_when_chaos_ends(
    make_rank: Any, number: signal.Signals, kind: str
) -> None:
    job = make_rank()
    options = [*COMMAND, "run", kind, "300", "--factor", "1000", "--every", "0.01"]
    process = subprocess.Popen(
        [*options, "--job", job.name], stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for(job.ranks[0], STANDS)
        process.send_signal(number)
        text, _ = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    wait_for(job.ranks[0], RUNS)
    killed = number is signal.SIGKILL
    assert process.returncode == (-number if killed else 130), text
    assert ("goes on" in text) == (not killed)


def test_dry_run_says_what_would_be_done_and_does_nothing(make_rank: Any) -> None:
    job = make_rank(4)
    words = ["chaos", "run", "--job", job.name, "--kill", "--count", "3", "--seed", "5"]
    said = [CliRunner().invoke(main, [*words, "--dry-run"]) for _ in range(2)]
    assert said[0].exit_code == 0
    assert said[0].output == said[1].output
    assert said[0].output.count("would kill rank") == 3
    assert all(state(process) in RUNS for process in job.ranks)


def test_command_does_what_was_drawn_and_says_so(make_rank: Any) -> None:
    job = make_rank(4)
    words = ["chaos", "run", "--job", job.name, "--kill", "--every", "0.01"]
    said = CliRunner().invoke(main, [*words, "--ranks", "1-2", "--count", "2"])
    assert said.exit_code == 0, said.output
    assert said.output.count("killed") == 2
    assert "2 of 2 done" in said.output
    for process in job.ranks[1:3]:
        wait_for(process, IS_DEAD)
    assert all(state(job.ranks[rank]) in RUNS for rank in (0, 3))


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--job", "no such job", "--kill"], 1, "expected one job"),
        (["--kill"], 2, "--job"),
        (["--job", "JOB"], 2, "choose at least one"),
        (["--job", "JOB", "--kill", "--ranks", "x"], 2, "expected ranks"),
        (["--job", "JOB", "--kill", "--ranks", "0,9"], 1, "found [9]"),
        (["--job", "JOB", "--stop", "-1"], 2, "positive"),
        (["--job", "JOB", "--kill", "--count", "0"], 2, "count"),
    ],
)
def test_wrong_options_touch_nothing(
    make_rank: Any, words: list[str], status: int, text: str
) -> None:
    job = make_rank()
    words = [job.name if word == "JOB" else word for word in words]
    said = CliRunner().invoke(main, ["chaos", "run", *words])
    assert said.exit_code == status, said.output
    assert text in said.output
    assert state(job.ranks[0]) in RUNS


def test_list_names_jobs_and_ranks_in_columns(make_rank: Any) -> None:
    job = make_rank(2)
    said = subprocess.run(
        [*COMMAND, "list"], capture_output=True, text=True, check=True
    )
    lines = [line.split("\t") for line in said.stdout.splitlines()]
    mine = next(line for line in lines if line[0] == job.name)
    pids = ",".join(str(process.pid) for process in job.ranks)
    assert mine[1:] == ["", "0,1", pids, "sleep 600"]


def test_chaos_itself_is_no_rank() -> None:
    """Under ``srun --overlap``, the chaos process has the variables of a rank."""
    name = f"test-{secrets.token_hex(8)}"
    env = os.environ | {"PMIX_NAMESPACE": name, "PMIX_RANK": "0"}
    said = subprocess.run(
        [*COMMAND, "list"], capture_output=True, text=True, env=env, check=False
    )
    assert name not in said.stdout


def test_chaos_loads_no_mpi() -> None:
    code = "import sys, hpcstrat.cli; sys.exit('mpi4py.MPI' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
