"""Determines by which libraries all ranks can move arrays between their GPUs."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.probe import probe
from hpcstrat.engine.logs import get_logger

if TYPE_CHECKING:
    from hpcstrat.engine.topology.topology import Topology

__all__ = ["Ability", "Capabilities", "gather"]

# Before this version, NCCL refuses two ranks on one GPU; since then, it refuses them
# unless the variable below is set (NCCL user guide, "Environment Variables").
_NCCL_THAT_SHARES = (2, 30)
_LET_NCCL_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True, slots=True)
class Ability:
    """An ability, and the reason; true in a condition if all ranks have the ability."""

    # ``reason`` is how the ability is known, or which rank and host lacks it, and why.
    ok: bool
    reason: str

    def __bool__(self) -> bool:
        """Return whether all ranks have the ability."""
        return self.ok


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a topology's ranks to move GPU memory."""

    nccl: Ability
    # True if MPI accepts GPU memory in point-to-point messages, Bcast and Allreduce.
    mpi_sendrecv: Ability
    mpi_broadcast: Ability
    mpi_allreduce: Ability
    one_gpu_per_rank: bool
    num_gpus: int

    def explain(self) -> str:
        """Return a text with one line for each ability: yes or no, and why."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        lines = [
            f"{name}: {'yes' if ability.ok else 'no'}, {ability.reason}"
            for name, ability in found.items()
            if isinstance(ability, Ability)
        ]
        each = "one each" if self.one_gpu_per_rank else "some shared"
        return "\n".join([f"ranks with GPUs: {self.num_gpus}, {each}", *lines])


def gather(topology: Topology) -> Capabilities:
    """Determine the abilities that all ranks have.

    Collective over ``topology.replica_comm``; every rank must have made its GPU
    current.
    """
    num_gpus = int(topology.replica_comm.allreduce(int(topology.gpu is not None)))
    shares = topology.replica_comm.allreduce(int(topology.shares_gpu))
    own = [_nccl_here(topology, bool(shares)), *_mpi(topology)]
    nccl, sendrecv, broadcast, allreduce = _agree(topology, own)
    one_each = not shares
    found = Capabilities(nccl, sendrecv, broadcast, allreduce, one_each, num_gpus)
    get_logger("device").info("what GPUs can do here:\n%s", found.explain())
    return found


# One rank's result for one ability: whether the rank has it, and the reason.
_Found = tuple[bool, str]


def _where(topology: Topology) -> str:
    return f"rank {topology.replica_id} on host {platform.node()}"


def _nccl_here(topology: Topology, shares: bool) -> _Found:
    """Return whether this rank can use NCCL, with the reason; raises no exception."""
    if topology.gpu is None:
        return False, f"{_where(topology)} has no GPU"
    try:
        ok, reason = _nccl(topology.nccl, shares)
    except Exception as error:
        ok, reason = False, f"{type(error).__name__}: {error}"
    return ok, reason if ok else f"{_where(topology)}: {reason}"


def _agree(topology: Topology, found: list[_Found]) -> list[Ability]:
    """Combine the results of all ranks; a reason is from the lowest rank that fails."""
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
    """Return whether this rank can use NCCL, and the reason; may raise an exception."""
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
    refusal = f"NCCL {version} refuses ranks that share a GPU, as some do here"
    if shares and numbers < _NCCL_THAT_SHARES:
        return False, refusal
    if shares and os.environ.get(_LET_NCCL_SHARE) != "1":
        return False, f"{refusal}, without {_LET_NCCL_SHARE}=1"
    return True, f"NCCL {version}"


def _mpi(topology: Topology) -> list[_Found]:
    """Return the cached results of the probe, which each worker's first rank reads."""
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
            f"{_where(topology)}: it has not been tested yet whether MPI can read GPU "
            "memory; run hpcstrat doctor on such a node"
        )
        return [(False, reason)] * len(names)
    answers = [report.answer(operations) for operations in names]
    return [
        (ok, reason if ok else f"{_where(topology)}: {reason}")
        for ok, reason in answers
    ]
