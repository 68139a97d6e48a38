"""Ranks in jobs of PBS, LSF and Grid Engine, which provide a list of a job's hosts."""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, MutableMapping

from hpcstrat.cluster_resolver.allocation import (
    AllocationClusterResolver,
    Placement,
    block_places,
)
from hpcstrat.cluster_resolver.launch import Launch, launch_from_environment

__all__ = ["LSFClusterResolver", "PBSClusterResolver", "SGEClusterResolver"]


class HostListClusterResolver(AllocationClusterResolver):
    """The ranks that an MPI launcher has started on the hosts of a scheduler's list.

    The list has the number of slots of each host. The resolver assumes that ranks are
    on the hosts in the order of the list: each host up to its slots, or the same number
    of ranks on each host. If this rank is on another host, RuntimeError is raised.
    """

    _scheduler = ""

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        *,
        host: str | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
        variables: MutableMapping[str, str] | None = None,
    ) -> None:
        self._host = platform.node() if host is None else host
        super().__init__(
            jobs,
            port_base,
            gpus_per_node,
            gpus_per_task,
            auto_set_gpu=auto_set_gpu,
            rpc_layer=rpc_layer,
            variables=variables,
        )

    def _find_placement(self, env: Mapping[str, str]) -> Placement:
        slots = self._slots(env)
        launch = launch_from_environment(env)
        if not launch.launcher:
            raise RuntimeError(
                f"expected a rank in a job of {self._scheduler}, found a process that "
                "no launcher has started; start the program with mpirun, or with the "
                "site's mpiexec"
            )
        hosts, counts = self._lay_out(slots, launch)
        places = block_places(counts)
        expected = hosts[places[launch.rank][0]]
        # Check this rank's host: wrong places would give all ranks wrong addresses.
        if expected.partition(".")[0] != self._host.partition(".")[0]:
            raise RuntimeError(
                f"expected rank {launch.rank} on host {expected}, as the list of "
                f"{self._scheduler} says, found it on {self._host}; let ranks fill one "
                "host after the other (mpirun --map-by slot), as many on each"
            )
        return Placement(launch.rank, hosts, places)

    @abstractmethod
    def _slots(self, env: Mapping[str, str]) -> dict[str, int]:
        """Return the number of slots of each host, in the order of ranks."""

    def _variable(self, env: Mapping[str, str], name: str) -> str:
        if not env.get(name):
            raise RuntimeError(
                f"expected a job of {self._scheduler}, found no {name} in the "
                "environment; start the program in a batch script"
            )
        return env[name]

    def _lines(self, env: Mapping[str, str], name: str) -> list[list[str]]:
        """Return the words of each line of the file that variable ``name`` names."""
        path = self._variable(env, name)
        try:
            with open(path, encoding="utf-8") as file:
                return [line.split() for line in file if line.strip()]
        except OSError as error:
            raise RuntimeError(
                f"expected the list of hosts of {self._scheduler} in {path}, found: "
                f"{error.strerror}; it is on the first host of the job only: make the "
                "resolver on rank 0, or give the other hosts the file"
            ) from error

    def _lay_out(
        self, slots: Mapping[str, int], launch: Launch
    ) -> tuple[list[str], list[int]]:
        """Return the hosts that have ranks, and the number of ranks on each."""
        hosts, counts = list(slots), list(slots.values())
        local = launch.local_size
        if sum(counts) == launch.size:
            return hosts, counts
        if local and not launch.size % local and launch.size // local <= len(hosts):
            number = launch.size // local
            return hosts[:number], [local] * number
        filled, left = [], launch.size
        for count in counts:
            filled.append(min(count, left))
            left -= filled[-1]
        if left:
            raise RuntimeError(
                f"expected at most {sum(counts)} ranks, as many as {self._scheduler} "
                f"has given slots, found {launch.size}; ask for more slots, or start "
                "as many ranks on each host"
            )
        return hosts, filled


class PBSClusterResolver(HostListClusterResolver):
    """The ranks that an MPI launcher has started in a job of PBS (``PBS_NODEFILE``).

    Works for PBS Pro, OpenPBS and Torque. The file has a line for each requested rank:
    with ``-l select=2:mpiprocs=4``, four lines for each of two hosts.

    Parameters
    ----------
    jobs : mapping of str to int, optional
        Number of tasks of each job, in the order of ranks; default: all are workers.
    port_base : int
        Port of the first task of each host; the host's other tasks have the next ports.
    gpus_per_node : int, optional
        Default: the number that ``CUDA_VISIBLE_DEVICES`` lists; 0 without it.
    gpus_per_task : int, optional
        Default: the host's GPUs divided by its tasks.
    host : str, optional
        Name of this host, for the check of the rank's host; default: the system's name.
    auto_set_gpu : bool
        Whether `cluster_spec` sets ``CUDA_VISIBLE_DEVICES`` to this task's GPUs, if
        there are any.
    rpc_layer : str
        Protocol of addresses.
    variables : mapping of str to str, optional
        Default: this process's environment.

    Attributes
    ----------
    task_type : str
        Job of this process.
    task_id : int
        Number of this process in its job.

    Raises
    ------
    RuntimeError
        Outside of a job of the scheduler, in a process that no launcher has started, or
        if this rank is not on the host that the list implies.
    """

    _scheduler = "PBS"

    def _slots(self, env: Mapping[str, str]) -> dict[str, int]:
        # A host's lines need not be adjacent in the file, but its ranks are successive.
        return dict(Counter(words[0] for words in self._lines(env, "PBS_NODEFILE")))


class LSFClusterResolver(HostListClusterResolver):
    """The ranks that an MPI launcher has started in a job of LSF (``LSB_MCPU_HOSTS``).

    Parameters, attributes and errors are the same as of `PBSClusterResolver`. Under
    ``jsrun``, the first host has no ranks, because it only launches the job.
    """

    _scheduler = "LSF"

    def _slots(self, env: Mapping[str, str]) -> dict[str, int]:
        words = self._variable(env, "LSB_MCPU_HOSTS").split()
        if len(words) % 2 or not all(word.isdecimal() for word in words[1::2]):
            raise ValueError(
                "expected hosts and slots in LSB_MCPU_HOSTS, such as node1 4 node2 4, "
                f"found {' '.join(words)!r:.200}; start the program in a batch script"
            )
        slots = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        if "JSM_NAMESPACE_RANK" in env and len(slots) > 1:
            del slots[words[0]]
        return slots


class SGEClusterResolver(HostListClusterResolver):
    """The ranks that an MPI launcher has started in a job of SGE (``PE_HOSTFILE``).

    Works for Son of Grid Engine, Univa and Altair Grid Engine, and related schedulers;
    the job must request a parallel environment (``qsub -pe NAME SLOTS``). Parameters,
    attributes and errors are the same as of `PBSClusterResolver`.
    """

    _scheduler = "SGE"

    def _slots(self, env: Mapping[str, str]) -> dict[str, int]:
        # A line has host, slots, queue, cores (sge_pe(5)); a host has a line per queue.
        slots: dict[str, int] = {}
        for host, number, *_ in self._lines(env, "PE_HOSTFILE"):
            slots[host] = slots.get(host, 0) + int(number)
        return slots
