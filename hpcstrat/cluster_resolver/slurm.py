"""The tasks of a Slurm job step."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

from hpcstrat.cluster_resolver.allocation import (
    AllocationClusterResolver,
    Placement,
    block_places,
)
from hpcstrat.cluster_resolver.node_list import expand_node_list, expand_tasks_per_node

__all__ = ["SlurmClusterResolver"]


class SlurmClusterResolver(AllocationClusterResolver):
    """The tasks that ``srun`` has started, whatever their number on each node.

    Parameters
    ----------
    jobs : mapping of str to int, optional
        Number of tasks of each job, in the order of ranks; default: all are workers.
    port_base : int
        Port of the first task of each node; the others follow.
    gpus_per_node : int, optional
        Default: what Slurm says; 0 where it says nothing.
    gpus_per_task : int, optional
        Default: the node's GPUs divided by its tasks.
    tasks_per_node : int, sequence of int, or str, optional
        Default: what Slurm says. Text is of Slurm's form, such as ``2(x3),1``.
    auto_set_gpu : bool
        Whether `cluster_spec` sets ``CUDA_VISIBLE_DEVICES`` to this task's GPUs, where
        there are any and Slurm has not done so.
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
        Outside of a job step, or if numbers of tasks, nodes or GPUs do not fit.
    ValueError
        If a variable of Slurm's is not of the known form.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Sequence[int] | str | None = None,
        *,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
        variables: MutableMapping[str, str] | None = None,
    ) -> None:
        self._variables = os.environ if variables is None else variables
        self._rank = self._number("SLURM_PROCID")
        # Variables of the step: sbatch sets those of the job for its own script, too.
        num_tasks = self._number("SLURM_STEP_NUM_TASKS")
        nodes = expand_node_list(self._text("SLURM_STEP_NODELIST"))
        if tasks_per_node is None:
            tasks_per_node = self._text("SLURM_STEP_TASKS_PER_NODE")
        counts = _counts(tasks_per_node, len(nodes))
        self._check_tasks(num_tasks, nodes, counts)
        if gpus_per_node is None:
            stated = self._variables.get("SLURM_GPUS_ON_NODE", "")
            gpus_per_node = int(stated) if stated.isdecimal() else 0
        super().__init__(
            Placement(self._rank, nodes, self._lay_out(counts)),
            jobs,
            port_base=port_base,
            gpus_on_node=gpus_per_node,
            gpus_per_task=gpus_per_task,
            auto_set_gpu=auto_set_gpu,
            rpc_layer=rpc_layer,
            variables=self._variables,
        )

    def _text(self, name: str) -> str:
        value = self._variables.get(name, "")
        if not value:
            raise RuntimeError(
                f"expected a job step of Slurm, found no {name} in the environment; "
                "start the program with srun"
            )
        return value

    def _number(self, name: str) -> int:
        text = self._text(name)
        if not text.isascii() or not text.isdecimal():
            raise ValueError(
                f"expected a number as {name}, found {text!r}; start the program with "
                "srun"
            )
        return int(text)

    def _check_tasks(self, num_tasks: int, nodes: list[str], counts: list[int]) -> None:
        if len(counts) != len(nodes) or sum(counts) != num_tasks:
            raise RuntimeError(
                f"expected {num_tasks} tasks on the nodes {nodes}, found "
                f"tasks_per_node {counts}; change it"
            )
        if self._rank >= num_tasks:
            raise RuntimeError(
                f"expected SLURM_PROCID below {num_tasks}, found {self._rank}; start "
                "the program with srun"
            )

    def _lay_out(self, counts: list[int]) -> list[tuple[int, int]]:
        """Return each rank's node, and its number there."""
        places = block_places(counts)
        stated = self._variables.get("SLURM_DISTRIBUTION", "")
        # The distribution over sockets and cores follows; it moves no rank.
        across = stated.partition(":")[0].partition(",")[0]
        # The environment does not say which rank is where with these two.
        if across in ("plane", "arbitrary"):
            raise RuntimeError(
                f"expected tasks distributed by block or cyclic, found {stated}; "
                "start the program with srun --distribution=block"
            )
        if across == "cyclic":
            # One task to each node in turn, see srun(1).
            places.sort(key=lambda place: (place[1], place[0]))
        # A layout that is wrong for this rank would give all of them wrong addresses.
        found = self._variables.get("SLURM_NODEID", "")
        if found.isdecimal() and int(found) != places[self._rank][0]:
            raise RuntimeError(
                f"expected rank {self._rank} on node {places[self._rank][0]} of the "
                f"step, found it on node {found}; distribute tasks with srun's "
                "--distribution=block or cyclic"
            )
        return places


def _counts(tasks_per_node: int | Sequence[int] | str, num_nodes: int) -> list[int]:
    if isinstance(tasks_per_node, str):
        return expand_tasks_per_node(tasks_per_node)
    if isinstance(tasks_per_node, int):
        return [tasks_per_node] * num_nodes
    return [int(count) for count in tasks_per_node]
