"""Choice of the algorithm and of the piece size for arrays in host memory.

Only this module knows all algorithms. The choice depends only on the size of the call,
the options and the topology, which are the same on all ranks. The thresholds were
measured: see `benchmarks/bench_allreduce.py` and `benchmarks/bench_hosts.py`.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.exchanged import (
    FEW_EXCHANGING,
    PART_BYTES,
    exchanges,
    reduce_by_exchange,
    reduce_by_mpi,
)
from hpcstrat.engine.algorithms.shared_memory import reduce_in_memory
from hpcstrat.engine.algorithms.work import IN_HEADER, Choice
from hpcstrat.engine.channel.interruptible import PIECE_BYTES
from hpcstrat.engine.channel.wire_headers import room_bytes
from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.engine.topology.topology import Topology, slot_bytes

__all__ = [
    "Choice",
    "by_mpi",
    "hierarchical",
    "imagined",
    "schedule",
    "select",
    "shared_memory",
    "wire_type",
]

# Piece size for two ranks, and for more ranks: so large that Python's overhead per
# piece is small, but small enough for the cache.
DIRECT_PIECE_BYTES = 512 << 10
SCATTERED_PIECE_BYTES = 256 << 10
# With at most this number of ranks, each rank adds all values of a small call itself. A
# call is small if its values fill at most half of a piece and, for three or more ranks,
# if the values of all ranks together have at most SMALL_BYTES.
MOST_DIRECT_RANKS = 8
SMALL_BYTES = 128 << 10
# With more than MOST_DIRECT_RANKS ranks, calls of at least this number of bytes times
# the number of ranks use shared memory, and smaller calls use MPI's allreduce.
FROM_BYTES_PER_RANK = 1 << 10
# The first rank of a worker adds values for the header only if the values of all its
# replicas together have at most this size.
GATHERED_BYTES = 256 << 10
# With more than FEW_EXCHANGING workers, calls of at least this size are reduced inside
# each worker, and then between the workers.
HIERARCHICAL_FROM_BYTES = 16 << 10
_MOST_EXCHANGED_BYTES = 8 << 20
# An exchange of parts has at least this number of pieces, with parts of at least this
# size, if the call has enough bytes.
_LEAST_EXCHANGED = 4
_LEAST_PART_BYTES = 16 << 10
_MEMORY = "shared memory"
# The largest call size that `schedule` covers.
_MOST_SHOWN_BYTES = 1 << 30


def select(nbytes: int, topology: Topology, options: CommunicationOptions) -> Choice:
    """Return the algorithm and piece size of a reduction; the same on every rank.

    ``nbytes`` is the total size of the arrays, in the dtypes in which they are added.
    """
    if topology.num_workers > 1:
        choice = _between_workers(nbytes, topology, options)
        each = -(-topology.num_replicas // topology.num_workers)
        narrows = options.wire_dtype is not None
        room = room_bytes(topology.num_workers, narrows=narrows)
        most = min(room, GATHERED_BYTES // each)
        return replace(choice, small=nbytes <= most)
    # Up to MOST_DIRECT_RANKS ranks never use MPI's allreduce, so that their values are
    # always added in replica order.
    if topology.worker_comm.size <= MOST_DIRECT_RANKS:
        return shared_memory(nbytes, topology, options)
    large = nbytes >= topology.worker_comm.size * FROM_BYTES_PER_RANK
    return (shared_memory if large else by_mpi)(nbytes, topology, options)


def _between_workers(
    nbytes: int, topology: Topology, options: CommunicationOptions
) -> Choice:
    if options.wire_dtype is not None:
        return hierarchical(nbytes, topology, options)
    # Up to FEW_EXCHANGING workers, the values are always added in the workers' order.
    workers = topology.num_workers
    if workers < topology.num_replicas:
        if workers <= FEW_EXCHANGING or nbytes >= HIERARCHICAL_FROM_BYTES:
            return hierarchical(nbytes, topology, options)
    elif exchanges(nbytes, workers):
        return by_exchange(nbytes, topology, options)
    return by_mpi(nbytes, topology, options)


def by_exchange(
    nbytes: int, topology: Topology, options: CommunicationOptions
) -> Choice:
    """Return the choice of an exchange of parts, for workers of one replica."""
    workers = topology.num_workers
    default = min(PART_BYTES * workers, _MOST_EXCHANGED_BYTES)
    if nbytes > room_bytes(workers):
        # Use several pieces: with a single piece, the additions would wait for all
        # messages, and then the network would wait for the additions.
        several = max(nbytes // _LEAST_EXCHANGED, _LEAST_PART_BYTES * workers)
        default = min(default, several // 64 * 64)
    piece = max(64, options.bytes_per_pack or default)
    return Choice(reduce_by_exchange, piece, how="parts between workers")


def by_mpi(nbytes: int, topology: Topology, options: CommunicationOptions) -> Choice:
    """Return the choice of the MPI library's allreduce."""
    del nbytes, topology
    piece = max(64, options.bytes_per_pack or PIECE_BYTES)
    return Choice(reduce_by_mpi, piece, how="all-reduce of MPI")


def shared_memory(
    nbytes: int, topology: Topology, options: CommunicationOptions
) -> Choice:
    """Return the choice of a sum through shared memory, for replicas of one worker."""
    ranks = topology.worker_comm.size
    default = DIRECT_PIECE_BYTES if ranks == 2 else SCATTERED_PIECE_BYTES
    piece = _fitting(options.bytes_per_pack or default, topology)
    most = piece // 2 if ranks == 2 else min(SMALL_BYTES // ranks, piece // 2)
    small = ranks <= MOST_DIRECT_RANKS and nbytes <= most
    return Choice(reduce_in_memory, piece, small, in_worker=True, how=_MEMORY)


def hierarchical(
    nbytes: int, topology: Topology, options: CommunicationOptions
) -> Choice:
    """Return the choice of a sum inside each worker, and then between the workers."""
    if topology.num_workers == 1:
        return shared_memory(nbytes, topology, options)
    # Use large pieces, because workers exchange parts of a segment of a piece; but only
    # half of the largest place, because four pieces are in use at the same time.
    most = topology.slot_bytes // 2
    piece = _fitting(min(options.bytes_per_pack or most, most), topology)
    wire = options.wire_dtype
    dtype = None if wire is None else wire_type(wire)
    algorithm = functools.partial(reduce_in_memory, wire_dtype=dtype)
    # Bytes of the segment that a rank sums over the workers.
    segment = min(nbytes, piece) // topology.worker_comm.size
    parts = dtype is not None or exchanges(segment, topology.num_workers)
    across = "parts" if parts else "all-reduce of MPI"
    return Choice(algorithm, piece, how=f"inside workers, then {across} between them")


def wire_type(name: str) -> np.dtype[Any]:
    """Return the dtype of the values sent between workers, such as ``bfloat16``."""
    if name == "bfloat16":
        # This import registers bfloat16 with NumPy.
        import ml_dtypes  # noqa: F401
    return np.dtype(name)


def imagined(num_workers: int, replicas_per_worker: int) -> Any:
    """Return a stand-in for a topology with a core per replica, for `select`."""
    return SimpleNamespace(
        num_workers=num_workers,
        num_replicas=num_workers * replicas_per_worker,
        worker_comm=SimpleNamespace(size=replicas_per_worker),
        shares_cores=False,
        slot_bytes=slot_bytes(replicas_per_worker, num_workers),
    )


def schedule(num_workers: int, replicas_per_worker: int) -> list[tuple[int, str]]:
    """Return pairs ``(nbytes, name)``: the algorithm of calls from this size on.

    Not collective. The schedule is for calls with one array and a core per replica.
    """
    options = CommunicationOptions()
    topology = imagined(num_workers, replicas_per_worker)

    def how(nbytes: int) -> str:
        choice = select(nbytes, topology, options)
        inline = choice.small and topology.num_workers > 1
        return IN_HEADER if inline else choice.how

    found, low = [(1, how(1))], 1
    while low < _MOST_SHOWN_BYTES:
        sizes, last = range(low, 2 * low), found[-1][1]
        low += bisect.bisect_left(sizes, True, key=lambda n: how(n) != last)
        if how(low) != last:
            found.append((low, how(low)))
    return found


def _fitting(piece_bytes: int, topology: Topology) -> int:
    return max(64, min(piece_bytes, topology.slot_bytes) // 64 * 64)
