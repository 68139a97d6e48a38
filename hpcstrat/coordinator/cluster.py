"""Which rank coordinates, holds variables or works, and how they are connected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hpcstrat.cluster_resolver import ClusterResolver
from hpcstrat.coordinator.worker import Worker
from hpcstrat.errors import RankLostError
from hpcstrat.parameter_server.bells import Bells
from hpcstrat.parameter_server.client import Client
from hpcstrat.parameter_server.mailbox import Mailbox
from hpcstrat.parameter_server.server import VariableServer
from hpcstrat.strategies.connection import Wish, connect

__all__ = ["Cluster", "Roles", "wish_of"]

_COORDINATORS = ("chief", "coordinator", "master")


@dataclass(frozen=True)
class Roles:
    """Which rank does what; workers are in the order of their indices.

    Where each worker runs the program, the first of them is the coordinator.
    """

    coordinator: int
    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def between_graph(self) -> bool:
        """Whether each worker runs the program."""
        return self.coordinator in self.workers


class Cluster:
    """The connection of all ranks of a strategy, and this rank's part in it.

    Collective over ``wish.comm``. What is wrong is raised on every rank.
    """

    def __init__(
        self, wish: Wish, resolver: Any, num_ps: Any, *, between_graph: bool = False
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
        self._key, self._connection = connect(wish, problem)
        topology = self._connection.topology
        self.settings = self._connection.settings
        self.topology = topology
        with ExitStack() as undo:
            undo.callback(self._connection.close, self._key)
            task = None if resolver is None else (resolver.task_type, resolver.task_id)
            tasks = topology.replica_comm.allgather((task, num_ps))
            self.roles = _roles(tasks, between_graph)
            channel = self._connection.channel
            assert channel is not None
            undo.pop_all()
        self.bells = Bells(topology)
        self.mailbox = Mailbox(topology, channel, self.bells)
        self.mailbox.warn_seconds = float(self.settings.warn_seconds or 0)
        self.rank = self.mailbox.rank
        self.client = Client(self.mailbox, self.roles.servers)

    @property
    def coordinates(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.rank == self.roles.coordinator

    def serve(self, strategy: Any) -> None:
        """Serve, until whoever runs the program closes its strategy or ends."""
        roles = self.roles
        self.mailbox.on_loss = self._require_coordinator
        if self.rank in roles.servers:
            users = {roles.coordinator, *roles.workers}
            if VariableServer(self.mailbox, users).serve():
                self._close()
        else:
            index = roles.workers.index(self.rank)
            self.end(closes=Worker(strategy, roles.coordinator, index).serve())

    def _require_coordinator(self, lost: set[int]) -> None:
        if self.roles.coordinator in lost:
            raise RankLostError(
                "expected the coordinator to go on, found that it was lost; start the "
                "job again",
                [self.roles.coordinator],
            )

    def end(self, *, closes: bool) -> None:
        """Wait until all have ended; free everything where all of them close.

        For those who use servers, which stay until the last has ended: workers do so
        after the function that they run.
        """
        mailbox, roles = self.mailbox, self.roles
        mailbox.on_loss = lambda lost: None
        # Nothing collective ends where a rank may be lost.
        closes = closes or self.topology.survives
        workers = roles.workers if self.coordinates else ()
        for rank in (*workers, *roles.servers):
            if rank != self.rank:
                # Some may not have heard of a loss.
                mailbox.send(rank, ("end", closes, tuple(mailbox.lost)))
        told: dict[int, bool] = {}

        def all_told() -> bool:
            while (found := mailbox.poll()) is not None:
                server, (kind, *rest) = found
                if kind == "ended":
                    told[server] = rest[0]
            mailbox.leave_answers()
            return mailbox.lost.union(told) >= set(roles.servers)

        # Without a limit: they may have much to do, as programs of their own do.
        warns = self.coordinates and not roles.between_graph
        mailbox.wait(all_told, lambda: "the other ranks to end", warns=warns)
        if all(told.values()):
            self._close()

    def _close(self) -> None:
        """Free everything; collective, unless a rank may be lost by now."""
        if self.topology.survives:
            self._connection.abandon(self._key)
            return
        self.mailbox.close()
        self.bells.close()
        self._connection.close(self._key)


def _roles(tasks: Sequence[Any], between_graph: bool) -> Roles:
    """Return who does what, or raise the same error on every rank."""
    size = len(tasks)
    counts = {num_ps for _, num_ps in tasks}
    if all(task is not None and task[0] for task, _ in tasks):
        return _resolved([task for task, _ in tasks], between_graph)
    if len(counts) > 1:
        raise ValueError(
            f"expected the same num_ps on every rank, found {sorted(counts)}; give all "
            "the same"
        )
    num_ps = counts.pop()
    least = num_ps + (1 if between_graph else 2)
    if size < least:
        first = "" if between_graph else "a coordinator, "
        raise ValueError(
            f"expected at least {least} ranks, {first}num_ps={num_ps} for variables "
            f"and a worker, found {size}; start more, or lower num_ps"
        )
    workers = range(1 + num_ps, size)
    servers = tuple(range(1, 1 + num_ps))
    return Roles(0, servers, (0, *workers) if between_graph else tuple(workers))


def _resolved(tasks: Sequence[tuple[str, int]], between_graph: bool) -> Roles:
    """Return the roles that the ranks' resolvers give them."""

    def ranks(*kinds: str) -> tuple[int, ...]:
        chosen = [(task[1] or 0, r) for r, task in enumerate(tasks) if task[0] in kinds]
        return tuple(rank for _, rank in sorted(chosen))

    first, servers, workers = ranks(*_COORDINATORS), ranks("ps"), ranks("worker")
    if between_graph and len(first) < 2:
        # The chief is a worker, too.
        workers = (*first, *workers)
        first = workers[:1]
    known = {*first, *servers, *workers}
    if len(first) != 1 or not servers or not workers or len(known) < len(tasks):
        raise ValueError(
            "expected one task 'chief', at least one 'ps' and one 'worker', and no "
            "other, found "
            f"{[task[0] for task in tasks]}; change the cluster"
        )
    return Roles(first[0], servers, workers)


def wish_of(kind: str, comm: Any, settings: Any, on_lost_rank: str = "abort") -> Wish:
    """Return what a strategy is asked for."""
    return Wish(
        kind=kind,
        comm=comm,
        replicas_per_worker=None,
        on_error="abort",
        on_lost_rank=on_lost_rank,
        progress_thread=False,
        settings=settings,
        devices=None,
    )
