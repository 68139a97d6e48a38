"""The base class of resolvers, and resolvers to which a program passes the cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hpcstrat.cluster_resolver.spec import ClusterSpec

__all__ = ["ClusterResolver", "SimpleClusterResolver", "UnionResolver", "master_url"]


def master_url(address: str, rpc_layer: str | None) -> str:
    """Return an address that begins with its protocol, such as ``grpc://host:port``."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


class ClusterResolver(ABC):
    """Base class of resolvers, which find a cluster's tasks and this process's task.

    Attributes
    ----------
    task_type : str or None
        Job of this process.
    task_id : int or None
        Number of this process in its job.
    rpc_layer : str or None
        Protocol of addresses.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    _accelerators: Mapping[str, int] = {}
    _environment: str | None = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks and their addresses.

        Not collective.

        Returns
        -------
        ClusterSpec
            Tasks and addresses; without jobs if there is no cluster.
        """

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task.

        Not collective.

        Parameters
        ----------
        task_type : str, optional
            Job of the task; default: this process's job.
        task_id : int, optional
            Number of the task; default: this process's number.
        rpc_layer : str, optional
            Protocol; default: the resolver's protocol.

        Returns
        -------
        str
            Address; empty if there is no cluster, or if no task is given or known.

        Raises
        ------
        ValueError
            If the cluster has no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        spec = self.cluster_spec()
        if task_type is None or task_id is None or not spec:
            return ""
        address = spec.task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the number of accelerators of a task.

        Not collective.

        Parameters
        ----------
        task_type : str, optional
            Job of the task; default: this process's job.
        task_id : int, optional
            Number of the task; default: this process's number.
        config_proto : object, optional
            Ignored; accepted because tf.distribute has this argument.

        Returns
        -------
        dict of str to int
            Numbers by type, such as ``{"GPU": 2}``; empty if unknown.
        """
        return dict(self._accelerators)

    @property
    def environment(self) -> str:
        """Name of the environment, such as a cloud; empty for your own machines."""
        return self._environment or ""

    def __repr__(self) -> str:
        number = "" if self.task_id is None else f" {self.task_id}"
        return f"<{type(self).__name__}, task {self.task_type or 'unknown'}{number}>"


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program describes.

    Parameters
    ----------
    cluster_spec : ClusterSpec
        The tasks.
    master : str
        Address that ``master()`` returns without arguments.
    task_type : str, optional
        Job of this process.
    task_id : int, optional
        Number of this process.
    environment : str
        Name of the environment.
    num_accelerators : dict of str to int, optional
        Accelerators of every task, such as ``{"GPU": 2}``.
    rpc_layer : str, optional
        Protocol of addresses.

    Raises
    ------
    TypeError
        If ``cluster_spec`` is not a ClusterSpec.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        *,
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"expected a ClusterSpec, found {type(cluster_spec).__name__}; write "
                "ClusterSpec({'worker': ['host:port']})"
            )
        self._spec = cluster_spec
        self._master = master
        self._environment = environment
        self._accelerators = dict(num_accelerators or {})
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        if task_type is None or task_id is None:
            return master_url(self._master, rpc_layer) if self._master else ""
        return super().master(task_type, task_id, rpc_layer)


class UnionResolver(ClusterResolver):
    """Several clusters as one; this process's task is that of the first resolver.

    If all resolvers with a job list its tasks, the lists are joined. If one maps task
    numbers to the job's tasks, all resolvers' numbers are kept, and `cluster_spec`
    raises a KeyError if a number occurs twice. Without arguments for a task,
    ``master()`` returns the first address that a resolver has.

    Parameters
    ----------
    *resolvers : ClusterResolver
        Resolvers, at least one.
    rpc_layer : str, optional
        Protocol; default: the first resolver's protocol.

    Raises
    ------
    ValueError
        If no resolver is given.
    TypeError
        If an argument is not a ClusterResolver.
    """

    def __init__(
        self, *resolvers: ClusterResolver, rpc_layer: str | None = None
    ) -> None:
        if not resolvers:
            raise ValueError("expected at least one resolver, found none; pass one")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"expected ClusterResolvers, found {type(resolver).__name__}; pass "
                    "resolvers only"
                )
        self._resolvers = resolvers
        self.task_type = resolvers[0].task_type
        self.task_id = resolvers[0].task_id
        self.rpc_layer = rpc_layer or resolvers[0].rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        specs = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        merged: dict[str, dict[int, str]] = {}
        for job in dict.fromkeys(job for spec in specs for job in spec):
            parts = [spec[job] for spec in specs if job in spec]
            merged[job] = _merged(job, parts)
        return ClusterSpec(merged)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        masters = (resolver.master(rpc_layer=rpc_layer) for resolver in self._resolvers)
        return next(filter(None, masters), "")

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        # As in tf.distribute, do not add accelerators of the other clusters.
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        return self._resolvers[0].environment


def _merged(job: str, parts: list[list[str] | dict[int, str]]) -> dict[int, str]:
    # Number the tasks again if all parts are lists, or else keep their numbers.
    if all(isinstance(part, list) for part in parts):
        return dict(enumerate(address for part in parts for address in part))  # type: ignore[misc]
    tasks: dict[int, str] = {}
    for part in parts:
        items = part if isinstance(part, dict) else dict(enumerate(part))
        twice = sorted(tasks.keys() & items.keys())
        if twice:
            raise KeyError(
                f"expected each task of job {job!r} from one resolver, found tasks "
                f"{twice} from two; number them differently"
            )
        tasks.update(items)
    return tasks
