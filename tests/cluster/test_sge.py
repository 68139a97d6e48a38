"""The scripts of ``jobs/sge``, and the code that reads Grid Engine, in a real one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcstrat.cli.main import main
from tests.cluster.sge import SGE
from tests.cluster.test_jobs import STEPS, program
from tests.conftest import why_no_gpu
from tests.docs.said import assert_said

PROGRAM = """
import platform, sys, time
import numpy as np
import hpcstrat as hs
from hpcstrat.cluster_resolver import SGEClusterResolver, batch_job_from_environment

strategy = hs.MultiWorkerMirroredStrategy()
total = strategy.reduce("sum", np.full(2, strategy.replica_id + 1.0))
hs.print_once("sum", *total, *sys.argv[1:])
print("at", strategy.replica_id, platform.node(), flush=True)
# Each rank makes it: one that is elsewhere than the list says raises.
resolver = SGEClusterResolver()
if strategy.replica_id == 0:
    spec = resolver.cluster_spec()
    print("tasks", *spec.job_tasks("worker"))
    job = batch_job_from_environment()
    print("job", job.job_id, "ends in", round(job.end() - time.time()), "s")
"""


def test_programs_run_on_the_hosts_of_the_job(sge: SGE, tmp_path: Path) -> None:
    path = program(tmp_path, PROGRAM)
    options = "-pe mpi 4 -l h_rt=600"
    job = sge.submit(tmp_path, "sge/cpu.sge", str(path), "--word", options=options)
    none = sge.submit(tmp_path, "sge/cpu.sge", options="-pe mpi 2")
    assert job.wait_to_end() == 0, job.output
    assert "sum 10.0 10.0 --word" in job.output
    # Either host may be first in the list.
    spec = r"^tasks node(\d):8888 node\1:8889 node(\d):8888 node\2:8889$"
    found = re.search(spec, job.output, re.MULTILINE)
    assert found
    assert found[1] != found[2]
    where = dict(re.findall(r"^at (\d) (node\d)$", job.output, re.MULTILINE))
    assert where == {str(rank): f"node{found[1 + rank // 2]}" for rank in range(4)}
    [left] = re.findall(rf"^job {job.number} ends in (\d+) s$", job.output, re.M)
    assert 500 < int(left) <= 600
    assert none.wait_to_end() == 1
    assert_said("no-program", none.output)


def test_a_job_goes_on_after_its_time_limit(sge: SGE, tmp_path: Path) -> None:
    """The job asks for its end, saves before, and is requeued by exit status 99."""
    path = program(tmp_path, STEPS)
    job = sge.submit(
        tmp_path, "sge/restart.sge", str(path), options="-pe mpi 2 -l h_rt=30"
    )
    assert job.wait_to_end() == 0, job.output
    assert "the job is about to end (replica 0: the job ends in" in job.output
    assert f"all is saved: requeueing job {job.number}" in job.output
    first, second = map(int, re.findall(r"begins at (\d+)", job.output))
    assert first == 0 < second
    assert "right True" in job.output


def test_a_script_of_jobs_new_runs(sge: SGE, tmp_path: Path) -> None:
    program(tmp_path, PROGRAM)
    words = ["jobs", "new", "--scheduler", "sge", "--folder", str(tmp_path)]
    size = ["--nodes", "2", "--ranks-per-node", "2", "--minutes", "10"]
    made = CliRunner().invoke(main, [*words, *size, "program.py word"])
    assert made.exit_code == 0, made.output
    job = sge.submit(tmp_path, "program.sge")
    assert job.wait_to_end() == 0, job.output
    assert "sum 10.0 10.0 word" in job.output


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_a_job_without_its_gpus_says_what_is_missing(sge: SGE, tmp_path: Path) -> None:
    path = program(tmp_path, PROGRAM)
    job = sge.submit(tmp_path, "sge/gpu.sge", str(path), options="-pe mpi 2")
    assert job.wait_to_end() != 0, job.output
    assert_said("no-gpu", job.output)
    assert "sum " not in job.output
