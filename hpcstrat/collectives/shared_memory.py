"""Reduction of a worker's replicas through its shared memory, in cache-sized pieces.

Two ranks are served best by the direct form: each copies a piece into its slot, and
adds the other's slot to it, straight into the result. Of more ranks, each sums one
segment of the piece over all slots, and all copy the sums out. Both forms add in the
order of the ranks, and so give the same bits on every rank, whatever the sizes of the
pieces.

While the ranks add one piece, the next is in its slots already, so that a rank seldom
waits for another. `hpcstrat.collectives.slots` says when a slot may be written, and
`hpcstrat.collectives.records` what orders the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.collectives.call import Call
from hpcstrat.collectives.header import Channel
from hpcstrat.collectives.slots import Slots
from hpcstrat.collectives.work import Work, fill, quietly
from hpcstrat.packing import Piece, Run
from hpcstrat.topology import NUM_SLOTS
from hpcstrat.typing import Array

__all__ = ["SmallReduction", "reduce_directly", "reduce_scattered"]

_CACHE_LINE_BYTES = 64


def reduce_directly(work: Work, channel: Channel) -> Iterator[Any]:
    """Sum by the direct form: every rank adds all slots itself.

    Collective over ``topology.worker_comm``, which is all replicas.

    Parameters
    ----------
    work : Work
        What to reduce.
    channel : Channel
        Of the replicas.

    Yields
    ------
    SegmentRecords or None
        See `hpcstrat.collectives.work`.
    """
    slots, me = channel.slots, channel.topology.worker_comm.rank
    slot = channel.next_slot()
    pieces = iter(work.pieces)
    piece: Piece | None = next(pieces)
    _fill(piece, work, slots, slot, me)
    yield None
    while piece is not None:
        following, after = next(pieces, None), (slot + 1) % NUM_SLOTS
        step = None
        if following is not None:
            _fill(following, work, slots, after, me)
            step = channel.step(work.call)
        for run in piece or ():
            _add_all(run, work, slots, slot, me)
        if step is not None:
            yield step
        piece, slot = following, after


def _fill(piece: Piece | None, work: Work, slots: Slots, slot: int, me: int) -> None:
    for run in piece or ():
        fill(run, work.sources, slots.of(run.dtype)[slot, me])


def _add_all(run: Run, work: Work, slots: Slots, slot: int, me: int) -> None:
    """Add a run of all slots into the results."""
    parts = slots.of(run.dtype)[slot]
    for index, start, stop, at in run.spans:
        result = work.results[index][start:stop]
        source = work.sources[index]
        terms: list[Array] = list(parts[:, at : at + stop - start])
        if source.dtype == run.dtype and len(terms) == 2:
            # The own values again: where the result lies over them, it is one array
            # less to go through the cache.
            terms[me] = source[start:stop]
        if result.dtype == run.dtype:
            add_in_order(terms, result)
            if work.divisor:
                quietly(np.divide, result, work.divisor, result)
        else:
            total = slots.scratch(run.dtype)[: stop - start]
            add_in_order(terms, total)
            if work.divisor:
                quietly(np.divide, total, work.divisor, total)
            quietly(np.copyto, result, total, "unsafe")


def add_in_order(
    terms: Sequence[Array], total: Array, scratch: Array | None = None
) -> None:
    """Add arrays in their order.

    Not collective.

    Parameters
    ----------
    terms : sequence of ndarray of shape (n,)
        At least one.
    total : ndarray of shape (n,)
        Where the sum goes; may be one of the first two terms, or any other where there
        is a ``scratch``.
    scratch : ndarray of shape (n,), optional
        For the sums of the first terms.
    """
    if len(terms) == 1:
        if terms[0] is not total:
            quietly(np.copyto, total, terms[0])
        return
    last = len(terms) - 1
    partial = terms[0]
    for number in range(1, len(terms)):
        out = total if scratch is None or number == last else scratch
        quietly(np.add, partial, terms[number], out)
        partial = out


def reduce_scattered(
    work: Work,
    channel: Channel,
    cross: Callable[[list[Array]], Iterator[Any]] | None = None,
) -> Iterator[Any]:
    """Sum by segments: each rank sums one segment of a piece over all slots.

    Collective over ``topology.replica_comm``.

    Parameters
    ----------
    work : Work
        What to reduce.
    channel : Channel
        Of the replicas.
    cross : callable, optional
        Sums this rank's segments over the workers, in place; needed where there are
        several. As many ranks of each worker have segments as the smallest one has.

    Yields
    ------
    SegmentRecords, Message or None
        See `hpcstrat.collectives.work`.
    """
    topology, slots = channel.topology, channel.slots
    me, movers = topology.worker_comm.rank, topology.smallest_worker
    slot = channel.next_slot()
    pieces = iter(work.pieces)
    piece: Piece | None = next(pieces)
    _fill(piece, work, slots, slot, me)
    yield None
    if topology.num_workers > 1:
        # The header of several workers orders no memory.
        yield channel.step(work.call)
    while piece is not None:
        following, after = next(pieces, None), (slot + 1) % NUM_SLOTS
        if following is not None:
            _fill(following, work, slots, after, me)
        own = []
        for run in piece if me < movers else ():
            low, high = _segment(run, me, movers)
            if low < high:
                terms = list(slots.of(run.dtype)[slot, :, low:high])
                scratch = slots.scratch(run.dtype)[: high - low]
                add_in_order(terms, terms[me], scratch)
                own.append(terms[me])
        if cross is not None and own:
            yield from cross(own)
        if work.divisor:
            for segment in own:
                quietly(np.divide, segment, work.divisor, segment)
        yield channel.step(work.call)
        for run in piece:
            _copy_out(run, work, slots.of(run.dtype)[slot], movers)
        piece, slot = following, after


def _segment(run: Run, number: int, movers: int) -> tuple[int, int]:
    """Return where a rank's segment of a run begins and ends, in whole cache lines."""
    line = _CACHE_LINE_BYTES // run.dtype.itemsize
    length = -(-run.size // (movers * line)) * line
    end = run.start + run.size
    return (
        min(run.start + number * length, end),
        min(run.start + (number + 1) * length, end),
    )


def _copy_out(run: Run, work: Work, parts: Array, movers: int) -> None:
    """Copy the sums from the slots of the ranks that made them."""
    segments = [_segment(run, number, movers) for number in range(movers)]
    for index, start, stop, at in run.spans:
        result, end = work.results[index], at + stop - start
        shift = start - at
        for number, (low, high) in enumerate(segments):
            first, last = max(low, at), min(high, end)
            if first < last:
                quietly(
                    np.copyto,
                    result[first + shift : last + shift],
                    parts[number, first:last],
                    "unsafe",
                )


class SmallReduction:
    """The direct form for one piece, with all its views made beforehand.

    Collective over ``topology.worker_comm``, which is all replicas, when called.

    Parameters
    ----------
    piece : Piece
        The only one; every array lies in it whole.
    shapes : sequence of tuple of int
        Of the arrays.
    channel : Channel
        Of the replicas.
    """

    def __init__(
        self, piece: Piece, shapes: Sequence[tuple[int, ...]], channel: Channel
    ) -> None:
        self._channel = channel
        self._rank = channel.topology.worker_comm.rank
        # For each slot: the index of each array with its views of all ranks' slots.
        self._views: list[list[tuple[int, list[Array]]]] = []
        for slot in range(NUM_SLOTS):
            views = []
            for run in piece:
                parts = channel.slots.of(run.dtype)[slot]
                for index, _, stop, at in run.spans:
                    rows = parts[:, at : at + stop]
                    views.append((index, [row.reshape(shapes[index]) for row in rows]))
            self._views.append(views)

    def __call__(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        divisor: int,
        call: Call,
        timeout_seconds: float | None,
    ) -> None:
        """Reduce.

        Collective over ``topology.worker_comm``, which is all replicas.

        Parameters
        ----------
        arrays : sequence of ndarray
            This replica's values, in any memory order.
        results : sequence of ndarray
            Where the results go.
        divisor : int
            By what to divide the sums; 0 for sums.
        call : Call
            The call.
        timeout_seconds : float, optional
            How long to wait for late ranks.
        """
        copyto, add, me = np.copyto, np.add, self._rank
        channel = self._channel
        views = self._views[channel.next_slot()]
        for index, parts in views:
            quietly(copyto, parts[me], arrays[index], "unsafe")
        channel.agree(call, timeout_seconds)
        for index, parts in views:
            result = total = results[index]
            if total.dtype != parts[0].dtype:
                total = np.empty_like(parts[0])
            quietly(add, parts[0], parts[1], total)
            for part in parts[2:]:
                quietly(add, total, part, total)
            if divisor:
                quietly(np.divide, total, divisor, total)
            if total is not result:
                quietly(copyto, result, total, "unsafe")
