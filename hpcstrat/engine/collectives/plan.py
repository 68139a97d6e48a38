"""A plan of one kind of reduction, made once and executed again and again.

A `Plan` reduces by an algorithm, at once or step by step. Its subclasses `KernelSum`,
inside a worker, and `HeaderSum`, between workers, do the same in fewer steps.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings
from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.arrays.packing import Piece, Signature, cut
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.work import Algorithm, Choice, Work
from hpcstrat.engine.typing import Array

__all__ = ["Plan", "Request", "is_plain"]

# Pieces of larger calls are worked out each time: it is the smallest part of the work.
_MOST_KEPT_PIECES = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """The arrays to reduce, and their results; the same on every rank."""

    call: Call
    signatures: tuple[Signature, ...]
    # Shapes and types of the results.
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    # By what to divide the sums; 0 for sums.
    divisor: int
    # Makes the arrays for the results.
    allocate: Callable[..., list[Array]]

    def made(self, how: str) -> Request:
        """Return the same request, whose call says how it is made."""
        return replace(self, call=replace(self.call, how=how))


def is_plain(array: Array) -> bool:
    """Whether algorithms take an array as it is: aligned, in C order, without gaps."""
    flags = array.flags
    return flags.c_contiguous and (is_device(array) or flags.aligned)


class Plan:
    """A reduction of arrays of some kinds by an algorithm.

    ``choice`` is None where nothing moves: of a single replica, whose ``channel`` is
    None, and of arrays without elements. To run it is collective over
    ``topology.replica_comm``. ``in_mapped_memory`` is the algorithm for a call that
    waits, if that may be another one.
    """

    def __init__(
        self,
        request: Request,
        choice: Choice | None,
        channel: Channel | None,
        in_mapped_memory: Callable[[Algorithm], Algorithm] | None = None,
    ) -> None:
        self.call, self.choice, self.channel = request.call, choice, channel
        self.signatures, self.results = request.signatures, request.results
        self.divisor = request.divisor
        self._allocate = functools.partial(request.allocate, request.results)
        self._in_mapped_memory = in_mapped_memory
        self._pieces: Sequence[Piece] = ()

    @property
    def starts(self) -> bool:
        """Whether the reduction can be started, and awaited later."""
        return self.choice is None or self.choice.starts

    def keep(self, repeat: Any, request: Any, timeout_seconds: float | None) -> None:
        """Let ``repeat`` make such calls in the kernel alone, if that serves them.

        ``request`` is the operation, the name of the call, and what holds the arrays: a
        list, or None for a single one.
        """

    def repeat(self, arrays: Any, outs: Any, timeout_seconds: float | None) -> Any:
        """Reduce a list of arrays in fewer steps than `run`, where there are such.

        Into new arrays, or into ``outs``. Returns None, and has done nothing, where
        there are none, or the arrays need more.
        """

    def run(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        """Reduce arrays, in any memory order.

        A result is the memory of its own array, or overlaps with none.
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
        """Do the same step by step; see `hpcstrat.engine.channel.waitable`.

        ``waits`` says whether the call waits for its end, so that nobody writes to the
        arrays meanwhile.
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
            )
            algorithm = self.choice.algorithm
            if waits and self._in_mapped_memory is not None:
                algorithm = self._in_mapped_memory(algorithm)
            yield from algorithm(work, self.channel)
        for result, flat in zip(results, flats, strict=True):
            if not is_plain(result):
                result[...] = flat.reshape(result.shape)

    def with_options(self, **options: Any) -> Plan:
        """Return the same plan, whose algorithm gets more arguments."""
        assert self.choice is not None
        plan = copy.copy(self)
        plan.choice = self.choice.with_options(**options)
        return plan

    def _cut(self, choice: Choice) -> Iterable[Piece]:
        """Return what to reduce, in order."""
        if self._pieces:
            return self._pieces
        pieces = functools.partial(
            cut, self.signatures, bool(self.divisor), choice.piece_bytes
        )
        some = tuple(itertools.islice(pieces(), _MOST_KEPT_PIECES + 1))
        if len(some) <= _MOST_KEPT_PIECES:
            self._pieces = some
            return some
        # Huge arrays are cut anew in each call, which costs little then.
        return pieces()
