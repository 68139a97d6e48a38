"""Calls in which one rank makes a mistake, so that all ranks must raise an error."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.fuzz.calls.arrays import Key, length
from tests.fuzz.calls.domain import Domain, Failed, Recipe

__all__ = ["MISTAKES", "Mistake"]

# A call of this rank, and whether the mistake is one that its rank can see by itself.
_Call = tuple[Callable[[], object], bool]
_DTYPES = [np.dtype(code) for code in ("u1", "i4", "f4", "f8", "c16", "M8[s]")]


class _Arguments:
    """What a call of this rank gets; ``wrong`` is true on the faulty rank only."""

    def __init__(self, domain: Domain, draw: Random, *, wrong: bool) -> None:
        self.domain, self.wrong = domain, wrong
        self.size, self.moves = domain.size, domain.moves
        self.root = draw.randrange(domain.size)
        self.dtype = draw.choice(_DTYPES)
        self.length = length(draw, self.dtype.itemsize, 2_000_000)
        self.which = draw.randrange(6)
        self.number = draw.randrange(domain.size)

    def other_length(self) -> int:
        return self.length + self.wrong * (1 + self.which)

    def other_dtype(self) -> np.dtype[Any]:
        kinds = [dtype for dtype in _DTYPES if dtype != self.dtype]
        return kinds[self.which % len(kinds)] if self.wrong else self.dtype

    def other_root(self) -> int:
        return (self.root + self.wrong) % self.size

    def varied(self) -> tuple[int, np.dtype[Any], int]:
        """Return length, dtype and root, of which one is wrong on the faulty rank."""
        count, dtype, root = self.length, self.dtype, self.root
        if self.which < 2:
            count = self.other_length()
        elif self.which < 4:
            dtype = self.other_dtype()
        else:
            root = self.other_root()
        return count, dtype, root

    def parts(self, count: int, dtype: Any) -> list[Any]:
        return [np.zeros(count, dtype) for _ in range(self.size)]


def _broadcast(a: _Arguments) -> _Call:
    count, dtype, root = a.varied()
    array = np.zeros(count, dtype)
    return lambda: a.moves.broadcast_into(array, root, "broadcast"), False


def _gather(a: _Arguments) -> _Call:
    count, dtype, root = a.varied()
    own, parts = np.zeros(count, dtype), a.parts(count, dtype)
    return lambda: a.moves.gather_into(own, parts, root, "gather"), False


def _scatter(a: _Arguments) -> _Call:
    count, dtype, root = a.varied()
    own, parts = np.zeros(count, dtype), a.parts(count, dtype)
    return lambda: a.moves.scatter_into(parts, own, root, "scatter"), False


def _all_gather(a: _Arguments) -> _Call:
    parts = a.parts(a.length, a.other_dtype() if a.which < 2 else a.dtype)
    if a.which >= 2 and a.wrong:
        # This rank expects another length of a part, perhaps of its own one.
        parts[a.number] = np.zeros(a.other_length(), a.dtype)
    own = np.zeros_like(parts[a.domain.rank])
    return lambda: a.moves.all_gather_into(own, parts, "all_gather"), False


def _all_to_all(a: _Arguments) -> _Call:
    sends = a.parts(a.length, a.other_dtype() if a.which < 2 else a.dtype)
    receives = a.parts(a.length, sends[0].dtype)
    if a.which >= 2 and a.wrong:
        pick = sends if a.which < 4 else receives
        pick[a.number] = np.zeros(a.other_length(), a.dtype)
    return lambda: a.moves.all_to_all(sends, receives, "all_to_all"), False


def _exchange(a: _Arguments) -> _Call:
    me, size, moves = a.domain.rank, a.size, a.moves
    # Neighbors that send no elements need not be named.
    a.length = max(a.length, 1)
    sends = {(me + 1) % size: np.zeros(a.length, a.dtype)}
    receives = {(me - 1) % size: np.zeros(a.length, a.dtype)}
    if a.wrong:
        pick = sends if a.which % 2 else receives
        if a.which < 2:
            pick[next(iter(pick))] = np.zeros(a.other_length(), a.dtype)
        elif a.which < 4:
            # The rank names no neighbor.
            pick.clear()
        else:
            sends, receives = (
                {rank: np.zeros(a.length, a.other_dtype()) for rank in each}
                for each in (sends, receives)
            )
    return lambda: moves.exchange(sends, receives, "exchange"), False


def _reduce_scatter(a: _Arguments) -> _Call:
    count = a.other_length() if a.which < 3 else a.length
    dtype = np.dtype("f4" if a.which >= 3 and a.wrong else "f8")
    parts = a.parts(count, dtype)
    result = np.zeros(count, dtype)
    call = a.moves.collectives.parts.reduce_scatter
    return lambda: call(np.add, parts, result, "reduce_scatter"), False


def _combine(a: _Arguments) -> _Call:
    array = np.zeros(a.other_length(), "f4")
    if a.which < 3:
        return lambda: a.moves.collectives.parts.combine(
            np.add, array, "combine"
        ), False
    call = a.moves.collectives.parts.reduce_to
    return lambda: call(np.add, array, a.root, "reduce_to"), False


def _halo(a: _Arguments) -> _Call:
    shape, width = (a.length, 3), 1
    if a.which < 2:
        shape = (a.length, 3 + a.wrong)
    elif a.which < 4:
        width += a.wrong
    dtype = a.other_dtype() if a.which >= 4 else a.dtype
    fields, value = a.domain.strategy.collectives.fields, np.zeros(shape, dtype)
    if a.which % 2:
        return lambda: fields.halo(value, 0, width), False
    return lambda: fields.halo(value, axis=0, width=(width, 0)), False


def _gather_new(a: _Arguments) -> _Call:
    shape: tuple[int, ...] = (a.length, 3)
    dtype, axis = a.dtype, 0
    if a.which < 2:
        shape = (a.length, 3 + a.wrong)
    elif a.which < 4:
        dtype = a.other_dtype()
    elif a.which == 4:
        axis = int(a.wrong)
    else:
        shape = (a.length, 3, *[1] * a.wrong)
    value = np.zeros(shape, dtype)
    if a.domain.inside:
        gather = hs.get_replica_context().all_gather
        return lambda: gather(value, axis), False
    return lambda: a.domain.strategy.gather(value, axis), False


def _start_gather(a: _Arguments) -> _Call:
    value = np.zeros(a.other_length() if a.which < 4 else a.length, a.dtype)
    if a.which >= 4:
        value = value.astype(a.other_dtype())
    if not a.domain.inside:
        return _gather_new(a)
    start = hs.get_replica_context().start_all_gather
    return lambda: start(value, 0).wait(), False


def _broadcast_new(a: _Arguments) -> _Call:
    count, dtype, root = a.varied()
    broadcast, tree = a.domain.strategy.collectives.broadcast, [np.zeros(count, dtype)]
    return lambda: broadcast(tree, root, "broadcast"), False


def _object(a: _Arguments) -> _Call:
    root, strategy = a.other_root(), a.domain.strategy
    return lambda: strategy.broadcast_object(a.length, root), False


def _reduce(a: _Arguments) -> _Call:
    dtype = "f4" if a.which < 3 and a.wrong else "f8"
    count = a.length if a.which < 3 else a.other_length()
    value = np.zeros(count, dtype)
    if a.domain.inside:
        reduce = hs.get_replica_context().all_reduce
        return lambda: reduce("sum", value), False
    return lambda: a.domain.strategy.reduce("sum", value, axis=None), False


def _other_call(a: _Arguments) -> _Call:
    if a.wrong:
        return a.domain.strategy.barrier, False
    return [_broadcast, _all_gather, _gather_new, _reduce, _all_to_all, _gather][
        a.which
    ](a)


def _bad_argument(a: _Arguments) -> _Call:
    """The rank's arguments are wrong by themselves: a ValueError, before the call."""
    moves, array = a.moves, np.zeros(a.length, a.dtype)
    parts, root = a.parts(a.length, a.dtype), a.root
    if a.wrong:
        root = a.size if a.which % 2 else -1
        if a.which >= 3:
            parts.append(array.copy())
        elif a.which == 2:
            array = np.zeros((4, 3), a.dtype).T
    if a.which == 2:
        root = a.root
    calls: list[Callable[[], object]] = [
        lambda: moves.broadcast_into(array, root, "broadcast"),
        lambda: moves.gather_into(array, parts, root, "gather"),
        lambda: moves.broadcast_into(array, root, "broadcast"),
        lambda: moves.all_gather_into(array, parts, "all_gather"),
        lambda: moves.all_to_all(parts, a.parts(a.length, a.dtype), "all_to_all"),
        lambda: moves.collectives.parts.reduce_scatter(
            np.add, [part.view("u1") for part in parts], array.view("u1"), "scatter"
        ),
    ]
    return calls[a.which], True


MISTAKES: list[Callable[[_Arguments], _Call]] = [
    _broadcast,
    _gather,
    _scatter,
    _all_gather,
    _all_to_all,
    _exchange,
    _reduce_scatter,
    _combine,
    _start_gather,
    _halo,
    _gather_new,
    _broadcast_new,
    _object,
    _reduce,
    _other_call,
    _bad_argument,
]


class Mistake(Recipe):
    """A call with a mistake of one rank."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain = domain
        self.kind = style.choice(MISTAKES)
        self.faulty = lengths.randrange(domain.size)
        self.seed = lengths.getrandbits(40)

    def _arguments(self) -> _Arguments:
        wrong = self.domain.rank == self.faulty
        return _Arguments(self.domain, Random(self.seed), wrong=wrong)

    def __str__(self) -> str:
        a = self._arguments()
        return (
            f"mistake of rank {self.faulty} in {self.kind.__name__.strip('_')}: "
            f"{a.dtype}[{a.length}], root {a.root}, which={a.which}, number={a.number}"
        )

    def go(self, key: Key) -> None:
        domain = self.domain
        if domain.size == 1 and self.kind is not _bad_argument:
            return
        call, alone = self.kind(self._arguments())
        try:
            call()
        except Exception as error:
            self._require(error, alone=alone)
        else:
            raise Failed("expected an error on every rank, found none")

    def _require(self, error: Exception, *, alone: bool) -> None:
        """Raise Failed if the error is not one that the mistake must cause here."""
        kinds: tuple[type[Exception], ...] = (hs.CollectiveError,)
        if self.kind in (_all_to_all, _exchange):
            kinds = (hs.CollectiveError, ValueError)
        if alone:
            own = self.domain.rank == self.faulty
            kinds = (ValueError,) if own else (hs.ReplicaError,)
            if own and isinstance(error, hs.CollectiveError):
                raise Failed(f"the faulty rank raised {error!r}") from error
        if not isinstance(error, kinds):
            raise Failed(f"expected one of {kinds}, found {error!r}") from error
