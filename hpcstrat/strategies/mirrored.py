"""The replicas of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.reduction.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.settings import Settings
from hpcstrat.errors import TopologyError
from hpcstrat.strategies.devices import gpu_numbers, parse_device
from hpcstrat.strategies.on_mpi import MpiStrategy

if TYPE_CHECKING:
    from mpi4py import MPI


class MirroredStrategy(MpiStrategy):
    """Synchronous training on the replicas of one worker, one MPI rank each.

    Collective over ``comm``.

    Parameters
    ----------
    devices : sequence of str, optional
        One device per replica, in replica order. ``GPU:0`` is the first GPU that the
        host's ranks see; naming GPUs is like the setting ``device="gpu"``. More CPU
        devices than ranks make logical replicas, several on a rank, like
        ``MultiWorkerMirroredStrategy(logical_replicas=...)``. Default: by the settings;
        on CPUs ``CPU:0``, ``CPU:1``, ...
    cross_device_ops : CrossDeviceOps, optional
        How buffers are summed; default: chosen by the library.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks, which must share a node; default: all of the job.
    on_error : str
        ``"abort"`` or ``"raise"``; see `Strategy`.
    settings : Settings, optional
        How the strategy watches over its ranks.

    Raises
    ------
    ValueError
        If the number of devices differs from the number of ranks, or one comes twice,
        or only some are GPUs.
    TopologyError
        If the ranks are spread over several nodes, or have the same GPU, or only some
        have one. On every rank.
    """

    _gathers_results = True

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        comm: MPI.Intracomm | None = None,
        on_error: str = "abort",
        settings: Settings | None = None,
    ) -> None:
        names, problem, logical = None, None, None
        try:
            if devices is not None:
                names = [parse_device(name) for name in devices]
            if gpu_numbers(names or ()) is None and names is not None:
                # With more devices than ranks, replicas share a rank.
                logical = _more_than_ranks(names, comm)
        except Exception as error:
            # The other ranks learn of the error when the ranks meet.
            problem = error
        super().__init__(
            comm=comm,
            cross_device_ops=cross_device_ops,
            on_error=on_error,
            settings=settings,
            devices=names,
            logical_replicas=logical,
            problem=problem,
        )
        # From here on all ranks have the same data: all raise and close, or none.
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
    """Return the number of devices, if there are more than ranks; else None."""
    size = launch_from_environment().size if comm is None else comm.size
    return len(names) if len(names) > size else None
