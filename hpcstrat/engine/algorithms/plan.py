"""Plans of reductions: a plan is made once for each kind of call, and run many times.

A `Plan` reduces by an algorithm, in one call or step by step. Its subclasses reduce in
fewer steps: `KernelSum` inside a worker, and `HeaderSum` between workers. `OrderPlan`
makes a MAX or MIN by a plan for order keys.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.work import Algorithm, Choice, Work
from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.arrays.order_keys import from_keys, to_keys
from hpcstrat.engine.arrays.packing import Piece, Signature, cut
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array

__all__ = ["OrderPlan", "Plan", "Request", "is_plain"]

# A plan keeps at most this many pieces. Larger calls compute their pieces each time,
# which takes little time compared with the sums.
_MOST_KEPT_PIECES = 4096


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
    ``topology.replica_comm``. ``in_mapped_memory``, if given, wraps the algorithm if
    the caller waits for the end.
    """

    def __init__(
        self,
        request: Request,
        choice: Choice | None,
        channel: Channel | None,
        in_mapped_memory: Callable[[Algorithm], Algorithm] | None = None,
    ) -> None:
        # The call names the algorithm, for timelines.
        self.call = replace(request.call, how="" if choice is None else choice.how)
        self.choice, self.channel = choice, channel
        self.signatures, self.results = request.signatures, request.results
        self.divisor = request.divisor
        self.function = np.add if request.op.adds else np.maximum
        self._allocate = functools.partial(request.allocate, request.results)
        self._in_mapped_memory = in_mapped_memory
        self._pieces: Sequence[Piece] = ()

    @property
    def starts(self) -> bool:
        """True if the reduction can be started now and awaited later."""
        return self.choice is None or self.choice.starts

    def keep(self, repeat: Any, request: Any, timeout_seconds: float | None) -> None:
        """Let the kernel's ``repeat`` make later calls of this kind; here do nothing.

        ``request`` is the operation, the name of the call, and the tree structure of
        the arrays (the structure of a list, or None for a single array).
        """

    def repeat(self, arrays: Any, outs: Any, timeout_seconds: float | None) -> Any:
        """Reduce arrays in fewer steps than `run`, if possible; here return None.

        Returns the results: new arrays, or ``outs``. Returns None without having done
        anything if `run` must reduce these arrays.
        """

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
            algorithm = self.choice.algorithm
            if waits and self._in_mapped_memory is not None:
                algorithm = self._in_mapped_memory(algorithm)
            yield from algorithm(work, self.channel)
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
