"""Collectives of MPI itself, over one contiguous buffer.

Large buffers go in pieces: Open MPI loses its cache beyond a few MiB, and a count past
2**31 - 1 is more than older libraries take.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.casting import quietly
from hpcstrat.collectives.header import Channel
from hpcstrat.collectives.started import Message
from hpcstrat.collectives.work import Work, drain, fill
from hpcstrat.packing import Run
from hpcstrat.topology import Topology
from hpcstrat.typing import Array

__all__ = ["PIECE_BYTES", "all_gather_bytes", "broadcast", "reduce_by_mpi"]

PIECE_BYTES = 1 << 20
"""Size of the pieces; the fastest in the all-reduce of 64 MiB on two ranks."""


def reduce_by_mpi(work: Work, channel: Channel) -> Iterator[Any]:
    """Sum by the all-reduce of the MPI library, one message for each run of a piece.

    Collective over ``topology.replica_comm``.

    Parameters
    ----------
    work : Work
        What to reduce.
    channel : Channel
        Of the replicas.

    Yields
    ------
    Message or None
        See `hpcstrat.collectives.work`.
    """
    mpi, comm = channel.topology.mpi, channel.topology.replica_comm
    scratch: dict[Any, Array] = {}
    yield None
    for run in itertools.chain.from_iterable(work.pieces):
        sent, total, packed = _buffers(run, work, scratch)
        if work.waits:
            comm.Allreduce(
                sent if sent is not None else mpi.IN_PLACE, total, op=mpi.SUM
            )
            channel.topology.moves += 1
        else:
            if sent is not None:
                np.copyto(total, sent)
            yield Message(comm.Iallreduce(mpi.IN_PLACE, total, op=mpi.SUM))
        if work.divisor:
            quietly(np.divide, total, work.divisor, total)
        if packed:
            drain(run, work.results, total)


def _buffers(
    run: Run, work: Work, scratch: dict[Any, Array]
) -> tuple[Array | None, Array, bool]:
    """Return what to send, None for the second; where the sum goes; whether packed."""
    if len(run.spans) == 1:
        index, start, stop, _ = run.spans[0]
        source, result = work.sources[index], work.results[index]
        if source.dtype == run.dtype == result.dtype:
            total = result[start:stop]
            # NumPy's C long and C long long may be equal, MPI's never are.
            sent = source[start:stop].view(total.dtype)
            return None if np.may_share_memory(sent, total) else sent, total, False
    kept = scratch.get(run.dtype)
    if kept is None or kept.size < run.size:
        kept = scratch[run.dtype] = np.empty(run.size, run.dtype)
    fill(run, work.sources, kept[: run.size])
    return None, kept[: run.size], True


def broadcast(flat: Array, topology: Topology, root: int) -> None:
    """Send a buffer from one replica to all others.

    Collective over ``topology.replica_comm``.

    Parameters
    ----------
    flat : ndarray of shape (n,)
        Contiguous, any type of fixed size; overwritten on the other ranks.
    topology : Topology
        Where.
    root : int
        The replica whose values are taken.
    """
    data = flat.view(np.uint8)
    for start in range(0, data.size, PIECE_BYTES):
        topology.replica_comm.Bcast(data[start : start + PIECE_BYTES], root=root)
        topology.moves += 1


def all_gather_bytes(
    flat: Array, out: Array, counts: Sequence[int], topology: Topology
) -> None:
    """Concatenate the replicas' buffers on every replica.

    Collective over ``topology.replica_comm``.

    Parameters
    ----------
    flat : ndarray of shape (n,)
        This replica's contiguous part; ``n`` may differ.
    out : ndarray of shape (sum of counts,)
        Filled in replica order.
    counts : sequence of int
        Elements of each replica.
    topology : Topology
        Where.
    """
    comm: Any = topology.replica_comm
    if out.nbytes < 1 << 30:
        sizes = [count * flat.itemsize for count in counts]
        comm.Allgatherv(
            [flat.view(np.uint8), topology.mpi.BYTE],
            [out.view(np.uint8), sizes, topology.mpi.BYTE],
        )
        topology.moves += 1
        return
    # Displacements past 2**31 - 1 bytes are beyond many MPIs: one rank after the other.
    start = 0
    for root, count in enumerate(counts):
        part = out[start : start + count]
        if root == topology.replica_id:
            part[:] = flat
        broadcast(part, topology, root)
        start += count
