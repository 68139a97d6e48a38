"""Reduction of a few values by sending them in the headers between workers.

The first rank of each worker adds the values of its worker. Each worker receives the
sums of all other workers, and adds them in the order of the workers. The result has the
same bits as a reduction inside each worker and then by parts between the workers, see
`hpcstrat.engine.algorithms.shared_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat.engine.algorithms.plan import Plan, Request
from hpcstrat.engine.algorithms.work import Choice, add_in_order, divide
from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.packing import Piece, Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HeaderStep, WaitSteps
from hpcstrat.engine.channel.wire_headers import HeaderBlocks, carried_bytes
from hpcstrat.engine.typing import Array

__all__ = ["IN_HEADER", "HeaderSum", "fits_header", "header_bytes"]

IN_HEADER = "in the header of the call"
"""Description of a sum in the header, for `Choice.how`."""

# For each array: its index, a view for its values, a view of its sum, and whether it
# has the dtype in which it is added.
_Views = list[tuple[int, Array, Array, bool]]


def header_bytes(piece: Piece) -> int:
    """Return the bytes that one worker's values of a piece occupy in a header."""
    used = max((run.start + run.size) * run.dtype.itemsize for run in piece)
    return carried_bytes(used)


def fits_header(piece: Piece, channel: Channel) -> bool:
    """Return whether a header can carry a piece's values; the same on every rank."""
    if channel.wire is None:
        return False
    # The values must also fit a place, in which the ranks of a worker exchange them.
    most = min(channel.wire.room_bytes, channel.topology.slot_bytes)
    return header_bytes(piece) <= most


class HeaderSum(Plan):
    """The plan of a sum in one header: one piece contains all arrays as a whole.

    `run` and `steps` are collective over ``topology.replica_comm``. The object is also
    the `HeaderPayload` of the headers between the workers.
    """

    def __init__(
        self, request: Request, choice: Choice, channel: Channel, piece: Piece
    ) -> None:
        super().__init__(request, choice, channel)
        assert channel.wire is not None
        self._rings, self._headers, self._piece = channel.rings, channel.wire, piece
        self._rank = channel.topology.worker_comm.rank
        values = HeaderBlocks(channel.wire, header_bytes(piece))
        self.nbytes, self.take = values.nbytes, values.take
        # For each run: this worker's values, and all workers' values in worker order.
        self._blocks: list[tuple[Array, list[Array]]] = []
        for run in piece if values.in_order else ():
            terms = [_part(block, run) for block in values.in_order]
            self._blocks.append((terms[self._headers.worker], terms))
        # For each run: the values of the worker's ranks, and the sum of all workers.
        self._rows: list[list[Array]] = []
        self._totals: list[Array] = []
        # The views of a worker of one rank, whose values are always at the same
        # address; None for other workers.
        self._views: _Views | None = None
        if channel.wire.alone:
            self._totals = [_part(channel.wire.total, run) for run in piece]
            self._views = self._make_views([values for values, _ in self._blocks])

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
        """Take the next place in the rings; return views of the arrays in the place."""
        place = self._rings.take(self._rings.place_bytes(self.nbytes))
        self._rows = [self._rings.rows(run, place) for run in self._piece]
        # Write the sums into the first rank's place, whose values no other rank reads.
        self._totals = [rows[0] for rows in self._rows]
        return self._make_views([rows[self._rank] for rows in self._rows])

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Reduce arrays step by step, by one header; see `Plan.steps`."""
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

    # `WireHeaders` calls the methods below, on the first rank of each worker.

    def gather(self) -> None:
        """Write the sum of this worker's values behind the header of its message."""
        # A worker of one rank has no rows: its values are already behind the header.
        for rows, (own, _) in zip(self._rows, self._blocks, strict=False):
            add_in_order(rows, own, function=self.function)

    def finish(self) -> None:
        """Add the sums of all workers, in the order of the workers."""
        for (_, terms), total in zip(self._blocks, self._totals, strict=True):
            add_in_order(terms, total, function=self.function)
            divide(total, self.divisor)


def _part(block: Array, run: Run) -> Array:
    size = run.dtype.itemsize
    return block[run.start * size : (run.start + run.size) * size].view(run.dtype)
