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
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.packing import Signature
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.plan import Plan, Request
from hpcstrat.engine.collectives.work import Choice, Work
from hpcstrat.engine.native import load, type_codes
from hpcstrat.engine.observe.timeline import active
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
        self._large = any(
            math.prod(shape) * dtype.itemsize >= _SMALL_BYTES
            for shape, dtype in self.results
        )
        made = self.signatures, [dtype for _, dtype in self.results], self.divisor
        self._sum = _make_sum(*made, choice.piece_bytes, channel, scattered=scattered)
        self._reduce, self._digest = self._sum.reduce, self.call.digest

    def repeat(self, value: Any, out: Any, timeout_seconds: float | None) -> Any:
        """Do as `Plan.repeat`; None also where more than a header is to be done."""
        channel: Any = self.channel
        if (
            channel.failures.broken
            or channel.closed
            or channel.pending
            or channel.notice
            or channel.failures.leaving is not None
            or active.recorder is not None
        ):
            return None
        if out is None and self._large:
            out = self._allocate()
            if type(value) is not list:
                [out] = out
        mark, looks = channel.position.run_fingerprint, channel.waiter.kernel_looks
        channel.num_calls += 1
        try:
            found = self._reduce(value, out, mark, self._digest, looks)
        except MemoryError:
            # Memory for the results is missing: nothing has been announced.
            channel.num_calls -= 1
            raise
        except BaseException as error:
            channel.failures.interrupted(self.call, error)
            raise
        if found is None:
            channel.num_calls -= 1
            return None
        if type(found) is int:
            return self._go_on(found, timeout_seconds)
        channel.last_call = self.call
        return found

    def _go_on(self, found: int, timeout_seconds: float | None) -> Any:
        """Wait for what the kernel has not seen; return the results."""
        channel: Any = self.channel
        try:
            if found == _HEADER_AWAITED and not channel.waiter.wait_header(
                channel.steps, self.call, timeout_seconds
            ):
                found = _DIFFERS
            channel.last_call = self.call
        except BaseException as error:
            channel.failures.interrupted(self.call, error)
            raise
        if found == _DIFFERS:
            channel.failures.settle(self.call, timeout_seconds)
        return self._finish()

    def run(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        """Do as `Plan.run`."""
        channel: Any = self.channel
        if channel.pending:
            # Their headers came first, and their data use the same places.
            channel.pending.drain()
        sources, targets = list(arrays), list(results)
        if not self._sum.start(sources, targets):
            # Some have gaps, or another order.
            sources = [np.require(a, requirements=["C", "A"]) for a in arrays]
            targets = [np.require(r, requirements=["C", "A", "W"]) for r in results]
            started = self._sum.start(sources, targets)
            assert started
        channel.agree(self.call, timeout_seconds)
        self._finish()
        for result, target in zip(results, targets, strict=True):
            if target is not result:
                result[...] = target

    def _finish(self) -> Any:
        """Go on after the header, to the end; return the results."""
        channel, call = self.channel, self.call
        assert channel is not None
        with channel.moving(call):
            while self._sum.go_on(call.digest, channel.waiter.kernel_looks) != _DONE:
                # Raises where ranks differ.
                channel.wait(channel.steps, call)
        return self._sum.take_results()


def _make_sum(
    signatures: Sequence[Signature],
    results: Sequence[np.dtype[Any]],
    divisor: int,
    piece_bytes: int,
    channel: Channel,
    *,
    scattered: bool,
) -> Any:
    """Return the kernel's own object for sums of such arrays.

    ``results`` are the types of their results.
    """
    module, codes = load(), type_codes([d for d, _ in signatures], means=bool(divisor))
    assert module is not None
    # Arrays without memory.
    likes = [np.broadcast_to(np.empty((), d), shape) for d, shape in signatures]
    result_likes = [
        np.broadcast_to(np.empty((), dtype), shape)
        for dtype, (_, shape) in zip(results, signatures, strict=True)
    ]
    made = channel.kernel, codes, likes, result_likes
    return module.Sum(*made, piece_bytes, divisor, scattered)


def _reduce(work: Work, channel: Channel, *, scattered: bool) -> WaitSteps:
    """Do the same in a call that others may come between, as an algorithm."""
    signatures = [(source.dtype, source.shape) for source in work.sources]
    made = signatures, [result.dtype for result in work.results], work.divisor
    one = _make_sum(*made, work.piece_bytes, channel, scattered=scattered)
    started = one.start(list(work.sources), list(work.results))
    assert started
    yield HEADER
    while one.go_on(work.call.digest, 0) != _DONE:
        yield channel.steps
    one.take_results()
