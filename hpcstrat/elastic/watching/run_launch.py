"""The command that starts the ranks of a generation: srun, or mpirun by watchers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcstrat._launchers import LAUNCHERS
from hpcstrat.elastic.watching import child_start
from hpcstrat.elastic.watching.launch_agent import AGENT

__all__ = ["RunLaunch", "child_words", "choose_launcher", "environment_without_step"]

_START = [sys.executable, "-I", "-S", child_start.__file__]


@dataclass(frozen=True)
class RunLaunch:
    """The start of a program: its launcher, the launcher's own options, its ranks.

    ``use`` is the wanted number of nodes; ``ranks`` is the number of ranks in all, also
    on fewer nodes.
    """

    launcher: str
    options: tuple[str, ...]
    use: int
    ranks: int
    program: tuple[str, ...]

    def words(self, nodes: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Return the command that starts ranks on these nodes, in an environment."""
        program = [*_START, "rank", *self.program]
        if self.launcher == "srun":
            job = os.environ["SLURM_JOB_ID"]
            return [
                *("srun", f"--jobid={job}", "--overlap", "--overcommit"),
                *(f"--nodes={len(nodes)}", f"--ntasks={self.ranks}"),
                *(f"--nodelist={','.join(nodes)}", "--kill-on-bad-exit=1"),
                *("--export=ALL", *self.options, *program),
            ]
        # With fewer nodes than before, some get more ranks.
        share, more = divmod(self.ranks, len(nodes))
        slots = [f"{name}:{share + (i < more)}" for i, name in enumerate(nodes)]
        if self.launcher == "mpiexec":
            return [
                *("mpiexec", "-rmk", "user", "-launcher", "ssh"),
                *("-hosts", ",".join(slots), "-n", str(self.ranks)),
                *(*self.options, *program),
            ]
        # mpirun passes no other variables to ranks on other nodes.
        passed = [name for name in env if name.startswith(_PREFIXES) or name in _PASSED]
        exports = [word for name in passed for word in ("-x", name)]
        return [
            *("mpirun", "--prtemca", "plm", "ssh", "--prtemca", "ras", _SCHEDULERS),
            *("--prtemca", "plm_ssh_agent", AGENT, "--host", ",".join(slots)),
            *("-n", str(self.ranks), *exports, *self.options, *program),
        ]

    def environment(
        self, nodes: Sequence[str], variables: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the launcher's environment, with the variables of the generation."""
        env = {**environment_without_step(os.environ), **variables}
        if self.launcher == "srun":
            # Slurm's PMIx compares a node's number in the job with one in the step, to
            # decide which of two nodes connects. With different numbers neither does,
            # and MPI_Init waits forever (Slurm 22.05, and its master branch in 2026).
            env["SLURM_JOB_NODELIST"] = ",".join(nodes)
        elif len(nodes) < self.use:
            # Without this, mpirun refuses more ranks on a node than it has cores.
            env.setdefault("PRTE_MCA_hwloc_default_binding_policy", ":overload-allowed")
        if self.launcher == "mpiexec":
            # The agent is one word here: python -m of a module needs a script.
            env["HYDRA_LAUNCHER_EXEC"] = _agent_script(variables)
        return env


# mpirun would take the nodes of the job, with the slots that they have there.
_SCHEDULERS = "^slurm,pbs,tm,lsf,gridengine,flux"
_PREFIXES = ("PYTHON", "HPCSTRAT_", "OMP_", "UCX_", "FI_", "NCCL_", "OMPI_MCA_")
_PASSED = ("PATH", "LD_LIBRARY_PATH", "RUN_FOLDER")


def _agent_script(variables: Mapping[str, str]) -> str:
    path = Path(variables["HPCSTRAT_WATCH_FOLDER"]) / "agent"
    path.write_text(f'#!/bin/sh\nexec {AGENT} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return str(path)


def choose_launcher() -> str:
    """Return the launcher: srun in a job of Slurm, else that of the MPI library."""
    if os.environ.get("SLURM_JOB_ID") and shutil.which("srun"):
        return "srun"
    mpirun = shutil.which("mpirun")
    if mpirun:
        done = subprocess.run(
            [mpirun, "--version"], check=False, capture_output=True, text=True
        )
        if "Open MPI" not in done.stdout:
            return "mpiexec"
    return "mpirun"


def child_words(words: Sequence[str], nice: int = 0) -> list[str]:
    """Return a command that starts another one, which ends with this process."""
    return [*_START, "child", str(os.getpid()), str(nice), *words]


def environment_without_step(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of the watchers' own Slurm step.

    srun would take them as the options of the step that it is to start.
    """
    [srun] = [launcher for launcher in LAUNCHERS if launcher.name == "srun"]
    ranks = (srun.rank, *srun.local_rank)
    step = ("SLURM_STEP", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE")
    others = ("SLURM_NNODES", "SLURM_NODELIST", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND")
    tasks = ("SLURM_NODEID", "SLURM_LAUNCH_NODE", "SLURM_GTIDS", "SLURM_TASK_PID")
    mpi = ("PMI", "SLURM_MPI_TYPE", "SLURM_OVERCOMMIT")
    return {
        name: value
        for name, value in env.items()
        if not name.startswith((*ranks, *step, *others, *tasks, *mpi))
    }
