"""`MultiWorkerMirroredStrategy`: one replica on each rank, on any number of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.engine.settings import Settings
from hpcstrat.strategies.on_mpi import MpiStrategy, checked_shape

if TYPE_CHECKING:
    from mpi4py import MPI


class MultiWorkerMirroredStrategy(MpiStrategy):
    """Synchronous training on all ranks of a job.

    A replica is one rank, or several ranks that solve a part of a problem together.

    Collective over ``comm``.

    Parameters
    ----------
    cluster_resolver : object, optional
        Kept as an attribute, but not used, because MPI defines the ranks.
    communication_options : CommunicationOptions, optional
        Default options of all collective calls.
    logical_replicas : int, optional
        Total number of replicas, at least the number of ranks and equal on every rank.
        Each rank runs several replicas, one after the other, and every result has the
        same bits on any number of ranks; see ``docs/user-guide/same-bits.md``. Default:
        one replica on each rank.
    ranks_per_replica : int, optional
        Number of ranks of each replica, which divides the number of ranks and is equal
        on every rank. The ranks of a replica are neighbors in rank order; they use the
        calls of the attribute ``inside``. Values that leave a replica, such as losses
        and gradients, must be equal on its ranks; see
        ``docs/user-guide/replicas-of-several-ranks.md``. Default: 1.
    replica_shape : dict of str to int, optional
        Instead of ``ranks_per_replica``: the numbers of ranks along named axes, such as
        ``{"x": 2, "y": 2}``. The last axis varies fastest in rank order.
    replicas_per_worker : int, optional
        Divide each node's ranks into workers of this size. Default: one worker per
        node.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks of the strategy; default: all ranks of the job.
    cross_device_ops : CrossDeviceOps, optional
        The algorithm that sums buffers; default: chosen by the library.
    on_error : str
        ``"abort"`` or ``"raise"``; see `Strategy`.
    progress_thread : bool
        True: a thread continues started reductions, so that messages between workers
        travel while the program computes. The thread needs ``MPI_THREAD_MULTIPLE``,
        which MPI has if the first strategy of the program is made with
        ``progress_thread=True``. The thread can run only while the program releases
        Python's interpreter lock, as NumPy does during computations.
    on_lost_rank : str
        ``"abort"``: the death of a rank ends the job. ``"raise"``: every remaining rank
        raises a RankLostError at its current or next collective call; then `close` this
        strategy, and make one on the remaining ranks, as `hpcstrat.elastic.run` does.
        ``"raise"`` needs ``mpirun --with-ft ulfm`` of Open MPI 5.
    settings : Settings, optional
        Settings of timeouts and checks.

    Raises
    ------
    ValueError
        If there are fewer logical replicas than ranks, or if the ranks cannot be
        divided into replicas. On every rank.
    TopologyError
        If a progress thread is requested but MPI was started for one thread, if
        ``on_lost_rank="raise"`` is not supported by this MPI library or launcher, if
        two ranks have the same GPU, or if only some ranks have a GPU. On every rank.
    RankLostError
        If a rank is lost during this call, with ``on_lost_rank="raise"``.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: CommunicationOptions | None = None,
        *,
        logical_replicas: int | None = None,
        ranks_per_replica: int | None = None,
        replica_shape: Mapping[str, int] | None = None,
        replicas_per_worker: int | None = None,
        comm: MPI.Intracomm | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        on_error: str = "abort",
        progress_thread: bool = False,
        on_lost_rank: str = "abort",
        settings: Settings | None = None,
    ) -> None:
        # `MpiStrategy` raises this error after it has notified the other ranks.
        problem, shape = checked_shape(ranks_per_replica, replica_shape)
        if hasattr(cluster_resolver, "Get_size"):
            problem = TypeError(
                "expected a cluster resolver as first argument, found a communicator; "
                "pass it as comm="
            )
        super().__init__(
            comm=comm,
            replicas_per_worker=replicas_per_worker,
            cross_device_ops=cross_device_ops,
            communication_options=communication_options,
            on_error=on_error,
            progress_thread=progress_thread,
            on_lost_rank=on_lost_rank,
            settings=settings,
            logical_replicas=logical_replicas,
            replica_shape=shape,
            problem=problem,
        )
        self._cluster_resolver = cluster_resolver
        self._bind()

    @property
    def cluster_resolver(self) -> Any:
        """The argument ``cluster_resolver``, which hpcstrat keeps but does not use."""
        return self._cluster_resolver
