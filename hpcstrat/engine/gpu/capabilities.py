"""Ways to move arrays between the GPUs of all ranks; found once, agreed by all."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.probe import probe
from hpcstrat.engine.logs import get_logger

if TYPE_CHECKING:
    from hpcstrat.engine.topology.topology import Topology

__all__ = ["Ability", "Capabilities", "gather"]

# NCCL refuses two ranks on one GPU before this, and later unless it is told not to
# (its user guide, section "Environment Variables").
_NCCL_THAT_SHARES = (2, 30)
_LET_NCCL_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True, slots=True)
class Ability:
    """Whether something can be done, on all ranks; true in conditions if it can."""

    # The reason says how that is known, or why not, with rank and host.
    ok: bool
    reason: str

    def __bool__(self) -> bool:
        """Return whether it can be done."""
        return self.ok


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of all ranks of a topology with the memory of their GPUs."""

    nccl: Ability
    # MPI takes memory of GPUs point to point, in MPI_Bcast, in MPI_Allreduce.
    mpi_sendrecv: Ability
    mpi_broadcast: Ability
    mpi_allreduce: Ability
    one_gpu_per_rank: bool
    num_gpus: int

    def explain(self) -> str:
        """Say what can be done, and why not: one line for each ability."""
        lines = []
        for field in fields(self):
            ability = getattr(self, field.name)
            if isinstance(ability, Ability):
                word = "yes" if ability.ok else "no"
                lines.append(f"{field.name}: {word}, {ability.reason}")
        each = "one each" if self.one_gpu_per_rank else "some shared"
        return "\n".join([f"ranks with GPUs: {self.num_gpus}, {each}", *lines])


def gather(topology: Topology) -> Capabilities:
    """Find what all ranks can do.

    Collective over ``topology.replica_comm``; every rank has its GPU in use.
    """
    num_gpus = int(topology.replica_comm.allreduce(int(topology.gpu is not None)))
    shares = topology.replica_comm.allreduce(int(topology.shares_gpu))
    own = [
        _guarded(topology, lambda: _nccl(topology.nccl, bool(shares))),
        *_mpi(topology),
    ]
    nccl, sendrecv, broadcast, allreduce = _agree(topology, own)
    found = Capabilities(
        nccl=nccl,
        mpi_sendrecv=sendrecv,
        mpi_broadcast=broadcast,
        mpi_allreduce=allreduce,
        one_gpu_per_rank=not shares,
        num_gpus=num_gpus,
    )
    get_logger("device").info("what GPUs can do here:\n%s", found.explain())
    return found


# Finding of a rank: whether it can, and how it knows or why not.
_Found = tuple[bool, str]


def _where(topology: Topology) -> str:
    return f"rank {topology.replica_id} on host {platform.node()}"


def _guarded(topology: Topology, find: Callable[[], _Found]) -> _Found:
    """Return what was found, or the error of finding it: others wait for this rank."""
    if topology.gpu is None:
        return False, f"{_where(topology)} has no GPU"
    try:
        ok, reason = find()
    except Exception as error:
        ok, reason = False, f"{type(error).__name__}: {error}"
    return ok, reason if ok else f"{_where(topology)}: {reason}"


def _agree(topology: Topology, found: list[_Found]) -> list[Ability]:
    """Return what all ranks can do, with the reason of the first that cannot."""
    comm = topology.replica_comm
    own = np.array([comm.size if ok else comm.rank for ok, _ in found], np.int32)
    first = np.empty_like(own)
    comm.Allreduce(own, first, op=topology.mpi.MIN)
    abilities = []
    for root, (_, reason) in zip(first.tolist(), found, strict=True):
        ok = root == comm.size
        told = comm.bcast(reason, root=0 if ok else root)
        abilities.append(Ability(ok, told))
    return abilities


def _nccl(wanted: bool, shares: bool) -> _Found:
    """Return whether NCCL can be used, as far as this rank knows."""
    if not wanted:
        return False, "the setting nccl is off"
    module = library.nccl()
    if module is None:
        return False, (
            "CuPy finds no NCCL library; install nvidia-nccl-cu12 or nvidia-nccl-cu13, "
            "or load the site's module"
        )
    version = library.versions().nccl
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if shares and numbers < _NCCL_THAT_SHARES:
        return False, f"NCCL {version} refuses ranks that share a GPU, as some do here"
    if shares and os.environ.get(_LET_NCCL_SHARE) != "1":
        return False, (
            f"NCCL {version} refuses ranks that share a GPU, as some do here, without "
            f"{_LET_NCCL_SHARE}=1"
        )
    return True, f"NCCL {version}"


# MPI: what the probe has found out.


def _mpi(topology: Topology) -> list[_Found]:
    """Return what MPI can do, as each worker's first rank finds in the cache."""
    names = list(probe.ABILITIES.values())
    setting = topology.mpi_reads_gpu
    if setting != "auto":
        reason = f"the setting mpi_reads_gpu is {setting!r}"
        return [(setting == "yes", reason)] * len(names)
    report = None
    if topology.worker_comm.rank == 0 and topology.gpu is not None:
        try:
            report = probe.known(topology.mpi.Get_library_version())
        except Exception as error:
            get_logger("device").warning("the cache of trials is unusable: %s", error)
    report = topology.worker_comm.bcast(report)
    if report is None:
        reason = (
            f"{_where(topology)}: it was not tried yet whether MPI takes memory of "
            "GPUs; run hpcstrat doctor on such a node"
        )
        return [(False, reason)] * len(names)
    answers = [report.answer(operations) for operations in names]
    return [
        (ok, reason if ok else f"{_where(topology)}: {reason}")
        for ok, reason in answers
    ]
