"""Loss of a rank, or of a whole host, in a job on two hosts."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.testing import launch_command
from hpcstrat.testing.job import wait_until
from tests.cluster.hosts import SCRIPTS, Hosts
from tests.mpi.programs import killing
from tests.mpi.programs.killing import Trial, attempt, judge, undisturbed

pytestmark = pytest.mark.skipif(
    "--oversubscribe" not in launch_command(1),
    reason="only mpirun of Open MPI lets a job live on when a rank dies",
)


def _launch(hosts: Hosts, n: int) -> list[str]:
    first = (n + 1) // 2
    launcher = hosts.launcher((first, n - first))
    return launch_command(n, launcher, fault_tolerant=True)


def _fail_for(trials: list[Trial]) -> None:
    wrong = [str(trial) for trial in trials if trial.problem]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


def test_goes_on_after_the_loss_of_a_rank_of_either_host(hosts: Hosts) -> None:
    expected = undisturbed({})
    run = {"spare_ranks": 1, "partner_copies": True}
    cases: list[tuple[int, dict[str, Any]]] = [
        (4, {"kills": [{"rank": 0, "where": "reduce", "step": 5}]}),
        (4, {"kills": [{"rank": 3, "where": "reduce", "step": 5}]}),
        # A spare rank of the other host replaces the lost rank.
        (4, {"kills": [{"rank": 1, "where": "commit", "step": 5}], "run": run}),
        (3, {"kills": [{"rank": 2, "where": "setup"}], "large": 40_000}),
    ]
    trials = []
    for n, options in cases:
        trial = attempt(_launch(hosts, n), options)
        judge(trial, expected, exact="run" in options)
        found = [result["replicas"] for result in trial.results]
        if set(found) != {n - 1} and not trial.problem:
            trial.problem = f"replicas are {found}"
        trials.append(trial)
    _fail_for(trials)
    assert not hosts.processes()


def test_loss_of_a_whole_host_ends_the_job_without_a_marker(
    make_hosts: Callable[..., Hosts],
) -> None:
    own = make_hosts(2)

    def switch_off(folder: Path) -> float:
        assert wait_until((folder / "started").exists, 60)
        time.sleep(0.3)
        words = [str(SCRIPTS / "hosts_down.sh"), "node2"]
        env = {"HPCHOSTS_RUN": str(own.folder), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        subprocess.run(words, check=True, env=env)
        return time.time()

    trial = attempt(_launch(own, 4), {"pause": 0.5}, disturb=switch_off)
    assert not trial.problem, str(trial)
    assert not trial.marked, str(trial)
    assert not trial.results, str(trial)
    assert wait_until(lambda: not own.processes(), 10), own.processes()


@pytest.mark.slow
def test_hundred_random_kills(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    trials = killing.campaign(100, 200, lambda n: _launch(hosts, n))
    with capsys.disabled():
        print(f"\ntwo hosts: {killing.figures(trials)}")
    _fail_for(trials)
