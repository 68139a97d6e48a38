"""Binds each rank to a GPU, and checks the binding.

The ranks of a host exchange lists of the GPUs that they see; then each rank computes
the same binding from these lists. A GPU is identified by its PCI bus id and UUID, never
by its CUDA number, because each rank may have its own ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.library import Gpu
from hpcstrat.engine.logs import get_logger
from hpcstrat.errors import TopologyError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcstrat.engine.topology.topology import Topology

__all__ = ["Binding", "View", "bind", "choose", "foresee", "problem", "worker_gpus"]

_SHARE = "Settings(share_gpus=True) or HPCSTRAT_SHARE_GPUS=1"


@dataclass(frozen=True, slots=True)
class View:
    """The GPUs that a rank sees, by CUDA number, and the choices of its program."""

    rank: int
    gpus: tuple[Gpu, ...] = ()
    # CUDA number of the GPU that the program has made current.
    chosen: int | None = None
    # Index of a GPU in the host's `worker_gpus`, which the program has requested.
    wanted: int | None = None
    # The reason why the rank has no GPU, or another error.
    reason: str = ""
    # CUDA number of the GPU that an earlier strategy, or `foresee`, chose for the rank.
    earlier: int | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """The device that a rank computes on."""

    gpu: Gpu | None = None
    # Index of the GPU in `worker_gpus`.
    number: int = 0
    # True if another rank of the host has the same GPU, or another MIG instance of it.
    shared: bool = False


class _Taken:
    """The GPU that an earlier strategy or `foresee` has chosen for this process."""

    index: int | None = None
    foreseen = False
    # True if it has been logged that CuPy is loaded but there is no GPU.
    logged = False


def worker_gpus(views: Sequence[View]) -> list[Gpu]:
    """Return the GPUs that the ranks of a host see, without duplicates.

    The GPUs are in the order in which the ranks list them. Each `Gpu` has the CUDA
    number of the first rank that sees it.
    """
    found = {gpu.identity: gpu for view in reversed(views) for gpu in view.gpus}
    order = dict.fromkeys(gpu.identity for view in views for gpu in view.gpus)
    return [found[identity] for identity in order]


def choose(views: Sequence[View]) -> list[Gpu | None]:
    """Return a GPU for each rank of a host; its ``index`` is that rank's CUDA number.

    A rank gets the GPU that the program has named or chosen, or else the GPU that the
    rank had earlier, if no other rank has it. The remaining ranks that see the same
    list of GPUs get these GPUs in turn, first the GPUs that no rank has; a rank that
    sees a single GPU gets it. A rank's element is None if the rank sees no GPU, or does
    not see the GPU that the program has named.
    """
    everything = worker_gpus(views)
    result: list[Gpu | None] = [_fixed(view, everything) for view in views]
    taken = {gpu.identity for gpu in result if gpu is not None}
    # Indices of the ranks for which the program has neither named nor chosen a GPU.
    free = [
        index
        for index, view in enumerate(views)
        if result[index] is None and view.wanted is None and view.gpus
    ]
    for index in free:
        view = views[index]
        if view.earlier is not None and view.earlier < len(view.gpus):
            gpu = view.gpus[view.earlier]
            if gpu.identity not in taken:
                result[index] = gpu
                taken.add(gpu.identity)
    turns: dict[tuple[Any, ...], list[int]] = {}
    for index in free:
        if result[index] is None:
            seen = tuple(gpu.identity for gpu in views[index].gpus)
            turns.setdefault(seen, []).append(index)
    for seen, indices in turns.items():
        # Put the GPUs that no rank has first.
        order = sorted(range(len(seen)), key=lambda n: seen[n] in taken)
        for turn, index in enumerate(indices):
            result[index] = views[index].gpus[order[turn % len(order)]]
    return result


def _fixed(view: View, everything: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU that the program has named or chosen for a rank, if any."""
    if view.wanted is not None:
        if view.wanted >= len(everything):
            return None
        identity = everything[view.wanted].identity
        return next((gpu for gpu in view.gpus if gpu.identity == identity), None)
    if view.chosen is not None and view.chosen < len(view.gpus):
        return view.gpus[view.chosen]
    return None


def problem(
    views: Sequence[View], gpus: Sequence[Gpu | None], host: str, *, share: bool = False
) -> str:
    """Return an error message about the GPUs of a host's ranks, or an empty string.

    The message names ranks, host and GPU. If no rank has a GPU, there is no error.
    """
    if all(gpu is None for gpu in gpus):
        named = next((v for v in views if v.wanted is not None and v.gpus), None)
        return "" if named is None else _without(named, views, host)
    for view, gpu in zip(views, gpus, strict=True):
        if gpu is None:
            return _without(view, views, host)
    if share or len({gpu.identity for gpu in gpus if gpu is not None}) == len(gpus):
        return ""
    return _twice(views, [gpu for gpu in gpus if gpu is not None], host)


def _without(view: View, views: Sequence[View], host: str) -> str:
    """Return the error message for a rank that has no GPU."""
    if view.wanted is not None and view.gpus:
        there = worker_gpus(views)
        named = f"GPU:{view.wanted}"
        if view.wanted >= len(there):
            return (
                f"expected {named} on host {host} for rank {view.rank}, found that its "
                f"ranks see {_count(len(there), 'GPU')}; name GPU:0 to "
                f"GPU:{len(there) - 1}"
            )
        return (
            f"expected rank {view.rank} on host {host} to see {named}, which is "
            f"{there[view.wanted]}, found that it sees {_listed(view.gpus)}; let every "
            "rank see all GPUs of its host (srun --gpu-bind=none), or name the devices "
            "in the order of the ranks"
        )
    return _NO_GPU.format(rank=view.rank, host=host, reason=view.reason)


_NO_GPU = (
    "expected a GPU for every rank, because others have one, found none for rank "
    "{rank} on host {host}: {reason}; ask the launcher for as many GPUs as ranks "
    "(sbatch --gpus-per-node), or keep all on the CPU with HPCSTRAT_DEVICE=cpu"
)


def _twice(views: Sequence[View], gpus: Sequence[Gpu], host: str) -> str:
    """Return the error message for a GPU that several ranks have."""
    times = Counter(gpu.identity for gpu in gpus)
    gpu = next(gpu for gpu in gpus if times[gpu.identity] > 1)
    pairs = zip(views, gpus, strict=True)
    ranks = [view.rank for view, own in pairs if own.identity == gpu.identity]
    there = worker_gpus(views)
    if len(there) >= len(views):
        advice = (
            "let every rank see all GPUs of its host (srun --gpus-per-node="
            f"{len(there)} --gpu-bind=none), or exactly its own (--gpus-per-task=1), "
            "and leave the choice to the strategy"
        )
    else:
        advice = (
            f"start {_count(len(there), 'rank')} on this host (srun --ntasks-per-node="
            f"{len(there)}), or ask for {len(views)} GPUs (--gpus-per-node={len(views)}"
            ")"
        )
    return (
        f"expected a GPU for each rank, found that ranks {_words(ranks)} on host "
        f"{host} share {gpu}: {_count(len(views), 'rank')} of this host see "
        f"{_count(len(there), 'GPU')}; {advice}, or share it on purpose with {_SHARE}, "
        "or leave GPUs alone with HPCSTRAT_DEVICE=cpu"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _words(numbers: Sequence[int]) -> str:
    texts = [str(number) for number in numbers]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(gpu.pci_bus_id for gpu in gpus)


def _look(rank: int, wanted: int | None) -> View:
    """Return the GPUs that this rank sees, and the choices of its program."""
    try:
        reason = library.why_no_gpu()
        gpus = () if reason else tuple(library.visible_gpus())
        # Number 0 is CUDA's default, so it does not show a choice of the program.
        chosen = None if reason else library.current_gpu() or None
    except Exception as error:
        # Return the error: the other ranks wait for this view, and must raise it, too.
        return View(rank, wanted=wanted, reason=f"{type(error).__name__}: {error}")
    if _Taken.foreseen and chosen == _Taken.index:
        chosen = None
    return View(rank, gpus, chosen, wanted, reason, _Taken.index)


def foresee(number: int) -> None:
    """Make a GPU current before MPI starts: the GPU that this rank will probably get.

    ``number`` is the GPU number that the program has named, or this rank's index on its
    host. Does nothing if the program or a strategy has already chosen a GPU.
    """
    # MPI libraries may look for a CUDA context only at their start, and without it copy
    # through host memory (Open MPI 5: github.com/open-mpi/ompi/issues/13354).
    if _Taken.index is None and not library.current_gpu():
        gpus = library.visible_gpus()
        own = gpus[number % len(gpus)]
        library.use(own.index)
        _Taken.index, _Taken.foreseen = own.index, True


def _lowest(topology: Topology, here: bool) -> int:
    """Return the lowest replica with ``here`` True, or if none, the replica count."""
    comm = topology.replica_comm
    rank = comm.rank if here else comm.size
    return int(comm.allreduce(rank, op=topology.mpi.MIN))


def bind(
    topology: Topology,
    node: MPI.Intracomm,
    *,
    device: str = "auto",
    share: bool = False,
    wanted: int | None = None,
) -> Binding:
    """Choose this rank's GPU, and make it the current GPU of the calling thread.

    Collective over ``topology.replica_comm``; ``node`` has the replicas of this host in
    the same order. ``device`` ("auto", "cpu", "gpu") and ``share`` are the same on
    every rank, and ``wanted`` is given on every rank or on none. The binding has no GPU
    if all ranks compute on the CPU. Raises TopologyError on every rank if ranks have
    the same GPU without ``share``, or if some ranks have no GPU.
    """
    if device == "cpu" or (device == "auto" and not _any_wants(topology)):
        return Binding()
    view = _look(topology.replica_id, wanted)
    views: list[View] = node.allgather(view)
    gpus = choose(views)
    own = gpus[node.rank]
    trouble = problem(views, gpus, platform.node(), share=share)
    trouble = trouble or (_take(own, view.rank) if own else _alone(view, device))
    # All ranks take part in this reduction, so that they raise the same error together.
    first = _lowest(topology, bool(trouble))
    if first < topology.num_replicas:
        raise TopologyError(topology.replica_comm.bcast(trouble, root=first))
    assert own is not None
    _Taken.index, _Taken.foreseen = own.index, False
    # Compare PCI bus ids, which the MIG instances of a GPU share, as NCCL does.
    buses = [gpu.pci_bus_id.lower() for gpu in gpus if gpu is not None]
    return Binding(
        own,
        [gpu.identity for gpu in worker_gpus(views)].index(own.identity),
        shared=buses.count(own.pci_bus_id.lower()) > 1,
    )


def _any_wants(topology: Topology) -> bool:
    """Return whether all ranks need a GPU: any rank has loaded CuPy, and has a GPU."""
    loaded = library.is_loaded()
    reason = library.why_no_gpu() if loaded else ""
    found = _lowest(topology, loaded and not reason) < topology.num_replicas
    if not found and loaded and not _Taken.logged:
        _Taken.logged = True
        get_logger("device").info(
            "CuPy is loaded, but there is no GPU (%s): computing on the CPU", reason
        )
    return found


def _alone(view: View, device: str) -> str:
    """Return the error message for a rank of a host without GPUs."""
    host = platform.node()
    if device == "auto":
        return _NO_GPU.format(rank=view.rank, host=host, reason=view.reason)
    return (
        f"expected a GPU for every rank, because GPUs were asked for, found none for "
        f"rank {view.rank} on host {host}: {view.reason}; ask the launcher for GPUs "
        "(sbatch --gpus-per-node), install CuPy (hpcstrat's extra "
        "cuda12 or cuda13), or compute on the CPU with HPCSTRAT_DEVICE=cpu"
    )


def _take(gpu: Gpu, rank: int) -> str:
    """Make a GPU current for this thread; return an error message, or ""."""
    try:
        library.use(gpu.index)
    except Exception as error:
        # The GPU has failed, or another process has it in exclusive mode.
        return (
            f"expected rank {rank} on host {platform.node()} to compute on GPU {gpu}, "
            f"found {error}; look at nvidia-smi there, or leave the host out (sbatch "
            "--exclude)"
        )
    return ""
