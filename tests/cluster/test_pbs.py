"""The scripts of ``jobs/pbs``, and the code that reads PBS, in a real OpenPBS.

Neither Debian nor PyPI has OpenPBS, so that these tests need an installed one.
"""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from hpcstrat.cli.main import main
from tests.cluster.pbs import PBS
from tests.cluster.test_jobs import STEPS, program
from tests.cluster.test_sge import PROGRAM

TWO = "-l select=2:ncpus=2:mpiprocs=2:ompthreads=1"


def test_programs_run_on_the_hosts_of_the_job(pbs: PBS, tmp_path: Path) -> None:
    path = program(tmp_path, PROGRAM.replace("SGE", "PBS"))
    options = f"{TWO} -l walltime=600"
    job = pbs.submit(tmp_path, "pbs/cpu.pbs", str(path), "word", options=options)
    assert job.wait_to_end() == 0, job.output
    assert "sum 10.0 10.0 word" in job.output
    assert "tasks node1:8888 node1:8889 node2:8888 node2:8889" in job.output
    where = re.findall(r"^at (\d) (node\d)$", job.output, re.MULTILINE)
    assert sorted(where) == [
        *(("0", "node1"), ("1", "node1"), ("2", "node2"), ("3", "node2"))
    ]
    [left] = re.findall(rf"^job {job.number} ends in (\d+) s$", job.output, re.M)
    assert 500 < int(left) <= 600


def test_a_job_goes_on_after_its_time_limit(pbs: PBS, tmp_path: Path) -> None:
    """The job asks qstat for its end, saves before, and submits itself again."""
    path = program(tmp_path, STEPS)
    words = ["jobs", "new", "--scheduler", "pbs", "--folder", str(tmp_path)]
    size = ["--nodes", "2", "--ranks-per-node", "1", "--restart"]
    made = CliRunner().invoke(main, [*words, *size, str(path)])
    assert made.exit_code == 0, made.output
    script = tmp_path / "jobs/program.pbs"
    # The next job inherits only variables that the script names, but needs more here.
    text = script.read_text(encoding="utf-8")
    assert "qsub -l" in text
    script.write_text(text.replace("qsub -l", "qsub -V -l"), encoding="utf-8")
    job = pbs.submit(tmp_path, "program.pbs", options="-l walltime=30")
    assert job.wait_to_end() == 42, job.output
    assert "the job is about to end (replica 0: the job ends in" in job.output
    assert "all is saved: submitting the job that follows" in job.output
    first, second = map(int, re.findall(r"begins at (\d+)", job.output))
    assert first == 0 < second
    assert "right True" in job.output
