"""The scripts of ``jobs/``, submitted to a real Slurm and run to their ends."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcstrat import testing
from hpcstrat.testing.job import wait_until
from tests.cluster.slurm import ROOT, Job, Slurm, copy_scripts, is_open_mpi
from tests.conftest import why_no_gpu
from tests.docs.said import assert_said

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
ulfm = pytest.mark.skipif(not is_open_mpi(), reason="needs ULFM of Open MPI")
# So many epochs that a job still trains when a test interrupts it.
EPOCHS = 12
CHAOS_EPOCHS = 80
# A signal before the time limit that the program ignores.
UNHEEDED = "URG@1"
CLI = "from hpcstrat.cli import main; main()"
# Functions in the stack of Open MPI's crash at the start.
START_CRASH = ("mca_pml_ob1_recv_frag_callback_match", "ompi_mpi_init")


Body = Callable[[Slurm, Path], None]
BODIES: dict[str, Body] = {}
# Tests whose jobs would disturb others, by preemption or the death of a node.
ALONE: set[str] = set()


def beside_others(body: Body) -> Callable[[dict[str, Future[None]]], None]:
    """Make a test of a body that mostly waits, and starts with the first test."""

    @functools.wraps(body)
    def test(bodies: dict[str, Future[None]]) -> None:
        bodies[body.__name__].result()

    del test.__wrapped__  # type: ignore[attr-defined]
    BODIES[body.__name__] = _again_if_mpi_failed(body)
    return test


def _again_if_mpi_failed(body: Body) -> Body:
    """Run a test again if Open MPI itself crashed at its start.

    See https://github.com/open-mpi/ompi/issues/12495: no code of hpcstrat ran before
    that crash.
    """

    @functools.wraps(body)
    def attempt(slurm: Slurm, folder: Path) -> None:
        try:
            body(slurm, folder)
        except AssertionError as error:
            if not all(name in str(error) for name in START_CRASH):
                raise
            again = folder / "again"
            again.mkdir()
            body(slurm, again)

    return attempt


def alone(body: Body) -> Body:
    """Run a test with a separate Slurm."""
    ALONE.add(body.__name__)
    return body


def _is_wanted(item: Any) -> bool:
    return not any(mark.args[0] for mark in item.iter_markers("skipif"))


@pytest.fixture(scope="module", autouse=True)
def bodies(
    request: pytest.FixtureRequest,
    make_slurm: Callable[[int], Slurm],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[None]]]:
    """Start the bodies of the selected tests."""
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.name for item in items if item.name in BODIES and _is_wanted(item)]
    with ThreadPoolExecutor(len(BODIES)) as pool:
        started = {}
        for name in names:
            shared = None if name in ALONE else request.getfixturevalue("slurm")
            folder = tmp_path_factory.mktemp(name[:30])
            started[name] = pool.submit(BODIES[name], shared or make_slurm(3), folder)
        yield started


def _with_modules(folder: Path, *names: str, init: str = "") -> Path:
    """Return a folder whose site.env loads modules, as edited by a user."""
    copy_scripts(folder)
    path = folder / "jobs/site.env"
    text = path.read_text(encoding="utf-8")
    assert "\nsite_modules=()\n" in text
    words = f"\nsite_modules=({' '.join(names)})\n{init}\n"
    path.write_text(text.replace("\nsite_modules=()\n", words), encoding="utf-8")
    return folder


# The function that Lmod and Environment Modules define. It prints an error and fails if
# there is no module of the name.
MODULE = 'module() { echo "$*"; [[ $2 == there ]] && export FROM_MODULE=yes; }'


def test_a_launch_is_checked(slurm: Slurm, tmp_path: Path) -> None:
    """Check a correct launch, a --mpi of another library, and missing parts."""
    right = slurm.submit(tmp_path, "smoke.sbatch")
    other = "pmi2" if is_open_mpi() else "none"
    wrong = slurm.submit(tmp_path, "smoke.sbatch", SLURM_MPI_TYPE=other)
    unknown = slurm.submit(tmp_path, "smoke.sbatch", SLURM_MPI_TYPE="openmpi")
    none = slurm.submit(tmp_path, "smoke.sbatch", SITE_VENV="nowhere")
    folder = _with_modules(tmp_path / "command", "gcc", "openmpi")
    no_command = slurm.submit(folder, "smoke.sbatch", MODULESHOME="")
    folder = _with_modules(tmp_path / "modules", "gcc", "openmpi", init=MODULE)
    no_module = slurm.submit(folder, "smoke.sbatch")
    logless = slurm.submit(tmp_path, "smoke.sbatch", output="missing/%j.out")
    assert right.wait_to_end() == "COMPLETED", right.output
    assert_said("smoke", right.output)
    log = tmp_path / f"logs/smoke-{right.number}.out"
    assert right.fields()["StdOut"] == str(log)
    for job in (wrong, unknown, none, no_command, no_module):
        assert job.wait_to_end() == "FAILED", job.output
    assert_said("wrong-mpi", wrong.output)
    assert_said("unknown-mpi", unknown.output)
    assert_said("no-environment", none.output)
    assert_said("no-module-command", no_command.output)
    assert_said("no-module", no_module.output)
    assert logless.wait_to_end() == "FAILED"
    assert not logless.output
    assert_said("no-log", slurm.command("scontrol", "show", "job", str(logless.number)))


def test_what_cannot_be_submitted_is_said(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.try_to_submit(tmp_path, "smoke.sbatch", partition="standard")
    assert done.returncode
    assert_said("no-partition", done.stderr)
    done = slurm.try_to_submit(tmp_path, "smoke.sbatch", gpus_per_node=9)
    assert done.returncode
    assert_said("no-such-nodes", done.stderr)


PROGRAM = """
import sys
import numpy as np
import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy()
total = strategy.reduce("sum", np.full(2, strategy.replica_id + 1.0))
hs.print_once("sum", *total, *sys.argv[1:])
"""


def program(folder: Path, text: str) -> Path:
    """Write a user's program."""
    path = folder / "program.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_programs_of_users_run_in_arrays_and_allocations(
    slurm: Slurm, tmp_path: Path
) -> None:
    path = program(tmp_path, PROGRAM)
    size = {"nodes": 2, "ntasks_per_node": 1}
    job = slurm.submit(
        *(tmp_path, "cpu.sbatch", path, "--word"),
        array="0-1",
        output="%A-%a.out",
        **size,
    )
    # mpirun uses the nodes of its allocation.
    options = "--allow-run-as-root" if is_open_mpi() else ""
    said = slurm.shell(
        f"salloc --nodes=2 --ntasks-per-node=1 mpirun {options} python {path}"
    )
    assert "sum 3.0 3.0" in said
    job.wait_for(
        lambda job: not job.slurm.command("squeue", "-h", "-j", str(job.number))
    )
    for index in (0, 1):
        text = (tmp_path / f"{job.number}-{index}.out").read_text(encoding="utf-8")
        print(text)
        assert "sum 3.0 3.0 --word" in text


# A fake Apptainer. Like Apptainer, it runs a process in separate namespaces, where the
# process may not read the memory of others; but it keeps the root folder.
APPTAINER = """#!/bin/sh
[ "$1" = exec ] || exit 9
while [ "${1%.sif}" = "$1" ]; do shift; done
shift
OMPI_MCA_smsc=^cma exec unshare --user --map-root-user --mount "$@"
"""


def test_containers_of_ranks_form_one_job(slurm: Slurm, tmp_path: Path) -> None:
    """A fake with the options of Apptainer is used, which no registry has."""
    path = program(tmp_path, PROGRAM)
    for name in ("bin/apptainer", "hpcstrat.sif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(APPTAINER, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    folders = (tmp_path / "bin", Path(sys.executable).parent)
    where = {"nodes": 1, "ntasks_per_node": 2, "OPAL_PREFIX": sys.prefix}
    job = slurm.submit(
        *(tmp_path, "container.sbatch", path),
        PATH=os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
        **where,
    )
    none = slurm.submit(tmp_path, "container.sbatch", path, **where)
    assert job.wait_to_end() == "COMPLETED", job.output
    assert "sum 3.0 3.0" in job.output
    assert none.wait_to_end() == "FAILED", none.output
    assert_said("no-apptainer", none.output)


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_a_job_without_its_gpus_says_what_is_missing(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = slurm.submit(
        *(tmp_path, "gpu.sbatch", program(tmp_path, PROGRAM)),
        nodes=1,
        ntasks_per_node=2,
        gpus_per_node=2,
        cpus_per_task=1,
    )
    assert job.wait_to_end() == "FAILED", job.output
    assert_said("no-gpu", job.output)
    assert "sum " not in job.output


def test_scaling_is_measured_and_reported(slurm: Slurm, tmp_path: Path) -> None:
    small = ("--sizes", "4B,1KiB", "--repeats", 2)
    job = slurm.submit(
        *(tmp_path, "scaling.sbatch", "--parts", "all_reduce", *small),
        nodes=2,
        ntasks_per_node=1,
    )
    assert job.wait_to_end() == "COMPLETED", job.output
    files = {path.name for path in (tmp_path / f"runs/scaling-{job.number}").iterdir()}
    assert {f"scaling-{n}.json" for n in (1, 2)} <= files
    matplotlib = importlib.util.find_spec("matplotlib")
    assert ("report.html" in files) == (matplotlib is not None)


@pytest.mark.framework("torch")
def test_torch_programs_train_over_mpi(slurm: Slurm, tmp_path: Path) -> None:
    size = {"nodes": 2, "ntasks_per_node": 1}
    job = slurm.submit(tmp_path, "torch_ddp.sbatch", **size)
    assert job.wait_to_end(180) == "COMPLETED", job.output
    assert (tmp_path / f"runs/ddp-{job.number}/digits.pt").exists()
    assert "epoch 10: loss" in job.output


FOR_GPUS = str(ROOT / "tests/integrations/programs/for_gpus.py")
HIDDEN = ("--hide", "mpi", "--hide", "slurm")
OF_OTHERS = [*HIDDEN, "--set", "slurm", "--set", "openmpi", "--set", "torchrun"]


@pytest.mark.full
@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    ("options", "has_openmpi"),
    [([], False), (OF_OTHERS, True)],
    ids=["variables of srun", "variables of others"],
)
def test_torch_programs_for_gpus_train_on_cpus(
    options: list[str], has_openmpi: bool, slurm: Slurm, tmp_path: Path
) -> None:
    words = ["--make-group", "--on-cpus", "--explain", *options, FOR_GPUS]
    # Ranks of two nodes, of which one has two.
    size = {"nodes": 2, "ntasks": 3}
    job = slurm.submit(tmp_path, "torch_ddp.sbatch", *words, **size)
    assert job.wait_to_end(180) == "COMPLETED", job.output
    printed = re.findall(r"^True (True|False) (\S+)$", job.output, re.M)
    assert len(printed) == 3, job.output
    # All ranks have the weights that one process computes.
    alone = [sys.executable, "-c", CLI, "torch", "--set", "slurm", *words[:2], FOR_GPUS]
    finished = testing.launch(1, alone, timeout=150)
    assert finished.returncode == 0, finished.stderr
    _, _, total = finished.stdout.split()
    for found, weights in printed:
        assert found == str(has_openmpi), job.output
        assert float(weights) == pytest.approx(float(total), rel=1e-10)
    parts = [
        "made the process group of 3 ranks",
        "ignored device_ids=[0] of DistributedDataParallel",
        "computed torch.nn.SyncBatchNorm on CPUs",
    ]
    if options:
        parts += [
            "hid the variables of slurm from the program: ",
            "set the variables of slurm: SLURM_PROCID=0, ",
            "set the variables of openmpi: OMPI_COMM_WORLD_RANK=0, ",
            "set the variables of torchrun: ",
        ]
    for part in parts:
        assert job.output.count(f"hpcstrat torch: {part}") == 1, job.output


@pytest.mark.full
@pytest.mark.framework("torch")
def test_a_torch_program_without_its_variables_is_told_the_option(
    slurm: Slurm, tmp_path: Path
) -> None:
    words = ["--make-group", "--on-cpus", "--hide", "slurm", FOR_GPUS]
    size = {"nodes": 2, "ntasks_per_node": 1}
    job = slurm.submit(tmp_path, "torch_ddp.sbatch", *words, **size)
    assert job.wait_to_end(180) == "FAILED", job.output
    expected = "expected a program that needs no variable 'SLURM_PROCID'"
    assert expected in job.output, job.output
    assert "--set slurm" in job.output


@pytest.mark.framework("jax")
def test_jax_programs_train(slurm: Slurm, tmp_path: Path) -> None:
    size = {"nodes": 2, "ntasks_per_node": 1}
    job = slurm.submit(tmp_path, "jax.sbatch", **size)
    assert job.wait_to_end(180) == "COMPLETED", job.output
    assert list((tmp_path / f"runs/jax-{job.number}").glob("ckpt-*.h5"))


@beside_others
def test_training_takes_chaos(slurm: Slurm, folder: Path) -> None:
    job = slurm.submit(
        *(folder, "chaos.sbatch", "--epochs", CHAOS_EPOCHS),
        nodes=2,
        ntasks_per_node=1,
    )
    assert job.wait_to_end() == "COMPLETED", job.output
    assert "test accuracy 0.9" in job.output
    assert "expected one job" not in job.output, job.output


ELASTIC = """
import os, signal, time
import numpy as np
import hpcstrat as hs

def train(strategy, memory):
    with strategy.scope():
        total = hs.Variable(0.0, name="total", aggregation="mean")
    memory.track(total=total)
    saved = hs.CheckpointManager(os.environ["RUN_FOLDER"] + "/saved", total=total)
    step = memory.restore()
    if step is None:
        step = saved.restore_or_initialize() or 0
        hs.print_once("begins at", step)
    for step in range(step, 12):
        if step == 5 and strategy.num_replicas_in_sync == 4 == strategy.replica_id + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.run(lambda: total.assign_add(1.0))
        memory.commit(step + 1)
        saved.save(step + 1, overwrite=True)
        hs.print_once("has done", step + 1)
        while step == 8 and waits:
            time.sleep(1)
    hs.print_once("total", float(total.numpy()), strategy.num_replicas_in_sync)

waits = os.environ["WAITS"] and not os.getenv("SLURM_RESTART_COUNT")
hs.elastic.run(train, completion_marker=os.path.join(os.environ["RUN_FOLDER"], "done"))
"""


@ulfm
@beside_others
def test_training_goes_on_without_a_rank(slurm: Slurm, folder: Path) -> None:
    size = {"nodes": 2, "ntasks_per_node": 2, "WAITS": ""}
    job = slurm.submit(folder, "train_elastic.sbatch", program(folder, ELASTIC), **size)
    assert job.wait_to_end() == "COMPLETED", job.output
    assert "total 12.0 3" in job.output
    assert "the program has come to its end" in job.output


@ulfm
@beside_others
@alone
def test_training_is_requeued_when_a_node_dies(slurm: Slurm, folder: Path) -> None:
    size = {"nodes": 2, "ntasks_per_node": 1, "WAITS": "yes"}
    job = slurm.submit(folder, "train_elastic.sbatch", program(folder, ELASTIC), **size)
    job.wait_for_text("has done 9")
    assert job.fields()["NodeList"] == "node[1-2]"
    slurm.switch_off("node2")
    job.wait_for_text("there is no completion marker: requeueing")
    job.start_again(1)
    assert job.wait_to_end() == "COMPLETED", job.output
    assert job.fields()["NodeList"] == "node[1,3]"
    assert "begins at 9" in job.output
    assert "total 12.0 2" in job.output


@needs_matplotlib
@beside_others
def test_a_full_quota_ends_a_job_that_keeps_what_is_saved(
    slurm: Slurm, folder: Path
) -> None:
    """The job continues from its checkpoint when there is room again."""
    runs = folder / "runs"
    runs.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o")
    slurm.on("node3", *mount, "size=900k", "tmpfs", str(runs))
    job = slurm.submit(
        *(folder, "train_digits.sbatch", "--epochs", 8),
        nodes=1,
        ntasks_per_node=2,
        nodelist="node3",
        SITE_MOST_FAILURES=0,
    )
    assert job.wait_to_end() == "FAILED", job.output
    assert_said("full-quota", job.output)
    slurm.on("node3", *mount, "remount,size=90m", "tmpfs", str(runs))
    slurm.command("scontrol", "requeue", str(job.number))
    job.start_again(1)
    assert job.wait_to_end() == "COMPLETED", job.output
    done = re.findall(r"resumed from .*, (\d+) epochs are done", job.output)
    assert len(done) == 1
    assert 0 < int(done[0]) < 8
    there = slurm.on("node3", "find", str(runs), "-type", "f").split()
    folder = runs / f"digits-{job.number}"
    assert str(folder / "curves.png") in there
    assert str(folder / "checkpoints/ckpt-0000000184.h5") in there


PATIENT = """
import os, time
import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = hs.Variable(0.0, name="total", aggregation="mean")
manager = hs.CheckpointManager("patient", total=total)
config = hs.TerminationConfig(requeue=True)
handler = hs.PreemptionCheckpointHandler(None, manager, termination_config=config)
before = handler.total_run_calls
hs.print_once("begins at", before)
restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
while restarts < 2 or handler.total_run_calls < before + 3:
    handler.run(strategy.run, lambda: total.assign_add(1.0))
    time.sleep(0.5)
hs.print_once("right", float(total.numpy()) == handler.total_run_calls)
"""


STEPS = """
import os, time
import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = hs.Variable(0.0, name="total", aggregation="mean")
manager = hs.CheckpointManager(os.environ["RUN_FOLDER"] + "/saved", total=total)
handler = hs.PreemptionCheckpointHandler(None, manager)
before = handler.total_run_calls
hs.print_once("begins at", before)
while not before or handler.total_run_calls < before + 3:
    handler.run(strategy.run, lambda: total.assign_add(1.0))
    time.sleep(0.2)
hs.print_once("right", float(total.numpy()) == handler.total_run_calls)
"""


@beside_others
def test_a_program_of_a_user_is_started_again(slurm: Slurm, folder: Path) -> None:
    job = slurm.submit(
        *(folder, "restart.sbatch", program(folder, STEPS)),
        nodes=2,
        ntasks_per_node=1,
    )
    job.wait_for_text("begins at 0")
    job.signal_ranks(signal.SIGUSR1, 1)
    job.wait_for_text("all is saved: requeueing")
    job.start_again(1)
    assert job.wait_to_end() == "COMPLETED", job.output
    [again] = re.findall(r"begins at ([1-9]\d*)", job.output)
    assert int(again) > 0
    assert "right True" in job.output


# Saves each step, and comes to its end only after it was started again.
SAVES = """
import os
import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = hs.Variable(0.0, name="total", aggregation="mean")
manager = hs.CheckpointManager(os.environ["RUN_FOLDER"] + "/saved", total=total)
step = begin = manager.restore_or_initialize() or 0
hs.print_once("begins at", begin)
while not begin or step < begin + 3:
    strategy.run(lambda: total.assign_add(1.0))
    step += 1
    manager.save(step)
    hs.print_once("has done", step)
hs.print_once("right", float(total.numpy()) == step)
"""


@beside_others
def test_a_job_that_has_lost_a_rank_is_started_again(
    slurm: Slurm, folder: Path
) -> None:
    """The loss of a node ends the other ranks before Slurm notices it."""
    job = slurm.submit(
        *(folder, "restart.sbatch", program(folder, SAVES)),
        nodes=2,
        ntasks_per_node=1,
    )
    job.wait_for_text("has done 2")
    job.signal_ranks(signal.SIGKILL, 1)
    job.wait_for_text("requeueing job")
    assert "without the completion marker" in job.output
    job.start_again(1)
    assert job.wait_to_end() == "COMPLETED", job.output
    assert re.findall(r"begins at ([1-9]\d*)", job.output)
    assert "right True" in job.output


@beside_others
def test_a_cancelled_job_is_not_started_again(slurm: Slurm, folder: Path) -> None:
    job = slurm.submit(
        *(folder, "restart.sbatch", program(folder, STEPS)),
        nodes=1,
        ntasks_per_node=1,
    )
    job.wait_for_text("begins at 0")
    slurm.command("scancel", str(job.number))
    assert job.wait_to_end() == "CANCELLED", job.output
    assert job.fields()["Restarts"] == "0"
    assert "was cancelled: it is not requeued" in job.output


@needs_matplotlib
@beside_others
@alone
def test_jobs_go_on_after_their_time_limit_signals_and_preemption(
    slurm: Slurm, folder: Path
) -> None:
    """The weights have the same bits, on other nodes, after any or no signals."""
    patient = slurm.submit(
        *(folder, "cpu.sbatch", program(folder, PATIENT)),
        nodes=1,
        ntasks_per_node=2,
        nodelist="node1",
        time=1,
        signal=UNHEEDED,
        open_mode="append",
    )
    where = {"partition": "low", "nodes": 2, "ntasks_per_node": 2}
    words = ("train_digits.sbatch", "--epochs", EPOCHS, "--dump")
    # Slurm checks every 30 seconds for due signals, so 10 to 40 s before the end.
    end = {"time": 1, "signal": "USR1@20"}
    job = slurm.submit(folder, *words, folder / "twice.npz", **where, **end)
    job.wait_for_text("epoch   1:")
    job.signal_ranks(signal.SIGSTOP)
    # The same training without an interruption.
    other = slurm.submit(folder, *words, folder / "none.npz", **where)
    wait_until(lambda: signal.SIGUSR1 in job.pending_signals(), job.seconds_left() - 18)
    job.signal_ranks(signal.SIGCONT)
    job.wait_for_text("all is saved: requeueing")
    job.start_again(1, ExcNodeList="node1", TimeLimit=10)
    job.wait_for_text("resumed from")
    before = job.output.count("epoch ")
    job.wait_for(lambda job: job.output.count("epoch ") > before)
    # Slurm continues stopped processes when it sends SIGTERM.
    job.signal_ranks(signal.SIGSTOP)
    assert job.fields()["NodeList"] == "node[2-3]"
    assert "SIGUSR1" in job.output
    assert other.wait_to_end() == "COMPLETED", other.output
    taking = ["--partition=high", "--nodes=2", "--exclude=node1", "--exclusive"]
    slurm.command("sbatch", *taking, "--wrap=true")
    job.wait_for_text("DUE TO PREEMPTION")
    job.start_again(2, ExcNodeList="")
    assert job.wait_to_end() == "COMPLETED", job.output
    assert_said("digits", job.output)
    assert_said("requeued", job.output)
    assert_said("resumed", job.output)
    assert_said("preempted", job.output)
    assert job.output.count("resumed from") == 2
    assert job.output.count("the job is about to end") == 2
    with (
        np.load(folder / "twice.npz") as found,
        np.load(folder / "none.npz") as expected,
    ):
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])
    [accuracy] = re.findall(r"^test accuracy 0\.9\d*$", other.output, re.MULTILINE)
    assert accuracy in job.output.splitlines()
    _check_patient(patient)


def _check_patient(job: Job) -> None:
    """The job knows its end first from Slurm, and later from a signal to one rank."""
    job.wait_for_text("the job is about to end (replica 0: the job ends in")
    job.start_again(1)
    job.wait_for(lambda job: job.output.count("begins at") == 2)
    job.signal_ranks(signal.SIGTERM, 1)
    job.wait_for_text("the job is about to end (replica 1: SIGTERM)")
    job.start_again(2)
    assert job.wait_to_end() == "COMPLETED", job.output
    begins = [int(n) for n in re.findall(r"begins at (\d+)", job.output)]
    assert len(begins) == 3
    assert begins[0] == 0 < begins[1] <= begins[2]
    assert "right True" in job.output
    assert "TIME LIMIT" not in job.output
