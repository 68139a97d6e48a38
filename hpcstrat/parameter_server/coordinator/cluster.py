"""The roles of ranks (coordinator, server, worker) and the connection between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from hpcstrat.cluster_resolver import ClusterResolver
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.topology.starting import abandon_mpi
from hpcstrat.engine.topology.survival import is_loss
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import RankLostError
from hpcstrat.parameter_server.client import Client
from hpcstrat.parameter_server.coordinator.worker import Worker
from hpcstrat.parameter_server.mailbox import Mailbox
from hpcstrat.parameter_server.server import VariableServer
from hpcstrat.parameter_server.wakeup_pipes import WakeupPipes
from hpcstrat.safety.uncaught import running_mpi
from hpcstrat.strategies.connection import StrategyRequest, connect

_COORDINATORS = ("chief", "coordinator", "master")


@dataclass(frozen=True)
class Roles:
    """The role of each rank; the rank of worker i is ``workers[i]``.

    If each worker runs the program, the first worker is also the coordinator. Spare
    ranks wait until they replace a lost rank.
    """

    coordinator: int
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    spares: tuple[int, ...] = ()

    @property
    def between_graph(self) -> bool:
        """True if each worker runs the program."""
        return self.coordinator in self.workers

    def with_replaced(self, lost: int, spare: int) -> Roles:
        """Return the roles after a spare rank has replaced a lost rank."""

        def replaced(ranks: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(spare if rank == lost else rank for rank in ranks)

        left = tuple(rank for rank in self.spares if rank != spare)
        servers, workers = replaced(self.servers), replaced(self.workers)
        return replace(self, servers=servers, workers=workers, spares=left)


class Cluster:
    """The connection between all ranks of a strategy, and this rank's role in it.

    Collective over ``request.comm``. An error is raised on every rank. If the strategy
    survives losses, and a rank is lost during the call, the remaining ranks connect.
    """

    def __init__(
        self,
        request: StrategyRequest,
        resolver: Any,
        num_ps: Any,
        spare_ranks: Any = 0,
        *,
        between_graph: bool = False,
    ) -> None:
        problem: Exception | None = None
        if resolver is not None and not isinstance(resolver, ClusterResolver):
            problem = TypeError(
                f"expected a ClusterResolver, found {resolver!r:.80}; leave it out, or "
                "pass one of hs.cluster_resolver"
            )
        if not isinstance(num_ps, int) or num_ps < 1:
            problem = ValueError(
                f"expected num_ps >= 1, found {num_ps!r}; give at least one rank to "
                "variables"
            )
        if not isinstance(spare_ranks, int) or spare_ranks < 0:
            problem = ValueError(
                f"expected spare_ranks >= 0, found {spare_ranks!r}; say how many ranks "
                "wait until another is lost"
            )
        while True:
            numbers = num_ps, spare_ranks
            made = False
            try:
                self._connect(request, problem, resolver, numbers, between_graph)
                made = True
            except Exception as error:
                if not (request.survives and _is_loss(error, request)):
                    raise
            if not request.survives or _all_agree(made, request):
                return
            # No rank has begun to serve yet, so the remaining ranks can get new roles.
            if made:
                self._connection.abandon(self._key)
            comm = request.comm or Topology.world()
            left = comm.Shrink()
            lost = comm.size - left.size
            request = replace(request, comm=left)
            spare_ranks = max(spare_ranks - lost, 0)
            # Skip MPI_Finalize, which may wait forever for ranks that exit early.
            abandon_mpi()
            if left.rank == 0:
                get_logger().warning(
                    "lost %d of %d ranks while %s was made; it is made of the "
                    "remaining ranks",
                    lost,
                    comm.size,
                    request.kind,
                )

    def _connect(
        self,
        request: StrategyRequest,
        problem: Exception | None,
        resolver: Any,
        numbers: tuple[Any, Any],
        between_graph: bool,
    ) -> None:
        """Connect all ranks, and agree on their roles."""
        self._key, self._connection = connect(request, problem)
        topology = self._connection.topology
        self.settings = self._connection.settings
        self.topology = topology
        # Make no collective call if ranks may be lost, because the call might not end.
        ends = self._connection.abandon if request.survives else self._connection.close
        with ExitStack() as undo:
            undo.callback(ends, self._key)
            task = None if resolver is None else (resolver.task_type, resolver.task_id)
            tasks = topology.replica_comm.allgather((task, numbers))
            self.roles = _roles(tasks, between_graph)
            if self.roles.spares and not topology.survives:
                raise ValueError(
                    "expected on_lost_rank='raise' with spare ranks, found 'abort'; "
                    "pass it, or give all ranks a task"
                )
            channel = self._connection.channel
            assert channel is not None
            self.wakeup_pipes = WakeupPipes(topology)
            self.mailbox = Mailbox(topology, channel, self.wakeup_pipes)
            undo.pop_all()
        self.mailbox.warn_seconds = float(self.settings.warn_seconds or 0)
        self.rank = self.mailbox.rank
        self.client = Client(self.mailbox, self.roles.servers)

    @property
    def coordinates(self) -> bool:
        """True if this rank is the coordinator."""
        return self.rank == self.roles.coordinator

    def serve(self, strategy: Any) -> None:
        """Serve in this role until the coordinator closes its strategy or ends."""
        self.mailbox.on_loss = self._require_coordinator
        ended = self._await_place() if self.rank in self.roles.spares else None
        roles = self.roles
        if self.rank in roles.servers:
            users = {roles.coordinator, *roles.workers, *roles.spares}
            if VariableServer(self.mailbox, users).serve():
                self._close()
            return
        if ended is None:
            index = roles.workers.index(self.rank)
            ended = Worker(strategy, roles.coordinator, index).serve()
        self.end(closes=ended)

    def _await_place(self) -> bool | None:
        """Wait, as a spare rank, until this rank gets a role, and return None.

        If the coordinator ends before that, return whether it closed its strategy. The
        rank sleeps while it waits, because other ranks may need its core.
        """
        while self.rank in self.roles.spares:
            _, (kind, *rest) = self.mailbox.wait(self.mailbox.poll, lambda: "a place")
            if kind == "end":
                self.mailbox.lost.update(rest[1])
                return bool(rest[0])
            if kind == "roles":
                self.take(rest[0])
        if self.rank in self.roles.servers:
            # Other servers run until their users end. Notify them that this rank is not
            # a user any more; otherwise they would wait for its end forever.
            for server in self.roles.servers:
                if server != self.rank:
                    self.mailbox.send(server, ("serves",))
        return None

    def take(self, roles: Roles) -> None:
        """Record the new roles of all ranks on this rank."""
        self.roles = roles
        self.client.use(roles.servers)

    def replace(self, lost: int) -> int | None:
        """Replace a lost rank by a spare rank.

        Returns the spare rank, or None if no spare rank is left. Runs on the
        coordinator, which sends the new roles to all ranks that use servers.
        """
        lives = (r for r in self.roles.spares if r not in self.mailbox.lost)
        spare = next(lives, None)
        if spare is None:
            return None
        told = (*self.roles.workers, *self.roles.spares)
        self.take(self.roles.with_replaced(lost, spare))
        for rank in told:
            self.mailbox.send(rank, ("roles", self.roles))
        get_logger().warning("rank %d takes the place of rank %d", spare, lost)
        return spare

    def _require_coordinator(self, lost: set[int]) -> None:
        if self.roles.coordinator in lost:
            raise RankLostError(
                "expected the coordinator to go on, found that it was lost; start the "
                "job again",
                [self.roles.coordinator],
            )

    def end(self, *, closes: bool) -> list[Any]:
        """Wait until all ranks have ended; free MPI's objects if all have closed.

        All ranks that use servers call this method; the servers run until the last of
        these ranks has called it. A worker calls it after its current function. Returns
        the messages that this rank has not processed.
        """
        mailbox, roles = self.mailbox, self.roles
        mailbox.on_loss = lambda lost: None
        # Make no collective call if ranks may be lost, because the call might not end.
        closes = closes or self.topology.survives
        others = (*roles.workers, *roles.spares) if self.coordinates else ()
        for rank in (*others, *roles.servers):
            if rank != self.rank:
                # Include lost ranks, because the receiver may not have noticed a loss.
                mailbox.send(rank, ("end", closes, tuple(mailbox.lost)))
        told: dict[int, bool] = {}
        left: list[Any] = []

        def all_told() -> bool:
            while (found := mailbox.poll()) is not None:
                server, message = found
                if message[0] == "ended":
                    told[server] = message[1]
                else:
                    left.append(message)
            mailbox.leave_answers()
            return mailbox.lost.union(told) >= set(roles.servers)

        # If workers run the program, do not warn: a program may take any time.
        warns = self.coordinates and not roles.between_graph
        mailbox.wait(all_told, lambda: "the other ranks to end", warns=warns)
        if all(told.values()):
            self._close()
        return left

    def _close(self) -> None:
        """Free communicators and memory; collective, unless losses are survived."""
        if self.topology.survives:
            if self.mailbox.lost:
                # Skip MPI_Finalize, which may wait forever for ranks that exit early.
                abandon_mpi()
            self._connection.abandon(self._key)
            return
        self.mailbox.close()
        self.wakeup_pipes.close()
        self._connection.close(self._key)


def _roles(tasks: Sequence[Any], between_graph: bool) -> Roles:
    """Return the roles of all ranks, or raise the same error on every rank."""
    size = len(tasks)
    counts = {numbers for _, numbers in tasks}
    if all(task is not None and task[0] for task, _ in tasks):
        return _resolved([task for task, _ in tasks], between_graph)
    if len(counts) > 1:
        raise ValueError(
            "expected the same num_ps and spare_ranks on every rank, found "
            f"{sorted(counts)}; give all the same"
        )
    num_ps, spare_ranks = counts.pop()
    active = size - spare_ranks
    least = num_ps + (1 if between_graph else 2)
    if active < least:
        first = "" if between_graph else "a coordinator, "
        rest = f", beside spare_ranks={spare_ranks}" if spare_ranks else ""
        raise ValueError(
            f"expected at least {least} ranks, {first}num_ps={num_ps} for variables "
            f"and a worker{rest}, found {active}; start more, or lower num_ps"
        )
    workers = range(1 + num_ps, active)
    servers, spares = tuple(range(1, 1 + num_ps)), tuple(range(active, size))
    chosen = (0, *workers) if between_graph else tuple(workers)
    return Roles(0, servers, chosen, spares)


def _resolved(tasks: Sequence[tuple[str, int]], between_graph: bool) -> Roles:
    """Return the roles that the ranks' resolvers name."""

    def ranks(*kinds: str) -> tuple[int, ...]:
        chosen = [(task[1] or 0, r) for r, task in enumerate(tasks) if task[0] in kinds]
        return tuple(rank for _, rank in sorted(chosen))

    first, servers, workers = ranks(*_COORDINATORS), ranks("ps"), ranks("worker")
    # If each worker runs the program, a loss ends the job, so use no spare ranks.
    spares = () if between_graph else ranks("spare")
    if between_graph and len(first) < 2:
        # The chief is also a worker.
        workers = (*first, *workers)
        first = workers[:1]
    known = {*first, *servers, *workers, *spares}
    if len(first) != 1 or not servers or not workers or len(known) < len(tasks):
        raise ValueError(
            "expected one task 'chief', at least one 'ps' and one 'worker', and no "
            "other, found "
            f"{[task[0] for task in tasks]}; change the cluster"
        )
    return Roles(first[0], servers, workers, spares)


def _is_loss(error: Exception, request: StrategyRequest) -> bool:
    """Return whether an error, raised while ranks connect, reports a lost rank."""
    mpi = running_mpi()
    if mpi is None or isinstance(error, RankLostError):
        return mpi is not None
    return is_loss(mpi, error, request.comm or Topology.world())


def _all_agree(made: bool, request: StrategyRequest) -> bool:
    """Return whether all ranks have connected; the result is equal on all ranks."""
    try:
        return bool((request.comm or Topology.world()).Agree(int(made)))
    except Exception as error:
        if not _is_loss(error, request):
            raise
        return False
