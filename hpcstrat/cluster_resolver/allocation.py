"""Base class of resolvers for tasks on the nodes that a scheduler has allocated."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from hpcstrat.cluster_resolver.resolver import ClusterResolver
from hpcstrat.cluster_resolver.spec import ClusterSpec

__all__ = ["AllocationClusterResolver", "Placement", "block_places"]

_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes of a job, and each rank's place: its node, and its number there."""

    rank: int
    nodes: Sequence[str]
    places: Sequence[tuple[int, int]]
    # Number of GPUs of this rank's node. None if the scheduler does not set it: then
    # the number is derived from CUDA_VISIBLE_DEVICES.
    gpus_on_node: int | None = None


def block_places(counts: Iterable[int]) -> list[tuple[int, int]]:
    """Return each rank's (node, number there), if ranks fill one node after another."""
    return [(node, i) for node, count in enumerate(counts) for i in range(count)]


class AllocationClusterResolver(ClusterResolver):
    """A resolver of all ranks of a job; subclasses find the `Placement` of ranks."""

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        *,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
        variables: MutableMapping[str, str] | None = None,
    ) -> None:
        self._variables = os.environ if variables is None else variables
        placement = self._find_placement(self._variables)
        num_tasks = len(placement.places)
        self._jobs = dict(jobs) if jobs is not None else {"worker": num_tasks}
        if sum(self._jobs.values()) != num_tasks:
            raise RuntimeError(
                f"expected as many tasks in jobs as were started, {num_tasks}, found "
                f"{sum(self._jobs.values())} in {self._jobs}; change jobs, or the "
                "number of tasks (srun --ntasks, mpirun -n, flux run -n)"
            )
        self._rank = placement.rank
        self.rpc_layer = rpc_layer
        self._addresses = [
            f"{placement.nodes[node]}:{port_base + local}"
            for node, local in placement.places
        ]
        self.task_type, self.task_id = self.get_task_info()
        self._auto_set_gpu = auto_set_gpu
        if gpus_per_node is None:
            gpus_per_node = placement.gpus_on_node
        self._choose_gpus(placement, gpus_per_node, gpus_per_task)

    @abstractmethod
    def _find_placement(self, env: Mapping[str, str]) -> Placement: ...

    def _choose_gpus(
        self, placement: Placement, per_node: int | None, per_task: int | None
    ) -> None:
        own_node, local = placement.places[self._rank]
        count = sum(node == own_node for node, _ in placement.places)
        text = self._variables.get(_GPUS, "")
        visible = [name for name in text.split(",") if name]
        if per_node is None:
            # If fewer GPUs than tasks are visible, each task sees only its own GPUs.
            per_node = len(visible) if len(visible) >= count else len(visible) * count
        # If CUDA_VISIBLE_DEVICES does not list all GPUs of the node, it lists this
        # task's own GPUs, as srun --gpus-per-task or an earlier resolver has set it.
        whole = not visible or len(visible) == per_node
        if per_task is None:
            share = per_node // count
            per_task = share if whole else min(share, len(visible))
        if per_task * count > per_node:
            raise RuntimeError(
                f"expected at most {per_node} GPUs for the {count} tasks of a "
                f"node, found {per_task} for each; lower gpus_per_task"
            )
        if per_task:
            self._accelerators = {"GPU": per_task}
        names = visible or [str(number) for number in range(per_node)]
        own = names[local * per_task : (local + 1) * per_task]
        self._own_gpus = ",".join(own if whole else visible)

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks and their addresses.

        Not collective. Sets ``CUDA_VISIBLE_DEVICES``, if ``auto_set_gpu``.

        Returns
        -------
        ClusterSpec
            Tasks of all jobs; ranks are assigned to jobs in the order of ``jobs``.
        """
        # Like tf.distribute, set CUDA_VISIBLE_DEVICES in this method. Never empty it.
        if self._auto_set_gpu and self._own_gpus:
            self._variables[_GPUS] = self._own_gpus
        cluster, first = {}, 0
        for job, count in self._jobs.items():
            cluster[job] = self._addresses[first : first + count]
            first += count
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str, int]:
        """Return the task of this process.

        Not collective.

        Returns
        -------
        str, int
            Job of this process, and its number in the job.
        """
        first = 0
        for job, count in self._jobs.items():
            if self._rank < first + count:
                return job, self._rank - first
            first += count
        raise AssertionError("every rank belongs to a job")
