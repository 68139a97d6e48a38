"""The launcher's description of this process, read from the environment without MPI."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hpcstrat._launchers import (
    FOREIGN_LAUNCHERS,
    LAUNCHERS,
    MPICH_PROTOCOL,
    RUN_NAMES,
    SCHEDULERS,
    own_environment,
)
from hpcstrat.cluster_resolver.batch_job import batch_job_from_environment
from hpcstrat.cluster_resolver.node_list import expand_tasks_per_node
from hpcstrat.cluster_resolver.tf_config import TFConfigClusterResolver

__all__ = ["Launch", "foreign_launch", "launch_from_environment", "run_name"]

_SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"
# Only Hydra sets these variables; srun and flux run also use MPICH's protocol.
_MPIEXEC_SIGNS = ("HYDI_CONTROL_FD", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_EVALUATOR = "evaluator"
_PMI_SPEAKERS = ("flux run", "srun")


@dataclass(frozen=True, slots=True)
class Launch:
    """The launcher of this process, and the ranks that it has assigned.

    Parameters
    ----------
    launcher : str
        Name of the launcher; empty if there was no launcher.
    rank : int
        Rank of this process among those that the launcher started.
    size : int
        Number of processes that the launcher started.
    local_rank : int, optional
        Rank among the processes of this host; None if unknown.
    local_size : int, optional
        Number of processes on this host; None if unknown.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None


class ForeignLaunch(NamedTuple):
    """Processes that a launcher of another library says to have started."""

    # Number of these processes.
    size: int
    # Source of the number, such as ``torchrun says (WORLD_SIZE=4)``.
    told: str
    # Names of the variables with the number.
    variables: str


def launch_from_environment(environment: Mapping[str, str] | None = None) -> Launch:
    """Read the rank and the number of ranks that the launcher has set.

    Not collective.

    Parameters
    ----------
    environment : mapping of str to str, optional
        Default: this process's environment.

    Returns
    -------
    Launch
        Values of the first known launcher whose rank and size are set as numbers.
    """
    env = own_environment() if environment is None else environment
    for launcher in LAUNCHERS:
        numbers = launcher.numbers(env)
        if numbers is not None:
            return Launch(
                _speaker(env) if launcher.name == MPICH_PROTOCOL else launcher.name,
                *numbers,
                _first(_number(env, name) for name in launcher.local_rank),
                _first(_number(env, name) for name in launcher.local_size),
            )
    return Launch()


def foreign_launch(
    environment: Mapping[str, str] | None = None,
) -> ForeignLaunch | None:
    """Read the number of processes that a launcher of another library has set.

    Not collective. None if there was no such launcher, or if it has started one process
    only. The variables say nothing about MPI: in a job of MPI, the program or its job
    script may have set them, too.
    """
    env = own_environment() if environment is None else environment
    for launcher in FOREIGN_LAUNCHERS:
        numbers = launcher.numbers(env)
        if numbers is not None and numbers[1] > 1:
            told = f"{launcher.name} says ({launcher.size}={numbers[1]})"
            names = f"{launcher.rank} and {launcher.size}"
            return ForeignLaunch(numbers[1], told, names)
    # A TF_CONFIG that is not valid is an error only where a program asks for it.
    with contextlib.suppress(ValueError, TypeError):
        resolver = TFConfigClusterResolver(variables=env)
        spec = resolver.cluster_spec()
        size = sum(spec.num_tasks(job) for job in spec.jobs if job != _EVALUATOR)
        if size > 1 and resolver.task_type != _EVALUATOR:
            return ForeignLaunch(size, "TF_CONFIG says", "TF_CONFIG")
    return None


def run_name(environment: Mapping[str, str] | None = None) -> str:
    """Return a name of this run of the job, equal on all its ranks.

    Not collective. It consists of the batch job's ID, the number of its requeues, and
    the launcher's name of the ranks. Empty without a scheduler and a launcher.
    """
    env = own_environment() if environment is None else environment
    job = batch_job_from_environment(env)
    found = [] if job is None else [job.job_id]
    names = [*(one.restarts for one in SCHEDULERS.values()), *RUN_NAMES]
    return "-".join([*found, *(env[name] for name in names if env.get(name))])


def _first(numbers: Iterable[int | None]) -> int | None:
    return next((number for number in numbers if number is not None), None)


def _number(env: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; if it lists all nodes, this node's number."""
    text = env.get(name, "")
    if name != _SLURM_TASKS:
        return int(text) if text.isdecimal() else None
    with contextlib.suppress(IndexError, KeyError, ValueError):
        counts = expand_tasks_per_node(text)
        if "SLURM_NODEID" not in env and len(set(counts)) == 1:
            return counts[0]
        return counts[int(env["SLURM_NODEID"])]
    return None


def _speaker(env: Mapping[str, str]) -> str:
    """Return the name of the launcher that set the variables of MPICH's protocol."""
    if any(sign in env for sign in _MPIEXEC_SIGNS):
        return MPICH_PROTOCOL
    # PMI_RANK is not the scheduler's rank if an mpiexec in a job step has set it.
    for launcher in LAUNCHERS:
        if launcher.name in _PMI_SPEAKERS and env.get(launcher.rank) == env["PMI_RANK"]:
            return launcher.name
    return "mpiexec of Cray PALS" if "PALS_RANKID" in env else MPICH_PROTOCOL
