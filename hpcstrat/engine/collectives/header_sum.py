"""Reduction of a few values between workers, which travel in the header of the call.

Each worker's sum is made by its first rank; all workers get the sums of all others, and
add them in the order of the workers: the bits are those of a reduction inside each
worker and then by parts between them, see `hpcstrat.engine.collectives.hierarchical`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.packing import Piece, Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HeaderStep, WaitSteps
from hpcstrat.engine.channel.wire_headers import HEADER_BYTES
from hpcstrat.engine.collectives.plan import Plan, Request
from hpcstrat.engine.collectives.work import Choice, add_in_order, divide
from hpcstrat.engine.typing import Array

__all__ = ["IN_HEADER", "HeaderSum", "fits_header", "header_bytes"]

IN_HEADER = "in the header of the call"
"""Says in words how it is done, as `Choice.how`."""

# Long doubles begin at multiples of it.
_ALIGNMENT_BYTES = 16

# For each array: its index, the place for its values, the place of its sum, and whether
# it has the type in which it is added.
_Views = list[tuple[int, Array, Array, bool]]


def header_bytes(piece: Piece) -> int:
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
    return header_bytes(piece) <= most


class HeaderSum(Plan):
    """The sum of one piece, in which every array lies whole.

    Its views are made beforehand. To run it is collective over
    ``topology.replica_comm``. Between the workers it is a `HeaderPayload`.
    """

    def __init__(
        self, request: Request, choice: Choice, channel: Channel, piece: Piece
    ) -> None:
        super().__init__(request, choice, channel)
        assert channel.wire is not None
        self._channel, self._headers, self._piece = channel, channel.wire, piece
        self._rank = channel.topology.worker_comm.rank
        self.nbytes = nbytes = header_bytes(piece)
        self._place, self._place_bytes = 0, channel.rings.place_bytes(nbytes)
        self._copies: list[tuple[Array, Array]] = []
        # For each run: this worker's values, and those of all in their order.
        self._blocks: list[tuple[Array, list[Array]]] = []
        if self._rank == 0:
            self._make_blocks(nbytes)
        # The sums of all workers for each run, and the views, where this rank is alone.
        self._totals: list[Array] = []
        self._views: _Views | None = None
        if channel.topology.worker_comm.size == 1:
            self._totals = [_part(self._headers.total, run) for run in piece]
            own = [values for values, _ in self._blocks]
            self._views = self._make_views(own, self._totals)

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
                dtype, shape = self.signatures[index]
                low = at - run.start
                part, sums = (
                    array[low : low + stop].reshape(shape) for array in (values, total)
                )
                views.append((index, part, sums, dtype == run.dtype))
        return views

    def _in_place(self) -> _Views:
        """Return the views of the next place in the worker's memory."""
        places, me = self._channel.rings, self._rank
        self._place = place = places.take(self._place_bytes)
        rows = [places.rows(run, place) for run in self._piece]
        return self._make_views([r[me] for r in rows], [r[0] for r in rows])

    def run(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        """Do as `Plan.run`."""
        channel = self._channel
        if channel.pending:
            # Their headers came first, and their data use the same places.
            channel.pending.drain()
        views = self._views or self._in_place()
        _lay_out(views, arrays)
        channel.agree(self.call, timeout_seconds, self)
        with channel.moving(self.call):
            _copy_out(views, results)

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Do as `Plan.steps`."""
        del waits
        views = self._views or self._in_place()
        _lay_out(views, arrays)
        yield HeaderStep(self)
        _copy_out(views, results)

    def _total(self, number: int, run: Run) -> Array:
        """Return where the sum of a run lies."""
        if self._views is not None:
            return self._totals[number]
        # The place of the worker's first rank, which nobody else has looked at.
        return self._channel.rings.rows(run, self._place)[0]

    # Methods that the header calls, on the first rank of a worker.

    def gather(self) -> None:
        """Lay the sum of the worker's values behind the header."""
        if self._views is not None:
            # They have been laid there.
            return
        for run, (own, _) in zip(self._piece, self._blocks, strict=True):
            add_in_order(self._channel.rings.rows(run, self._place), own)

    def take(self, step: int) -> None:
        """Lay what has come in a step behind what a later one sends."""
        out, came = self._copies[step]
        out[...] = came

    def finish(self) -> None:
        """Add the sums of all workers, in the order of the workers."""
        for number, run in enumerate(self._piece):
            total = self._total(number, run)
            add_in_order(self._blocks[number][1], total)
            divide(total, self.divisor)


def _lay_out(views: _Views, arrays: Sequence[Array]) -> None:
    for index, part, _, same in views:
        if same:
            part[...] = arrays[index]
        else:
            call_without_fp_warnings(assign, part, ..., arrays[index])


def _copy_out(views: _Views, results: Sequence[Array]) -> None:
    for index, _, total, same in views:
        if same:
            results[index][...] = total
        else:
            call_without_fp_warnings(assign, results[index], ..., total)


def _cut(message: Array, count: int, nbytes: int) -> list[Array]:
    """Return the values of each worker in a message."""
    starts = range(HEADER_BYTES, HEADER_BYTES + count * nbytes, nbytes)
    return [message[start : start + nbytes] for start in starts]


def _part(block: Array, run: Run) -> Array:
    size = run.dtype.itemsize
    return block[run.start * size : (run.start + run.size) * size].view(run.dtype)
