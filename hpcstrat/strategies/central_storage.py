"""`CentralStorageStrategy`: the ranks of a node share one copy of each variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.algorithms.slices import SharedAllocator
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.options import CommunicationOptions, VariableOptions
from hpcstrat.engine.settings import Settings
from hpcstrat.strategies.devices import parse_device
from hpcstrat.strategies.on_mpi import MpiStrategy
from hpcstrat.strategies.step_slices import StepSlices
from hpcstrat.strategies.update_backends import Copies
from hpcstrat.variables import CentralVariable

if TYPE_CHECKING:
    from mpi4py import MPI


class CentralStorageStrategy(MpiStrategy):
    """Synchronous training with one copy of each variable in the memory of each node.

    Collective over ``comm``. The ranks of a node share the host memory of each
    variable, and of an optimizer's state. In a step, each of the node's N ranks sums
    the gradients of one slice, an N-th of the elements, and updates that slice. With
    several nodes, each node has its own copy, and the gradients of each slice are also
    summed between nodes.

    Parameters
    ----------
    compute_devices : sequence of str, optional
        A CPU device per replica, in replica order; default: ``CPU:0``, ``CPU:1``, ...
    parameter_device : str, optional
        The device of variables: ``CPU:0``, which is the default.
    communication_options : CommunicationOptions, optional
        Default options of all collective calls; an optimizer's step uses only
        ``timeout_seconds``.
    replicas_per_worker : int, optional
        Divide the ranks of each node into workers of this many replicas, each with its
        own copy of the variables. Default: one worker per node.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks of the strategy; default: all ranks of the job.
    cross_device_ops : CrossDeviceOps, optional
        The algorithm for sums that are not gradients; default: the library's choice.
    on_error : str
        ``"abort"`` or ``"raise"``; see `Strategy`.
    on_lost_rank : str
        As for `MultiWorkerMirroredStrategy`. After the loss of a rank, variables may be
        partly updated: restore a checkpoint.
    settings : Settings, optional
        Settings of timeouts and checks.

    Attributes
    ----------
    parameter_devices : tuple of str
        The device of variables.

    Raises
    ------
    ValueError
        If a device is a GPU or is named twice, if the number of devices differs from
        the number of ranks, or if the setting ``device`` is ``"gpu"``. On every rank.
    RankLostError
        If a rank is lost during this call, with ``on_lost_rank="raise"``.
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
            # `MpiStrategy` raises this error after it has notified the other ranks.
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
        # From here on all ranks have the same settings and names, so either all ranks
        # raise an error and close the strategy, or none.
        if self.settings.device == "gpu":
            self.close()
            raise ValueError(
                "expected the setting device='auto' or 'cpu' for CentralStorageStrategy"
                ", whose variables lie in host memory, found 'gpu'; change it, or use "
                "MirroredStrategy"
            )
        self._require_devices(names, self.num_replicas_in_sync, "compute_devices")
        self.allocator = SharedAllocator()
        if names is not None:
            names = [names[replica] for replica in self.topology.worker_replicas]
        self._bind(names)

    def variable_class(self, options: VariableOptions) -> Any:
        return CentralVariable

    def update_backend(self) -> type[Copies]:
        return Copies if self.num_replicas_in_sync == 1 else StepSlices


def _require_host(names: Sequence[str], parameter_device: str | None) -> None:
    """Raise an error for devices other than CPUs."""
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
