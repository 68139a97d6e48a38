"""Sums over ranks by messages: by an exchange of parts, or by MPI's allreduce.

In an exchange of parts, each rank sums one part of the values: it receives this part
from all other ranks, adds the values in rank order, and sends the sum back. Each rank
sends and receives ``2 (p - 1) / p`` times the bytes of its values, the minimum for
``p`` ranks (Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002), in two messages to
each other rank (the pairwise exchange of Thakur, Rabenseifner and Gropp,
doi:10.1177/1094342005051521). The result has the same bits on all ranks. Several sums
are under way at the same time, so that the network stays busy, see `ConcurrentSums`.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.work import (
    Work,
    add_in_order,
    divide,
    drain,
    fill,
    slice_of,
)
from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.halves import narrowed, widened
from hpcstrat.engine.arrays.packing import Run
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.interruptible import InterruptibleComm
from hpcstrat.engine.channel.waitable import HEADER, Waitable, WaitSteps
from hpcstrat.engine.typing import Array

__all__ = [
    "FEW_EXCHANGING",
    "MOST_EXCHANGING",
    "PART_BYTES",
    "ConcurrentSums",
    "exchanged_sum",
    "exchanges",
    "reduce_by_exchange",
    "reduce_by_mpi",
    "reduce_run",
    "rounded_sum",
]

PART_BYTES = 256 << 10
"""Size of a message: smaller ones cost time of Python, larger ones idle the network."""

MOST_EXCHANGING = 64
"""Most ranks that exchange parts: a rank sends a message to each of the others."""

FEW_EXCHANGING = 4
"""Up to this number of ranks, parts of any size are exchanged."""

# Pairs ``(p, nbytes)``: up to ``p`` ranks exchange parts of at least ``nbytes`` bytes.
# MPI's allreduce sends only ``2 log2(p)`` messages per rank, but one after the other:
# each takes as long as five messages that are sent together.
_LEAST_PART_BYTES = ((16, 4 << 10), (MOST_EXCHANGING, 16 << 10))
_PARTS_TAG, _SUMS_TAG = 31, 37
_MOST_UNDER_WAY = 4
_EXPONENT_BYTES = 8
# Scaled values are below 2**15, because the largest number of float16 is 65504.
_TOP_EXPONENT = 15


def reduce_by_mpi(work: Work, channel: Channel) -> WaitSteps:
    """Sum by the allreduce of the MPI library, one call for each run of a piece.

    Collective over ``topology.replica_comm``. Arrays are cut into pieces, because Open
    MPI no longer works in the cache beyond a few MiB, and older MPI libraries accept no
    count past 2**31 - 1.
    """
    comm = channel.interruptible(channel.topology.replica_comm)
    yield HEADER
    for run in itertools.chain.from_iterable(work.pieces):
        yield from reduce_run(run, work, comm, _sum_by_mpi)


def reduce_by_exchange(work: Work, channel: Channel) -> WaitSteps:
    """Sum by exchanges of parts, several pieces at a time; for workers of one replica.

    Collective over ``topology.replica_comm``.
    """
    comm = channel.interruptible(channel.topology.replica_comm)
    sums_under_way = ConcurrentSums()
    yield HEADER
    for run in itertools.chain.from_iterable(work.pieces):
        yield from sums_under_way.add(reduce_run(run, work, comm, exchanged_sum))
    yield from sums_under_way.end()


def reduce_run(
    run: Run, work: Work, comm: InterruptibleComm, sum_over: Callable[..., WaitSteps]
) -> WaitSteps:
    """Sum one run of a piece over ``comm``, without a copy if possible."""
    index, start, stop, _ = run.spans[0]
    source, result = work.sources[index], work.results[index]
    if len(run.spans) == 1 and source.dtype == run.dtype == result.dtype:
        # View the values in the result's dtype: NumPy's C long and C long long may be
        # equal, but their MPI datatypes always differ.
        total = result[start:stop]
        values = source[start:stop].view(total.dtype)
        yield from sum_over(values, total, comm, work.divisor, work.function)
        return
    total = comm.empty((run.size,), run.dtype)
    fill(run, work.sources, total)
    yield from sum_over(total, total, comm, work.divisor, work.function)
    drain(run, work.results, total)


def exchanges(nbytes: int, size: int) -> bool:
    """Return whether ``size`` ranks sum ``nbytes`` by exchanging parts, not by MPI."""
    if size <= FEW_EXCHANGING:
        return True
    least = (part for most, part in _LEAST_PART_BYTES if size <= most)
    return nbytes >= size * next(least, math.inf)


def _sum_by_mpi(
    values: Array,
    total: Array,
    comm: InterruptibleComm,
    divisor: int,
    function: np.ufunc,
) -> WaitSteps:
    """Sum arrays by MPI's allreduce, and divide the sum by ``divisor``.

    If the arrays overlap, the values are copied first, because Open MPI's in-place
    allreduce is slow: it sends all data up and down a tree of the ranks, while with two
    buffers each rank sums a part.
    """
    if np.may_share_memory(values, total):
        values = values.copy()
    op = comm.mpi.SUM if function is np.add else comm.mpi.MAX
    yield comm.Iallreduce(values, total, op)
    divide(total, divisor)


def exchanged_sum(
    values: Array,
    total: Array,
    comm: InterruptibleComm,
    divisor: int = 0,
    function: np.ufunc = np.add,
) -> WaitSteps:
    """Sum arrays over the ranks, and divide the sum; ``total`` may be ``values``.

    Collective over ``comm``. If ``divisor`` is 0, the sum is not divided. For
    ``function`` see `Work`.
    """
    size, me = comm.size, comm.rank
    if not exchanges(total.nbytes, size):
        yield from _sum_by_mpi(values, total, comm, divisor, function)
        return
    spans, others = _parts(total.size, comm)
    own = total[spans[me]]
    rows = comm.empty(((size - 1) * -(-total.size // size),), total.dtype)
    came = {rank: rows[i * own.size :][: own.size] for i, rank in enumerate(others)}
    yield comm.start({rank: values[spans[rank]] for rank in others}, came, _PARTS_TAG)
    terms = [values[spans[me]] if rank == me else came[rank] for rank in range(size)]
    # Partial sums overwrite a received part, which is the third argument.
    add_in_order(terms, own, terms[1 if me == 0 else 0], function)
    divide(own, divisor)
    # Other sums may use this memory now.
    del rows, came, terms
    yield comm.start(
        dict.fromkeys(others, own),
        {rank: total[spans[rank]] for rank in others},
        _SUMS_TAG,
    )


def _parts(count: int, comm: InterruptibleComm) -> tuple[list[slice], list[int]]:
    """Return each rank's slice, and the other ranks, beginning with the next rank."""
    spans = [slice_of(count, rank, comm.size) for rank in range(comm.size)]
    others = [(comm.rank + shift) % comm.size for shift in range(1, comm.size)]
    return spans, others


class _Flow(Waitable):
    """One of several sums, as a `Waitable` that waits for its end."""

    def __init__(self, steps: WaitSteps, sums: ConcurrentSums) -> None:
        self._steps, self._sums = steps, sums
        # Number of steps begun, and the `Waitable` awaited now (None at the end).
        self.num_begun = 0
        self.awaited: Waitable | None = None
        self.begin_step()

    def begin_step(self) -> None:
        self.awaited = next(self._steps, None)
        self.num_begun += 1

    def agreed(self) -> bool:
        """Advance all algorithms; return whether this algorithm has ended."""
        self._sums.advance()
        return self.awaited is None


class ConcurrentSums:
    """Runs several algorithms together, each with the same steps on all ranks.

    An algorithm begins its step ``n`` only after all earlier algorithms have begun
    their step ``n``. So messages with the same tag are started in the same order on all
    ranks, even if some ranks are faster.
    """

    def __init__(self) -> None:
        self._flows: deque[_Flow] = deque()

    def add(self, steps: WaitSteps) -> WaitSteps:
        """Begin an algorithm; if four are under way, wait for the oldest one first."""
        if len(self._flows) == _MOST_UNDER_WAY:
            yield self._flows[0]
        self.begin(steps)

    def end(self) -> WaitSteps:
        """Wait for the end of all algorithms."""
        yield from tuple(self._flows)

    def begin(self, steps: WaitSteps) -> Waitable:
        """Begin an algorithm, and return a `Waitable` that waits for its end."""
        self.advance()
        flow = _Flow(steps, self)
        self._flows.append(flow)
        return flow

    def advance(self) -> None:
        """Advance all algorithms as far as possible without waiting."""
        before = None
        for flow in self._flows:
            while flow.awaited is not None and flow.awaited.agreed():
                if before is not None and flow.num_begun >= before.num_begun:
                    break
                flow.begin_step()
            if flow.awaited is not None:
                before = flow
        while self._flows and self._flows[0].awaited is None:
            self._flows.popleft()


def rounded_sum(
    values: Array, comm: InterruptibleComm, wire_dtype: np.dtype[Any]
) -> WaitSteps:
    """Sum arrays over the ranks in place by parts, sending half-precision numbers.

    Collective over ``comm``. The values of each message are scaled by a power of two,
    so that the largest of them is just below 2**15. The sums are computed in the dtype
    of the values. Numbers are rounded twice: values on the way to the rank that adds,
    and sums on the way back. In each step, the error of a value ``x`` of a part whose
    largest value is ``M`` is at most ``u |x| + 2**-39 M``, where ``u`` is 2**-11 for
    float16 and 2**-8 for bfloat16: half a unit in the last place, or half of float16's
    smallest subnormal number.
    """
    me, (spans, others) = comm.rank, _parts(values.size, comm)
    parts = [values[span] for span in spans]
    sizes = [_EXPONENT_BYTES + part.size * wire_dtype.itemsize for part in parts]
    sent = {rank: _encoded(parts[rank], wire_dtype) for rank in others}
    came = {rank: np.empty(sizes[me], np.uint8) for rank in others}
    yield comm.start(sent, came, _PARTS_TAG)
    total = np.zeros_like(parts[me])
    for rank in range(comm.size):
        # This rank's own values are added without rounding.
        term = parts[me] if rank == me else _decoded(came[rank], values, wire_dtype)
        call_without_fp_warnings(np.add, total, term, total)
    own = _encoded(total, wire_dtype)
    sums = {rank: np.empty(sizes[rank], np.uint8) for rank in others}
    yield comm.start(dict.fromkeys(others, own), sums, _SUMS_TAG)
    for rank, message in {**sums, me: own}.items():
        # This rank also decodes its own sums, so that all ranks have the same bits.
        parts[rank][:] = _decoded(message, values, wire_dtype)


def _encoded(values: Array, wire_dtype: np.dtype[Any]) -> Array:
    """Return a message of ``values``: scale exponent, flag, and scaled values."""
    message = np.empty(_EXPONENT_BYTES + values.size * wire_dtype.itemsize, np.uint8)
    magnitudes = np.abs(values)
    largest = magnitudes.max(initial=0)
    fast = values.dtype == np.float32 and bool(np.isfinite(largest))
    if not np.isfinite(largest):
        largest = magnitudes.max(initial=0, where=np.isfinite(magnitudes))
    exponent = _TOP_EXPONENT - int(np.frexp(largest)[1]) if largest else 0
    # ``fast``: all values are finite, so that the receiver need not look for NaN.
    message[:_EXPONENT_BYTES].view(np.int32)[:] = exponent, fast
    out = message[_EXPONENT_BYTES:]
    if fast:
        bits = call_without_fp_warnings(
            narrowed, magnitudes, values, exponent, wire_dtype
        )
        out.view(np.uint16)[...] = bits
    else:
        scaled = call_without_fp_warnings(np.ldexp, values, exponent)
        call_without_fp_warnings(assign, out.view(wire_dtype), ..., scaled)
    return message


def _decoded(message: Array, like: Array, wire_dtype: np.dtype[Any]) -> Array:
    exponent, fast = message[:_EXPONENT_BYTES].view(np.int32).tolist()
    scaled: Array
    if fast:
        bits = message[_EXPONENT_BYTES:].view(np.uint16)
        scaled = call_without_fp_warnings(widened, bits, exponent, wire_dtype)
    else:
        values = message[_EXPONENT_BYTES:].view(wire_dtype).astype(like.dtype)
        scaled = call_without_fp_warnings(np.ldexp, values, -exponent)
    return scaled
