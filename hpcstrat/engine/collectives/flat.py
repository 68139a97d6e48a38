"""Collectives of MPI itself, over one contiguous buffer.

Large buffers go in pieces: Open MPI loses its cache beyond a few MiB, and a count past
2**31 - 1 is more than older libraries take.

What is sent and what is received are never the same memory: Open MPI's nonblocking
all-reduce of data in place sends all of it up and down a tree, whose height the time
grows with, where it otherwise has each rank sum a part.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.packing import Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, Message, WaitSteps
from hpcstrat.engine.collectives.work import Work, divide, drain, fill
from hpcstrat.engine.typing import Array

__all__ = ["reduce_by_mpi"]


def reduce_by_mpi(work: Work, channel: Channel) -> WaitSteps:
    """Sum by the all-reduce of the MPI library, one message for each run of a piece.

    Collective over ``topology.replica_comm``.
    """
    mpi, comm = channel.topology.mpi, channel.topology.replica_comm
    # For each type: the buffer to send, and the one for the sum.
    scratch: dict[Any, tuple[Array, Array]] = {}
    yield HEADER
    for run in itertools.chain.from_iterable(work.pieces):
        sent, total, packed = _buffers(run, work, scratch)
        if work.waits:
            channel.interruptible(comm).Allreduce(sent, total, op=mpi.SUM)
        else:
            yield Message(comm.Iallreduce(sent, total, op=mpi.SUM), sent)
        divide(total, work.divisor)
        if packed:
            drain(run, work.results, total)


def _buffers(
    run: Run, work: Work, scratch: dict[Any, tuple[Array, Array]]
) -> tuple[Array, Array, bool]:
    """Return what to send; where the sum goes; and whether both are packed."""
    if len(run.spans) == 1:
        index, start, stop, _ = run.spans[0]
        source, result = work.sources[index], work.results[index]
        if source.dtype == run.dtype == result.dtype:
            total = result[start:stop]
            # NumPy's C long and C long long may be equal, MPI's never are.
            sent = source[start:stop].view(total.dtype)
            if np.may_share_memory(sent, total):
                sent = sent.copy()
            return sent, total, False
    kept = scratch.get(run.dtype)
    if kept is None or kept[0].size < run.size:
        kept = np.empty(run.size, run.dtype), np.empty(run.size, run.dtype)
        scratch[run.dtype] = kept
    sent, total = kept[0][: run.size], kept[1][: run.size]
    fill(run, work.sources, sent)
    return sent, total, True
