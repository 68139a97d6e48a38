"""ParameterServerStrategy: one coordinator, workers, and parameter servers."""

from __future__ import annotations

import atexit
import dataclasses
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcstrat.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
)
from hpcstrat.engine.options import InputContext, InputOptions, VariableOptions
from hpcstrat.engine.settings import Settings
from hpcstrat.errors import UnavailableError
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.parameter_server.coordinator.cluster import Cluster, Roles
from hpcstrat.parameter_server.server_slots import ServerSlots
from hpcstrat.parameter_server.server_steps import apply_at_servers
from hpcstrat.parameter_server.server_variables import ServerVariable, ShardedVariable
from hpcstrat.strategies.connection import StrategyRequest
from hpcstrat.strategies.default import SingleReplicaStrategy

if TYPE_CHECKING:
    from mpi4py import MPI

_NAME = "ParameterServerStrategy"


class ServerDef(NamedTuple):
    """The task of a `Server`, with the values that the program passed."""

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str


class Server:
    """The task of a rank that is not the coordinator; the program runs it by `join`.

    On a rank that is not the coordinator, the constructor of ParameterServerStrategy
    never returns: the program ends when the coordinator ends. Use a Server instead if
    the program must continue: `join` returns when the coordinator ends. The first
    arguments are those of ``tf.distribute.Server``, or only a resolver; the keyword
    arguments are those of ParameterServerStrategy.

    Parameters
    ----------
    server_or_cluster_def : ClusterSpec, mapping, ServerDef or ClusterResolver, optional
        All tasks, or a resolver, which also names this rank's task. Default: the rank's
        number determines its task.
    job_name : str, optional
        Job of this rank; needed if the ClusterSpec has several jobs.
    task_index : int, optional
        Index of this rank in its job; needed if the job has several tasks.
    protocol : str, optional
        Protocol in `target`. It has no other effect: all messages use MPI.
    config : object, optional
        Ignored; accepted because tf.distribute has it.
    start : bool
        Ignored; accepted because tf.distribute has it. `join` always serves.
    cluster_resolver : ClusterResolver, optional
        A resolver, instead of the first argument.
    num_ps, spare_ranks : int
        As for ParameterServerStrategy.
    comm : mpi4py.MPI.Intracomm, optional
        As for ParameterServerStrategy.
    settings : Settings, optional
        As for ParameterServerStrategy.
    on_lost_rank : {"abort", "raise"}
        As for ParameterServerStrategy.

    Raises
    ------
    ValueError
        If the cluster does not have the named task, or has several tasks and none is
        named.
    TypeError
        If ``server_or_cluster_def`` has another type.
    """

    def __init__(  # noqa: PLR0917 - the order of tf.distribute
        self,
        server_or_cluster_def: Any = None,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        *,
        cluster_resolver: ClusterResolver | None = None,
        num_ps: int = 1,
        spare_ranks: int = 0,
        comm: MPI.Intracomm | None = None,
        settings: Settings | None = None,
        on_lost_rank: str = "abort",
    ) -> None:
        del config, start
        given = server_or_cluster_def
        if given is None or isinstance(given, ClusterResolver):
            resolver = given or cluster_resolver
        else:
            resolver = _resolver_of(given, job_name, task_index)
        told = given.protocol if isinstance(given, ServerDef) else ""
        self._protocol = protocol or told
        self._request = StrategyRequest(
            kind=_NAME, comm=comm, settings=settings, on_lost_rank=on_lost_rank
        )
        self._resolver = resolver
        self._numbers = resolver, num_ps, spare_ranks

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """Raise NotImplementedError, because MPI starts the ranks that serve.

        Not collective.

        Parameters
        ----------
        config : object, optional
            Not used.
        start : bool
            Not used.

        Returns
        -------
        Server
            Never.
        """
        del config, start
        raise NotImplementedError(
            "expected ranks of a job of MPI as servers, found create_local_server, "
            "which makes one in the program's own process; start the program with "
            "mpirun -n 3 and make a ParameterServerStrategy"
        )

    def start(self) -> None:
        """Do nothing, because `join` serves.

        Not collective.
        """

    @property
    def target(self) -> str:
        """Address of this task, such as ``"grpc://node1:2222"``, or "" if unknown."""
        resolver = self._resolver
        if resolver is None:
            return ""
        protocol = self._protocol or None
        return resolver.master(resolver.task_type, resolver.task_id, protocol)

    @property
    def server_def(self) -> ServerDef:
        """All tasks of the cluster, and the task of this rank."""
        resolver = self._resolver
        if resolver is None or resolver.task_type is None or resolver.task_id is None:
            raise ValueError(
                "expected a Server that was given its tasks, found one that takes them "
                "from MPI; pass a ClusterSpec with job_name and task_index, or a "
                "resolver"
            )
        spec = resolver.cluster_spec()
        return ServerDef(spec, resolver.task_type, resolver.task_id, self._protocol)

    def join(self) -> None:
        """Do this rank's task, until the coordinator ends or closes its strategy.

        Collective over ``comm``: at the same time the coordinator must make a
        ParameterServerStrategy.

        Raises
        ------
        ValueError
            If this rank is the coordinator, or if there are too few ranks.
        """
        cluster = Cluster(self._request, *self._numbers)
        if cluster.coordinates:
            # The other ranks serve already, and servers run until this rank ends, too.
            cluster.end(closes=True)
            raise ValueError(
                f"expected a rank other than the coordinator, found rank {cluster.rank}"
                "; make a ParameterServerStrategy there"
            )
        cluster.serve(_ServedStrategy(cluster))

    def __repr__(self) -> str:
        return f"Server(num_ps={self._numbers[1]}, spare_ranks={self._numbers[2]})"


class ParameterServerStrategy(SingleReplicaStrategy):
    """Trains asynchronously: servers hold the variables, and workers run functions.

    Collective over ``comm``. All ranks start the same program. The constructor returns
    only on the coordinator. On the other ranks the constructor serves until the
    coordinator closes the strategy or ends, and then ends the program by SystemExit.
    There is one replica in sync.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        Defines each rank's task: one ``chief``, any number of ``ps``, ``worker`` and
        ``spare``. Default: rank 0 is the coordinator, the next ``num_ps`` ranks hold
        variables, the last ``spare_ranks`` ranks are spare, and the ranks between them
        are workers.
    variable_partitioner : Partitioner, optional
        Chooses the number of shards of each variable. Default: each variable is one
        shard.
    num_ps : int
        Number of ranks that hold variables. Not used if there is a resolver.
    spare_ranks : int
        Number of ranks that wait to replace a lost rank. Not used if there is a
        resolver. Needs ``on_lost_rank="raise"``.
    comm : mpi4py.MPI.Intracomm, optional
        Default: all ranks of the job.
    settings : Settings, optional
        The settings of rank 0 apply on all ranks. While the coordinator waits, it logs
        every ``warn_seconds`` which workers have not ended a function.
    on_lost_rank : {"abort", "raise"}
        Whether the loss of a rank ends the job. ``"raise"`` needs ``mpirun --with-ft
        ulfm``: functions of a lost worker run again on other workers, a spare rank
        replaces it, and the loss of a server raises UnavailableError; see
        ``ClusterCoordinator.recover``.

    Attributes
    ----------
    coordinator : ClusterCoordinator or None
        The coordinator of this strategy; None until the program has made it.

    Raises
    ------
    ValueError
        If there is no rank for variables, or no worker, or if there are spare ranks
        without ``on_lost_rank="raise"``. Raised on every rank.
    SystemExit
        On all ranks except the coordinator, after the coordinator has ended.
    """

    ranks_are_independent = False
    sums_each_step = False

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        num_ps: int = 1,
        spare_ranks: int = 0,
        comm: MPI.Intracomm | None = None,
        settings: Settings | None = None,
        on_lost_rank: str = "abort",
    ) -> None:
        request = StrategyRequest(
            kind=_NAME, comm=comm, settings=settings, on_lost_rank=on_lost_rank
        )
        cluster = Cluster(request, cluster_resolver, num_ps, spare_ranks)
        self._resolver = cluster_resolver
        self._begin(cluster, variable_partitioner)
        if not cluster.coordinates:
            cluster.serve(self)
            sys.exit(0)
        # Let the other ranks end when this process ends. (An uncaught error ends the
        # whole job instead.) Exit functions run in reverse order, so this function,
        # registered after the exit function of MPI, runs before MPI is finalized.
        atexit.register(self.leave)

    def _begin(self, cluster: Cluster, partitioner: Any) -> None:
        super().__init__()
        self.cluster = cluster
        self._settings = cluster.settings
        self.variable_partitioner = partitioner
        self.client = cluster.client
        # A ClusterCoordinator or None; importing this type would be circular.
        self.coordinator: Any = None
        self.closed = False
        self._num_placed = 0
        # Variables by number. A worker has only the variables that its functions use.
        self._variables: weakref.WeakValueDictionary[int, ServerVariable] = (
            weakref.WeakValueDictionary()
        )
        self.slots = ServerSlots(self.client, self._variables)
        # By an optimizer's key: the number of its newest handle, and the optimizer.
        self._optimizers: dict[int, tuple[int, Optimizer]] = {}
        self._forgotten: deque[int] = deque()

    @property
    def roles(self) -> Roles:
        """The role of each rank; for the library's own modules."""
        return self.cluster.roles

    @property
    def cluster_resolver(self) -> Any:
        """The resolver in use; None if the ranks' numbers determine the roles."""
        return self.__dict__.get("_resolver")

    def variable_class(self, options: VariableOptions) -> Any:
        self._require_coordinator("a variable")
        return ServerVariable if self.variable_partitioner is None else ShardedVariable

    def _require_coordinator(self, what: str) -> None:
        if self.closed or not self.cluster.coordinates:
            raise ValueError(
                f"expected {what} to be made by the coordinator, in its strategy's "
                "scope, found a scheduled function, the function of a data set, "
                "or a closed strategy; make it before"
            )

    def told_of(self, variable: ServerVariable) -> Any:
        """Return the number and shards that another rank chose for a new variable.

        Return None if this rank makes the shards. For the library's own modules.
        """
        return None

    def not_made(self, error: BaseException) -> None:
        """Notify other ranks that a variable could not be made, because of ``error``.

        For the library's own modules.
        """

    def next_server(self) -> int:
        """Return the server for the next variable or shard; servers are used in turn.

        For the library's own modules.
        """
        servers = self.client.alive()
        if not servers:
            raise UnavailableError(
                "expected a parameter server, found that all were lost; start the job "
                "again"
            )
        rank = servers[self._num_placed % len(servers)]
        self._num_placed += 1
        return rank

    def apply_gradients(
        self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]]
    ) -> bool:
        policy = self.settings.non_finite or "off"
        with self.client.lock:
            return apply_at_servers(self.client, optimizer, grads_and_vars, policy)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Return a data set from which each worker reads all batches.

        Not collective. Call it in the function of a per-worker data set, and return its
        result there.

        Parameters
        ----------
        dataset : Dataset or iterable of batches
            The batches to read.
        options : InputOptions, optional
            Options for reading the batches.

        Returns
        -------
        DistributedDataset or DealtDataset
            Iterable of batches.

        Raises
        ------
        ValueError
            On the coordinator of a `ClusterCoordinator`.
        """
        options = self._own_options("experimental_distribute_dataset", options)
        return super().experimental_distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """Return the batches that a function makes for this worker.

        Not collective. Call it in the function of a per-worker data set, and return its
        result there.

        Parameters
        ----------
        dataset_fn : callable
            Takes an InputContext and returns an iterable of batches. The context has
            one pipeline, or, if each worker runs the program, one pipeline for each
            worker.
        options : InputOptions, optional
            Options for reading the batches.

        Returns
        -------
        DealtDataset
            Iterable of batches.

        Raises
        ------
        ValueError
            On the coordinator of a `ClusterCoordinator`.
        """
        options = self._own_options("distribute_datasets_from_function", options)
        return super().distribute_datasets_from_function(dataset_fn, options)

    def _own_options(self, what: str, options: InputOptions | None) -> InputOptions:
        """Return the options, changed so that each worker reads all data."""
        if self.cluster.coordinates:
            raise ValueError(
                f"expected {what} in the function of a per-worker data set, found it "
                "on the coordinator, which runs no step; use "
                "ClusterCoordinator.create_per_worker_dataset"
            )
        return self._independent(options)

    @staticmethod
    def _independent(options: InputOptions | None) -> InputOptions:
        return dataclasses.replace(options or InputOptions(), independent=True)

    def known(self, number: int, variable: ServerVariable) -> None:
        """Record a new variable, and send its restored optimizer state to servers.

        For the library's own modules.
        """
        self._variables[number] = variable
        self.slots.give(variable)

    def move_from_lost(self) -> None:
        """Make the variables of lost servers again on other ranks, with zeros.

        Spare ranks are used first, then the remaining servers. The state of optimizers
        is reset. Call it on the coordinator, while no function runs. For the library's
        own modules.
        """
        lost = self.client.mailbox.lost
        places = {
            rank: spare
            for rank in self.roles.servers
            if rank in lost and (spare := self.cluster.replace(rank)) is not None
        }
        for number, variable in list(self._variables.items()):
            if variable.move_from(lost, places):
                del self._variables[number]
        self.slots.forget()

    def renew(self) -> None:
        """Forget all objects that handles created; for the library's own modules."""
        self._variables.clear()
        self._optimizers.clear()

    def resolve(self, kind: str, number: int, parts: Any) -> Any:
        """Return this rank's object for a handle that another rank sent.

        For the library's own modules.
        """
        if kind == "variable":
            variable = self._variables.get(number)
            if variable is None:
                variable = ServerVariable._from_handle(self, number, parts)
                self._variables[number] = variable
            return variable
        if kind == "optimizer":
            made, *rest = parts
            last, optimizer = self._optimizers.get(number, (-1, None))
            if made > last:
                # Ignore older handles: a function that was pickled earlier may arrive
                # later, with older options of the optimizer.
                newest = Optimizer.from_rule(*rest)
                optimizer = optimizer or newest
                vars(optimizer).update(vars(newest))
                self._optimizers[number] = made, optimizer
            return optimizer
        return self

    def _handle(self) -> tuple[str, int, Any]:
        """Return the handle that other ranks resolve to their own strategy object."""
        return "strategy", 0, None

    def forget(self, numbers: Iterable[int]) -> None:
        """Queue a variable's shards, which the servers free at the next `forget_now`.

        For the library's own modules.
        """
        # Send no message, because the garbage collector may call this at any time.
        self._forgotten.extend(numbers)

    def forget_now(self) -> None:
        """Let the servers free queued shards; for the library's own modules."""
        numbers = []
        while self._forgotten:
            numbers.append(self._forgotten.popleft())
        if numbers:
            for server in self.client.alive():
                self.client.tell(server, "delete", numbers)

    def require_idle(self, what: str) -> None:
        if self.coordinator is not None:
            self.coordinator.require_idle(what)

    def close(self) -> None:
        """Let all other ranks end, and free communicators and shared memory.

        Not collective; call it on the coordinator. Functions that have not begun are
        cancelled, and running functions are awaited. A second call does nothing.
        """
        self._end(closes=True)

    def leave(self) -> None:
        """Let all other ranks end, like `close`; called at the end of the program.

        For the library's own modules.
        """
        self._end(closes=False)

    def _end(self, *, closes: bool) -> list[Any]:
        """End this rank's part; return the messages that it has not processed."""
        with self.client.lock:
            if self.closed:
                return []
            self.closed = True
            return self.cluster.end(closes=closes)

    def __repr__(self) -> str:
        roles = self.roles
        spares = f", {len(roles.spares)} spare ranks" if roles.spares else ""
        return (
            f"ParameterServerStrategy({len(roles.servers)} parameter servers, "
            f"{len(roles.workers)} workers{spares})"
        )


class _ServedStrategy(ParameterServerStrategy):
    """The strategy of a rank that serves until `Server.join` returns."""

    def __init__(self, cluster: Cluster) -> None:
        self._begin(cluster, None)


def _resolver_of(given: Any, job: str | None, index: int | None) -> ClusterResolver:
    """Return a resolver for the first three arguments of a Server."""
    if isinstance(given, ServerDef):
        job, index = job or given.job_name, given.task_index if index is None else index
        given = given.cluster
    spec = ClusterSpec(given)
    if job is None and len(spec.jobs) == 1:
        job = spec.jobs[0]
    if job is not None and index is None and spec.num_tasks(job) == 1:
        index = spec.task_indices(job)[0]
    if job is None or index is None:
        raise ValueError(
            f"expected job_name and task_index of one task of {spec!r}, found "
            f"{job!r} and {index!r}; pass both"
        )
    spec.task_address(job, index)
    return SimpleClusterResolver(spec, task_type=job, task_id=index)
