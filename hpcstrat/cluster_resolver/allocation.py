"""Tasks on the nodes that a scheduler has given to a job."""

from __future__ import annotations

import os
import platform
from abc import abstractmethod
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from hpcstrat.cluster_resolver.launch import Launch, launch_from_environment
from hpcstrat.cluster_resolver.resolver import ClusterResolver
from hpcstrat.cluster_resolver.spec import ClusterSpec

__all__ = [
    "AllocationClusterResolver",
    "HostListClusterResolver",
    "Placement",
    "block_places",
    "read_file",
]

_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes of a job; and for each rank its node, and its number there."""

    rank: int
    nodes: Sequence[str]
    places: Sequence[tuple[int, int]]

    @property
    def num_local(self) -> int:
        """Number of tasks on this rank's node."""
        own = self.places[self.rank][0]
        return sum(node == own for node, _ in self.places)


def block_places(counts: Iterable[int]) -> list[tuple[int, int]]:
    """Return the places of ranks that fill one node after the other."""
    return [(node, i) for node, count in enumerate(counts) for i in range(count)]


class AllocationClusterResolver(ClusterResolver):
    """All ranks of a job, node by node; subclasses find out the `Placement`.

    ``gpus_on_node`` is what the scheduler says of this rank's node; None where it says
    nothing, and then ``CUDA_VISIBLE_DEVICES`` counts.
    """

    def __init__(
        self,
        placement: Placement,
        jobs: Mapping[str, int] | None,
        *,
        port_base: int,
        gpus_on_node: int | None,
        gpus_per_task: int | None,
        auto_set_gpu: bool,
        rpc_layer: str,
        variables: MutableMapping[str, str],
    ) -> None:
        num_tasks = len(placement.places)
        self._jobs = dict(jobs) if jobs is not None else {"worker": num_tasks}
        if sum(self._jobs.values()) != num_tasks:
            raise RuntimeError(
                f"expected as many tasks in jobs as were started, {num_tasks}, found "
                f"{sum(self._jobs.values())} in {self._jobs}; change jobs, or the "
                "number of tasks (srun --ntasks, mpirun -n, flux run -n)"
            )
        self._placement = placement
        self._variables = variables
        self.rpc_layer = rpc_layer
        self._addresses = [
            f"{placement.nodes[node]}:{port_base + local}"
            for node, local in placement.places
        ]
        self.task_type, self.task_id = self.get_task_info()
        self._auto_set_gpu = auto_set_gpu
        self._choose_gpus(gpus_on_node, gpus_per_task)

    def _choose_gpus(self, per_node: int | None, per_task: int | None) -> None:
        local, count = (
            self._placement.places[self._placement.rank][1],
            self._placement.num_local,
        )
        text = self._variables.get(_GPUS, "")
        visible = [name for name in text.split(",") if name]
        if per_node is None:
            # Fewer than tasks: the launcher has given each its own.
            each = len(visible) if len(visible) >= count else len(visible) * count
            per_node = each
        # A list of another length is this task's own, made by srun --gpus-per-task, or
        # by another resolver.
        whole = not visible or len(visible) == per_node
        if per_task is None:
            # Share of its own node: others may have more tasks.
            share = per_node // count
            per_task = share if whole else min(share, len(visible))
        if per_task * count > per_node:
            raise RuntimeError(
                f"expected at most {per_node} GPUs for the {count} tasks of a "
                f"node, found {per_task} for each; lower gpus_per_task"
            )
        self._gpus_per_task = per_task
        names = visible or [str(number) for number in range(per_node)]
        own = names[local * per_task : (local + 1) * per_task]
        self._own_gpus = ",".join(own if whole else visible)

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks and their addresses.

        Not collective. Sets ``CUDA_VISIBLE_DEVICES`` with ``auto_set_gpu``.

        Returns
        -------
        ClusterSpec
            Ranks in the order of ``jobs``.
        """
        # Not before it is asked for, as in tf.distribute; never emptied.
        if self._auto_set_gpu and self._own_gpus:
            self._variables[_GPUS] = self._own_gpus
        cluster, first = {}, 0
        for job, count in self._jobs.items():
            cluster[job] = self._addresses[first : first + count]
            first += count
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str, int]:
        """Return which task this process is.

        Not collective.

        Returns
        -------
        str, int
            Job, and number in it.
        """
        first, rank = 0, self._placement.rank
        for job, count in self._jobs.items():
            if rank < first + count:
                return job, rank - first
            first += count
        raise AssertionError("every rank belongs to a job")

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return how many GPUs this task has.

        Not collective.

        Parameters
        ----------
        task_type : str, optional
            Not used.
        task_id : int, optional
            Not used.
        config_proto : object, optional
            Not used.

        Returns
        -------
        dict of str to int
            Such as ``{"GPU": 2}``; empty without GPUs.
        """
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}


class HostListClusterResolver(AllocationClusterResolver):
    """The ranks that an MPI launcher has started on the hosts of a scheduler's list.

    The list has the number of slots of each host. Ranks fill the hosts in its order, by
    slots, or the same number on each; a rank on another host is an error.
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
        env = os.environ if variables is None else variables
        slots = self._slots(env)
        launch = launch_from_environment(env)
        if not launch.launcher:
            raise RuntimeError(
                f"expected a rank in a job of {self._scheduler}, found a process that "
                "no launcher has started; start the program with mpirun, or with the "
                "site's mpiexec"
            )
        hosts, counts = self._lay_out(slots, launch)
        placement = Placement(launch.rank, hosts, block_places(counts))
        self._check_host(placement, platform.node() if host is None else host)
        super().__init__(
            placement,
            jobs,
            port_base=port_base,
            gpus_on_node=gpus_per_node,
            gpus_per_task=gpus_per_task,
            auto_set_gpu=auto_set_gpu,
            rpc_layer=rpc_layer,
            variables=env,
        )

    @abstractmethod
    def _slots(self, env: Mapping[str, str]) -> dict[str, int]:
        """Return the hosts in the order of ranks, with their slots."""

    def _variable(self, env: Mapping[str, str], name: str) -> str:
        if not env.get(name):
            raise RuntimeError(
                f"expected a job of {self._scheduler}, found no {name} in the "
                "environment; start the program in a batch script"
            )
        return env[name]

    def _lay_out(
        self, slots: Mapping[str, int], launch: Launch
    ) -> tuple[list[str], list[int]]:
        """Return the hosts that have ranks, and how many each has."""
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

    def _check_host(self, placement: Placement, own: str) -> None:
        expected = placement.nodes[placement.places[placement.rank][0]]
        # A rank that computed another place than it has would give wrong addresses.
        if expected.partition(".")[0] != own.partition(".")[0]:
            raise RuntimeError(
                f"expected rank {placement.rank} on host {expected}, as the list of "
                f"{self._scheduler} says, found it on {own}; let ranks fill one host "
                "after the other (mpirun --map-by slot), as many on each"
            )


def read_file(path: str, scheduler: str) -> list[list[str]]:
    """Return the words of each line of a file that a scheduler has written."""
    try:
        with open(path, encoding="utf-8") as file:
            return [line.split() for line in file if line.strip()]
    except OSError as error:
        raise RuntimeError(
            f"expected the list of hosts of {scheduler} in {path}, found: "
            f"{error.strerror}; it is on the first host of the job only: make the "
            "resolver on rank 0, or give the other hosts the file"
        ) from error
