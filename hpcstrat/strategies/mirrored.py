"""`MirroredStrategy`: one replica on each rank of a single node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.settings import Settings
from hpcstrat.errors import TopologyError
from hpcstrat.strategies.devices import gpu_numbers, parse_device
from hpcstrat.strategies.on_mpi import MpiStrategy, checked_shape

if TYPE_CHECKING:
    from mpi4py import MPI


class MirroredStrategy(MpiStrategy):
    """Synchronous training on the ranks of one node, with one replica on each rank.

    Collective over ``comm``.

    Parameters
    ----------
    devices : sequence of str, optional
        One device per replica, in replica order. ``GPU:0`` is the first GPU that the
        host's ranks see; naming GPUs has the effect of the setting ``device="gpu"``. If
        there are more CPU devices than ranks, each rank runs several logical replicas,
        as with ``MultiWorkerMirroredStrategy(logical_replicas=...)``. Default: GPUs or
        CPUs, by the setting ``device``; CPUs are named ``CPU:0``, ``CPU:1``, ...
    cross_device_ops : CrossDeviceOps, optional
        The algorithm that sums buffers; default: chosen by the library.
    ranks_per_replica, replica_shape : int, dict of str to int, optional
        The ranks of each replica, as in `MultiWorkerMirroredStrategy`.
    comm : mpi4py.MPI.Intracomm, optional
        The strategy's ranks, which must share a node; default: all ranks of the job.
    on_error : str
        ``"abort"`` or ``"raise"``; see `Strategy`.
    settings : Settings, optional
        Settings of timeouts and checks.

    Raises
    ------
    ValueError
        If there are fewer devices or more GPUs than ranks, if a device is named twice
        (allowed for GPUs with ``share_gpus``), or if only some devices are GPUs.
    TopologyError
        If the ranks are on several nodes, if two ranks have the same GPU, or if only
        some ranks have a GPU. On every rank.
    """

    _gathers_results = True

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        ranks_per_replica: int | None = None,
        replica_shape: Mapping[str, int] | None = None,
        comm: MPI.Intracomm | None = None,
        on_error: str = "abort",
        settings: Settings | None = None,
    ) -> None:
        names, logical = None, None
        problem, shape = checked_shape(ranks_per_replica, replica_shape)
        try:
            if devices is not None:
                names = [parse_device(name) for name in devices]
            if gpu_numbers(names or ()) is None and names is not None:
                logical = _more_than_ranks(names, comm)
        except Exception as error:
            # `MpiStrategy` raises this error after it has notified the other ranks.
            problem = error
        super().__init__(
            comm=comm,
            cross_device_ops=cross_device_ops,
            on_error=on_error,
            settings=settings,
            devices=names,
            logical_replicas=logical,
            replica_shape=shape,
            problem=problem,
        )
        # From here on all ranks have the same topology and names, so either all ranks
        # raise an error and close the strategy, or none.
        count = self.num_replicas_in_sync
        if self.topology.num_workers > 1:
            workers = self.topology.num_workers
            self.close()
            raise TopologyError(
                f"expected the ranks of one node for MirroredStrategy, found {count} "
                f"ranks on {workers} nodes; use MultiWorkerMirroredStrategy"
            )
        each = 1 if self.settings.share_gpus and gpu_numbers(names or ()) else count
        self._require_devices(names, each, "devices")
        self._bind(names)


def _more_than_ranks(names: Sequence[str], comm: Any) -> int | None:
    """Return the number of devices if it exceeds the number of ranks, else None."""
    size = launch_from_environment().size if comm is None else comm.size
    return len(names) if len(names) > size else None
