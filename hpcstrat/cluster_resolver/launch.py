"""The launcher's description of this process, from the environment; no MPI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcstrat.cluster_resolver.node_list import expand_tasks_per_node

__all__ = ["Launch", "launch_from_environment"]

# Variables that each launcher gives to every process that it starts: its name, and the
# variables of rank, number of ranks, rank on the host, number of ranks there.
_OPEN_MPI = "OMPI_COMM_WORLD_"
_MPIEXEC = "mpiexec of MPICH"
_SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_FLUX, _JSRUN = "FLUX_TASK_RANK", "JSM_NAMESPACE_"
# The order matters: ranks that mpirun starts in a Slurm job see Slurm's variables, too.
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
    # Cray's PALS, mpiexec beside PBS, gives the last ones.
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
# srun and flux run speak MPICH's protocol, too, but give none of these.
_MPIEXEC_SIGNS = ("HYDI_CONTROL_FD", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@dataclass(frozen=True, slots=True)
class Launch:
    """The way in which this process was started.

    Parameters
    ----------
    launcher : str
        Name of the launcher; empty where there was none.
    rank : int
        This process's rank, as the launcher counts.
    size : int
        Number of processes that the launcher started.
    local_rank : int, optional
        Rank among the processes of this host; None where the launcher does not say.
    local_size : int, optional
        Number of processes on this host; None where the launcher does not say.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None


def launch_from_environment(environment: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's rank and size.

    Not collective.

    Parameters
    ----------
    environment : mapping of str to str, optional
        Default: this process's environment.

    Returns
    -------
    Launch
        From the first launcher whose variables for rank and size are numbers.
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
    """Return the number in a variable; of tasks per node, that of this node."""
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
    """Return the launcher that gave the rank of MPICH's protocol."""
    if any(sign in env for sign in _MPIEXEC_SIGNS):
        return _MPIEXEC
    # An mpiexec in a job step inherits the scheduler's rank, which need not be its own.
    for name, rank in (("flux run", _FLUX), ("srun", "SLURM_PROCID")):
        if env.get(rank) == env["PMI_RANK"]:
            return name
    return "mpiexec of Cray PALS" if "PALS_RANKID" in env else _MPIEXEC
