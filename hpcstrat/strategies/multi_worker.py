"""The replicas of all workers of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.engine.reduction.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.settings import Settings
from hpcstrat.strategies.on_mpi import MpiStrategy

if TYPE_CHECKING:
    from mpi4py import MPI


class MultiWorkerMirroredStrategy(MpiStrategy):
    """Synchronous training on all ranks of a job, one replica each.

    Collective over ``comm``.

    Parameters
    ----------
    cluster_resolver : object, optional
        Kept for programs that ask for it; MPI says which ranks there are.
    communication_options : CommunicationOptions, optional
        Defaults of every call.
    logical_replicas : int, optional
        Number of replicas if it is larger than that of ranks, the same on every rank: a
        rank then runs several in turn, and every result has the same bits on any number
        of ranks; see ``docs/user-guide/same-bits.md``. Default: one replica on each
        rank.
    replicas_per_worker : int, optional
        Make the ranks of one node act as workers of this many replicas; default: one
        worker per node.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks; default: all of the job.
    cross_device_ops : CrossDeviceOps, optional
        How buffers are summed; default: chosen by the library.
    on_error : str
        ``"abort"`` or ``"raise"``; see `Strategy`.
    progress_thread : bool
        Whether a thread continues started reductions, so that messages between workers
        travel while the program computes. Needs ``MPI_THREAD_MULTIPLE``, which MPI has
        if the first strategy of a program asks for the thread. The thread runs when the
        program releases Python's interpreter lock, as NumPy does while it computes.
    on_lost_rank : str
        ``"abort"``: the death of a rank ends the job. ``"raise"``: every remaining rank
        raises a RankLostError at its current or next collective call; then `close` this
        strategy, and make another one of a communicator of the remaining ranks. Needs
        ``mpirun --with-ft ulfm`` of Open MPI 5. `hpcstrat.elastic.run` does all this.
    settings : Settings, optional
        How the strategy watches over its ranks.

    Raises
    ------
    ValueError
        If there are fewer logical replicas than ranks. On every rank.
    TopologyError
        If MPI was started for one thread, and a progress thread is wanted, or the loss
        of a rank cannot be survived here, or ranks have the same GPU, or only some have
        one. On every rank.
    RankLostError
        If a rank is lost meanwhile, with ``on_lost_rank="raise"``.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: CommunicationOptions | None = None,
        *,
        logical_replicas: int | None = None,
        replicas_per_worker: int | None = None,
        comm: MPI.Intracomm | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        on_error: str = "abort",
        progress_thread: bool = False,
        on_lost_rank: str = "abort",
        settings: Settings | None = None,
    ) -> None:
        # `MpiStrategy` raises it after telling the other ranks.
        problem = None
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
            problem=problem,
        )
        self._cluster_resolver = cluster_resolver
        self._bind()

    @property
    def cluster_resolver(self) -> Any:
        return self._cluster_resolver
