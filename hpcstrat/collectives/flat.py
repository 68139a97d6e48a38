"""Collectives of MPI itself, over one contiguous buffer.

Large buffers go in pieces: Open MPI loses its cache beyond a few MiB, and a count past
2**31 - 1 is more than older libraries take.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from hpcstrat.arrays.casting import quietly
from hpcstrat.arrays.packing import Run
from hpcstrat.channel.awaited import HEADER, Awaits, Message
from hpcstrat.channel.channel import Channel
from hpcstrat.collectives.work import Work, drain, fill
from hpcstrat.typing import Array

__all__ = ["reduce_by_mpi"]


def reduce_by_mpi(work: Work, channel: Channel) -> Awaits:
    """Sum by the all-reduce of the MPI library, one message for each run of a piece.

    Collective over ``topology.replica_comm``.
    """
    mpi, comm = channel.topology.mpi, channel.topology.replica_comm
    scratch: dict[Any, Array] = {}
    yield HEADER
    for run in itertools.chain.from_iterable(work.pieces):
        sent, total, packed = _buffers(run, work, scratch)
        if work.waits:
            own = sent if sent is not None else mpi.IN_PLACE
            channel.patient(comm).Allreduce(own, total, op=mpi.SUM)
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
