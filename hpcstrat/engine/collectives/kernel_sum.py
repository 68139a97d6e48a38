"""Sums over a worker's replicas, made by one call of the compiled kernel.

The kernel adds in the same order as `hpcstrat.engine.collectives.shared_memory`, so
that the results have the same bits. Each rank copies a piece of its values into its
place, and adds the pieces of all ranks. With three or more ranks and large pieces, each
rank adds only one segment of the piece, and all ranks copy the sums of all segments
into their results. The kernel itself waits only for microseconds; the channel makes all
longer waits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, HeaderStep, WaitSteps
from hpcstrat.engine.channel.wire_headers import HEADER_BYTES, WireHeaders
from hpcstrat.engine.channel.worker_values import WorkerValues
from hpcstrat.engine.collectives.plan import Plan, Request
from hpcstrat.engine.collectives.work import Choice, Work
from hpcstrat.engine.native import load, type_codes
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array

__all__ = ["KernelSum", "SentValues", "kernel_codes"]

# The kernel allocates results below this size; larger results use recycled memory.
_SMALL_BYTES = 32 << 10

# Two ranks add large calls in pieces of this size: four places of it, which are used in
# turn, stay in the cache of a core.
_CACHED_PIECE_BYTES = 64 << 10

# Return codes of the kernel.
_DONE, _HEADER_AWAITED, _, _DIFFERS, _, _HEADER_SENT = range(6)


def kernel_codes(request: Request, channel: Channel) -> bytes | None:
    """Return the kernel's codes for the arrays' dtypes, the same on every rank.

    Returns None if the kernel cannot sum the arrays, or if there is no kernel.
    """
    if channel.kernel is None:
        return None
    return type_codes([dtype for dtype, _ in request.signatures], request.op.name)


class SentValues:
    """The `HeaderPayload` of a call whose values the kernel copies and adds.

    ``nbytes`` is the size in bytes of the values of each worker. With two workers, the
    kernel's places are parts of the messages; with more, values are copied.
    """

    def __init__(self, values: WorkerValues, headers: WireHeaders, nbytes: int) -> None:
        self.nbytes = nbytes
        places, me = values.places[:, :nbytes], headers.worker
        most = max(headers.counts)
        # The values of this worker and of the next workers, in the messages it sends.
        sent = _blocks(headers.out, most, nbytes)
        # Destination and source of copies: before the first message, and, for each
        # step, of the received values.
        self._gathered: list[tuple[Array, Array]] = []
        self._taken: list[list[tuple[Array, Array]]] = [[] for _ in headers.counts]
        if headers.num_workers > 2:
            self._gathered = [(sent[0], places[me])]
            for step, count in enumerate(headers.counts):
                came = _blocks(headers.came[step], count, nbytes)
                first = (me + (1 << step)) % headers.num_workers
                until_last = min(count, headers.num_workers - first)
                later = max(0, min(count, most - (1 << step)))
                self._taken[step] = [
                    (places[first : first + until_last], came[:until_last]),
                    (places[: count - until_last], came[until_last:]),
                    (sent[1 << step :][:later], came[:later]),
                ]
        # Lets the kernel find the records of all workers, and add their values.
        self.finish = values.kernel.arrive
        self.exchange = headers.exchange(nbytes)

    def gather(self) -> None:
        """Copy this worker's values from its place behind the header of its message."""
        for to, source in self._gathered:
            to[...] = source

    def take(self, step: int) -> None:
        """Copy the values received in a step to their places, and to later messages."""
        for to, source in self._taken[step]:
            to[...] = source


def _piece_bytes(arrays: Sequence[Array], piece_bytes: int, topology: Topology) -> int:
    """Return the size of the kernel's pieces; the same on every rank.

    Two ranks of a worker that share cores with other ranks, or with each other, add
    large pieces, because each piece costs them a switch. Workers of one rank send all
    values in one piece.
    """
    if topology.worker_comm.size != 2 or topology.shares_cores:
        return piece_bytes
    large = sum(array.nbytes for array in arrays) > piece_bytes
    return min(piece_bytes, _CACHED_PIECE_BYTES) if large else piece_bytes


def _blocks(message: Array, count: int, nbytes: int) -> Array:
    """Return the values behind a message's header, one row for each worker."""
    behind = message[HEADER_BYTES : HEADER_BYTES + count * nbytes]
    return behind.reshape(count, nbytes)


@dataclass(frozen=True, slots=True)
class _KernelWaits:
    """The waits of calls that the kernel has begun.

    It has no reference to the plan, because the kernel keeps its method `wait`.
    """

    channel: Any
    call: Call
    # The values in the header between workers, or None inside a worker.
    carried: SentValues | None

    def wait(
        self,
        timeout_seconds: float | None,
        one: Any,
        found: int,
        failed: BaseException | None = None,
    ) -> Any:
        """Wait for the ranks that the kernel found missing; then return the results.

        ``failed`` is the error of a message that the kernel has started.
        """
        channel, call, carried = self.channel, self.call, self.carried
        try:
            if carried is not None:
                state, sent = channel.state, found == _HEADER_SENT
                header = state.num_calls, state.run_fingerprint, call.digest, 0
                channel.wire.post(*header, carried, sent=sent)
                found = _HEADER_AWAITED
            if failed is not None:
                raise failed
            if found == _HEADER_AWAITED:
                agreed = channel.wait_header(call, timeout_seconds)
                found = found if agreed else _DIFFERS
            channel.state.last_call = call
        except BaseException as error:
            channel.failures.interrupted(call, error)
            raise
        if found == _DIFFERS:
            channel.failures.settle(call, timeout_seconds, carried)
        return self.finish(one)

    def finish(self, one: Any) -> Any:
        """Make all steps of a call after its header; return the results."""
        channel = self.channel
        if self.carried is not None:
            # All values have arrived with the header: no rank waits for this one.
            one.go_on(0)
            return one.take_results()
        with channel.moving(self.call):
            while one.go_on(channel.state.looks) != _DONE:
                # `wait` raises CollectiveError if the ranks are in different steps.
                channel.wait(channel.steps, self.call)
        return one.take_results()


class KernelSum(Plan):
    """The plan of a sum by the kernel, for replicas that are all on one worker.

    For workers of one replica, ``carried`` has the values of all workers, which are
    sent in the header; one piece contains all arrays. `run` and `repeat` are collective
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
        # Each of three or more ranks adds a segment, unless the call is small.
        scattered = channel.topology.num_replicas > 2 and not choice.small
        algorithm = functools.partial(
            _reduce, codes=codes, scattered=scattered, carried=carried
        )
        super().__init__(request, replace(choice, algorithm=algorithm), channel)
        # Arrays with the right shapes and dtypes, but without memory for each element.
        likes = [np.broadcast_to(np.empty((), d), s) for d, s in self.signatures]
        result_likes = [np.broadcast_to(np.empty((), d), s) for s, d in self.results]
        large = max(like.nbytes for like in result_likes) >= _SMALL_BYTES
        piece_bytes = _piece_bytes(likes, choice.piece_bytes, channel.topology)
        made = channel.kernel, codes, likes, result_likes, piece_bytes
        how = self.divisor, scattered, self.call, self.call.digest
        self._sum = load().Sum(*made, *how, self._allocate if large else None)
        self._waits = _KernelWaits(channel, self.call, carried)

    def keep(self, repeat: Any, request: Any, timeout_seconds: float | None) -> None:
        """Let the kernel make later calls of this kind itself, see `Plan.keep`."""
        channel: Any = self.channel
        op, what, structure = request
        # All forms in which callers pass the operation: "sum", ReduceOp.SUM, "SUM".
        names = sys.intern(op.name.lower()), op, op.name
        wait = functools.partial(self._waits.wait, timeout_seconds)
        leave, listed = channel.failures.leave, structure is not None
        carried = self._waits.carried
        exchange = () if carried is None else carried.exchange
        self._sum.keep(repeat, what, names, listed, wait, leave, exchange)

    def repeat(self, arrays: Any, outs: Any, timeout_seconds: float | None) -> Any:
        """Make the whole call in the kernel if possible, see `Plan.repeat`."""
        channel: Any = self.channel
        if channel.pending:
            # End the started calls first: their data use the same rings.
            channel.pending.drain()
        if not channel.may_repeat():
            return None
        found = self._sum.reduce(arrays, outs)
        if type(found) is int:
            return self._waits.wait(timeout_seconds, self._sum, found)
        return found

    def run(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        """Reduce arrays by the kernel; `repeat` has already ended all started calls."""
        channel: Any = self.channel
        sources, targets = list(arrays), list(results)
        if not self._sum.start(sources, targets):
            # Copy arrays that are not contiguous or not aligned.
            sources = [np.require(a, requirements=["C", "A"]) for a in arrays]
            targets = [np.require(r, requirements=["C", "A", "W"]) for r in results]
            started = self._sum.start(sources, targets)
            assert started
        channel.agree(self.call, timeout_seconds, self._waits.carried)
        self._waits.finish(self._sum)
        for result, target in zip(results, targets, strict=True):
            if target is not result:
                result[...] = target


def _reduce(
    work: Work,
    channel: Channel,
    *,
    codes: bytes,
    scattered: bool,
    carried: SentValues | None,
) -> WaitSteps:
    """Sum by the kernel in separate steps, so that a started call can use it."""
    sources, results = list(work.sources), list(work.results)
    piece_bytes = _piece_bytes(sources, work.piece_bytes, channel.topology)
    made = channel.kernel, codes, sources, results, piece_bytes, work.divisor
    one = load().Sum(*made, scattered, work.call, work.call.digest, None)
    started = one.start(sources, results)
    assert started
    yield HEADER if carried is None else HeaderStep(carried)
    while one.go_on(0) != _DONE:
        yield channel.steps
    one.take_results()
