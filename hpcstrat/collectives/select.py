"""Which algorithm reduces, and in what pieces; the only module that knows them all.

The choice depends on the size of the call, the options and the topology, which are the
same on all ranks, and on nothing else. The thresholds were measured: see
`benchmarks/bench_allreduce.py` and `benchmarks/bench_hosts.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.channel.patient import PIECE_BYTES
from hpcstrat.collectives.exchanged import (
    MOST_EXCHANGING,
    PART_BYTES,
    reduce_by_exchange,
)
from hpcstrat.collectives.flat import reduce_by_mpi
from hpcstrat.collectives.hierarchical import reduce_hierarchically
from hpcstrat.collectives.shared_memory import reduce_directly, reduce_scattered
from hpcstrat.collectives.work import Algorithm
from hpcstrat.options import CommunicationOptions
from hpcstrat.topology.topology import Topology

__all__ = ["Choice", "by_mpi", "hierarchical", "select", "shared_memory", "wire_type"]

DIRECT_PIECE_BYTES = 512 << 10
"""Size of a piece of two ranks: large enough for Python, small enough for a cache."""

SCATTERED_PIECE_BYTES = 256 << 10
"""Size of a piece of three and more ranks."""

SMALL_BYTES = 128 << 10
"""Three and more ranks add all slots themselves up to this size by their number."""

MOST_DIRECT_RANKS = 8
"""Up to this number of ranks small messages are added by all of them."""

FROM_BYTES_PER_RANK = 1 << 10
"""With more ranks, the size from which shared memory serves, for each rank."""

HIERARCHICAL_FROM_BYTES = 16 << 10
"""Size from which several workers reduce inside each worker first."""


EXCHANGE_FROM_BYTES = 32 << 10
"""Size from which workers of one replica exchange parts, for each of them."""

_MOST_EXCHANGED_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """How to reduce."""

    algorithm: Algorithm
    piece_bytes: int
    # Whether `SmallReduction` does it.
    small: bool = False
    # Whether it can be started, and awaited later.
    starts: bool = True


def select(nbytes: int, topology: Topology, options: CommunicationOptions) -> Choice:
    """Choose how to reduce over the replicas; the same on every rank.

    ``nbytes`` is the size of all arrays, in the types in which they are added.
    """
    ranks = topology.worker_comm.size
    if topology.num_workers == 1:
        choice = shared_memory(nbytes, topology, options)
        # So up to MOST_DIRECT_RANKS it is in the order of the replicas in any case.
        if choice.small or nbytes >= ranks * FROM_BYTES_PER_RANK:
            return choice
    elif options.wire_dtype is not None:
        return hierarchical(nbytes, topology, options)
    elif topology.num_workers < topology.num_replicas:
        if nbytes >= HIERARCHICAL_FROM_BYTES:
            return hierarchical(nbytes, topology, options)
    elif (
        topology.num_workers <= MOST_EXCHANGING
        and nbytes >= EXCHANGE_FROM_BYTES * topology.num_workers
    ):
        return by_exchange(nbytes, topology, options)
    return by_mpi(nbytes, topology, options)


def by_exchange(
    nbytes: int, topology: Topology, options: CommunicationOptions
) -> Choice:
    """Return the exchange of messages, for workers of one replica."""
    del nbytes
    default = min(PART_BYTES * topology.num_workers, _MOST_EXCHANGED_BYTES)
    return Choice(reduce_by_exchange, max(64, options.bytes_per_pack or default))


def by_mpi(nbytes: int, topology: Topology, options: CommunicationOptions) -> Choice:
    """Return the all-reduce of the MPI library."""
    del nbytes, topology
    return Choice(reduce_by_mpi, max(64, options.bytes_per_pack or PIECE_BYTES))


def shared_memory(
    nbytes: int, topology: Topology, options: CommunicationOptions
) -> Choice:
    """Return the best reduction through shared memory, for replicas of one worker."""
    ranks = topology.worker_comm.size
    default = DIRECT_PIECE_BYTES if ranks == 2 else SCATTERED_PIECE_BYTES
    if ranks > topology.num_cores:
        # A step costs a turn of each.
        default = topology.slot_bytes
    piece = _fitting(options.bytes_per_pack or default, topology)
    if ranks == 2:
        return Choice(reduce_directly, piece, nbytes <= piece // 2)
    most = min(SMALL_BYTES // ranks, piece // 2)
    small = ranks <= MOST_DIRECT_RANKS and nbytes <= most
    return Choice(reduce_scattered, piece, small)


def hierarchical(
    nbytes: int, topology: Topology, options: CommunicationOptions
) -> Choice:
    """Return the reduction inside each worker, then across."""
    if topology.num_workers == 1:
        return shared_memory(nbytes, topology, options)
    # Large pieces: what workers exchange are parts of a rank's segment of one. Half of
    # the largest, of which more are in use at once.
    most = topology.slot_bytes // 2
    piece = _fitting(min(options.bytes_per_pack or most, most), topology)
    wire = options.wire_dtype
    dtype = None if wire is None else wire_type(wire)
    return Choice(functools.partial(reduce_hierarchically, wire_dtype=dtype), piece)


def wire_type(name: str) -> np.dtype[Any]:
    """Return the type in which values travel between workers; may be ml_dtypes'."""
    if name == "bfloat16":
        # Registers the type with NumPy.
        import ml_dtypes  # noqa: F401
    return np.dtype(name)


def _fitting(piece_bytes: int, topology: Topology) -> int:
    return max(64, min(piece_bytes, topology.slot_bytes) // 64 * 64)
