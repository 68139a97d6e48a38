"""Reduction of a worker's replicas by the compiled kernel, in one call of it.

It does what `hpcstrat.engine.collectives.shared_memory` does, in the same order, and so
with the same bits: each rank lays its values out in pieces, and adds those of all
ranks; of a large piece of three and more ranks, each adds a segment, and all copy the
sums out. The kernel itself waits for microseconds only. The channel makes all longer
waits.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.packing import Signature
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.plan import Plan, Request
from hpcstrat.engine.collectives.work import Choice, Work
from hpcstrat.engine.native import load, type_codes
from hpcstrat.engine.typing import Array

__all__ = ["KernelSum", "serves"]

# The kernel makes smaller results itself; larger ones lie in memory used again.
_SMALL_BYTES = 32 << 10

# Results of the kernel: done; the header or a step has not come; ranks differ in it.
_DONE, _HEADER_AWAITED, _STEP_AWAITED, _DIFFERS, _STEP_DIFFERS = range(5)


def serves(dtypes: Sequence[np.dtype[Any]], channel: Channel) -> bool:
    """Whether the kernel can sum arrays of some types; the same on every rank."""
    return channel.kernel is not None and type_codes(dtypes, means=False) is not None


class KernelSum(Plan):
    """The sum of some arrays over the ranks of a worker, which are all replicas.

    To run it is collective over ``topology.worker_comm``.
    """

    def __init__(self, request: Request, choice: Choice, channel: Channel) -> None:
        # Each of three and more ranks adds a segment, unless the values are few.
        scattered = channel.topology.num_replicas > 2 and not choice.small
        algorithm = functools.partial(_reduce, scattered=scattered)
        super().__init__(request, choice.replaced(algorithm), channel)
        large = any(
            math.prod(shape) * dtype.itemsize >= _SMALL_BYTES
            for shape, dtype in self.results
        )
        self._sum = _make_sum(
            self.signatures,
            [dtype for _, dtype in self.results],
            self.divisor,
            choice.piece_bytes,
            channel,
            call=self.call,
            scattered=scattered,
            allocate=self._allocate if large else None,
        )

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


def _make_sum(
    signatures: Sequence[Signature],
    results: Sequence[np.dtype[Any]],
    divisor: int,
    piece_bytes: int,
    channel: Channel,
    *,
    call: Call,
    scattered: bool,
    allocate: Callable[[], list[Array]] | None = None,
) -> Any:
    """Return the kernel's own object for sums of such arrays.

    ``results`` are the types of their results, which ``allocate`` makes, or the kernel.
    """
    module, codes = load(), type_codes([d for d, _ in signatures], means=bool(divisor))
    assert module is not None
    # Arrays without memory.
    likes = [np.broadcast_to(np.empty((), d), shape) for d, shape in signatures]
    result_likes = [
        np.broadcast_to(np.empty((), dtype), shape)
        for dtype, (_, shape) in zip(results, signatures, strict=True)
    ]
    made = channel.kernel, codes, likes, result_likes, piece_bytes, divisor, scattered
    return module.Sum(*made, call, call.digest, allocate)


def _reduce(work: Work, channel: Channel, *, scattered: bool) -> WaitSteps:
    """Do the same in a call that others may come between, as an algorithm."""
    signatures = [(source.dtype, source.shape) for source in work.sources]
    made = signatures, [result.dtype for result in work.results], work.divisor
    one = _make_sum(
        *made, work.piece_bytes, channel, call=work.call, scattered=scattered
    )
    started = one.start(list(work.sources), list(work.results))
    assert started
    yield HEADER
    while one.go_on(0) != _DONE:
        yield channel.steps
    one.take_results()
