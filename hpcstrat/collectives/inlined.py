"""Reduction of a few values between workers, which travel in the header of the call.

Each worker's sum is made by its first rank; all workers get the sums of all others, and
add them in the order of the workers: the bits are those of a reduction inside each
worker and then by parts between them, see `hpcstrat.collectives.hierarchical`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.arrays.casting import assign, make_quiet, quietly
from hpcstrat.arrays.packing import Piece, Run, Signature
from hpcstrat.channel.awaited import Awaits, Header
from hpcstrat.channel.call import Call
from hpcstrat.channel.channel import Channel
from hpcstrat.channel.wire_headers import HEADER_BYTES
from hpcstrat.collectives.work import add_in_order, divide
from hpcstrat.typing import Array

__all__ = ["INLINE", "InlineReduction", "fits_header", "inlined_bytes"]

INLINE = "in the header of the call"
"""Says in words how it is done, as `Choice.how`."""

# Long doubles begin at multiples of it.
_ALIGNMENT_BYTES = 16

# Of each array: its index, where its values are laid, where its sum lies, and whether
# it has the type in which it is added.
_Views = list[tuple[int, Array, Array, bool]]


def inlined_bytes(piece: Piece) -> int:
    """Return how many bytes of each worker a piece takes in a header."""
    used = max((run.start + run.size) * run.dtype.itemsize for run in piece)
    return used + -used % _ALIGNMENT_BYTES


def fits_header(piece: Piece, channel: Channel) -> bool:
    """Whether a header carries a piece; the same on every rank."""
    headers = channel.wire
    if headers is None:
        return False
    # The ranks of a worker lay out their values in its memory.
    most = min(headers.room_bytes, channel.topology.slot_bytes)
    return inlined_bytes(piece) <= most


class InlineReduction:
    """The sum of one piece, in which every array lies whole.

    Its views are made beforehand. To call it is collective over
    ``topology.replica_comm``. Between the workers it is a `Carried`.
    """

    def __init__(
        self,
        piece: Piece,
        signatures: Sequence[Signature],
        divisor: int,
        channel: Channel,
    ) -> None:
        assert channel.wire is not None
        self._channel, self._headers = channel, channel.wire
        self._piece, self._signatures, self._divisor = piece, signatures, divisor
        self._rank = channel.topology.worker_comm.rank
        self.nbytes = nbytes = inlined_bytes(piece)
        self._place, self._place_bytes = 0, channel.places.place_bytes(nbytes)
        self._copies: list[tuple[Array, Array]] = []
        # Of each run: this worker's values, and those of all in their order.
        self._blocks: list[tuple[Array, list[Array]]] = []
        if self._rank == 0:
            self._make_blocks(nbytes)
        self._views: _Views | None = None
        # Of each run, where this rank is alone; and where the sum of a single one goes
        # instead.
        self._totals: list[Array] = []
        self._into: Array | None = None
        # All values are laid out before the first result is written.
        self.whole = True
        # Whether there is one array, whose sum is added up in the result itself; and
        # where it is laid.
        self.single, self._own = False, np.empty(0, np.uint8)
        self._terms = list[Array]()
        self._quietly = make_quiet()
        if channel.topology.worker_comm.size == 1:
            self._totals = [_part(self._headers.total, run) for run in piece]
            own = [values for values, _ in self._blocks]
            self._views = self._make_views(own, self._totals)
            _, part, total, same = self._views[0]
            # Empty ones have no view, but count.
            if same and len(signatures) == 1:
                self.single, self._own, self._totals = True, part, [total]
                [(_, terms)] = self._blocks
                self._terms = [term.reshape(part.shape) for term in terms]
                self._blocks = [(part, self._terms)]
                self._first, self._second, *self._further = self._terms

    def _make_blocks(self, nbytes: int) -> None:
        headers = self._headers
        largest = max(headers.counts)
        blocks = _cut(headers.out, largest, nbytes)
        steps = zip(headers.counts, headers.came, strict=True)
        for step, (count, came) in enumerate(steps):
            # Not all is sent on.
            used = nbytes * max(0, min(count, largest - (1 << step)))
            behind = headers.out[HEADER_BYTES + (nbytes << step) :]
            self._copies.append((behind[:used], came[HEADER_BYTES:][:used]))
            blocks[1 << step :] = _cut(came, count, nbytes)
        # They are those of this worker, the one after it, and so on.
        me, size = headers.worker, headers.num_workers
        in_order = [blocks[(worker - me) % size] for worker in range(size)]
        for run in self._piece:
            terms = [_part(block, run) for block in in_order]
            self._blocks.append((terms[me], terms))

    def _make_views(self, own: Sequence[Array], totals: Sequence[Array]) -> _Views:
        views = []
        for run, values, total in zip(self._piece, own, totals, strict=True):
            for index, _, stop, at in run.spans:
                dtype, shape = self._signatures[index]
                low = at - run.start
                part, sums = (
                    array[low : low + stop].reshape(shape) for array in (values, total)
                )
                views.append((index, part, sums, dtype == run.dtype))
        return views

    def _in_place(self) -> _Views:
        """Return the views of the next place in the worker's memory."""
        places, me = self._channel.places, self._rank
        self._place = place = places.take(self._place_bytes)
        views = places.kept.get((self, place))
        if views is None:
            rows = [places.rows(run, place) for run in self._piece]
            views = self._make_views([r[me] for r in rows], [r[0] for r in rows])
            places.keep((self, place), views, 2 * len(views))
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
        """Reduce arrays, in any memory order, as a `SmallReduction` does."""
        del separate
        channel, call = self._channel, planned.call
        if self.single:
            self._own[...] = arrays[0]
            with self.into(results[0]):
                channel.agree_on(self, call, timeout_seconds)
            return
        views = self._views or self._in_place()
        _lay_out(views, arrays)
        run = self._piece[0]
        if flat is not None and flat.dtype != run.dtype:
            flat = None
        # Of a single run, the memory of its results.
        into = flat if len(self._totals) == 1 else None
        with self.into(into):
            channel.agree_on(self, call, timeout_seconds)
        if into is not None:
            return
        try:
            if flat is not None:
                # One run, in which the arrays lie as their results do.
                flat[...] = self._total(0, run)
            else:
                _copy_out(views, results)
        except BaseException as error:
            channel.interrupted(call, error)
            raise

    def reduce_one(
        self, array: Array, result: Array, call: Call, timeout_seconds: float | None
    ) -> None:
        """Do the same for a ``single`` array, in a call that `Channel.is_plain`."""
        channel = self._channel
        self._own[...] = array
        try:
            # As `Channel.swap`: a call less, right behind one of the system.
            channel.num_calls += 1
            mark, looks = channel.position.run_mark, channel.waiter.quick_looks
            came = self._headers.swap(mark, call.digest, self, looks)
            channel.last_call = call
            if came:
                self._quietly(np.add, self._first, self._second, result)
                for term in self._further:
                    self._quietly(np.add, result, term, result)
                if self._divisor:
                    divide(result, self._divisor)
                return
        except BaseException as error:
            channel.interrupted(call, error)
            raise
        with self.into(result):
            channel.end_swap(self, call, timeout_seconds)

    @contextlib.contextmanager
    def into(self, result: Array | None) -> Iterator[None]:
        """Let the sum of the only run, where this rank is alone, go into a result."""
        self._into = result
        try:
            yield
        finally:
            self._into = None

    def steps(self, arrays: Sequence[Array], results: Sequence[Array]) -> Awaits:
        """Do the same in a call that is started."""
        views = self._views or self._in_place()
        _lay_out(views, arrays)
        yield Header(self)
        _copy_out(views, results)

    def _total(self, number: int, run: Run) -> Array:
        """Return where the sum of a run lies."""
        if self._into is not None:
            return self._into
        if self._views is not None:
            return self._totals[number]
        # The place of the worker's first rank, which nobody else has looked at.
        return self._channel.places.rows(run, self._place)[0]

    # What the header asks for, on the first rank of a worker.

    def gather(self) -> None:
        """Lay the sum of the worker's values behind the header."""
        if self._views is not None:
            # They have been laid there.
            return
        for run, (own, _) in zip(self._piece, self._blocks, strict=True):
            add_in_order(self._channel.places.rows(run, self._place), own)

    def take(self, step: int) -> None:
        """Lay what has come in a step behind what a later one sends."""
        out, came = self._copies[step]
        out[...] = came

    def finish(self) -> None:
        """Add the sums of all workers, in the order of the workers."""
        if self.single and self._into is not None:
            add_in_order(self._terms, self._into)
            if self._divisor:
                divide(self._into, self._divisor)
            return
        for number, run in enumerate(self._piece):
            total = self._total(number, run)
            add_in_order(self._blocks[number][1], total)
            divide(total, self._divisor)


def _lay_out(views: _Views, arrays: Sequence[Array]) -> None:
    for index, part, _, same in views:
        if same:
            part[...] = arrays[index]
        else:
            quietly(assign, part, ..., arrays[index])


def _copy_out(views: _Views, results: Sequence[Array]) -> None:
    for index, _, total, same in views:
        if same:
            results[index][...] = total
        else:
            quietly(assign, results[index], ..., total)


def _cut(message: Array, count: int, nbytes: int) -> list[Array]:
    """Return the values of each worker in a message."""
    starts = range(HEADER_BYTES, HEADER_BYTES + count * nbytes, nbytes)
    return [message[start : start + nbytes] for start in starts]


def _part(block: Array, run: Run) -> Array:
    size = run.dtype.itemsize
    return block[run.start * size : (run.start + run.size) * size].view(run.dtype)
