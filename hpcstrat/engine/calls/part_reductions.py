"""Collective calls that combine parts of arrays by any function of NumPy.

Integrations of libraries such as ``torch.distributed`` use this module. All arrays must
be contiguous and in host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.blocks import MoveBlocks, sent_blocks
from hpcstrat.engine.algorithms.move_plan import plan_scatter
from hpcstrat.engine.algorithms.plan import Kinds
from hpcstrat.engine.algorithms.work import add_in_order, divide, slice_of
from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings, is_half
from hpcstrat.engine.calls.moves import Moves, describe_arrays, flat_view
from hpcstrat.engine.calls.repeated_moves import RepeatedMoves, kinds_of
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.typing import Array

__all__ = ["PartReductions"]

# Limit of the memory into which a rank receives the other ranks' values at a time.
_MOST_RECEIVED_BYTES = 16 << 20


class PartReductions:
    """Calls in which each replica combines one part of the arrays of all replicas.

    All calls are collective over ``topology.replica_comm``, with the errors of `Moves`.
    Values are combined in replica order.
    """

    def __init__(self, collectives: Any) -> None:
        # The `Collectives` of the replicas.
        self.collectives = collectives
        self._moves: Moves = collectives.moves
        self._repeated: RepeatedMoves = collectives.repeated
        self._size, self._rank = collectives.size, collectives.rank

    @collective
    def combine(self, function: np.ufunc, array: Array, what: str) -> None:
        """Combine the arrays of all replicas by a ufunc, in place, on every replica."""
        _check_function(function, array, what)
        parts = self._cut(array)
        own, call = parts[self._rank], describe_arrays(what, array)
        self._scatter(function, parts, own, call)
        self._moves.all_gather_into(own, parts, f"all_gather of {what}")

    @collective
    def reduce_to(
        self,
        function: np.ufunc,
        array: Array,
        root: int,
        what: str,
        *,
        divisor: int = 0,
    ) -> None:
        """Combine the arrays of all replicas by a ufunc, in place, on the root only.

        Divides the result by a ``divisor`` other than 0, in floating point.
        """
        _check_function(function, array, what)
        self._moves.check_root(root)
        if self._size == 1:
            return
        parts = self._cut(array)
        own, text = np.empty_like(parts[self._rank]), f"{what}(root={root})"
        self._scatter(function, parts, own, describe_arrays(text, array), divisor)
        # Other ranks do not send empty parts, which the root does not receive either.
        receives = {r: p for r, p in enumerate(parts) if p.size and self._rank == root}
        sends = {root: own} if own.size else {}
        self._moves.exchange(sends, receives, f"gather of {text}")

    def _cut(self, array: Array) -> list[Array]:
        flat, size = flat_view(array), self._size
        return [flat[slice_of(flat.size, number, size)] for number in range(size)]

    def reduce_scatter(
        self,
        function: np.ufunc,
        parts: Sequence[Array],
        result: Array,
        what: str,
        *,
        divisor: int = 0,
    ) -> None:
        """Combine part ``r`` of all replicas by a ufunc, on replica ``r``.

        The ``parts`` have one dtype, but may have different sizes. ``result`` receives
        this replica's part of the results; it may be the memory of this part itself.
        """
        given = what, (function.__name__, divisor), list(parts), [result]
        self._repeated.call(self._reduce_scatter, *given, function)

    def _reduce_scatter(
        self,
        what: str,
        name: tuple[str, int],
        parts: list[Array],
        outs: list[Array],
        function: np.ufunc,
    ) -> None:
        (_, divisor), [result], channel = name, outs, self.collectives.channel
        _check_function(function, result, what)
        self._moves.check_parts(parts, result)
        flat, flats = flat_view(result), [flat_view(part) for part in parts]
        call = describe_arrays(what, parts[0], flats)
        if channel is not None:
            channel.failures.refuse(call)
        if channel is not None and function is np.add:
            kinds = kinds_of(parts), kinds_of(outs)
            own = divisor, *kinds[0], *kinds[1]
            make = functools.partial(plan_scatter, call, kinds, divisor, channel)
            plan = self._repeated.plan(call, own, make)
            if plan is not None:
                self._repeated.keep(plan, what, name, parts)
                plan.move(parts, outs, self.collectives.timeout_seconds)
                return
        if any(
            np.may_share_memory(flat, part)
            for rank, part in enumerate(flats)
            if rank != self._rank or part.ctypes.data != flat.ctypes.data
        ):
            flats = [part.copy() for part in flats]
        self._scatter(function, flats, flat, call, divisor)

    def _scatter(
        self,
        function: np.ufunc,
        parts: list[Array],
        result: Array,
        call: Call,
        divisor: int = 0,
    ) -> None:
        """Send each part to its replica, which combines the values of all replicas.

        Half-precision numbers are added and multiplied in float32.
        """
        if self._size == 1:
            result[...] = parts[0]
            return
        longest, itemsize = max(part.size for part in parts), result.itemsize
        columns = max(1, _MOST_RECEIVED_BYTES // (self._size * itemsize))
        # Allocate all memory before the header, which reports a lack of memory.
        terms = np.empty((self._size, min(columns, result.size)), result.dtype)
        widens = is_half(result.dtype) and function in (np.add, np.multiply)
        scratch = np.empty(terms.shape[1], np.float32 if widens else result.dtype)
        for start in range(0, max(1, longest), columns):
            piece = slice(start, start + columns)
            pieces, into = [part[piece] for part in parts], result[piece]
            rows = list(terms[:, : into.size])
            self.collectives.call(call.text, self._move, pieces, rows, call)
            _combine(rows, into, function, divisor, scratch[: into.size])

    def _move(self, parts: list[Array], rows: list[Array], call: Call) -> None:
        """Receive the values of all replicas for this replica's part."""
        given, repeated = (call.text, call.digest, parts), self._repeated
        if repeated.repeat(*given, rows, True) is None:

            def plan() -> tuple[MoveBlocks, Kinds]:
                sizes = np.array([part.nbytes for part in parts])
                every = {rank: rank for rank in range(self._size)}
                table = np.broadcast_to(sizes, (self._size, self._size))
                return sent_blocks(table, self._rank, every, every), []

            repeated.make_known(call, parts, rows, plan, given)


def _combine(
    terms: list[Array], total: Array, function: np.ufunc, divisor: int, scratch: Array
) -> None:
    """Combine arrays in their order, in the dtype of ``scratch``; not collective."""
    if scratch.dtype == total.dtype:
        # A ufunc whose output overlaps an input may have other bits.
        add_in_order(terms, total, scratch, function)
        divide(total, divisor)
        return
    call_without_fp_warnings(assign, scratch, ..., terms[0])
    add_in_order([scratch, *terms[1:]], scratch, function=function)
    divide(scratch, divisor)
    call_without_fp_warnings(assign, total, ..., scratch)


def _check_function(function: np.ufunc, array: Array, what: str) -> None:
    """Before the header, raise TypeError if the ufunc does not accept the dtype."""
    nothing = array.reshape(-1)[:0]
    try:
        function(nothing, nothing)
    except TypeError as error:
        raise TypeError(
            f"expected a type for which {function.__name__} is defined in {what}, "
            f"found {array.dtype}; use another reduction or another type"
        ) from error
