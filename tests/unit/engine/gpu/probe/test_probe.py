"""The trial of MPI in other processes, which succeed, die or hang.

The programs here are real processes without MPI; tests/gpu runs the real program.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hpcstrat.engine.gpu.probe import probe as module
from hpcstrat.engine.gpu.probe.launching import (
    find_launcher,
    kept_settings,
    launch,
    scrubbed,
)
from hpcstrat.engine.gpu.probe.outcome import (
    OPERATIONS,
    Answer,
    LauncherEnd,
    read_outcome,
)
from hpcstrat.engine.gpu.probe.probe import ProbeReport, cache_path, known, probe, save

Probing = Callable[..., ProbeReport]
LIBRARY = "Some MPI 1.0"
KIND = {"mpi": LIBRARY, "driver": "12.9", "gpus": "H100"}

# A launcher that starts two ranks like mpirun, and exits when one of them fails.
LAUNCHER = """
import os, subprocess, sys
ranks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, "FAKE_RANK": str(rank)})
    for rank in range(2)
]
codes = [rank.wait() for rank in ranks]
sys.exit(next((abs(code) for code in codes if code), 0))
"""

# A program that does for each operation, size and rank what FAKE_PLAN says.
PROGRAM = """
import ctypes, faulthandler, json, os, sys, time
from hpcstrat.engine.gpu.probe.outcome import OPERATIONS

rank = int(os.environ.get("FAKE_RANK", 0))
plan = json.loads(os.environ["FAKE_PLAN"])
skipped = sys.argv[sys.argv.index("--skip") + 1].split(",")
folder = sys.argv[-1]
if plan.get("start"):
    sys.exit(plan["start"])
out = open(f"{folder}/rank-{rank}.jsonl", "x")
fault = open(f"{folder}/rank-{rank}.fault", "w")
faulthandler.enable(fault)

def say(**line):
    out.write(json.dumps(line) + "\\n")
    out.flush()

say(hello=plan.get("library", "Some MPI 1.0"), gpu=rank)
for name in OPERATIONS:
    if name in skipped:
        continue
    for size in (8, 65536):
        what = plan.get(f"{name}/{size}/{rank}", "")
        say(operation=name, bytes=size)
        if what == "crash":
            ctypes.string_at(0)
        if what == "hang":
            faulthandler.dump_traceback_later(0.3, exit=True, file=fault)
            time.sleep(60)
        if what == "sleep":
            time.sleep(60)
        if what == "quit":
            os._exit(3)
        say(operation=name, bytes=size, ok=not what, reason=what)
        if what:
            sys.exit(3)
    say(finished=name)
say(done=True)
"""


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probing:
    """Return a function that runs a probe with a plan, on two ranks."""
    monkeypatch.setattr(module, "node_kind", lambda version: KIND)
    launcher, program = tmp_path / "launcher.py", tmp_path / "program.py"
    launcher.write_text(LAUNCHER)
    program.write_text(PROGRAM)

    def run(plan: dict[str, object], limit_seconds: float = 60.0) -> ProbeReport:
        monkeypatch.setenv("FAKE_PLAN", json.dumps(plan))
        return probe(
            LIBRARY,
            launcher=[sys.executable, str(launcher)],
            program=[str(program)],
            limit_seconds=limit_seconds,
        )

    return run


def test_answers_of_all_operations_are_read(report: Probing) -> None:
    found = report({})
    assert list(found.answers) == list(OPERATIONS)
    assert all(answer.ok for answer in found.answers.values())
    assert found.answers["send"].reason == "contents compared, 8 B, 64 KiB"
    assert found.how == "2 ranks on 2 GPUs of one host"
    ok, reason = found.answer(("send", "receive"))
    assert ok
    assert found.date in reason


def test_segmentation_fault_is_an_answer_and_the_others_are_tried(
    report: Probing,
) -> None:
    found = report({"allreduce/65536/1": "crash", "send/8/0": "crash"})
    words = "the process ended by SIGSEGV in Allreduce of 64 KiB"
    assert found.answers["allreduce"] == Answer(False, words)
    assert found.answers["send"].reason.endswith("SIGSEGV in Send of 8 B")
    assert found.answers["broadcast"].ok
    # Operations that need a failed operation are not tried.
    assert found.answers["exchange"].reason == "not tried, because send failed"
    assert found.answer(("send",)) == (
        False,
        "send of GPU memory: the process ended by SIGSEGV in Send of 8 B",
    )


def test_hang_is_an_answer(report: Probing) -> None:
    found = report({"broadcast/8/0": "hang"})
    assert found.answers["broadcast"].reason == "the process hung in Bcast of 8 B"
    assert found.answers["allreduce"].ok


def test_other_contents_are_an_answer(report: Probing) -> None:
    found = report({"receive/65536/1": "element 3 is 0, not 21,"})
    assert not found.answers["receive"].ok
    assert found.answers["receive"].reason == (
        "element 3 is 0, not 21, on rank 1 (Recv of 64 KiB)"
    )
    assert found.answers["send"].ok


def test_process_that_leaves_is_an_answer(report: Probing) -> None:
    found = report({"allreduce/8/0": "quit"})
    words = "the process ended without a word in Allreduce of 8 B"
    assert found.answers["allreduce"].reason == words


def test_program_that_does_not_start_gives_no_answer(report: Probing) -> None:
    found = report({"start": 7})
    assert found.answers == {}
    assert "did not come to the first operation (exit status 7)" in found.how
    assert found.answer(("send",))[0] is False


def test_other_mpi_library_gives_no_answer(report: Probing) -> None:
    found = report({"library": "Another MPI 2.0"})
    assert found.answers == {}
    assert "another MPI library, Another MPI 2.0" in found.how


def test_launcher_that_does_not_end_is_killed(report: Probing) -> None:
    begin = time.monotonic()
    found = report({"send/8/0": "sleep", "send/8/1": "sleep"}, limit_seconds=8.0)
    assert not found.answers["send"].ok
    # Without the timeout, the program would take 60 seconds for each operation.
    assert time.monotonic() - begin < 60


def test_one_process_proves_no_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "node_kind", lambda version: KIND)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # Set a variable that belongs to no launcher.
    monkeypatch.setenv("FAKE_PLAN", "{}")
    found = probe(LIBRARY, program=[str(program)])
    assert found.weak
    assert found.answers["sendrecv"].ok
    ok, reason = found.answer(("sendrecv",))
    assert not ok
    assert "one process that sent to itself" in reason
    monkeypatch.setenv("FAKE_PLAN", json.dumps({"sendrecv/8/0": "crash"}))
    found = probe(LIBRARY, program=[str(program)])
    assert found.answer(("sendrecv",))[1].endswith("SIGSEGV in Sendrecv of 8 B")


def test_lines_that_are_cut_are_left_out(tmp_path: Path) -> None:
    lines = ['{"hello": "x", "gpu": 0}', '{"operation": "send", "bytes": 8}', '{"ope']
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines))
    found = read_outcome(tmp_path, LauncherEnd(-11, "", 1))
    words = "the process ended by signal 11 in Send of 8 B"
    assert found.answers == {"send": Answer(False, words)}


def test_all_processes_of_a_launcher_end_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid}; wait"
    ended = launch(
        ["/bin/sh", "-c", script],
        dict(os.environ),
        str(tmp_path),
        limit_seconds=1.0,
        num_ranks=1,
    )
    assert ended.status is None
    assert "had to be killed" in str(ended)
    child = Path("/proc") / pid.read_text().strip() / "stat"
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Tests of the trial's environment.

JOB = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_MCA_ess": "pmi",
    "OMPI_MCA_initial_wdir": "/",
    "PMIX_RANK": "0",
    "PMIX_SERVER_URI41": "x",
    "PRTE_LAUNCHED": "1",
    "PMI_FD": "9",
    "PMI_RANK": "0",
    "PMI2_X": "0",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "0",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "I_MPI_PMI_LIBRARY": "/usr/lib/libpmi2.so",
    "PBS_NODEFILE": "/x",
    "OPAL_USER_PARAMS_GIVEN": "1",
}
USER = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_cuda_support": "1",
    "UCX_TLS": "cuda,sm",
    "MPICH_GPU_SUPPORT_ENABLED": "1",
    "MPIR_CVAR_ENABLE_GPU": "1",
    "I_MPI_OFFLOAD": "1",
    "MV2_USE_CUDA": "1",
    "LD_PRELOAD": "/opt/cray/libmpi_gtl_cuda.so",
}
OTHER = {
    "PATH": "/usr/bin",
    "HOME": "/root",
    "OPAL_PREFIX": "/opt/x",
    "CUDA_VISIBLE_DEVICES": "1",
}


@given(
    st.sets(st.sampled_from(sorted(JOB))),
    st.sets(st.sampled_from(sorted(USER))),
)
def test_traces_of_a_job_go_and_settings_of_the_user_stay(
    job: set[str], user: set[str]
) -> None:
    set_by_user = {name: USER[name] for name in user}
    environment = {name: JOB[name] for name in job} | set_by_user | OTHER
    assert scrubbed(environment) == set_by_user | OTHER
    assert kept_settings(environment) == set_by_user
    # A rank, and a process outside of the job, have the same settings of the node.
    assert kept_settings(scrubbed(environment)) == kept_settings(environment)


def test_scheduler_stays_for_its_own_launcher() -> None:
    kept = scrubbed(JOB, allocation=True)
    assert "SLURM_JOB_NODELIST" in kept
    assert "PMIX_RANK" not in kept


def test_own_settings_are_no_other_kind_of_node() -> None:
    ours = {"MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1"}
    assert kept_settings(ours) == {}
    assert kept_settings({"LD_LIBRARY_PATH": "/opt/ucx/lib:"}) == {
        "LD_LIBRARY_PATH": "/opt/ucx/lib"
    }


def test_launcher_of_another_library_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr("hpcstrat.engine.gpu.probe.launching._library_folders", list)
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    mpirun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin"}
    assert find_launcher("MPICH Version: 5.0.2", environment) == (
        [str(mpirun), "-n", "2"],
        "",
    )
    command, reason = find_launcher("Open MPI v5.0.11, package", environment)
    assert command == []
    assert reason == f"{mpirun}: not the launcher of Open MPI v5.0.11"
    mpirun.unlink()
    assert "no mpirun of Open MPI" in find_launcher("Open MPI v5", environment)[1]


# Tests of the cache of reports.


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProbeReport:
    """Write a report to the cache, and return its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "node_kind", lambda version: {**KIND, "mpi": version})
    answers = {name: Answer(name != "allreduce", "why") for name in OPERATIONS}
    report = ProbeReport(
        KIND, "2026-01-01 00:00 UTC", "2 ranks", answers, output="said"
    )
    assert save(report) == ""
    return report


def test_kept_report_comes_back(cached: ProbeReport, tmp_path: Path) -> None:
    assert known(LIBRARY) == cached
    assert [p.name for p in (tmp_path / "hpcstrat").iterdir()] == [
        cache_path(KIND).name
    ]


def test_other_kind_of_node_is_not_known(cached: ProbeReport) -> None:
    assert known("Another MPI 2.0") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace("H100", "A100"),
        lambda text: text.replace('"send"', '"sent"'),
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "answers": {}}),
        lambda text: json.dumps({**json.loads(text), "answers": {"send": 1}}),
    ],
    ids=["empty", "half", "format", "kind", "name", "list", "none", "number"],
)
def test_damaged_report_is_not_known(
    cached: ProbeReport, damage: Callable[[str], str]
) -> None:
    path = cache_path(KIND)
    path.write_text(damage(path.read_text()))
    assert known(LIBRARY) is None
    assert save(cached) == ""
    assert known(LIBRARY) == cached


def test_report_without_answers_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert save(ProbeReport(KIND, "today", "it did not start")) == ""
    assert list(tmp_path.iterdir()) == []


def test_report_that_cannot_be_kept_says_why(
    cached: ProbeReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "file" in save(cached)
    assert known(LIBRARY) is None
