"""Algorithms for arrays that a worker's ranks share: each rank writes one slice.

Each worker has one copy of each array, in shared memory. The algorithms are generators,
see `hpcstrat.engine.channel.waitable`. No rank of a worker writes before all its ranks
have arrived, and no rank continues before all writes are visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.exchanged import ConcurrentSums, exchanged_sum
from hpcstrat.engine.algorithms.work import add_in_order, divide, fill, slice_of
from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.packing import Piece, Run
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.topology.segment import Segment
from hpcstrat.engine.typing import Array

__all__ = [
    "SharedAllocator",
    "SlicedPiece",
    "lay_out",
    "reduce_slices",
    "write_between",
]

_LINE_BYTES = 64
_SHARED_BYTES = 4 << 20
_MOST_SHARED_BYTES = 256 << 10

SlicedPiece = tuple[Piece, Array | None]
"""A run for each rank with a slice, and the array for the sum of this rank's run."""


def write_between(write: Callable[[], None], call: Call, channel: Channel) -> WaitSteps:
    """Call ``write`` after all ranks have arrived and before any rank continues.

    Collective over ``topology.replica_comm``. Meanwhile no rank of the worker reads the
    memory that ``write`` changes. ``write`` must not raise.
    """
    yield HEADER
    write()
    yield channel.step(call)


class SharedAllocator:
    """Shared memory of a worker's ranks, allocated in the same order on all ranks.

    Memory is freed with the last array that refers to it. Large arrays have a segment
    of their own. Small arrays share segments: each segment costs a file descriptor.
    """

    def __init__(self) -> None:
        self._shared = np.empty(0, np.uint8)
        self._used = 0

    def take(self, like: Array, comm: Any) -> Array:
        """Return a flat shared array like ``like``; collective over ``comm``."""
        nbytes = like.nbytes
        if nbytes > _MOST_SHARED_BYTES:
            octets = _segment(comm, nbytes)
        else:
            span = nbytes + -nbytes % _LINE_BYTES
            if self._used + span > self._shared.size:
                self._shared, self._used = _segment(comm, _SHARED_BYTES), 0
            octets = self._shared[self._used :][:nbytes]
            self._used += span
        array: Array = octets.view(like.dtype)
        return array


def _segment(comm: Any, nbytes: int) -> Array:
    octets: Array = np.frombuffer(Segment(comm, nbytes).buffer, np.uint8, nbytes)
    return octets


def lay_out(
    value: Array,
    allocator: SharedAllocator,
    made: list[Array],
    call: Call,
    channel: Channel,
    *,
    sends: bool,
) -> WaitSteps:
    """Allocate shared memory in each worker, and write replica 0's value there.

    Collective over ``topology.replica_comm``. The new array, of the value's shape, is
    appended to ``made``. If ``sends`` is false, all replicas must have the same value.
    """
    topology = channel.topology
    yield HEADER
    comm = channel.interruptible(topology.worker_comm)
    target = allocator.take(value, comm)
    made.append(target.reshape(value.shape))
    own = slice_of(target.size, comm.rank, comm.size)
    if not sends:
        call_without_fp_warnings(assign, target[own], ..., value.reshape(-1)[own])
    elif topology.replica_id == 0:
        call_without_fp_warnings(assign, made[-1], ..., value)
    yield channel.step(call)
    if sends and topology.num_workers > 1:
        # The root of the broadcast is 0, because replica 0 is on worker 0.
        if comm.rank < topology.smallest_worker:
            own = slice_of(target.size, comm.rank, topology.smallest_worker)
            channel.interruptible(topology.cross_worker_comm).Bcast(target[own], 0)
        yield channel.step(call)


def reduce_slices(
    pieces: Sequence[SlicedPiece],
    sources: Sequence[Array],
    call: Call,
    channel: Channel,
    *,
    place_bytes: int,
    divisor: int = 0,
) -> WaitSteps:
    """Sum run ``r`` of each piece over the replicas, on rank ``r`` of each worker.

    Collective over ``topology.replica_comm``. The values are added in the order of a
    worker's ranks, and then in the order of the workers, as in
    `hpcstrat.engine.algorithms.shared_memory`. No division if ``divisor`` is 0.
    """
    topology, rows = channel.topology, channel.rings.rows
    me = topology.worker_comm.rank
    cross = channel.interruptible(topology.cross_worker_comm)
    sums_under_way = ConcurrentSums()

    def put(piece: Piece) -> int:
        place = channel.rings.take(place_bytes)
        for rank, run in enumerate(piece):
            if rank != me or _in_source(run, sources) is None:
                fill(run, sources, rows(run, place)[me])
        return place

    place = put(pieces[0][0]) if pieces else 0
    yield HEADER
    for number, (piece, total) in enumerate(pieces, start=1):
        # Each piece is put into its place before the ranks read the preceding piece,
        # so that each piece needs only one step.
        after, step = 0, None
        if number < len(pieces):
            after = put(pieces[number][0])
            step = channel.step(call)
        if total is not None:
            own, terms = _in_source(piece[me], sources), rows(piece[me], place)
            if own is not None:
                terms = [*terms[:me], own, *terms[me + 1 :]]
            add_in_order(terms, total)
            if topology.num_workers == 1:
                divide(total, divisor)
            else:
                across = exchanged_sum(total, total, cross, divisor)
                yield from sums_under_way.add(across)
        if step is not None:
            yield step
        place = after
    yield from sums_under_way.end()


def _in_source(run: Run, sources: Sequence[Array]) -> Array | None:
    """Return a view of this rank's values of a run, or None if they must be copied."""
    if len(run.spans) != 1:
        return None
    index, start, stop, _ = run.spans[0]
    values = sources[index][start:stop]
    return values if values.dtype == run.dtype else None
