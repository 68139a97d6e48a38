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
        One device per replica, in replica order. More CPU devices than ranks are
        logical replicas, of which a rank runs several, as
        ``MultiWorkerMirroredStrategy(logical_replicas=...)`` has them. ``GPU:0`` is the
        first GPU of the host, as its ranks see them; naming GPUs is as the setting
        ``device="gpu"``.
        Default: by the settings, ``CPU:0``, ``CPU:1``, ... on CPUs.
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
                # More devices than ranks are replicas that share a rank.
                logical = _more_than_ranks(names, comm)
        except Exception as error:
            # The others learn of it, where they wait for this rank.
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
        # From here on the ranks know the same, so that all raise, and close, or none.
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
