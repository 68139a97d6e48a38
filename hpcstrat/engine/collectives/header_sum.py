"""Reduction of a few values between workers, which travel in the header of the call.

Each worker's sum is made by its first rank; all workers get the sums of all others, and
add them in the order of the workers: the bits are those of a reduction inside each
worker and then by parts between them, see `hpcstrat.engine.collectives.shared_memory`.
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

# Long doubles begin at multiples of this.
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
    if channel.wire is None:
        return False
    # The ranks of a worker lay out their values in its memory.
    most = min(channel.wire.room_bytes, channel.topology.slot_bytes)
    return header_bytes(piece) <= most


class HeaderSum(Plan):
    """The sum of one piece, in which every array lies whole.

    To run it is collective over ``topology.replica_comm``. Between the workers it is a
    `HeaderPayload`.
    """

    def __init__(
        self, request: Request, choice: Choice, channel: Channel, piece: Piece
    ) -> None:
        super().__init__(request, choice, channel)
        assert channel.wire is not None
        self._rings, self._headers, self._piece = channel.rings, channel.wire, piece
        self._rank = channel.topology.worker_comm.rank
        self.nbytes = header_bytes(piece)
        # For each step: where to, and from where, values that are sent on are copied.
        self._copies: list[tuple[Array, Array]] = []
        # For each run: this worker's values, and those of all in their order.
        self._blocks: list[tuple[Array, list[Array]]] = []
        if self._rank == 0:
            self._make_blocks(self.nbytes)
        # For each run: the values of the worker's ranks, and the sum of all workers.
        self._rows: list[list[Array]] = []
        self._totals: list[Array] = []
        # Made once where this rank is alone, as its values always lie in one place.
        self._views: _Views | None = None
        if channel.wire.alone:
            self._totals = [_part(channel.wire.total, run) for run in piece]
            self._views = self._make_views([values for values, _ in self._blocks])

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

    def _make_views(self, own: Sequence[Array]) -> _Views:
        views = []
        for run, *pair in zip(self._piece, own, self._totals, strict=True):
            for index, _, stop, at in run.spans:
                dtype, shape = self.signatures[index]
                low = at - run.start
                part, sums = (array[low : low + stop].reshape(shape) for array in pair)
                views.append((index, part, sums, dtype == run.dtype))
        return views

    def _in_next_place(self) -> _Views:
        """Return the views of the next place in the worker's memory."""
        place = self._rings.take(self._rings.place_bytes(self.nbytes))
        self._rows = [self._rings.rows(run, place) for run in self._piece]
        # The place of the first rank, which nobody else has looked at.
        self._totals = [rows[0] for rows in self._rows]
        return self._make_views([rows[self._rank] for rows in self._rows])

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Do as `Plan.steps`."""
        del waits
        views = self._views or self._in_next_place()
        for index, part, _, same in views:
            if same:
                part[...] = arrays[index]
            else:
                call_without_fp_warnings(assign, part, ..., arrays[index])
        yield HeaderStep(self)
        for index, _, total, same in views:
            if same:
                results[index][...] = total
            else:
                call_without_fp_warnings(assign, results[index], ..., total)

    # Methods that the header calls, on the first rank of a worker.

    def gather(self) -> None:
        """Write the sum of the worker's values behind the header."""
        # There are no rows where the values of a single rank lie there already.
        for rows, (own, _) in zip(self._rows, self._blocks, strict=False):
            add_in_order(rows, own)

    def take(self, step: int) -> None:
        """Copy what has come in a step to where a later step sends it from."""
        out, came = self._copies[step]
        out[...] = came

    def finish(self) -> None:
        """Add the sums of all workers, in the order of the workers."""
        for (_, terms), total in zip(self._blocks, self._totals, strict=True):
            add_in_order(terms, total)
            divide(total, self.divisor)


def _cut(message: Array, count: int, nbytes: int) -> list[Array]:
    """Return the values of each worker in a message."""
    starts = range(HEADER_BYTES, HEADER_BYTES + count * nbytes, nbytes)
    return [message[start : start + nbytes] for start in starts]


def _part(block: Array, run: Run) -> Array:
    size = run.dtype.itemsize
    return block[run.start * size : (run.start + run.size) * size].view(run.dtype)
