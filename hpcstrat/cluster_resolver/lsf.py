"""The ranks of a job of LSF."""

from __future__ import annotations

from collections.abc import Mapping

from hpcstrat.cluster_resolver.allocation import HostListClusterResolver

__all__ = ["LSFClusterResolver"]


class LSFClusterResolver(HostListClusterResolver):
    """The ranks that an MPI launcher has started in a job of LSF (``LSB_MCPU_HOSTS``).

    Under ``jsrun`` the first host, from which a job is launched, has no ranks.

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
        Outside of a job of LSF, in a process that no launcher has started, or if the
        ranks are not where the list of hosts says.
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
