"""Names of devices, and the assignment of GPUs to the ranks of a strategy."""

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
    """Return a device name in the form ``GPU:1``, for example for ``/device:gpu:1``."""
    match = _NAME.fullmatch(str(name))
    if match is None:
        raise ValueError(
            f"expected a device such as 'GPU:0' or 'CPU:0', found {name!r}; change it"
        )
    return f"{match.group(1).upper()}:{int(match.group(2))}"


def gpu_numbers(names: Sequence[str]) -> list[int] | None:
    """Return the GPU numbers in names from `parse_device`; None if no name is a GPU.

    Raises ValueError if only some devices are GPUs."""
    # One collective call cannot use GPU memory on some ranks and host memory on others.
    numbers = [int(name[4:]) for name in names if name.startswith("GPU:")]
    if numbers and len(numbers) < len(names):
        raise ValueError(
            f"expected GPUs only, or CPU devices only, found {list(names)}; all "
            "replicas compute on devices of one kind"
        )
    return numbers or None


def use_gpu(number: int) -> None:
    """Select this process's current GPU by its number among the visible GPUs.

    Raises ValueError if ``number`` is too large, TopologyError without CuPy or a GPU.
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
    """Choose a GPU before MPI starts, and test whether MPI can use GPU memory.

    Not collective. Does nothing after MPI has started, or if the strategy needs no GPU.
    Rank 0 tests MPI, unless a test result is already saved; meanwhile the other ranks
    wait for rank 0 in the start of MPI.
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
        # This error is only logged: without a test result, GPU memory is not passed to
        # MPI, and wrong settings raise an error on all ranks later.
        get_logger("device").info("no GPU, or no trial, before MPI starts: %s", error)


def _try_mpi() -> None:
    from hpcstrat.engine.gpu.probe import probe
    from hpcstrat.engine.gpu.probe.probe_program import library_version

    version = library_version()
    if probe.known(version) is not None:
        return
    get_logger("device").info(
        "testing what MPI can do with GPU memory, once for this kind of node"
    )
    trouble = probe.save(probe.probe(version))
    if trouble:
        get_logger("device").info("the report could not be kept: %s", trouble)


class Devices:
    """Assigns devices to the ranks of a topology, and sets the topology's GPU fields.

    With ``replicas_per_worker`` the ranks of several workers may see the same GPUs.
    """

    def __init__(
        self, topology: Topology, settings: Settings, replicas_per_worker: int | None
    ) -> None:
        self._topology = topology
        self._settings = settings
        self._several = replicas_per_worker is not None
        self._names: tuple[str, ...] | None = None

    def bind(self, names: Sequence[str] | None = None) -> tuple[str, ...]:
        """Assign a GPU to each rank, once; return the names of this worker's devices.

        Collective over ``topology.replica_comm``. ``names``, equal on every rank, lists
        a device for each replica. Raises TopologyError on every rank if two ranks have
        the same GPU, or if a rank has no GPU but the replicas must compute on GPUs.
        """
        topology = self._topology
        numbers = None if names is None else gpu_numbers(names)
        if names is not None and numbers is None:
            return tuple(names)
        # GPUs are assigned once for all strategies over these ranks, because those
        # strategies share one channel between the GPUs.
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
        """Bind all ranks to GPUs; return None if the ranks compute on CPUs."""
        topology, settings = self._topology, self._settings
        device = settings.device if numbers is None else "gpu"
        assert device is not None
        if device == "cpu":
            return None
        # ``node`` is a communicator of all ranks that see the same GPUs, including
        # ranks of other workers.
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
