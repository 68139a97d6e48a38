"""Resolvers of an MPI job's ranks, from the environment that its launcher sets."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

from hpcstrat.cluster_resolver.resolver import ClusterResolver
from hpcstrat.cluster_resolver.spec import ClusterSpec

__all__ = ["MPICHClusterResolver", "OpenMPIClusterResolver", "PMIxClusterResolver"]


class _MpiClusterResolver(ClusterResolver):
    """A resolver for which all ranks are tasks of one job, in order of ranks."""

    _launcher = ""
    # Names of environment variables; the first variable that has a number is used.
    _rank_names: tuple[str, ...] = ()
    _size_names: tuple[str, ...] = ()
    _local_rank_names: tuple[str, ...] = ()
    _local_size_names: tuple[str, ...] = ()

    def __init__(
        self,
        task_type: str = "worker",
        port_base: int = 8888,
        *,
        hosts: Sequence[str] | None = None,
        rpc_layer: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        env = os.environ if variables is None else variables
        self._port_base = port_base
        self._hosts = None if hosts is None else list(hosts)
        self.rpc_layer = rpc_layer
        self.task_type = task_type
        self.task_id = self._required(env, self._rank_names)
        self.num_tasks = self._required(env, self._size_names)
        self.local_rank = _number(env, self._local_rank_names)
        self.num_local_tasks = _number(env, self._local_size_names)
        if self._hosts is not None and len(self._hosts) != self.num_tasks:
            raise RuntimeError(
                f"expected a host for each of {self.num_tasks} ranks, found "
                f"{len(self._hosts)} hosts; pass one per rank, in order of ranks"
            )

    def _required(self, env: Mapping[str, str], names: tuple[str, ...]) -> int:
        number = _number(env, names)
        if number is None:
            raise RuntimeError(
                f"expected a process started by {self._launcher}, found no "
                f"{' or '.join(names)} in the environment; start the program with that "
                "launcher"
            )
        return number

    def cluster_spec(self) -> ClusterSpec:
        hosts = self._hosts
        # Launchers give a process no names of other hosts than its own.
        if hosts is None:
            if self.num_local_tasks != self.num_tasks:
                raise RuntimeError(
                    f"expected all {self.num_tasks} ranks on this host, found "
                    f"{self.num_local_tasks}, and {self._launcher} does not name the "
                    "other hosts; pass hosts=comm.allgather(platform.node())"
                )
            hosts = [platform.node()] * self.num_tasks
        seen: dict[str, int] = {}
        addresses = []
        for host in hosts:
            # Count ports for each host, because its ranks need not be successive.
            addresses.append(f"{host}:{self._port_base + seen.get(host, 0)}")
            seen[host] = seen.get(host, 0) + 1
        return ClusterSpec({str(self.task_type): addresses})


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    texts = (env.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


class OpenMPIClusterResolver(_MpiClusterResolver):
    """The ranks that Open MPI's ``mpirun`` has started (``OMPI_COMM_WORLD_*``).

    Parameters
    ----------
    task_type : str
        Name of the job to which all ranks belong.
    port_base : int
        Port of the first rank of each host; the host's other ranks have the next ports.
    hosts : sequence of str, optional
        Host of each rank. Required if ranks are on several hosts, because the launcher
        does not name other hosts; if missing, `cluster_spec` raises a RuntimeError.
    rpc_layer : str, optional
        Protocol of addresses.
    variables : mapping of str to str, optional
        Default: this process's environment.

    Attributes
    ----------
    task_id, num_tasks : int
        Rank and number of ranks.
    local_rank, num_local_tasks : int or None
        Rank and number of ranks on this host; None if the launcher does not set them.

    Raises
    ------
    RuntimeError
        If this launcher did not start the process, or if ``hosts`` has a wrong length.
    """

    _launcher = "mpirun of Open MPI"
    _rank_names = ("OMPI_COMM_WORLD_RANK",)
    _size_names = ("OMPI_COMM_WORLD_SIZE",)
    _local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    _local_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE",)


class MPICHClusterResolver(_MpiClusterResolver):
    """The ranks that Hydra, ``mpiexec`` of MPICH, has started (``PMI_*``).

    It also works with ``srun --mpi=pmi2``, which sets the same variables. Parameters,
    attributes and errors are the same as of `OpenMPIClusterResolver`.
    """

    _launcher = "mpiexec of MPICH"
    _rank_names = ("PMI_RANK",)
    _size_names = ("PMI_SIZE",)
    # Hydra's variable, and that of srun, which uses the same protocol.
    _local_rank_names = ("MPI_LOCALRANKID", "SLURM_LOCALID")
    _local_size_names = ("MPI_LOCALNRANKS",)


class PMIxClusterResolver(_MpiClusterResolver):
    """The ranks of a PMIx server: ``prterun``, or ``srun --mpi=pmix``.

    PMIx puts only the rank into the environment (``PMIX_RANK``); the number of ranks is
    read from variables of Open MPI or Slurm. Parameters, attributes and errors are the
    same as of `OpenMPIClusterResolver`.
    """

    _launcher = "a PMIx launcher, such as srun --mpi=pmix"
    _rank_names = ("PMIX_RANK",)
    # Slurm's variable of the step is first: the job may have more tasks than the step.
    _size_names = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    _local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    _local_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
