"""Parameter servers on several hosts, and in a heterogeneous job of Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcstrat.testing import launch_command
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import ROOT, Slurm, is_open_mpi
from tests.mpi.programs import served_kills

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not is_open_mpi(), reason="needs ULFM, and PMIx under Slurm"),
]

PROGRAM = """
import os
import hpcstrat as hs

spec = hs.cluster_resolver.ClusterSpec({})
resolver = hs.cluster_resolver.SimpleClusterResolver(spec, task_type=os.environ["TASK"])
strategy = hs.ParameterServerStrategy(resolver)
with strategy.scope():
    variable = hs.Variable(1.0)
coordinator = hs.coordinator.ClusterCoordinator(strategy)
coordinator.schedule(variable.assign_add, (1.0,)).fetch()
print(strategy.roles.servers, strategy.roles.workers, float(variable.numpy()))
"""


def test_the_program_of_the_guide_trains_over_two_hosts(hosts: Hosts) -> None:
    path = ROOT / "docs" / "examples" / "embeddings_served.py"
    command = [sys.executable, str(path), "--servers", "2"]
    finished = hosts.launch((2, 3), command, round_robin=False, timeout=100)
    assert finished.returncode == 0, finished.stderr
    assert "8 shards" in finished.stdout


def test_random_kills_over_two_hosts(hosts: Hosts) -> None:
    def make_launch(n: int) -> list[str]:
        first = (n + 1) // 2
        launcher = hosts.launcher((first, n - first))
        return launch_command(n, launcher, fault_tolerant=True)

    trials = served_kills.campaign(5, 500, make_launch)
    wrong = [str(trial) for trial in trials if trial.problem]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


def test_components_of_a_heterogeneous_job_have_roles(
    slurm: Slurm, tmp_path: Path
) -> None:
    program = tmp_path / "roles.py"
    program.write_text(PROGRAM)
    parts = " : ".join(
        f"--het-group={group} env TASK={task} {sys.executable} {program}"
        for group, task in enumerate(("chief", "ps", "worker"))
    )
    line = f"salloc -Q -n1 : -n1 : -n2 bash -c 'srun --mpi=pmix {parts}'"
    assert "(1,) (2, 3) 2.0" in slurm.shell(line)
