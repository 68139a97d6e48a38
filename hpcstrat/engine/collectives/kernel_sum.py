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
from dataclasses import replace
from typing import Any

import numpy as np

from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.plan import Plan, Request
from hpcstrat.engine.collectives.work import Choice, Work
from hpcstrat.engine.native import load, type_codes
from hpcstrat.engine.typing import Array

__all__ = ["KernelSum", "kernel_codes"]

# The kernel allocates results below this size; larger results use recycled memory.
_SMALL_BYTES = 32 << 10

# Return codes of the kernel.
_DONE, _HEADER_AWAITED, _STEP_AWAITED, _DIFFERS, _STEP_DIFFERS = range(5)


def kernel_codes(request: Request, channel: Channel) -> bytes | None:
    """Return the kernel's codes for the arrays' dtypes, the same on every rank.

    Returns None if the kernel cannot sum the arrays, or if there is no kernel.
    """
    if channel.kernel is None:
        return None
    return type_codes([dtype for dtype, _ in request.signatures], request.op.name)


class KernelSum(Plan):
    """The plan of a sum by the kernel, for replicas that are all on one worker.

    `run` and `repeat` are collective over ``topology.worker_comm``.
    """

    def __init__(
        self, request: Request, choice: Choice, channel: Channel, codes: bytes
    ) -> None:
        # Each of three or more ranks adds a segment, unless the call is small.
        scattered = channel.topology.num_replicas > 2 and not choice.small
        algorithm = functools.partial(_reduce, codes=codes, scattered=scattered)
        super().__init__(request, replace(choice, algorithm=algorithm), channel)
        # Arrays with the right shapes and dtypes, but without memory for each element.
        likes = [np.broadcast_to(np.empty((), d), s) for d, s in self.signatures]
        result_likes = [np.broadcast_to(np.empty((), d), s) for s, d in self.results]
        large = max(like.nbytes for like in result_likes) >= _SMALL_BYTES
        made = channel.kernel, codes, likes, result_likes, choice.piece_bytes
        how = self.divisor, scattered, self.call, self.call.digest
        self._sum = load().Sum(*made, *how, self._allocate if large else None)

    def keep(self, repeat: Any, request: Any, timeout_seconds: float | None) -> None:
        """Let the kernel make later calls of this kind itself, see `Plan.keep`."""
        channel: Any = self.channel
        op, what, structure = request
        # All forms in which callers pass the operation: "sum", ReduceOp.SUM, "SUM".
        names = sys.intern(op.name.lower()), op, op.name
        wait = functools.partial(_wait, channel, self.call, timeout_seconds)
        leave, listed = channel.failures.leave, structure is not None
        self._sum.keep(repeat, what, names, listed, wait, leave)

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
            return _wait(channel, self.call, timeout_seconds, self._sum, found)
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
        channel.agree(self.call, timeout_seconds)
        _finish(channel, self.call, self._sum)
        for result, target in zip(results, targets, strict=True):
            if target is not result:
                result[...] = target


def _wait(
    channel: Any, call: Call, timeout_seconds: float | None, one: Any, found: int
) -> Any:
    """Wait for the ranks that the kernel found missing; then return the results."""
    try:
        if found == _HEADER_AWAITED and not channel.wait_header(call, timeout_seconds):
            found = _DIFFERS
        channel.state.last_call = call
    except BaseException as error:
        channel.failures.interrupted(call, error)
        raise
    if found == _DIFFERS:
        channel.failures.settle(call, timeout_seconds)
    return _finish(channel, call, one)


def _finish(channel: Any, call: Call, one: Any) -> Any:
    """Make all steps of a kernel call after its header; return the results."""
    with channel.moving(call):
        while one.go_on(channel.state.looks) != _DONE:
            # `wait` raises CollectiveError if the ranks are in different steps.
            channel.wait(channel.steps, call)
    return one.take_results()


def _reduce(
    work: Work, channel: Channel, *, codes: bytes, scattered: bool
) -> WaitSteps:
    """Sum by the kernel in separate steps, so that a started call can use it."""
    sources, results = list(work.sources), list(work.results)
    made = channel.kernel, codes, sources, results, work.piece_bytes, work.divisor
    one = load().Sum(*made, scattered, work.call, work.call.digest, None)
    started = one.start(sources, results)
    assert started
    yield HEADER
    while one.go_on(0) != _DONE:
        yield channel.steps
    one.take_results()
