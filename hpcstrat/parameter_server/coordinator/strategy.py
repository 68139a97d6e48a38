"""The strategy of a coordinator, workers and parameter servers."""

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
    """The task of a `Server`, as the program has named it."""

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str


class Server:
    """The task of a rank that is not the coordinator, called by the program.

    Use it instead of a ParameterServerStrategy, which ends the program of such a rank
    after the coordinator; `join` returns then. The first arguments are those of
    ``tf.distribute.Server``, or only a resolver; the others are those of
    ParameterServerStrategy.

    Parameters
    ----------
    server_or_cluster_def : ClusterSpec, mapping, ServerDef or ClusterResolver, optional
        All tasks, or a resolver, which also has this rank's task. Default: tasks by the
        numbers of the ranks.
    job_name : str, optional
        Job of this rank, with a ClusterSpec of several jobs.
    task_index : int, optional
        Number of this rank in its job, if that has several tasks.
    protocol : str, optional
        Protocol in `target`; messages are those of MPI.
    config : object, optional
        Accepted for tf.distribute's sake.
    start : bool
        Accepted for tf.distribute's sake: `join` serves.
    cluster_resolver : ClusterResolver, optional
        As first argument.
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
        If the cluster has no such task, or several and none is named.
    TypeError
        For tasks in another form.
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
        """Raise NotImplementedError: MPI starts the ranks that serve.

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
        """Do nothing: `join` serves.

        Not collective.
        """

    @property
    def target(self) -> str:
        """Address of this task, with the protocol before it; empty if unknown."""
        resolver = self._resolver
        if resolver is None:
            return ""
        protocol = self._protocol or None
        return resolver.master(resolver.task_type, resolver.task_id, protocol)

    @property
    def server_def(self) -> ServerDef:
        """All tasks, and the task of this rank."""
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
        """Serve as this rank's task says, until the coordinator ends.

        Collective over ``comm``: the coordinator makes a ParameterServerStrategy.

        Raises
        ------
        ValueError
            If this rank is the coordinator, or there are too few ranks.
        """
        cluster = Cluster(self._request, *self._numbers)
        if cluster.coordinates:
            # The others serve already; their servers wait for this rank.
            cluster.end(closes=True)
            raise ValueError(
                f"expected a rank other than the coordinator, found rank {cluster.rank}"
                "; make a ParameterServerStrategy there"
            )
        cluster.serve(_ServedStrategy(cluster))

    def __repr__(self) -> str:
        return f"Server(num_ps={self._numbers[1]}, spare_ranks={self._numbers[2]})"


class ParameterServerStrategy(SingleReplicaStrategy):
    """Trains asynchronously: servers hold variables, workers run functions.

    Collective over ``comm``. All ranks run the same program. On the coordinator the
    constructor returns. On other ranks it serves until the coordinator closes the
    strategy or ends, and then ends the program by SystemExit. There is one replica in
    sync.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        Gives each rank a task: one ``chief``, any number of ``ps``, ``worker`` and
        ``spare``. Default: rank 0 coordinates, the next ``num_ps`` hold variables, the
        last ``spare_ranks`` are spare, the others work.
    variable_partitioner : Partitioner, optional
        Number of shards of a variable; default: variables stay whole.
    num_ps : int
        Number of ranks for variables, without a resolver.
    spare_ranks : int
        Number of ranks that wait to take the place of a lost rank, without a resolver.
        Needs ``on_lost_rank="raise"``.
    comm : mpi4py.MPI.Intracomm, optional
        Default: all ranks of the job.
    settings : Settings, optional
        Those of rank 0 apply. After each ``warn_seconds`` of waiting, the coordinator
        names the workers that have not ended a function.
    on_lost_rank : {"abort", "raise"}
        Whether the loss of a rank ends the job. With ``"raise"``, which needs ``mpirun
        --with-ft ulfm``, functions of a lost worker run again elsewhere, a spare rank
        takes its place, and the loss of a server is an UnavailableError; see
        ``ClusterCoordinator.recover``.

    Attributes
    ----------
    coordinator : ClusterCoordinator or None
        The coordinator of this strategy, once the program has made it.

    Raises
    ------
    ValueError
        If there is not at least one rank for variables and one worker, or there are
        spare ranks without ``on_lost_rank="raise"``. On every rank.
    SystemExit
        On the other ranks, after the coordinator has ended.
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
        # The other ranks end with this process, however it ends: an uncaught error ends
        # all ranks. Registered after the end of MPI, this runs before it.
        atexit.register(self.leave)

    def _begin(self, cluster: Cluster, partitioner: Any) -> None:
        super().__init__()
        self.cluster = cluster
        self._settings = cluster.settings
        self.variable_partitioner = partitioner
        self.client = cluster.client
        # A ClusterCoordinator, which stands above this module.
        self.coordinator: Any = None
        self.closed = False
        self._num_placed = 0
        # By number; a worker has only the variables that its functions use.
        self._variables: weakref.WeakValueDictionary[int, ServerVariable] = (
            weakref.WeakValueDictionary()
        )
        self.slots = ServerSlots(self.client, self._variables)
        # By the optimizer's key, with the number of the newest handle.
        self._optimizers: dict[int, tuple[int, Optimizer]] = {}
        self._forgotten: deque[int] = deque()

    @property
    def roles(self) -> Roles:
        """The task of each rank; for the library's own modules."""
        return self.cluster.roles

    @property
    def cluster_resolver(self) -> Any:
        """The resolver in use; None if ranks have roles by their numbers."""
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
        """Return where another rank has put a new variable; None if this rank puts it.

        For the library's own modules.
        """
        return None

    def not_made(self, error: BaseException) -> None:
        """Note why a variable could not be made; for the library's own modules."""

    def next_server(self) -> int:
        """Return the server of the next variable or shard, in turn.

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
        """Return a data set that each worker reads as a whole.

        Not collective; in the function of a per-worker data set, which returns the
        result.

        Parameters
        ----------
        dataset : Dataset or iterable of batches
            Gives batches.
        options : InputOptions, optional
            How to read them.

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

        Not collective; in the function of a per-worker data set, which returns the
        result.

        Parameters
        ----------
        dataset_fn : callable
            Takes an InputContext, with one pipeline, or as many as there are workers
            that run the program, and returns an iterable of batches.
        options : InputOptions, optional
            How to read them.

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
        """Return options by which each worker has all of the data."""
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
        """Note a new variable, and give it restored state; for the library's own
        modules.
        """
        self._variables[number] = variable
        self.slots.give(variable)

    def move_from_lost(self) -> None:
        """Move variables of lost servers to spare ranks or other servers, as zeros.

        Optimizers begin anew. On the coordinator, while no function is under way. For
        the library's own modules.
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
        """Forget all objects made from handles; for the library's own modules."""
        self._variables.clear()
        self._optimizers.clear()

    def resolve(self, kind: str, number: int, parts: Any) -> Any:
        """Return the object for a handle from another rank; for the library's own
        modules.
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
                # Functions may still come with older handles, whose options are old.
                newest = Optimizer.from_rule(*rest)
                optimizer = optimizer or newest
                vars(optimizer).update(vars(newest))
                self._optimizers[number] = made, optimizer
            return optimizer
        return self

    def _handle(self) -> tuple[str, int, Any]:
        """Return the handle that stands for this strategy on other ranks."""
        return "strategy", 0, None

    def forget(self, numbers: Iterable[int]) -> None:
        """Let servers free a variable's shards, at the next call.

        For the library's own modules.
        """
        # The garbage collector calls this, so no message is sent now.
        self._forgotten.extend(numbers)

    def forget_now(self) -> None:
        """Tell the servers what to free; for the library's own modules."""
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
        """Let all other ranks end, and free what they share.

        Not collective; on the coordinator. Waits for functions that workers run, and
        cancels those that have not begun. A second call does nothing.
        """
        self._end(closes=True)

    def leave(self) -> None:
        """Let all other ranks end with this program, as `close` does.

        For the library's own modules.
        """
        self._end(closes=False)

    def _end(self, *, closes: bool) -> list[Any]:
        """End; return messages that this rank has not taken."""
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
    """Return a resolver of the first arguments of a Server."""
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
