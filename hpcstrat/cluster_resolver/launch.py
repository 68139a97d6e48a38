"""The launcher's description of this process, read from the environment without MPI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcstrat.cluster_resolver.node_list import expand_tasks_per_node

__all__ = ["Launch", "launch_from_environment"]

_OPEN_MPI = "OMPI_COMM_WORLD_"
_MPIEXEC = "mpiexec of MPICH"
_SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_FLUX, _JSRUN = "FLUX_TASK_RANK", "JSM_NAMESPACE_"
# For each launcher: its name, and the environment variables that it sets for the rank,
# the number of ranks, the rank on the host, and the number of ranks on the host.
# The order matters: ranks of mpirun in a Slurm job have Slurm's variables, too.
_LAUNCHERS = (
    (
        "mpirun of Open MPI",
        f"{_OPEN_MPI}RANK",
        f"{_OPEN_MPI}SIZE",
        (f"{_OPEN_MPI}LOCAL_RANK",),
        (f"{_OPEN_MPI}LOCAL_SIZE",),
    ),
    # jsrun of LSF; see its manual, "Environment variables".
    (
        "jsrun",
        f"{_JSRUN}RANK",
        f"{_JSRUN}SIZE",
        (f"{_JSRUN}LOCAL_RANK",),
        (f"{_JSRUN}LOCAL_SIZE",),
    ),
    # PALS, Cray's mpiexec for PBS, sets PMI_LOCAL_RANK and PMI_LOCAL_SIZE.
    (
        _MPIEXEC,
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "SLURM_LOCALID", "FLUX_TASK_LOCAL_ID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", _SLURM_TASKS),
    ),
    ("flux run", _FLUX, "FLUX_JOB_SIZE", ("FLUX_TASK_LOCAL_ID",), ()),
    (
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_LOCALID",),
        (_SLURM_TASKS,),
    ),
)
# Only Hydra sets these variables; srun and flux run also use MPICH's protocol.
_MPIEXEC_SIGNS = ("HYDI_CONTROL_FD", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


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
    env = os.environ if environment is None else environment
    for name, rank, size, places, counts in _LAUNCHERS:
        if env.get(rank, "").isdecimal() and env.get(size, "").isdecimal():
            return Launch(
                _speaker(env) if name == _MPIEXEC else name,
                int(env[rank]),
                int(env[size]),
                _first(_number(env, place) for place in places),
                _first(_number(env, count) for count in counts),
            )
    return Launch()


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
        return _MPIEXEC
    # PMI_RANK is not the scheduler's rank if an mpiexec in a job step has set it.
    for name, rank in (("flux run", _FLUX), ("srun", "SLURM_PROCID")):
        if env.get(rank) == env["PMI_RANK"]:
            return name
    return "mpiexec of Cray PALS" if "PALS_RANKID" in env else _MPIEXEC
