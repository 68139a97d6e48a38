"""Sums of few values in the headers between workers, without messages of their own.

The first rank of each worker adds the values of its worker, and the sums of all workers
in the order of the workers. The result has the same bits as a reduction inside each
worker and then by parts between the workers.
"""

from __future__ import annotations

import numpy as np

from hpcstrat.engine.algorithms.work import Work, add_in_order, divide, drain, fill
from hpcstrat.engine.arrays.packing import Piece, Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.channel.wire_headers import HeaderValues, carried_bytes
from hpcstrat.engine.typing import Array

__all__ = ["HeaderSum", "fits_header", "header_bytes"]


class HeaderSum(HeaderValues):
    """The algorithm for work of a single piece, and the `HeaderPayload` of its header.

    Calling it is collective over ``topology.replica_comm``.
    """

    def __init__(
        self, piece: Piece, channel: Channel, divisor: int, function: np.ufunc
    ) -> None:
        assert channel.wire is not None
        super().__init__(channel.wire, header_bytes(piece))
        self._divisor, self._function = divisor, function
        # For each run: all workers' values in worker order; empty except on the first
        # rank of a worker. This worker's values, the sum of those of its ranks.
        self._terms = [[_part(row, run) for row in self.rows] for run in piece]
        # For each run: the values of the worker's ranks, and the sum of all workers.
        self._ranks: list[list[Array]] = []
        self._totals: list[Array] = []

    def __call__(self, work: Work, channel: Channel) -> WaitSteps:
        """Sum the values of all ranks, see `hpcstrat.engine.algorithms.work`."""
        [piece] = work.pieces
        if self.headers.alone:
            own = [terms[self.headers.worker] for terms in self._terms]
            self._totals = [terms[0] for terms in self._terms]
        else:
            rings, me = channel.rings, channel.topology.worker_comm.rank
            place = rings.take(rings.place_bytes(self.nbytes))
            self._ranks = [rings.rows(run, place) for run in piece]
            own = [ranks[me] for ranks in self._ranks]
            # Write the sums into the first rank's place, which no other rank reads.
            self._totals = [ranks[0] for ranks in self._ranks]
        for run, values in zip(piece, own, strict=True):
            fill(run, work.sources, values)
        yield self
        for run, total in zip(piece, self._totals, strict=True):
            drain(run, work.results, total)

    # `WireHeaders` calls the methods below, on the first rank of each worker.

    def gather(self) -> None:
        """Write the sum of this worker's values behind the header of its message."""
        # A worker of one rank needs no sum.
        for ranks, terms in zip(self._ranks, self._terms, strict=False):
            add_in_order(ranks, terms[self.headers.worker], function=self._function)
        super().gather()

    def finish(self) -> None:
        """Add the sums of all workers, in the order of the workers."""
        for terms, total in zip(self._terms, self._totals, strict=True):
            add_in_order(terms, total, function=self._function)
            divide(total, self._divisor)


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


def _part(block: Array, run: Run) -> Array:
    size = run.dtype.itemsize
    return block[run.start * size : (run.start + run.size) * size].view(run.dtype)
