"""Replicas that share one copy of each variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.collectives.slices import SegmentPool
from hpcstrat.engine.options import CommunicationOptions, VariableOptions
from hpcstrat.engine.reduction.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.settings import Settings
from hpcstrat.strategies.devices import parse_device
from hpcstrat.strategies.on_mpi import MpiStrategy
from hpcstrat.strategies.step_slices import StepSlices
from hpcstrat.strategies.update_backends import Copies, UpdateBackend
from hpcstrat.variables import CentralVariable

if TYPE_CHECKING:
    from mpi4py import MPI


class CentralStorageStrategy(MpiStrategy):
    """Synchronous training on variables that lie once in the memory of each node.

    Collective over ``comm``. The ranks of a node share the host memory of each
    variable, and of an optimizer's state. In a step each rank sums and updates a slice,
    an N-th of the elements. Each of several nodes has a copy, and slices are summed
    between nodes.

    Parameters
    ----------
    compute_devices : sequence of str, optional
        A CPU device per replica, in replica order; default: ``CPU:0``, ``CPU:1``, ...
    parameter_device : str, optional
        The device of variables: ``CPU:0``, which is the default.
    communication_options : CommunicationOptions, optional
        Defaults of every call; an optimizer's step uses only ``timeout_seconds``.
    replicas_per_worker : int, optional
        Make the ranks of one node act as workers of this many replicas, each with a
        copy of the variables; default: one worker per node.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks; default: all of the job.
    cross_device_ops : CrossDeviceOps, optional
        How buffers other than gradients are summed; default: chosen by the library.
    on_error : str
        ``"abort"`` or ``"raise"``; see `Strategy`.
    on_lost_rank : str
        As for `MultiWorkerMirroredStrategy`. After a loss an update may be half made:
        restore a checkpoint.
    settings : Settings, optional
        How the strategy watches over its ranks.

    Attributes
    ----------
    parameter_devices : tuple of str
        The device of variables.

    Raises
    ------
    ValueError
        If a device is a GPU, one comes twice, or their number differs from that of
        ranks; with the setting ``device="gpu"``. On every rank.
    RankLostError
        If a rank is lost meanwhile, with ``on_lost_rank="raise"``.
    """

    parameter_devices = ("CPU:0",)
    _gathers_results = True

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        replicas_per_worker: int | None = None,
        comm: MPI.Intracomm | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        on_error: str = "abort",
        on_lost_rank: str = "abort",
        settings: Settings | None = None,
    ) -> None:
        names, problem = None, None
        try:
            if compute_devices is not None:
                names = [parse_device(name) for name in compute_devices]
            _require_host(names or (), parameter_device)
        except Exception as error:
            # The other ranks learn of the error when the ranks meet.
            problem = error
        super().__init__(
            comm=comm,
            replicas_per_worker=replicas_per_worker,
            cross_device_ops=cross_device_ops,
            communication_options=communication_options,
            on_error=on_error,
            on_lost_rank=on_lost_rank,
            settings=settings,
            devices=names,
            problem=problem,
        )
        # From here on all ranks have the same data: all raise and close, or none.
        if self.settings.device == "gpu":
            self.close()
            raise ValueError(
                "expected the setting device='auto' or 'cpu' for CentralStorageStrategy"
                ", whose variables lie in host memory, found 'gpu'; change it, or use "
                "MirroredStrategy"
            )
        self._require_devices(names, self.num_replicas_in_sync, "compute_devices")
        self.pool = SegmentPool()
        if names is not None:
            names = [names[replica] for replica in self.topology.worker_replicas]
        self._bind(names)

    def variable_class(self, options: VariableOptions) -> Any:
        return CentralVariable

    def update_backend(self) -> type[UpdateBackend]:
        return Copies if self.num_replicas_in_sync == 1 else StepSlices


def _require_host(names: Sequence[str], parameter_device: str | None) -> None:
    """Refuse devices that cannot have variables in host memory."""
    where = "CPU:0" if parameter_device is None else parse_device(parameter_device)
    if where != "CPU:0":
        raise ValueError(
            "expected parameter_device 'CPU:0', the memory that the ranks of a node "
            f"share, found {parameter_device!r}; leave it out, or use MirroredStrategy "
            "for variables on GPUs"
        )
    if any(name.startswith("GPU:") for name in names):
        raise ValueError(
            "expected CPU devices as compute_devices, from whose memory variables are "
            f"read, found {list(names)}; use MirroredStrategy for GPUs"
        )
