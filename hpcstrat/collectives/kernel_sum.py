"""Reduction of a worker's replicas by the compiled kernel, in one call of it.

It does what `hpcstrat.collectives.shared_memory` does, in the same order, and so with
the same bits: each rank lays its values out in pieces, and adds those of all ranks; of
a large piece of three and more ranks, each adds a segment, and all copy the sums out.
The kernel itself waits for microseconds only. The channel makes all longer waits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.arrays.casting import FIRST_FOREIGN_TYPE
from hpcstrat.arrays.packing import Signature, cut, wire_dtype
from hpcstrat.channel.awaited import HEADER, Awaits
from hpcstrat.channel.call import Call
from hpcstrat.channel.channel import Channel
from hpcstrat.collectives.work import Work
from hpcstrat.native import load, type_codes
from hpcstrat.topology.topology import Topology
from hpcstrat.typing import Array

__all__ = ["KernelSum", "reduce_by_kernel", "serves"]

PIECE_BYTES = 128 << 10
"""Most bytes of a piece, where each rank has a core: two fit into a small cache."""

# Larger results lie in memory that is used again.
_LARGEST_NEW_BYTES = 32 << 10

# Whether results may lie over other arrays: they may, they do not, or it is to see.
_ANYWHERE, _APART, _SEE_WHETHER_APART = range(3)

# What the kernel returns: done; the header or a step has not come; ranks differ in it.
_DONE, _HEADER_AWAITED, _STEP_AWAITED, _DIFFERS, _STEP_DIFFERS = range(5)


def serves(dtypes: Sequence[np.dtype[Any]], channel: Channel) -> bool:
    """Whether the kernel can sum arrays of some types; the same on every rank."""
    return channel.kernel is not None and type_codes(dtypes) is not None


def _piece_bytes(most: int, topology: Topology) -> int:
    """Return the size of a piece, where a choice allows ``most``."""
    if topology.worker_comm.size > topology.num_cores:
        # A step costs a turn of each.
        return most
    return min(most, PIECE_BYTES)


def _kernel_sum(
    signatures: Sequence[Signature],
    divisor: int,
    piece_bytes: int,
    channel: Channel,
    scattered: bool,
) -> Any:
    """Return the kernel's own object for sums of such arrays."""
    module = load()
    codes = type_codes([dtype for dtype, _ in signatures])
    counts = [math.prod(shape) for _, shape in signatures]
    assert module is not None
    return module.Sum(channel.kernel, codes, counts, piece_bytes, divisor, scattered)


class KernelSum:
    """The sum of some arrays over the ranks of a worker, which are all replicas.

    To call it is collective over ``topology.worker_comm``. ``scattered`` says that each
    rank adds a segment of a piece, of ``piece_bytes`` at most.
    """

    def __init__(
        self,
        signatures: Sequence[Signature],
        divisor: int,
        piece_bytes: int,
        channel: Channel,
        *,
        scattered: bool,
    ) -> None:
        piece_bytes = _piece_bytes(piece_bytes, channel.topology)
        one = _kernel_sum(signatures, divisor, piece_bytes, channel, scattered)
        # Arrays of other libraries' types show their memory as integers only.
        self._foreign = any(d.num >= FIRST_FOREIGN_TYPE for d, _ in signatures)
        self._holds: Any = getattr(load(), "holds", None)
        self._kinds = tuple(itertools.chain(*signatures))
        kinds = [(_result_dtype(d, bool(divisor)), shape) for d, shape in signatures]
        self._result_kinds = tuple(itertools.chain(*kinds))
        self._new = [(shape, dtype) for dtype, shape in kinds]
        # Whether lists of arrays are to be looked at again and again.
        largest = max(math.prod(shape) * dtype.itemsize for shape, dtype in self._new)
        self.repeats = not self._foreign and largest <= _LARGEST_NEW_BYTES
        self._channel, self._start = channel, one.start
        self._reduce, self._go_on = one.reduce, one.go_on
        pieces = cut(signatures, bool(divisor), piece_bytes)
        # Whether all values are laid out before the first result is written.
        self.whole = len(tuple(itertools.islice(pieces, 2))) == 1
        self.single = len(signatures) == 1 and not self._foreign

    def __call__(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        planned: Any,
        timeout_seconds: float | None,
        separate: bool,
        *,
        flat: Array | None = None,
    ) -> None:
        """Reduce arrays, in any memory order.

        ``separate`` says that no result lies over another array.
        """
        del flat
        call = planned.call
        if self._foreign:
            arrays, results = _as_integers(arrays), _as_integers(results)
        sources, targets = list(arrays), list(results)
        try:
            self._make(sources, targets, separate, call, timeout_seconds)
        except BufferError:
            # Before the header: some have gaps, or another order.
            sources = [np.require(a, requirements=["C", "A"]) for a in arrays]
            targets = [np.require(r, requirements=["C", "A", "W"]) for r in results]
            self._make(sources, targets, separate, call, timeout_seconds)
            for result, target in zip(results, targets, strict=True):
                if target is not result:
                    result[...] = target

    def reduce_list(
        self,
        arrays: list[Any],
        out: list[Any] | None,
        call: Call,
        timeout_seconds: float | None,
    ) -> list[Array] | None:
        """Do the same for arrays of the same kinds, where nothing is in the way.

        Into new arrays, or into ``out``. Returns None, and has done nothing, where the
        arrays are others, where results are large and not given, or would lie over
        other arrays, or where the call is not `Channel.is_plain`.
        """
        plain, ndarray, results = self._channel.is_plain(), np.ndarray, out
        if not plain or not self._holds(arrays, ndarray, self._kinds):
            return None
        if results is None:
            empty = np.empty
            results = [empty(shape, dtype) for shape, dtype in self._new]
        elif not self._holds(results, ndarray, self._result_kinds):
            return None
        near = _APART if out is None else _SEE_WHETHER_APART
        try:
            self._make_plainly(arrays, results, near, call, timeout_seconds)
        except BufferError:
            return None
        return results

    def reduce_one(
        self, array: Array, result: Array, call: Call, timeout_seconds: float | None
    ) -> None:
        """Do the same for a ``single`` array, in a call that `Channel.is_plain`."""
        try:
            self._make_plainly([array], [result], _APART, call, timeout_seconds)
        except BufferError:
            array = np.require(array, requirements=["C", "A"])
            self._make_plainly([array], [result], _APART, call, timeout_seconds)

    def _make(
        self,
        sources: list[Array],
        targets: list[Array],
        separate: bool,
        call: Call,
        timeout_seconds: float | None,
    ) -> None:
        channel = self._channel
        if channel.is_plain():
            self._make_plainly(sources, targets, separate, call, timeout_seconds)
            return
        self._start(sources, targets, separate)
        channel.agree(call, timeout_seconds)
        self._finish(call)

    def _make_plainly(
        self,
        sources: list[Array],
        targets: list[Array],
        separate: int,
        call: Call,
        timeout_seconds: float | None,
    ) -> None:
        channel = self._channel
        mark, looks = channel.position.run_mark, channel.waiter.kernel_looks
        channel.num_calls += 1
        try:
            found = self._reduce(sources, targets, separate, mark, call.digest, looks)
            if found == _HEADER_AWAITED and not channel.arrivals.wait(
                channel.waiter, channel.steps, call, timeout_seconds
            ):
                found = _DIFFERS
            channel.last_call = call
        except BufferError:
            channel.num_calls -= 1
            raise
        except BaseException as error:
            channel.interrupted(call, error)
            raise
        if found == _DIFFERS:
            channel.settle(call, timeout_seconds)
        if found != _DONE:
            self._finish(call)

    def _finish(self, call: Call) -> None:
        """Go on after the header, to the end."""
        channel = self._channel
        with channel.moving(call):
            while self._go_on(call.digest, channel.waiter.kernel_looks) != _DONE:
                # Raises where ranks differ.
                channel.wait(channel.steps, call)


def _result_dtype(dtype: np.dtype[Any], means: bool) -> np.dtype[Any]:
    wire, narrows = wire_dtype(dtype, means)
    return dtype if narrows else wire


def _as_integers(arrays: Sequence[Array]) -> list[Array]:
    """Return views of arrays of other libraries' types, which have two bytes."""
    return [
        array.view(np.uint16) if array.dtype.num >= FIRST_FOREIGN_TYPE else array
        for array in arrays
    ]


def reduce_by_kernel(work: Work, channel: Channel, *, scattered: bool) -> Awaits:
    """Do the same in a call that others may come between, as an algorithm.

    Collective over ``topology.worker_comm``, which is all replicas.
    """
    signatures = [(source.dtype, source.shape) for source in work.sources]
    piece_bytes = _piece_bytes(work.piece_bytes, channel.topology)
    one = _kernel_sum(signatures, work.divisor, piece_bytes, channel, scattered)
    one.start(_as_integers(work.sources), _as_integers(work.results), True)
    yield HEADER
    while one.go_on(work.call.digest, 0) != _DONE:
        yield channel.steps
