"""Reduction through the memory that a worker's ranks share, in pieces.

Each rank copies a piece of its values into its place, sums one segment of the piece
over all ranks' places in rank order, and copies the sums of all segments into its
results. The result has the same bits on every rank, and does not depend on the piece
size. While the ranks add one piece, the next piece is already in its place.
`hpcstrat.engine.channel.shared_rings` explains when a place may be written, and
`hpcstrat.engine.channel.headers` how stores become visible to the other ranks.

With several workers, each segment is then summed over the ranks that have the same
position in their workers, so that all network links are busy and few bytes are sent.
The number of these positions is the number of ranks of the smallest worker. While the
sums of one piece are sent, the next piece is added inside the workers.

Inside one worker the compiled kernel does the same work faster, if it is available;
tests compare it with this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.exchanged import (
    ConcurrentSums,
    exchanged_sum,
    rounded_sum,
)
from hpcstrat.engine.algorithms.work import (
    Work,
    add_in_order,
    divide,
    fill,
    segment_of,
)
from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.packing import Piece, Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.shared_rings import SharedRings
from hpcstrat.engine.channel.waitable import HEADER, Waitable, WaitSteps
from hpcstrat.engine.typing import Array

__all__ = ["reduce_in_memory"]

# A piece that has not been copied out, its place, this rank's segments of the piece,
# and the unfinished sums over the workers.
_Behind = tuple[Piece, int, list[Array], list[Waitable]]


def reduce_in_memory(
    work: Work, channel: Channel, wire_dtype: np.dtype[Any] | None = None
) -> WaitSteps:
    """Sum by segments: each rank sums one segment of a piece over all places.

    Collective over ``topology.replica_comm``. If ``wire_dtype`` is given (``float16``,
    or ``bfloat16`` of ml_dtypes), float32 and float64 values are rounded to it in
    messages between workers. With several workers, a piece is at most half of the
    largest place, because four pieces are in use at the same time: other ranks may
    still copy the oldest piece out.
    """
    topology, places = channel.topology, channel.rings
    me, movers = topology.worker_comm.rank, topology.smallest_worker
    crosses = topology.num_workers > 1
    place_bytes = places.place_bytes(work.piece_bytes)
    pieces = iter(work.pieces)
    piece, place = next(pieces), places.take(place_bytes)
    _lay_out(piece, place, work, places, me)
    yield HEADER
    sums_under_way = ConcurrentSums()
    # Pieces whose sums over the workers have not ended.
    behind: deque[_Behind] = deque()
    while piece:
        following, after = next(pieces, ()), 0
        if following:
            after = places.take(place_bytes)
            _lay_out(following, after, work, places, me)
        own, flows = [], []
        for run, sums in _own_segments(piece, place, work.function, channel):
            own.append(sums)
            if crosses:
                steps = _over_workers(run, sums, work, channel, wire_dtype)
                flows.append(sums_under_way.begin(steps))
        behind.append((piece, place, own, flows))
        # With several workers, end a piece only after the next piece has begun, so that
        # messages of both are on the network. With one worker, end it immediately,
        # while its values are in the cache.
        num_stay = int(crosses and bool(following))
        ended = [behind.popleft() for _ in range(len(behind) - num_stay)]
        for _, _, segments, its_flows in ended:
            yield from its_flows
            for segment in segments:
                divide(segment, work.divisor)
        yield channel.step(work.call)
        for done, its_place, _, _ in ended:
            for run in done:
                _copy_out(run, work, places.rows(run, its_place), movers)
        piece, place = following, after


def _lay_out(
    piece: Piece, place: int, work: Work, places: SharedRings, me: int
) -> None:
    """Copy a piece of this rank's values into a place of its ring."""
    for run in piece:
        fill(run, work.sources, places.rows(run, place)[me])


def _own_segments(
    piece: Piece, place: int, function: np.ufunc, channel: Channel
) -> Iterator[tuple[Run, Array]]:
    """Sum this rank's segment of each run over the worker's ranks, in its own place."""
    topology, places = channel.topology, channel.rings
    me, movers = topology.worker_comm.rank, topology.smallest_worker
    for run in piece if me < movers else ():
        low, high = segment_of(run.size, run.dtype, me, movers)
        if low < high:
            terms = [row[low:high] for row in places.rows(run, place)]
            scratch = places.scratch(run.dtype)
            add_in_order(terms, terms[me], scratch, function)
            yield run, terms[me]


def _over_workers(
    run: Run,
    segment: Array,
    work: Work,
    channel: Channel,
    wire_dtype: np.dtype[Any] | None,
) -> WaitSteps:
    """Sum a segment in place over the ranks of the same position in all workers."""
    comm = channel.interruptible(channel.topology.cross_worker_comm)
    # For a mean, integers are summed in float64: do not round these sums either.
    source = work.sources[run.spans[0][0]].dtype
    exact = source.kind in "iu" or segment.dtype.char not in "fd"
    if wire_dtype is None or exact:
        return exchanged_sum(segment, segment, comm, function=work.function)
    return rounded_sum(segment, comm, wire_dtype)


def _copy_out(run: Run, work: Work, rows: Sequence[Array], movers: int) -> None:
    """Copy the sums of all segments, each from its rank's place, into the results."""
    segments = [segment_of(run.size, run.dtype, n, movers) for n in range(movers)]
    for index, start, stop, at in run.spans:
        result, begin = work.results[index], at - run.start
        end, shift = begin + stop - start, start - begin
        for (low, high), row in zip(segments, rows, strict=False):
            first, last = max(low, begin), min(high, end)
            if first < last:
                part = result[first + shift : last + shift]
                call_without_fp_warnings(assign, part, ..., row[first:last])
