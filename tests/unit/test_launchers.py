"""One table names the launchers; each module that looks for a launcher reads it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcstrat
from hpcstrat._launchers import (
    FOREIGN_LAUNCHERS,
    LAUNCHER_PROGRAMS,
    LAUNCHERS,
    Launcher,
)
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.cluster_resolver.launch import run_name
from hpcstrat.engine.gpu.probe.launching import scrubbed
from hpcstrat.testing.launcher import clean_environment
from hpcstrat.tools.chaos import processes

PACKAGE = Path(hpcstrat.__file__).parent
SIZED = [launcher for launcher in LAUNCHERS if launcher.size]
# Resolvers read one launcher each, and MPICH checks the protocol of its launcher.
OWN = ("cluster_resolver/", "engine/topology/starting.py", "_launchers.py")


def _names(path: Path) -> Iterator[str]:
    """Yield the words of a module's texts, except of its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_other_module_names_launchers() -> None:
    variables = {
        name for one in LAUNCHERS for name in (one.rank, one.size, *one.local_rank)
    }
    known = variables - {""} | (LAUNCHER_PROGRAMS - {"mpirun", "mpiexec", "srun"})
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if not str(path.relative_to(PACKAGE)).startswith(OWN)
        for name in _names(path)
        if name in known
    }
    assert not found, sorted(found)


@pytest.mark.parametrize("launcher", SIZED, ids=lambda one: one.name)
def test_every_module_knows_the_launcher(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {launcher.rank: "1", launcher.size: "2", "SLURM_STEP_ID": "0"}
    launch = launch_from_environment(env)
    assert (launch.launcher, launch.rank, launch.size) == (launcher.name, 1, 2)
    assert processes._rank(env) == 1
    assert launcher.rank not in scrubbed(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ours = launcher.name not in ("srun", "flux run")
    assert (launcher.rank not in clean_environment()) == ours


def test_programs_of_launchers_have_the_names_of_the_kernel() -> None:
    assert max(map(len, LAUNCHER_PROGRAMS)) <= 15


def test_import_prepares_ranks_of_every_launcher() -> None:
    """A rank is prepared at the import, in time for errors before its strategy."""
    program = (
        "import sys, hpcstrat; print('hpcstrat.safety.start.early' in sys.modules)"
    )
    variables = {name for one in (*LAUNCHERS, *FOREIGN_LAUNCHERS) for name in one[1:3]}
    outside = {k: v for k, v in os.environ.items() if k not in variables}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**outside, **({one.rank: "1", one.size: "2"} if one else {})},
            stdout=subprocess.PIPE,
            text=True,
        )
        for one in (None, *SIZED)
    ]
    said = [process.communicate(timeout=60)[0].strip() for process in started]
    assert said == ["False", *["True"] * len(SIZED)]


def test_runs_of_a_job_have_different_names() -> None:
    envs: list[dict[str, str]] = [
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "1"},
        {"PBS_JOBID": "7.server", "PMIX_NAMESPACE": "prterun-a-1@1"},
        {"PBS_JOBID": "7.server", "PMIX_NAMESPACE": "prterun-a-2@1"},
        {"PMI_JOBID": "kvs_1_0"},
        {"PALS_APID": "3c"},
        {},
    ]
    assert len({run_name(env) for env in envs}) == len(envs)
    assert run_name({}) == ""
