"""Names of devices, and the GPU that each rank gets with its strategy."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.binding import Binding, bind, foresee
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.survival import create
from hpcstrat.engine.topology.topology import Topology

_NAME = re.compile(r"/?(?:.*/)?(?:device:)?(cpu|gpu):(\d+)", re.IGNORECASE)


def parse_device(name: str) -> str:
    """Return a device's name as ``GPU:1``, also of ``/gpu:1`` and ``/device:GPU:1``."""
    match = _NAME.fullmatch(str(name))
    if match is None:
        raise ValueError(
            f"expected a device such as 'GPU:0' or 'CPU:0', found {name!r}; change it"
        )
    return f"{match.group(1).upper()}:{int(match.group(2))}"


def gpu_numbers(names: Sequence[str]) -> list[int] | None:
    """Return the numbers of the GPUs in names from `parse_device`; None without any.

    Raises ValueError if only some devices are GPUs.
    """
    # A collective call cannot use two kinds of memory.
    numbers = [int(name[4:]) for name in names if name.startswith("GPU:")]
    if numbers and len(numbers) < len(names):
        raise ValueError(
            f"expected GPUs only, or CPU devices only, found {list(names)}; all "
            "replicas compute on devices of one kind"
        )
    return numbers or None


def use_gpu(number: int) -> None:
    """Compute on one of the GPUs that this process sees.

    Raises ValueError for a number too large; TopologyError without CuPy or a GPU.
    """
    library.load()
    gpus = library.visible_gpus()
    if number >= len(gpus):
        raise ValueError(
            f"expected GPU:0 to GPU:{len(gpus) - 1}, which this process sees, found "
            f"GPU:{number}; name one of these, or change CUDA_VISIBLE_DEVICES"
        )
    library.use(gpus[number].index)


def prepare_mpi(given: Settings, names: Sequence[str] | None = None) -> None:
    """Take a GPU, and test what MPI can do with its memory, if that will be needed.

    Not collective; does nothing once MPI runs. The first rank makes the test, if its
    result is not known; the others wait for it in the start of MPI.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    launched = launch_from_environment()
    if launched.size == 1 or (mpi and mpi.Is_initialized()):
        return
    try:
        settings = given.resolved()
        numbers = gpu_numbers(names or ())
        named = settings.device == "gpu" or numbers is not None
        asked = named or (settings.device == "auto" and library.is_loaded())
        if not asked or library.why_no_gpu():
            return
        place = numbers[launched.rank] if numbers else launched.local_rank
        if place is not None:
            foresee(place)
        if not launched.rank and settings.mpi_reads_gpu == "auto":
            _try_mpi()
    except Exception as error:
        # Without a result MPI gets no GPU memory. All ranks raise an error about wrong
        # settings later.
        get_logger("device").info("no GPU, or no trial, before MPI starts: %s", error)


def _try_mpi() -> None:
    from hpcstrat.engine.gpu.probe import probe
    from hpcstrat.engine.gpu.probe.probe_program import library_version

    version = library_version()
    if probe.known(version) is not None:
        return
    get_logger("device").info(
        "trying what MPI can do with memory of GPUs, once for this kind of node"
    )
    trouble = probe.save(probe.probe(version))
    if trouble:
        get_logger("device").info("the report could not be kept: %s", trouble)


class Devices:
    """The devices of a topology's replicas; sets the topology's attributes about GPUs.

    With ``replicas_per_worker`` a host may have several workers, whose ranks see the
    same GPUs.
    """

    def __init__(
        self, topology: Topology, settings: Settings, replicas_per_worker: int | None
    ) -> None:
        self._topology = topology
        self._settings = settings
        self._several = replicas_per_worker is not None
        self._names: tuple[str, ...] | None = None

    def bind(self, names: Sequence[str] | None = None) -> tuple[str, ...]:
        """Give each rank its GPU, the first time; name this worker's devices.

        Collective over ``topology.replica_comm``. ``names`` has a device for each
        replica, the same on every rank. Raises TopologyError on every rank if ranks
        have the same GPU, or some have none.
        """
        topology = self._topology
        numbers = None if names is None else gpu_numbers(names)
        if names is not None and numbers is None:
            return tuple(names)
        # Once for all strategies over these ranks, which share the channel between
        # their GPUs.
        if self._names is None:
            binding = self._bound(numbers)
            if binding is None:
                return tuple(f"CPU:{i}" for i in range(topology.worker_comm.size))
            topology.gpu, topology.shares_gpu = binding.gpu, binding.shared
            topology.mpi_reads_gpu = self._settings.mpi_reads_gpu or "auto"
            topology.nccl = bool(self._settings.nccl)
            own = f"GPU:{binding.number}"
            self._names = tuple(topology.worker_comm.allgather(own))
        if names is not None and tuple(names) != self._names:
            raise ValueError(
                f"expected the devices of the strategies that are open, {self._names}, "
                f"found {tuple(names)}; name the same, or close them first"
            )
        return self._names

    def _bound(self, numbers: Sequence[int] | None) -> Binding | None:
        """Bind all ranks; None if they compute on the CPU."""
        topology, settings = self._topology, self._settings
        device = settings.device if numbers is None else "gpu"
        assert device is not None
        if device == "cpu":
            return None
        # All ranks that see the same GPUs, also those of other workers.
        node: Any = topology.worker_comm
        if self._several:
            comm = topology.replica_comm
            kind, rank = topology.mpi.COMM_TYPE_SHARED, topology.replica_id
            split = functools.partial(comm.Split_type, kind, rank)
            node = create(topology.mpi, comm, split, topology.survives)
        try:
            binding = bind(
                topology,
                node,
                device=device,
                share=bool(settings.share_gpus),
                wanted=None if numbers is None else numbers[topology.replica_id],
            )
        finally:
            if self._several:
                node.Free()
        return None if binding.gpu is None else binding
