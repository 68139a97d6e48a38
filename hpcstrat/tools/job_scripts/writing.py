"""Functions that make a job script from one of hpcstrat's own scripts.

The new script differs only in the values in its head, and in the program. Tests run
each of hpcstrat's own scripts, if its scheduler is installed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FRAMEWORKS", "SCHEDULERS", "JobPlan", "own_scripts", "submit_line", "write"]

FRAMEWORKS = ("numpy", "torch", "torch-ddp", "jax", "keras")
"""Frameworks of a program; ``torch-ddp``: an unchanged torch.distributed program."""

_PROGRAM = '"$@"'
_READ_PROGRAM = '"${program[@]}"'


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The user's description of a job; ``minutes`` is the time limit."""

    scheduler: str
    program: str
    device: str = "cpu"
    framework: str = "numpy"
    nodes: int = 2
    ranks_per_node: int = 4
    minutes: int = 60
    restarts: bool = False
    account: str = ""
    queue: str = ""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """Name of the job and of its script, from the program's file name."""
        words = shlex.split(self.program)
        stem = Path(words[0]).stem if words else ""
        return re.sub(r"[^\w-]", "-", stem) or "program"

    @property
    def clock(self) -> str:
        """The time limit, such as 01:30:00."""
        return f"{self.minutes // 60:02d}:{self.minutes % 60:02d}:00"


@dataclass(frozen=True, slots=True)
class _ScriptSyntax:
    """A scheduler's options in the head of a job script, and functions to set them."""

    mark: str
    submit: str
    account: str
    queue: str
    # Returns patterns for options in the head of a script, with their replacements.
    changes: Callable[[JobPlan], dict[str, str]]
    suffix: str


def _slurm(plan: JobPlan) -> dict[str, str]:
    return {
        r"--job-name=\S+": f"--job-name={plan.name}",
        r"--nodes=\d+": f"--nodes={plan.nodes}",
        r"--ntasks-per-node=\d+": f"--ntasks-per-node={plan.ranks_per_node}",
        r"--gpus-per-node=\d+": f"--gpus-per-node={plan.ranks_per_node}",
        r"--time=\S+": f"--time={plan.clock}",
    }


def _pbs(plan: JobPlan) -> dict[str, str]:
    return {
        r"-N \S+": f"-N {plan.name}",
        r"select=\d+": f"select={plan.nodes}",
        r"(ncpus|mpiprocs|ngpus)=\d+": rf"\1={plan.ranks_per_node}",
        r"walltime=\S+": f"walltime={plan.clock}",
    }


def _flux(plan: JobPlan) -> dict[str, str]:
    return {
        r"--job-name=\S+": f"--job-name={plan.name}",
        r"--nodes=\d+": f"--nodes={plan.nodes}",
        r"--nslots=\d+": f"--nslots={plan.num_ranks}",
        r"--time-limit=\S+": f"--time-limit={plan.minutes}m",
    }


def _lsf(plan: JobPlan) -> dict[str, str]:
    return {
        r"-J \S+": f"-J {plan.name}",
        r"-n \d+": f"-n {plan.num_ranks}",
        r"ptile=\d+": f"ptile={plan.ranks_per_node}",
        r'-gpu "num=\d+"': f'-gpu "num={plan.ranks_per_node}"',
        r"-W \S+": f"-W {plan.minutes // 60}:{plan.minutes % 60:02d}",
    }


def _sge(plan: JobPlan) -> dict[str, str]:
    return {
        r"-N \S+": f"-N {plan.name}",
        r"-pe mpi \d+": f"-pe mpi {plan.num_ranks}",
        r"h_rt=\S+": f"h_rt={plan.clock}",
    }


SCHEDULERS = {
    "slurm": _ScriptSyntax(
        "#SBATCH ", "sbatch {}", "--account=", "--partition=", _slurm, "sbatch"
    ),
    "pbs": _ScriptSyntax("#PBS ", "qsub {}", "-A ", "-q ", _pbs, "pbs"),
    "flux": _ScriptSyntax(
        "# flux: ", "flux batch {}", "--bank=", "--queue=", _flux, "flux"
    ),
    "lsf": _ScriptSyntax("#BSUB ", "bsub <{}", "-P ", "-q ", _lsf, "lsf"),
    "sge": _ScriptSyntax("#$ ", "qsub {}", "-P ", "-q ", _sge, "sge"),
}
"""The syntax of each scheduler's job scripts, by the scheduler's name."""


def own_scripts() -> Path:
    """Return the folder of hpcstrat's own job scripts, in the wheel or in a clone."""
    packed = Path(__file__).parent / "scripts"
    return packed if packed.exists() else Path(__file__).parents[3] / "jobs"


def submit_line(plan: JobPlan) -> str:
    """Return the command that submits the script of `write`."""
    scheduler = SCHEDULERS[plan.scheduler]
    path = f"jobs/{plan.name}.{scheduler.suffix}"
    return f". jobs/site.env && {scheduler.submit.format(path)}"


def write(plan: JobPlan) -> str:
    """Return the text of a job script for a plan."""
    scheduler = SCHEDULERS[plan.scheduler]
    head, body, source = _script(plan, "restart" if plan.restarts else plan.device)
    if plan.restarts and plan.device == "gpu":
        # Combine the head that requests GPUs with the lines that a restart needs.
        cpu, gpu = _script(plan, "cpu")[0], _script(plan, "gpu")[0]
        more = [line for line in head if line.replace("restart", "cpu") not in cpu]
        head = gpu + more
        body = body.replace("srun ", "srun --gpu-bind=none ")
        # Require GPUs: without this line, a job that gets no GPUs would use CPUs.
        line = "export HPCSTRAT_DEVICE=gpu"
        body = body.replace("site_environment\n", f"site_environment\n{line}\n")
    for pattern, words in scheduler.changes(plan).items():
        head = [re.sub(pattern, words, line) for line in head]
    for option, value in (
        (scheduler.account, plan.account),
        (scheduler.queue, plan.queue),
    ):
        if value:
            head.insert(1, f"{scheduler.mark}{option}{value}")
    body = body.replace(f"jobs/{source}", f"jobs/{plan.name}.{scheduler.suffix}")
    return "\n".join(
        ["#!/usr/bin/env bash", *head, *_comment(plan), _program(plan, body)]
    )


def _script(plan: JobPlan, kind: str) -> tuple[list[str], str, str]:
    """Return one of hpcstrat's scripts: its scheduler options, its body, its path."""
    scheduler = SCHEDULERS[plan.scheduler]
    folder = "" if plan.scheduler == "slurm" else f"{plan.scheduler}/"
    source = f"{folder}{kind}.{scheduler.suffix}"
    text = (own_scripts() / source).read_text(encoding="utf-8")
    head = [line for line in text.splitlines() if line.startswith(scheduler.mark)]
    return head, text[text.index("set -euo pipefail") :], source


def _comment(plan: JobPlan) -> list[str]:
    lines = [
        f"# {plan.program}: {plan.num_ranks} ranks, {plan.ranks_per_node} on each of "
        f"{plan.nodes} nodes. Written by `hpcstrat jobs new`.",
        "# Submit it from the folder that has jobs/:",
        f"#   {submit_line(plan)}",
    ]
    if plan.restarts:
        lines.append("# The program keeps its checkpoints in RUN_FOLDER.")
    return lines


def _program(plan: JobPlan, body: str) -> str:
    """Put the user's program into a script, which has a placeholder for it."""
    reads = _READ_PROGRAM in body
    if reads:
        body = re.sub(r"\$\{PROGRAM:\?[^}]*\}", f"${{PROGRAM:-{plan.program}}}", body)
    else:
        body = re.sub(
            r': "\$\{1:\?[^}]*\}"',
            lambda _: f"(($#)) || set -- {plan.program}",
            body,
        )
    words = _READ_PROGRAM if reads else _PROGRAM
    if plan.framework == "torch-ddp":
        backend = "nccl" if plan.device == "gpu" else "gloo"
        started = f"hpcstrat torch --replace {backend} {words}"
        body = body.replace(f"python {words}", started)
    elif plan.framework == "jax" and plan.device == "cpu":
        # Let JAX use CPUs, so that it does not search for GPUs.
        line = 'export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"'
        body = body.replace("site_environment\n", f"site_environment\n{line}\n")
    return body
