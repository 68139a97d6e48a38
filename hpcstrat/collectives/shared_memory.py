"""Reduction of a worker's replicas through its shared memory, in cache-sized pieces.

Two ranks are served best by the direct form: each copies a piece into its place, and
adds the other's place to it, straight into the result. Of more ranks, each sums one
segment of the piece over all places, and all copy the sums out. Both forms add in the
order of the ranks, and so give the same bits on every rank, whatever the sizes of the
pieces.

While the ranks add one piece, the next lies in its place already, so that a rank seldom
waits for another. `hpcstrat.channel.places` says when a place may be written, and
`hpcstrat.channel.headers` what orders the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.arrays.casting import assign, make_quiet, quietly
from hpcstrat.arrays.packing import Piece, Run, Signature
from hpcstrat.channel.awaited import HEADER, Awaited, Awaits
from hpcstrat.channel.call import Call
from hpcstrat.channel.channel import Channel
from hpcstrat.channel.places import Places
from hpcstrat.collectives.pipeline import Pipeline
from hpcstrat.collectives.work import Work, add_in_order, divide, fill
from hpcstrat.typing import Array

__all__ = ["SmallReduction", "reduce_directly", "reduce_scattered"]

_CACHE_LINE_BYTES = 64


def reduce_directly(work: Work, channel: Channel) -> Awaits:
    """Sum by the direct form: each of two ranks adds the other's values to its own.

    Collective over ``topology.worker_comm``, which is all replicas, and two.
    """
    places, me = channel.places, channel.topology.worker_comm.rank
    place_bytes = places.place_bytes(work.piece_bytes)
    pieces = iter(work.pieces)
    piece, place = next(pieces), places.take(place_bytes)
    _lay_out(piece, place, work, places, me)
    yield HEADER
    while piece:
        following, after, step = next(pieces, ()), 0, None
        if following:
            after = places.take(place_bytes)
            _lay_out(following, after, work, places, me)
            step = channel.step(work.call)
        for run in piece:
            rows = places.rows(run, place)
            index, start, stop, _ = run.spans[0]
            result, source = work.results[index], work.sources[index]
            if len(run.spans) == 1 and source.dtype == result.dtype == run.dtype:
                # The own values again: they are nearer than the place, and where the
                # result lies over them, it is one array less in the cache.
                own, total = source[start:stop], result[start:stop]
                if me:
                    quietly(np.add, rows[0], own, total)
                else:
                    quietly(np.add, own, rows[1], total)
                divide(total, work.divisor)
            else:
                _add_spans(run, work, places, rows)
        if step is not None:
            yield step
        piece, place = following, after


def _lay_out(piece: Piece, place: int, work: Work, places: Places, me: int) -> None:
    """Copy a piece of this rank's values into a place of its ring."""
    for run in piece:
        fill(run, work.sources, places.rows(run, place)[me])


def _add_spans(run: Run, work: Work, places: Places, rows: Sequence[Array]) -> None:
    """Add a run of all places into the results."""
    for index, start, stop, at in run.spans:
        low = at - run.start
        result = work.results[index][start:stop]
        terms = [row[low : low + stop - start] for row in rows]
        total = result
        if result.dtype != run.dtype:
            total = places.scratch(run.dtype)[: stop - start]
        add_in_order(terms, total)
        divide(total, work.divisor)
        if total is not result:
            quietly(assign, result, ..., total)


# A piece, its place, this rank's segments of it, and what says that these are summed.
_Behind = tuple[Piece, int, list[Array], list[Awaited]]


def reduce_scattered(
    work: Work,
    channel: Channel,
    cross: Callable[[Run, Array], Awaits] | None = None,
) -> Awaits:
    """Sum by segments: each rank sums one segment of a piece over all places.

    Collective over ``topology.replica_comm``. ``cross`` sums a segment of this rank's
    over the workers, in place, where there are several: as many ranks of each worker
    have segments as the smallest one has. Pieces then fill half of the largest place:
    four of them are in use at once, one of which others may still copy out.
    """
    topology, places = channel.topology, channel.places
    me, movers = topology.worker_comm.rank, topology.smallest_worker
    place_bytes = places.place_bytes(work.piece_bytes)
    pieces = iter(work.pieces)
    piece, place = next(pieces), places.take(place_bytes)
    _lay_out(piece, place, work, places, me)
    yield HEADER
    pipeline = Pipeline()
    # Whose sums are on their way.
    behind: deque[_Behind] = deque()
    while piece:
        following, after = next(pieces, ()), 0
        if following:
            after = places.take(place_bytes)
            _lay_out(following, after, work, places, me)
        own, flows = [], []
        for run in piece if me < movers else ():
            low, high = _segment(run, me, movers)
            if low < high:
                terms = [row[low:high] for row in places.rows(run, place)]
                add_in_order(terms, terms[me], places.scratch(run.dtype))
                own.append(terms[me])
                if cross is not None:
                    flows.append(pipeline.begin(cross(run, terms[me])))
        behind.append((piece, place, own, flows))
        # Over a wire, one stays behind the next; else it is still in the cache.
        num_stay = int(cross is not None and bool(following))
        ended = [behind.popleft() for _ in range(len(behind) - num_stay)]
        yield from _come(ended, work.divisor)
        yield channel.step(work.call)
        for done, its_place, _, _ in ended:
            for run in done:
                _copy_out(run, work, places.rows(run, its_place), movers)
        piece, place = following, after


def _come(behind: Sequence[_Behind], divisor: int) -> Awaits:
    """Wait for the sums of this rank's segments, and divide them."""
    for _, _, segments, flows in behind:
        yield from flows
        for segment in segments:
            divide(segment, divisor)


def _segment(run: Run, number: int, movers: int) -> tuple[int, int]:
    """Return where a rank's segment of a run begins and ends, in whole cache lines."""
    line = _CACHE_LINE_BYTES // run.dtype.itemsize
    length = -(-run.size // (movers * line)) * line
    return min(number * length, run.size), min((number + 1) * length, run.size)


def _copy_out(run: Run, work: Work, rows: Sequence[Array], movers: int) -> None:
    """Copy the sums from the places of the ranks that made them."""
    segments = [_segment(run, number, movers) for number in range(movers)]
    for index, start, stop, at in run.spans:
        result, begin = work.results[index], at - run.start
        end, shift = begin + stop - start, start - begin
        for (low, high), row in zip(segments, rows, strict=False):
            first, last = max(low, begin), min(high, end)
            if first < last:
                part = result[first + shift : last + shift]
                quietly(assign, part, ..., row[first:last])


# Of each array: its index, its memory in all ranks' rings, and whether it has the type
# in which it is added.
_Views = list[tuple[int, list[Array], bool]]
_MOST_VIEWS = 1024


class SmallReduction:
    """The direct form for one piece, in which every array lies whole.

    Its views are made beforehand. To call it is collective over
    ``topology.worker_comm``, which is all replicas.
    """

    def __init__(
        self,
        piece: Piece,
        signatures: Sequence[Signature],
        divisor: int,
        channel: Channel,
    ) -> None:
        self._channel = channel
        self._rank = channel.topology.worker_comm.rank
        self._piece = piece
        self._signatures = signatures
        nbytes = max((run.start + run.size) * run.dtype.itemsize for run in piece)
        # Many small arrays take larger places, of which there are fewer.
        views = len(signatures) * channel.topology.worker_comm.size
        spread = channel.places.ring_bytes * views // _MOST_VIEWS
        self._place_bytes = channel.places.place_bytes(max(nbytes, spread))
        self._divisor, self._quietly = divisor, make_quiet()
        # All values are laid out before the first result is written.
        self.whole = True
        # Whether there is one array, of the type in which it is added.
        [run, *others], [(dtype, _), *more] = piece, signatures
        self.single = not others and not more and dtype == run.dtype

    def _make_views(self, place: int) -> _Views:
        views = []
        for run in self._piece:
            rows = self._channel.places.rows(run, place)
            for index, _, stop, at in run.spans:
                dtype, shape = self._signatures[index]
                low = at - run.start
                parts = [row[low : low + stop].reshape(shape) for row in rows]
                views.append((index, parts, dtype == run.dtype))
        count = len(views) * len(views[0][1])
        self._channel.places.keep((self, place), views, count)
        return views

    def __call__(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        planned: Any,
        timeout_seconds: float | None,
        separate: bool,
        *,
        flat: Array | None = None,
    ) -> None:
        """Reduce arrays, in any memory order.

        ``separate`` says that no result lies over another array. All values are in the
        rings before the first result is written, and so are right in any case; this
        rank's own are nearer. ``flat`` is the memory of all results, side by side,
        where they are of one type.
        """
        me, channel, call = self._rank, self._channel, planned.call
        places, divisor = channel.places, self._divisor
        place = places.take(self._place_bytes)
        views = places.kept.get((self, place)) or self._make_views(place)
        for index, parts, same in views:
            if same:
                parts[me][...] = arrays[index]
            else:
                quietly(assign, parts[me], ..., arrays[index])
        channel.agree(call, timeout_seconds)
        try:
            if flat is not None and flat.dtype == self._piece[0].dtype:
                # One run, in which the arrays lie as their results do.
                rows = places.rows(self._piece[0], place)
                _add_small(rows, flat, divisor, me, None)
                return
            for index, parts, same in views:
                own = arrays[index] if same and separate else None
                _add_small(parts, results[index], divisor, me, own)
        except BaseException as error:
            channel.interrupted(call, error)
            raise

    def reduce_one(
        self, array: Array, result: Array, call: Call, timeout_seconds: float | None
    ) -> None:
        """Do the same for a ``single`` array, in a call that `Channel.is_plain`."""
        me, channel = self._rank, self._channel
        places = channel.places
        place = places.take(self._place_bytes)
        [(_, parts, _)] = places.kept.get((self, place)) or self._make_views(place)
        parts[me][...] = array
        channel.agree_plainly(call, timeout_seconds)
        try:
            # As in `_add_small`.
            first, second, *further = parts
            if not further:
                first, second = (first, array) if me else (array, second)
            self._quietly(np.add, first, second, result)
            for part in further:
                self._quietly(np.add, result, part, result)
            if self._divisor:
                divide(result, self._divisor)
        except BaseException as error:
            channel.interrupted(call, error)
            raise


def _add_small(
    parts: Sequence[Array], result: Array, divisor: int, me: int, own: Array | None
) -> None:
    """Add the parts of all ranks, one of which may be near: ``own``."""
    total = result
    if total.dtype != parts[0].dtype:
        total = np.empty_like(parts[0])
    if own is None or len(parts) > 2:
        quietly(np.add, parts[0], parts[1], total)
        for part in parts[2:]:
            quietly(np.add, total, part, total)
    elif me:
        quietly(np.add, parts[0], own, total)
    else:
        quietly(np.add, own, parts[1], total)
    divide(total, divisor)
    if total is not result:
        quietly(assign, result, ..., total)
