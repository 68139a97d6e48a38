"""The ranks of a job of Grid Engine."""

from __future__ import annotations

from collections.abc import Mapping

from hpcstrat.cluster_resolver.allocation import HostListClusterResolver, read_file

__all__ = ["SGEClusterResolver"]


class SGEClusterResolver(HostListClusterResolver):
    """The ranks that an MPI launcher has started in a job of SGE (``PE_HOSTFILE``).

    Of Son of Grid Engine, Univa or Altair Grid Engine, and others of that family; the
    job asks for a parallel environment (``qsub -pe NAME SLOTS``).

    Parameters
    ----------
    jobs : mapping of str to int, optional
        Number of tasks of each job, in the order of ranks; default: all are workers.
    port_base : int
        Port of the first task of each host; the others follow.
    gpus_per_node : int, optional
        Default: what ``CUDA_VISIBLE_DEVICES`` lists; 0 without it.
    gpus_per_task : int, optional
        Default: the host's GPUs divided by its tasks.
    host : str, optional
        This host's name, by which the place of the rank is checked; default: its own.
    auto_set_gpu : bool
        Whether `cluster_spec` sets ``CUDA_VISIBLE_DEVICES`` to this task's GPUs, where
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
        Outside of a job of SGE, in a process that no launcher has started, or if the
        ranks are not where the list of hosts says.
    """

    _scheduler = "SGE"

    def _slots(self, env: Mapping[str, str]) -> dict[str, int]:
        lines = read_file(self._variable(env, "PE_HOSTFILE"), "SGE")
        # Host, slots, queue and cores; see sge_pe(5). A host may have several queues.
        slots: dict[str, int] = {}
        for host, number, *_ in lines:
            slots[host] = slots.get(host, 0) + int(number)
        return slots
