"""The strategy with parameter servers in which each worker runs the program."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcstrat.cluster_resolver import ClusterResolver
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.options import InputContext, InputOptions
from hpcstrat.engine.settings import Settings
from hpcstrat.parameter_server.coordinator.cluster import Cluster
from hpcstrat.parameter_server.coordinator.strategy import ParameterServerStrategy
from hpcstrat.parameter_server.handles import error_bytes, error_of
from hpcstrat.parameter_server.server_variables import ServerVariable
from hpcstrat.strategies.connection import StrategyRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi4py import MPI


class ParameterServerStrategyV1(ParameterServerStrategy):
    """Parameter servers hold variables; each of the other ranks runs the program.

    Collective over ``comm``. Making a variable in the strategy's scope is collective
    over the workers, which must all make the same variables in the same order. If a
    worker has made fewer variables than the first worker, its `close` raises an error;
    if its program ends without a close, this error is logged. On parameter servers the
    constructor serves until all workers have ended or closed the strategy, and then
    ends the program by SystemExit. A worker that ends or closes the strategy waits for
    the other workers; at all other times workers do not wait for each other. There is
    one replica in sync. The class has the same interface as
    ``tf.compat.v1.distribute.experimental.ParameterServerStrategy``.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        Defines each rank's task: any number of ``ps`` and ``worker``, and at most one
        ``chief``, which is a worker. Default: ranks 1 to ``num_ps`` hold variables, and
        the other ranks are workers.
    num_ps : int
        Number of ranks that hold variables. Not used if there is a resolver.
    comm : mpi4py.MPI.Intracomm, optional
        Default: all ranks of the job.
    settings : Settings, optional
        The settings of rank 0 apply on all ranks.

    Raises
    ------
    ValueError
        If there is no rank for variables, or no worker. Raised on every rank.
    SystemExit
        On parameter servers, after all workers have ended.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        num_ps: int = 1,
        comm: MPI.Intracomm | None = None,
        settings: Settings | None = None,
    ) -> None:
        request = StrategyRequest(
            kind="ParameterServerStrategyV1", comm=comm, settings=settings
        )
        cluster = Cluster(request, cluster_resolver, num_ps, between_graph=True)
        self._resolver = cluster_resolver
        self._first_has_ended = False
        self._begin(cluster, None)
        if cluster.rank in cluster.roles.servers:
            cluster.serve(self)
            sys.exit(0)
        # This exit function runs before MPI is finalized.
        atexit.register(self.leave)

    @property
    def saves_checkpoints(self) -> bool:  # type: ignore[override]
        """True if this rank is the first worker; for the library's own modules."""
        return self.cluster.coordinates

    @property
    def worker_index(self) -> int:
        """The index of this worker; worker 0 makes variables and saves checkpoints."""
        return self.roles.workers.index(self.cluster.rank)

    def _require_coordinator(self, what: str) -> None:
        if self.closed:
            raise ValueError(
                f"expected {what} of an open strategy, found it closed; make another"
            )

    def told_of(self, variable: ServerVariable) -> Any:
        if self.cluster.coordinates:
            return None
        mailbox, first = self.client.mailbox, self.roles.coordinator
        message: Any = ("end",)
        if not self._first_has_ended:
            _, message = mailbox.wait(
                mailbox.poll,
                lambda: f"rank {first} to make {variable.name!r}",
                warns=True,
            )
        found, *told = message
        if found == "end":
            self._first_has_ended = True
            raise ValueError(
                f"expected rank {first} to make {variable.name!r}, found that it has "
                "ended; make the same variables on all workers"
            )
        if found == "failed":
            raise error_of(told[0])
        if found != _described(variable):
            raise ValueError(
                f"expected all workers to make the same variables, found "
                f"{_described(variable)} here, and {found} on rank {first}; make them "
                "in the same order"
            )
        return told

    def not_made(self, error: BaseException) -> None:
        self._tell("failed", error_bytes(error))

    def _tell(self, *message: Any) -> None:
        for rank in self.roles.workers[1:]:
            self.client.mailbox.send(rank, message)

    def known(self, number: int, variable: ServerVariable) -> None:
        super().known(number, variable)
        self._tell(_described(variable), number, variable._shards)

    def forget(self, numbers: Iterable[int]) -> None:
        """Do nothing: other workers may use the variable.

        For the library's own modules.
        """

    def close(self) -> None:
        """Wait until all workers have closed the strategy or ended, and free it.

        Collective over the workers. A second call does nothing.

        Raises
        ------
        ValueError
            If the first worker has made variables that this worker has not made.
        """
        problem = self._not_made_here(self._end(closes=True))
        if problem:
            raise ValueError(problem)

    def leave(self) -> None:
        """Wait until all workers have closed the strategy or ended.

        If this worker has made fewer variables than the first worker, logs an error
        that names the missing variables. For the library's own modules.
        """
        problem = self._not_made_here(self._end(closes=False))
        if problem:
            # Log the error, because an exception of an exit function has no effect.
            get_logger().error(problem)

    def _not_made_here(self, left: list[Any]) -> str:
        """Return an error text that names variables this worker has not made, or ""."""
        names = [message[0][0] for message in left if isinstance(message[0], tuple)]
        if not names:
            return ""
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return (
            "expected all workers to make the same variables, found that rank "
            f"{self.roles.coordinator} has made {', '.join(map(repr, names[:5]))}{more}"
            f", and rank {self.cluster.rank} has not; make the same ones on all "
            "workers"
        )

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        context = InputContext(len(self.roles.workers), self.worker_index, 1)
        return super().distribute_datasets_from_function(
            lambda _: dataset_fn(context), options
        )

    def _own_options(self, what: str, options: InputOptions | None) -> InputOptions:
        return self._independent(options)

    def __repr__(self) -> str:
        return super().__repr__().replace("Strategy(", "StrategyV1(", 1)


def _described(variable: ServerVariable) -> tuple[str, tuple[int, ...], str]:
    return variable.name, variable.shape, str(variable.dtype)
