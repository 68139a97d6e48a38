"""Plans of reductions: a plan is made once for each kind of call, and run many times.

A `Plan` reduces by an algorithm, in one call or step by step. Its subclasses reduce in
other ways:

- `KernelSum`: by the compiled kernel, which adds in the same order as
  `hpcstrat.engine.algorithms.shared_memory`, so that the results have the same bits.
  Each rank copies a piece of its values into its place, and adds the pieces of all
  ranks. With three or more ranks and large pieces, each rank adds only one segment of
  the piece, and all ranks copy the sums of all segments into their results.
- `HeaderSum`: few values, in the headers between workers. The first rank of each worker
  adds the values of its worker, and the sums of all workers in the order of the
  workers. The result has the same bits as a reduction inside each worker and then by
  parts between the workers.
- `OrderPlan`: a MAX or MIN, by a plan for order keys.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.kernel_call import (
    SMALL_BYTES,
    KernelCall,
    SentValues,
    cached_piece_bytes,
)
from hpcstrat.engine.algorithms.work import Choice, Work, add_in_order, divide
from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.arrays.order_keys import from_keys, to_keys
from hpcstrat.engine.arrays.packing import Piece, Run, Signature, cut
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, HeaderStep, WaitSteps
from hpcstrat.engine.channel.wire_headers import HeaderBlocks, carried_bytes
from hpcstrat.engine.native import load, type_codes
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array

__all__ = [
    "IN_HEADER",
    "HeaderSum",
    "KernelSum",
    "OrderPlan",
    "Plan",
    "Request",
    "fits_header",
    "header_bytes",
    "is_plain",
    "kernel_codes",
]

IN_HEADER = "in the header of the call"
"""Description of a sum in the header, for `Choice.how`."""

# A plan keeps at most this many pieces. Larger calls compute their pieces each time,
# which takes little time compared with the sums.
_MOST_KEPT_PIECES = 4096
# For each array: its index, a view for its values, a view of its sum, and whether it
# has the dtype in which it is added.
_Views = list[tuple[int, Array, Array, bool]]


@dataclass(frozen=True, slots=True)
class Request:
    """The arrays to reduce, and their results; the same on every rank."""

    call: Call
    signatures: tuple[Signature, ...]
    # Shapes and dtypes of the results.
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    # Divisor for a mean; 0 for a sum.
    divisor: int
    # Allocates the arrays for the results.
    allocate: Callable[..., list[Array]]
    op: ReduceOp = ReduceOp.SUM

    def of_keys(self) -> Request:
        """Return the request for the maximum of the order keys of these arrays."""
        signatures = [(np.dtype(f"u{d.itemsize}"), s) for d, s in self.signatures]
        results = tuple((shape, dtype) for dtype, shape in signatures)
        most = replace(self, op=ReduceOp.MAX)
        return replace(most, signatures=tuple(signatures), results=results)


def is_plain(array: Array) -> bool:
    """Return whether an array needs no copy: it is aligned and C-contiguous."""
    flags = array.flags
    return flags.c_contiguous and (is_device(array) or flags.aligned)


class Plan:
    """A reduction of arrays with given shapes and dtypes by an algorithm.

    ``choice`` is None if no data are sent: for a single replica, which has no
    ``channel``, and for arrays without elements. `run` and `steps` are collective over
    ``topology.replica_comm``.
    """

    # The kernel's call by which a `KernelSum` reduces, and which can be repeated.
    kernel_call: KernelCall | None = None

    def __init__(
        self, request: Request, choice: Choice | None, channel: Channel | None
    ) -> None:
        # The call names the algorithm, for timelines.
        self.call = replace(request.call, how="" if choice is None else choice.how)
        self.choice, self.channel = choice, channel
        self.signatures, self.results = request.signatures, request.results
        self.divisor = request.divisor
        self.function = np.add if request.op.adds else np.maximum
        self._pieces: Sequence[Piece] = ()

    @property
    def starts(self) -> bool:
        """True if the reduction can be started now and awaited later."""
        return self.choice is None or self.choice.starts

    def run(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        """Reduce arrays of any memory order into ``results``.

        Each result is the memory of its own array, or overlaps with no array.
        """
        if self.channel is None:
            for result, array in zip(results, arrays, strict=True):
                call_without_fp_warnings(assign, result, ..., array)
            return
        steps = self.steps(arrays, results, waits=True)
        self.channel.drive(steps, self.call, timeout_seconds)

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Reduce arrays step by step; see `hpcstrat.engine.channel.waitable`.

        ``waits`` says whether the caller waits for the end of the reduction, so that
        the program cannot write to the arrays meanwhile.
        """
        sources = [
            (array if is_plain(array) else array.copy("C")).reshape(-1)
            for array in arrays
        ]
        flats = [
            result.reshape(-1)
            if is_plain(result)
            else array_module(result).empty(result.size, result.dtype)
            for result in results
        ]
        if self.channel is None or self.choice is None:
            yield HEADER
            for source, flat in zip(sources, flats, strict=True):
                call_without_fp_warnings(assign, flat, ..., source)
        else:
            work = Work(
                self.call,
                pieces=self._cut(self.choice),
                sources=sources,
                results=flats,
                piece_bytes=self.choice.piece_bytes,
                divisor=self.divisor,
                function=self.function,
            )
            yield from self.choice.algorithm(work, self.channel)
        for result, flat in zip(results, flats, strict=True):
            if not is_plain(result):
                result[...] = flat.reshape(result.shape)

    def with_options(self, **options: Any) -> Plan:
        """Return a copy of this plan that passes more arguments to its algorithm."""
        assert self.choice is not None
        plan = copy.copy(self)
        plan.choice = self.choice.with_options(**options)
        return plan

    def _cut(self, choice: Choice) -> Iterable[Piece]:
        """Return the pieces of the arrays, in order."""
        if self._pieces:
            return self._pieces
        pieces = functools.partial(
            cut, self.signatures, bool(self.divisor), choice.piece_bytes
        )
        some = tuple(itertools.islice(pieces(), _MOST_KEPT_PIECES + 1))
        if len(some) <= _MOST_KEPT_PIECES:
            self._pieces = some
            return some
        return pieces()


class KernelSum(Plan):
    """The plan of a sum by the kernel, for replicas that are all on one worker.

    For workers of one replica, ``carried`` has the values of all workers, which are
    sent in the header; one piece contains all arrays. `run` and `steps` are collective
    over ``topology.replica_comm``.
    """

    def __init__(
        self,
        request: Request,
        choice: Choice,
        channel: Channel,
        codes: bytes,
        carried: SentValues | None = None,
    ) -> None:
        super().__init__(request, choice, channel)
        topology = channel.topology
        # Each of three or more ranks adds a segment, unless the call is small.
        scattered = topology.num_replicas > 2 and not choice.small
        # Arrays with the right shapes and dtypes, but without memory for each element.
        likes = [np.broadcast_to(np.empty((), d), s) for d, s in self.signatures]
        result_likes = [np.broadcast_to(np.empty((), d), s) for s, d in self.results]
        piece_bytes = choice.piece_bytes
        if sum(like.nbytes for like in likes) > piece_bytes:
            piece_bytes = cached_piece_bytes(piece_bytes, topology)
        allocate = None
        if max(like.nbytes for like in result_likes) >= SMALL_BYTES:
            allocate = functools.partial(request.allocate, request.results)
        made = channel.kernel, codes, likes, result_likes, piece_bytes
        how = self.divisor, scattered, self.call, self.call.digest
        one = load().Sum(*made, *how, allocate)
        self.kernel_call: KernelCall = KernelCall(channel, self.call, one, carried)

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Reduce arrays step by step; see `Plan.steps`."""
        return self.kernel_call.steps(arrays, results, waits=waits)


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


class OrderPlan(Plan):
    """A MAX, MIN, ALL or ANY: the maximum of order keys, which ``inner`` reduces.

    `run` and `steps` are collective over ``topology.replica_comm``.
    """

    def __init__(self, request: Request, inner: Plan) -> None:
        super().__init__(request, inner.choice, inner.channel)
        self._op, self._inner = request.op, inner

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Reduce arrays step by step; see `Plan.steps`."""
        keys = [to_keys(array, self._op) for array in arrays]
        yield from self._inner.steps(keys, keys, waits=waits)
        for key, result in zip(keys, results, strict=True):
            result[...] = from_keys(key, result.dtype, self._op)

    def with_options(self, **options: Any) -> Plan:
        """Raise ValueError, as a started call on a GPU cannot convert its results."""
        del options
        raise ValueError(
            "expected SUM or MEAN in a reduction of a GPU's arrays that is started, "
            f"found {self._op.name}; use all_reduce"
        )


def kernel_codes(request: Request, channel: Channel) -> bytes | None:
    """Return the kernel's codes for the arrays' dtypes, the same on every rank.

    Returns None if the kernel cannot sum the arrays, or if there is no kernel.
    """
    if channel.kernel is None:
        return None
    return type_codes([dtype for dtype, _ in request.signatures], request.op.name)


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
