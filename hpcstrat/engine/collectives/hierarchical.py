"""Reduction over several workers: inside each through shared memory, then across.

Rank ``r`` of every worker sums segment ``r`` of a piece over its worker, then over the
ranks with the same position in all workers, so that every worker's links are busy and
each byte crosses them as seldom as it can; all ranks of a worker copy the sums out.
Where the workers differ in size, as many ranks of each take part in the second stage as
the smallest one has. While the sums of one piece are on their way, the next one is
added up inside the workers.

The second stage may send half-precision numbers: see `CommunicationOptions.wire_dtype`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.packing import Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.collectives.exchanged import exchanged_sum, rounded_sum
from hpcstrat.engine.collectives.shared_memory import reduce_in_memory
from hpcstrat.engine.collectives.work import Work
from hpcstrat.engine.typing import Array

__all__ = ["reduce_hierarchically"]


def reduce_hierarchically(
    work: Work, channel: Channel, wire_dtype: np.dtype[Any] | None = None
) -> WaitSteps:
    """Sum inside each worker, then over the workers.

    Collective over ``topology.replica_comm``. In ``wire_dtype``, ``float16`` or
    ``bfloat16`` of ml_dtypes, float32 and float64 travel between workers.
    """
    cross = functools.partial(_over_workers, work, channel, wire_dtype)
    return reduce_in_memory(work, channel, cross)


def _over_workers(
    work: Work,
    channel: Channel,
    wire_dtype: np.dtype[Any] | None,
    run: Run,
    segment: Array,
) -> WaitSteps:
    """Sum a segment over the ranks of this position, in place."""
    comm = channel.interruptible(channel.topology.cross_worker_comm)
    # The mean of integers is summed in float64.
    source = work.sources[run.spans[0][0]].dtype
    exact = source.kind in "iu" or segment.dtype.char not in "fd"
    if wire_dtype is not None and not exact:
        return rounded_sum(segment, comm, wire_dtype)
    return exchanged_sum(segment, segment, comm)
