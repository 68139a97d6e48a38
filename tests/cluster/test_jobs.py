"""The scripts of ``jobs/``, submitted to a real Slurm and followed to their ends."""

from __future__ import annotations

import importlib.util
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from hpcstrat.preemption.watch import _asked
from tests.cluster.slurm import Slurm, is_open_mpi

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
# So many that a job is in the midst of them when it is to be.
EPOCHS = 60
CHAOS_EPOCHS = 150
# Of train_digits.sbatch.
LIMIT_SECONDS = 600


def test_a_launch_is_checked(slurm: Slurm, tmp_path: Path) -> None:
    """Right; under a --mpi of another library; and without an environment."""
    right = slurm.submit(tmp_path, "smoke.sbatch")
    other = "pmi2" if is_open_mpi() else "pmix"
    wrong = slurm.submit(tmp_path, "smoke.sbatch", SLURM_MPI_TYPE=other)
    none = slurm.submit(tmp_path, "smoke.sbatch", SITE_VENV="nowhere")
    assert right.wait_to_end() == "COMPLETED", right.output
    assert "replicas: 4, workers: 2, replicas per worker: 2 2" in right.output
    assert wrong.wait_to_end() == "FAILED", wrong.output
    said = "expected 4 ranks, as srun started, found 4 separate programs of one rank"
    assert said in wrong.output
    assert none.wait_to_end() == "FAILED", none.output
    assert "expected a Python environment in" in none.output


PROGRAM = """
import sys
import numpy as np
import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy()
total = strategy.reduce("sum", np.full(2, strategy.replica_id + 1.0))
hs.print_once("sum", *total, *sys.argv[1:])
"""


def test_programs_of_users_run_in_arrays_and_allocations(
    slurm: Slurm, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    size = {"nodes": 2, "ntasks_per_node": 1}
    job = slurm.submit(
        tmp_path,
        "cpu.sbatch",
        program,
        "--word",
        array="0-1",
        output="%A-%a.out",
        **size,
    )
    # mpirun takes the nodes of the allocation that it is in.
    options = "--allow-run-as-root" if is_open_mpi() else ""
    said = slurm.shell(
        f"salloc --nodes=2 --ntasks-per-node=1 mpirun {options} python {program}"
    )
    assert "sum 3.0 3.0" in said
    job.wait_for(
        lambda job: not job.slurm.command("squeue", "-h", "-j", str(job.number))
    )
    for index in (0, 1):
        text = (tmp_path / f"{job.number}-{index}.out").read_text(encoding="utf-8")
        assert "sum 3.0 3.0 --word" in text


def test_training_takes_chaos(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(
        *(tmp_path, "chaos.sbatch", "--epochs", CHAOS_EPOCHS),
        nodes=2,
        ntasks_per_node=1,
    )
    assert job.wait_to_end() == "COMPLETED", job.output
    assert "test accuracy 0.9" in job.output
    assert "expected one job" not in job.output, job.output


ELASTIC = """
import os, signal
import numpy as np
import hpcstrat as hs

def train(strategy, memory):
    with strategy.scope():
        total = hs.Variable(0.0, name="total", aggregation="mean")
    memory.track(total=total)
    for step in range(memory.restore() or 0, 12):
        if step == 5 and strategy.num_replicas_in_sync == 4 == strategy.replica_id + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.run(lambda: total.assign_add(1.0))
        memory.commit(step + 1)
    hs.print_once("total", float(total.numpy()), strategy.num_replicas_in_sync)

hs.elastic.run(train, completion_marker=os.path.join(os.environ["RUN_FOLDER"], "done"))
"""


@pytest.mark.skipif(not is_open_mpi(), reason="needs ULFM of Open MPI")
def test_training_goes_on_without_a_rank(slurm: Slurm, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ELASTIC, encoding="utf-8")
    size = {"nodes": 2, "ntasks_per_node": 2}
    job = slurm.submit(tmp_path, "train_elastic.sbatch", program, **size)
    assert job.wait_to_end() == "COMPLETED", job.output
    assert "total 12.0 3" in job.output
    assert "the program has come to its end" in job.output


@needs_matplotlib
def test_digits_go_on_to_the_same_bits_after_two_requeues(
    slurm: Slurm, tmp_path: Path
) -> None:
    """A signal to one rank, as before the time limit; then preemption; other nodes."""
    where = {"partition": "low", "nodes": 2, "ntasks_per_node": 2}
    words = ("train_digits.sbatch", "--epochs", EPOCHS, "--dump")
    job = slurm.submit(tmp_path, *words, tmp_path / "two.npz", **where)
    job.wait_for_text("epoch   1:")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.env.items():
            patch.setenv(name, value)
        left = (_asked(str(job.number)) or 0.0) - time.time()
    assert 0 < left < LIMIT_SECONDS
    job.signal_rank(3, signal.SIGUSR1)
    job.wait_for_text("all is saved: requeueing")
    job.start_again(1, ExcNodeList="node1")
    job.wait_for_text("resumed from")
    assert job.fields()["NodeList"] == "node[2-3]"
    before = job.output.count("epoch ")
    job.wait_for(lambda job: job.output.count("epoch ") > before)
    taking = ["--partition=high", "--nodes=2", "--exclude=node1", "--exclusive"]
    slurm.command("sbatch", *taking, "--wrap=true")
    job.wait_for_text("DUE TO PREEMPTION")
    job.start_again(2, ExcNodeList="")
    assert job.wait_to_end() == "COMPLETED", job.output
    assert job.output.count("resumed from") == 2
    assert job.output.count("the job is about to end") == 2
    # The same without an interrupt.
    other = slurm.submit(tmp_path, *words, tmp_path / "none.npz", **where)
    assert other.wait_to_end() == "COMPLETED", other.output
    with np.load(tmp_path / "two.npz") as found, np.load(tmp_path / "none.npz") as all_:
        for name in all_:
            np.testing.assert_array_equal(found[name], all_[name])
    [accuracy] = re.findall(r"^test accuracy 0\.9\d*$", other.output, re.MULTILINE)
    assert accuracy in job.output.splitlines()
