"""The tasks of a Slurm job step."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from hpcstrat.cluster_resolver.allocation import (
    AllocationClusterResolver,
    Placement,
    block_places,
)
from hpcstrat.cluster_resolver.node_list import expand_node_list, expand_tasks_per_node

__all__ = ["SlurmClusterResolver"]


class SlurmClusterResolver(AllocationClusterResolver):
    """The tasks that ``srun`` has started, with any number of tasks on each node.

    Parameters
    ----------
    jobs : mapping of str to int, optional
        Number of tasks of each job, in the order of ranks; default: all are workers.
    port_base : int
        Port of the first task of each node; the node's other tasks have the next ports.
    gpus_per_node : int, optional
        Default: the number that Slurm sets in the environment, or 0 if it sets none.
    gpus_per_task : int, optional
        Default: the node's GPUs divided by its tasks.
    tasks_per_node : int, sequence of int, or str, optional
        Default: the numbers that Slurm sets in the environment. A string has Slurm's
        notation, such as ``2(x3),1``.
    auto_set_gpu : bool
        Whether `cluster_spec` sets ``CUDA_VISIBLE_DEVICES`` to this task's GPUs, if it
        has any, unless the scheduler has set it to them.
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
        Outside of a job step, or if numbers of tasks, nodes or GPUs do not match.
    ValueError
        If a variable of Slurm has an unknown form.
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
        self._tasks_per_node = tasks_per_node
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
        rank = _number(env, "SLURM_PROCID")
        # Read the step's variables, because sbatch also sets the job's for its script.
        num_tasks = _number(env, "SLURM_STEP_NUM_TASKS")
        nodes = expand_node_list(_text(env, "SLURM_STEP_NODELIST"))
        tasks = self._tasks_per_node
        if tasks is None:
            tasks = _text(env, "SLURM_STEP_TASKS_PER_NODE")
        if isinstance(tasks, str):
            counts = expand_tasks_per_node(tasks)
        elif isinstance(tasks, int):
            counts = [tasks] * len(nodes)
        else:
            counts = [int(count) for count in tasks]
        if len(counts) != len(nodes) or sum(counts) != num_tasks:
            raise RuntimeError(
                f"expected {num_tasks} tasks on the nodes {nodes}, found "
                f"tasks_per_node {counts}; change it"
            )
        if rank >= num_tasks:
            raise RuntimeError(
                f"expected SLURM_PROCID below {num_tasks}, found {rank}; start the "
                "program with srun"
            )
        gpus = env.get("SLURM_GPUS_ON_NODE", "")
        places = _lay_out(env, rank, counts)
        return Placement(rank, nodes, places, int(gpus) if gpus.isdecimal() else 0)


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise RuntimeError(
            f"expected a job step of Slurm, found no {name} in the environment; start "
            "the program with srun"
        )
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    if not text.isascii() or not text.isdecimal():
        raise ValueError(
            f"expected a number as {name}, found {text!r}; start the program with srun"
        )
    return int(text)


def _lay_out(
    env: Mapping[str, str], rank: int, counts: list[int]
) -> list[tuple[int, int]]:
    """Return each rank's node, and the rank's number on this node."""
    places = block_places(counts)
    stated = env.get("SLURM_DISTRIBUTION", "")
    # Ignore the distribution over sockets and cores, which is within a node.
    across = stated.partition(":")[0].partition(",")[0]
    # For plane and arbitrary, no variable has the node of each rank.
    if across in ("plane", "arbitrary"):
        raise RuntimeError(
            f"expected tasks distributed by block or cyclic, found {stated}; start the "
            "program with srun --distribution=block"
        )
    if across == "cyclic":
        # Cyclic: one task on each node, then the next on each node, see srun(1).
        places.sort(key=lambda place: (place[1], place[0]))
    # Check this rank's node: a wrong layout would give all ranks wrong addresses.
    found = env.get("SLURM_NODEID", "")
    if found.isdecimal() and int(found) != places[rank][0]:
        raise RuntimeError(
            f"expected rank {rank} on node {places[rank][0]} of the step, found it on "
            f"node {found}; distribute tasks with srun's --distribution=block or cyclic"
        )
    return places
