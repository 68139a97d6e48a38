"""Reduction of a worker's replicas by the compiled kernel, in one call of it.

It does what `hpcstrat.engine.collectives.shared_memory` does, in the same order, and so
with the same bits: each rank lays its values out in pieces, and adds those of all
ranks; of a large piece of three and more ranks, each adds a segment, and all copy the
sums out. The kernel itself waits for microseconds only. The channel makes all longer
waits.
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

# The kernel makes smaller results itself; larger ones lie in memory used again.
_SMALL_BYTES = 32 << 10

# Results of the kernel: done; the header or a step has not come; ranks differ in it.
_DONE, _HEADER_AWAITED, _STEP_AWAITED, _DIFFERS, _STEP_DIFFERS = range(5)


def kernel_codes(request: Request, channel: Channel) -> bytes | None:
    """Return the kernel's codes of some arrays' types, the same on every rank.

    None if it cannot sum them.
    """
    if channel.kernel is None:
        return None
    means = bool(request.divisor)
    return type_codes([dtype for dtype, _ in request.signatures], means=means)


class KernelSum(Plan):
    """The sum of some arrays over the ranks of a worker, which are all replicas.

    To run it is collective over ``topology.worker_comm``.
    """

    def __init__(
        self, request: Request, choice: Choice, channel: Channel, codes: bytes
    ) -> None:
        # Each of three and more ranks adds a segment, unless the values are few.
        scattered = channel.topology.num_replicas > 2 and not choice.small
        algorithm = functools.partial(_reduce, codes=codes, scattered=scattered)
        super().__init__(request, replace(choice, algorithm=algorithm), channel)
        # Arrays without memory.
        likes = [np.broadcast_to(np.empty((), d), s) for d, s in self.signatures]
        result_likes = [np.broadcast_to(np.empty((), d), s) for s, d in self.results]
        large = max(like.nbytes for like in result_likes) >= _SMALL_BYTES
        made = channel.kernel, codes, likes, result_likes, choice.piece_bytes
        how = self.divisor, scattered, self.call, self.call.digest
        self._sum = load().Sum(*made, *how, self._allocate if large else None)

    def keep(self, repeat: Any, request: Any, timeout_seconds: float | None) -> None:
        """Do as `Plan.keep`."""
        channel: Any = self.channel
        op, what, structure = request
        # As callers name the operation.
        names = sys.intern(op.name.lower()), op, op.name
        wait = functools.partial(_wait, channel, self.call, timeout_seconds)
        leave, listed = channel.failures.leave, structure is not None
        self._sum.keep(repeat, what, names, listed, wait, leave)

    def repeat(self, arrays: Any, outs: Any, timeout_seconds: float | None) -> Any:
        """Do as `Plan.repeat`."""
        channel: Any = self.channel
        if channel.pending:
            # Their headers came first, and their data use the same places.
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
        """Do as `Plan.run`; started calls have ended in `repeat`."""
        channel: Any = self.channel
        sources, targets = list(arrays), list(results)
        if not self._sum.start(sources, targets):
            # Some have gaps, or another order.
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
    """Wait for what the kernel has not seen in a call; return the results."""
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
    """Go on after the header, to the end; return the results."""
    with channel.moving(call):
        while one.go_on(channel.state.looks) != _DONE:
            # Raises where ranks differ.
            channel.wait(channel.steps, call)
    return one.take_results()


def _reduce(
    work: Work, channel: Channel, *, codes: bytes, scattered: bool
) -> WaitSteps:
    """Do the same in a call that others may come between, as an algorithm."""
    sources, results = list(work.sources), list(work.results)
    made = channel.kernel, codes, sources, results, work.piece_bytes, work.divisor
    one = load().Sum(*made, scattered, work.call, work.call.digest, None)
    started = one.start(sources, results)
    assert started
    yield HEADER
    while one.go_on(0) != _DONE:
        yield channel.steps
    one.take_results()
