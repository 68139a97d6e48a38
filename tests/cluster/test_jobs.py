"""The scripts of ``jobs/``, submitted to a real Slurm and followed to their ends."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.slurm import Slurm

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
EPOCHS = 6


@needs_matplotlib
def test_digits_go_on_to_the_same_bits_after_two_requeues(
    slurm: Slurm, tmp_path: Path
) -> None:
    """A signal to one rank, as before the time limit; then preemption; other nodes."""
    where = {"partition": "low", "nodes": 2, "ntasks_per_node": 2}
    words = ("train_digits.sbatch", "--epochs", EPOCHS, "--dump")
    job = slurm.submit(tmp_path, *words, tmp_path / "two.npz", **where)
    job.wait_for_text("epoch   1:")
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
    last = other.output.splitlines()[-1]
    assert last == job.output.splitlines()[-1]
    assert last.startswith("test accuracy 0.9"), other.output
