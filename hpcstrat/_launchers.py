"""The launchers and schedulers that hpcstrat knows: their variables and programs.

Every module that looks for a launcher reads these tables. ``import hpcstrat`` reads
them, too: therefore this module imports next to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "FOREIGN_LAUNCHERS",
    "LAUNCHERS",
    "LAUNCHER_PROGRAMS",
    "MPICH_PROTOCOL",
    "RUN_NAMES",
    "SCHEDULERS",
    "Launcher",
    "Scheduler",
    "is_of_launcher",
    "is_watcher",
    "keep_environment",
    "own_environment",
]


class Launcher(NamedTuple):
    """A launcher, and the environment variables that it sets for each process.

    ``rank`` and ``size`` have the rank, and the number of ranks; ``local_rank`` and
    ``local_size`` the same for the processes of this host: the first that is set.
    """

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()

    def numbers(self, env: Mapping[str, str]) -> tuple[int, int] | None:
        """Return rank and size if both are set to numbers, or else None."""
        rank, size = env.get(self.rank, ""), env.get(self.size, "")
        if rank.isdecimal() and size.isdecimal():
            return int(rank), int(size)
        return None


MPICH_PROTOCOL = "mpiexec of MPICH"
"""Name of the launcher of MPICH; `flux run`, `srun` and PALS set its variables, too."""

LAUNCHERS = (
    Launcher(
        "mpirun of Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # prun of PRRTE tells the number of ranks to MPI only.
    Launcher("prun", "PMIX_RANK", ""),
    # jsrun of LSF; see its manual, "Environment variables".
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    # PALS, Cray's mpiexec for PBS, sets PMI_LOCAL_RANK and PMI_LOCAL_SIZE.
    Launcher(
        MPICH_PROTOCOL,
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "SLURM_LOCALID", "FLUX_TASK_LOCAL_ID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
    ),
    # mpirun_rsh; see the user guide of MVAPICH2, "Job launch".
    Launcher(
        "mpirun_rsh of MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ("FLUX_TASK_LOCAL_ID",)),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
    ),
)
"""Launchers whose processes MPI can connect. The order matters: ranks of mpirun in a
Slurm job have Slurm's variables, too."""

FOREIGN_LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    Launcher("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", ("HOROVOD_LOCAL_RANK",)),
    Launcher("jax.distributed", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
)
"""Launchers of other libraries, whose processes MPI does not connect. In a job of MPI,
the program or its script may have set the same variables."""

LAUNCHER_PROGRAMS = frozenset(
    (
        # Open MPI, jsrun, MPICH, MVAPICH, PALS, Flux, Slurm.
        *("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted"),
        *("jsrun", "jsmd", "mpiexec.hydra", "hydra_pmi_proxy", "pmi_proxy"),
        *("hydra_bstrap_pr", "mpirun_rsh", "mpispawn", "palsd", "flux-shell"),
        *("srun", "slurmstepd"),
    )
)
"""Names of the processes that start ranks, as the kernel shortens them to 15
characters. The nearest such ancestor of a rank has started it."""

_PREFIXES = (
    *("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_", "PMI2_", "HYDI_", "HYDRA_"),
    *("MPI_LOCAL", "MV2_COMM_WORLD_", "I_MPI_PMI", "I_MPI_HYDRA", "I_MPI_MPIRUN"),
    "JSM_",
)
# A setting of the user.
_KEPT = ("OPAL_PREFIX",)


def is_of_launcher(variable: str) -> bool:
    """Return whether a launcher sets an environment variable.

    A job inside of another job must not inherit these variables, because it would read
    the ranks of the outer job. Variables of schedulers are not included.
    """
    return variable.startswith(_PREFIXES) and variable not in _KEPT


def is_watcher(words: Sequence[str]) -> bool:
    """Return whether a command line is that of ``hpcstrat watch``, which is no rank."""
    return os.path.basename(words[0]) == "hpcstrat" and words[1:2] == ["watch"]


RUN_NAMES = (
    *("SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID"),
    *("PMI_JOBID", "HYDRA_JOBID"),
)
"""Variables with a launcher's name of the ranks that it has started together."""


class Scheduler(NamedTuple):
    """A scheduler's variables: those that identify a job, and their beginnings.

    A process is in a job if all variables of ``job`` are set; if ``any_of``, if one is.
    The first that is set has the job's ID. ``restarts`` has the number of requeues.
    """

    job: tuple[str, ...]
    prefixes: tuple[str, ...]
    any_of: bool = False
    restarts: str = ""

    def job_id(self, env: Mapping[str, str]) -> str:
        """Return the ID of the job in which a process runs; empty if there is none."""
        found = [env[name] for name in self.job if env.get(name)]
        complete = len(found) == len(self.job) or (self.any_of and found)
        return found[0] if complete else ""


SCHEDULERS = {
    # Flux does not set FLUX_JOB_ID in a batch script.
    "Flux": Scheduler(("FLUX_JOB_ID", "FLUX_ENCLOSING_ID"), ("FLUX_",), any_of=True),
    "Slurm": Scheduler(
        ("SLURM_JOB_ID",),
        ("SLURM_", "SLURMD_", "SRUN_"),
        restarts="SLURM_RESTART_COUNT",
    ),
    "PBS": Scheduler(("PBS_JOBID",), ("PBS_", "PALS_")),
    "LSF": Scheduler(("LSB_JOBID",), ("LSB_",)),
    # SGE needs two variables, because other schedulers set JOB_ID, too.
    "SGE": Scheduler(("JOB_ID", "SGE_TASK_ID"), ("PE_HOSTFILE",)),
}
"""Schedulers. The innermost is first: Flux runs inside of jobs of the others."""

_kept: dict[str, str] = {}


def keep_environment() -> None:
    """Let hpcstrat read this process's environment as it is now, also after changes."""
    _kept.update(os.environ)


def own_environment() -> Mapping[str, str]:
    """Return the environment in which the launcher has started this process."""
    return _kept or os.environ
