"""Calls of `Moves`, which fill arrays that exist, with their results by NumPy."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.calls.arrays import (
    NUMBERS,
    TYPES,
    Array,
    Key,
    clear,
    contents,
    empty,
    length,
    numbers,
    partition,
    shape_of,
    window,
)
from tests.fuzz.calls.domain import Domain, Failed, Recipe, compare
from tests.fuzz.calls.fields import FIELDS

__all__ = ["MOVES", "AllGather", "Gather"]


def _shapes(
    domain: Domain, style: Random, lengths: Random, itemsize: int
) -> list[tuple[int, ...]]:
    """Draw a shape for each rank: equal ones, or flat ones of different lengths."""
    if style.random() < 0.5:
        shape = shape_of(lengths, length(lengths, itemsize))
        return [shape] * domain.size
    if lengths.random() < 0.2:
        # A single rank has elements.
        full = lengths.randrange(domain.size)
        count = length(lengths, itemsize)
        return [(count if rank == full else 0,) for rank in domain.ranks]
    return [(length(lengths, itemsize),) for _ in domain.ranks]


def _memory(domain: Domain, shared: Random) -> Random:
    """Return this rank's own generator, for the memory of its arrays."""
    return Random(hash((shared.getrandbits(40), domain.rank)))


def _own(
    draw: Random, whole: Array | None, parts: list[Array] | None, part: Array
) -> Array:
    """Return memory for an argument: the part itself, in other parts, or elsewhere."""
    kind = draw.random()
    if parts is not None and kind < 0.25:
        return part
    if whole is not None and parts is not None and kind < 0.4:
        return window(draw, whole, part.shape)
    return empty(draw, part.dtype, part.shape)


def _scribble(own: Array, *results: Array) -> None:
    """Overwrite an input that is not a result: other ranks must not need it any more.

    Ranks do this before they compare their results, so that a rank which still reads
    another rank's input finds wrong values there.
    """
    if not any(np.may_share_memory(own, array) for array in results):
        own.reshape(-1).view(np.uint8)[...] = 1


def _require_kept(key: Key, inputs: list[tuple[Array, Array]]) -> None:
    """Compare inputs with their values before the call, for a third of the keys.

    A comparison takes time, after which another rank may have read the inputs anyway.
    """
    if key[-1] % 3 == 0:
        for array, before in inputs:
            compare(array.reshape(-1), before, "an input after the call")


class AllGather(Recipe):
    """Each rank's array becomes a part on every rank."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain, dtype = domain, style.choice(TYPES)
        self.shapes = _shapes(domain, style, lengths, dtype.itemsize)
        memory = _memory(domain, lengths)
        self.whole, self.parts = partition(memory, dtype, self.shapes)
        self.own = _own(memory, self.whole, self.parts, self.parts[domain.rank])
        self.dtype = dtype

    def __str__(self) -> str:
        return f"all_gather of {self.dtype}, shapes {self.shapes}"

    def go(self, key: Key) -> None:
        every = [
            contents(self.dtype, math.prod(shape), (*key, rank))
            for rank, shape in enumerate(self.shapes)
        ]
        for part in self.parts:
            clear(part)
        self.own.reshape(-1)[...] = every[self.domain.rank]
        moves = self.domain.moves
        moves.all_gather_into(self.own, self.parts, "all_gather")
        if not any(np.may_share_memory(self.own, part) for part in self.parts):
            _require_kept(key, [(self.own, every[self.domain.rank])])
        _scribble(self.own, *self.parts)
        for rank, part in enumerate(self.parts):
            compare(part.reshape(-1), every[rank], f"part {rank}")


class Gather(Recipe):
    """Each rank's array becomes a part on the root."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain, self.dtype = domain, style.choice(TYPES)
        self.root = lengths.randrange(domain.size)
        self.shape = shape_of(lengths, length(lengths, self.dtype.itemsize))
        shapes, memory = [self.shape] * domain.size, _memory(domain, lengths)
        whole, self.parts = partition(memory, self.dtype, shapes)
        on_root = self.parts if domain.rank == self.root else None
        self.own = _own(memory, whole, on_root, self.parts[domain.rank])
        # The parts of other ranks are not used, if they pass some.
        self.passed = self.parts if memory.random() < 0.3 else on_root

    def __str__(self) -> str:
        return f"gather of {self.dtype}{self.shape} to root {self.root}"

    def go(self, key: Key) -> None:
        count, domain = math.prod(self.shape), self.domain
        every = [contents(self.dtype, count, (*key, rank)) for rank in domain.ranks]
        for part in self.parts:
            clear(part)
        self.own.reshape(-1)[...] = every[domain.rank]
        domain.moves.gather_into(self.own, self.passed, self.root, "gather")
        if not any(np.may_share_memory(self.own, part) for part in self.parts):
            _require_kept(key, [(self.own, every[domain.rank])])
        _scribble(self.own, *self.parts)
        for rank, part in enumerate(self.parts):
            wanted = every[rank]
            if domain.rank != self.root:
                wanted = np.zeros(count, self.dtype)
            compare(part.reshape(-1), wanted, f"part {rank}")


class Scatter(Recipe):
    """Each part of the root becomes a rank's array."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain, self.dtype = domain, style.choice(TYPES)
        self.root = lengths.randrange(domain.size)
        self.shape = shape_of(lengths, length(lengths, self.dtype.itemsize))
        shapes, memory = [self.shape] * domain.size, _memory(domain, lengths)
        whole, self.parts = partition(memory, self.dtype, shapes)
        on_root = self.parts if domain.rank == self.root else None
        self.result = _own(memory, whole, on_root, self.parts[domain.rank])
        self.passed = self.parts if memory.random() < 0.3 else on_root

    def __str__(self) -> str:
        return f"scatter of {self.dtype}{self.shape} from root {self.root}"

    def go(self, key: Key) -> None:
        count, domain = math.prod(self.shape), self.domain
        clear(self.result)
        for rank, part in enumerate(self.parts):
            part.reshape(-1)[...] = contents(self.dtype, count, (*key, rank))
        domain.moves.scatter_into(self.passed, self.result, self.root, "scatter")
        for part in self.parts:
            _scribble(part, self.result)
        wanted = contents(self.dtype, count, (*key, domain.rank))
        compare(self.result.reshape(-1), wanted, "the result")


class Broadcast(Recipe):
    """The root's values become those of every rank."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain, self.dtype = domain, style.choice(TYPES)
        self.root = lengths.randrange(domain.size)
        self.shape = shape_of(lengths, length(lengths, self.dtype.itemsize))
        self.array = empty(_memory(domain, lengths), self.dtype, self.shape)

    def __str__(self) -> str:
        return f"broadcast of {self.dtype}{self.shape} from root {self.root}"

    def go(self, key: Key) -> None:
        domain, count = self.domain, math.prod(self.shape)
        flat = self.array.reshape(-1)
        flat[...] = contents(self.dtype, count, (*key, domain.rank))
        domain.moves.broadcast_into(self.array, self.root, "broadcast")
        wanted = contents(self.dtype, count, (*key, self.root))
        if domain.rank == self.root and key[-1] % 3:
            _scribble(self.array)
            return
        compare(flat, wanted, "the array")


class _Pairs:
    """Arrays that pairs of ranks send each other; ``counts[i][j]`` from i to j."""

    def __init__(
        self, domain: Domain, dtype: np.dtype[Any], counts: Any, draw: Random
    ) -> None:
        self.domain, self.dtype, self.counts = domain, dtype, counts
        me = domain.rank
        to = [rank for rank in domain.ranks if counts[me][rank] >= 0]
        of = [rank for rank in domain.ranks if counts[rank][me] >= 0]
        shapes = [(counts[me][rank],) for rank in to]
        sent, sends = partition(draw, dtype, shapes)
        self.sends = dict(zip(to, sends, strict=True))
        shapes = [(counts[rank][me],) for rank in of]
        _, receives = partition(draw, dtype, shapes)
        self.receives = dict(zip(of, receives, strict=True))
        form = draw.random()
        if form < 0.1 and all(counts[me][r] == counts[r][me] for r in domain.ranks):
            # Each array is received into the memory of the one that is sent.
            self.receives = dict(self.sends)
        elif form < 0.2 and sent is not None:
            # Some arrays are received into memory from which others are sent.
            for rank in of:
                apart = [a for r, a in self.receives.items() if r != rank]
                if self.receives[rank].size > sent.size:
                    continue
                there = window(draw, sent, self.receives[rank].shape)
                if not any(np.may_share_memory(there, other) for other in apart):
                    self.receives[rank] = there

    def fill(self, key: Key) -> None:
        for array in self.receives.values():
            clear(array)
        for rank, array in self.sends.items():
            array[...] = contents(
                self.dtype, array.size, (*key, self.domain.rank, rank)
            )

    def compare(self, key: Key) -> None:
        me, inputs = self.domain.rank, []
        for rank, array in self.sends.items():
            if not any(np.may_share_memory(array, r) for r in self.receives.values()):
                before = contents(self.dtype, array.size, (*key, me, rank))
                inputs.append((array, before))
        _require_kept(key, inputs)
        for array, _ in inputs:
            _scribble(array)
        for rank, array in self.receives.items():
            wanted = contents(self.dtype, array.size, (*key, rank, me))
            compare(array, wanted, f"the array from {rank}")


class AllToAll(Recipe):
    """Each rank sends an array to each rank."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.dtype, size = style.choice(TYPES), domain.size
        itemsize = self.dtype.itemsize * size
        count = length(lengths, itemsize)
        counts = [[count] * size for _ in domain.ranks]
        if style.random() < 0.5:
            counts = [[length(lengths, itemsize) for _ in row] for row in counts]
        self.pairs = _Pairs(domain, self.dtype, counts, _memory(domain, lengths))

    def __str__(self) -> str:
        return f"all_to_all of {self.dtype}, {self.pairs.counts}"

    def go(self, key: Key) -> None:
        pairs = self.pairs
        pairs.fill(key)
        sends, receives = list(pairs.sends.values()), list(pairs.receives.values())
        pairs.domain.moves.all_to_all(sends, receives, "all_to_all")
        pairs.compare(key)


class Exchange(Recipe):
    """Each rank sends arrays to some ranks, and receives arrays from some ranks."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.dtype, size = style.choice(TYPES), domain.size
        ring = style.random() < 0.4
        share, same = style.random(), style.random() < 0.5
        itemsize = self.dtype.itemsize * max(size - 1, 1)
        common = length(lengths, itemsize)
        counts = [[-1] * size for _ in domain.ranks]
        for i in domain.ranks:
            for j in domain.ranks:
                near = (
                    (i - j) % size in (1, size - 1) if ring else style.random() < share
                )
                if i != j and near:
                    counts[i][j] = common if same else length(lengths, itemsize)
        memory = _memory(domain, lengths)
        self.pairs = _Pairs(domain, self.dtype, counts, memory)
        self.reversed = memory.random() < 0.5

    def __str__(self) -> str:
        return f"exchange of {self.dtype}, {self.pairs.counts}"

    def go(self, key: Key) -> None:
        pairs, moves = self.pairs, self.pairs.domain.moves
        pairs.fill(key)
        sends, receives = (
            dict(sorted(arrays.items(), reverse=self.reversed))
            for arrays in (pairs.sends, pairs.receives)
        )
        moves.exchange(sends, receives, "exchange")
        pairs.compare(key)


class _Combining:
    """A function of numbers, and a divisor."""

    def __init__(self, style: Random, size: int, *, divides: bool) -> None:
        self.dtype = style.choice(NUMBERS)
        choices = [np.add, np.add, np.multiply]
        if self.dtype.kind != "c":
            choices += [np.maximum, np.minimum]
        self.function = style.choice(choices)
        self.divisor = 0
        if divides and self.dtype.kind in "fcV" and self.function is np.add:
            self.divisor = style.choice((0, size))

    def __str__(self) -> str:
        by = f", divided by {self.divisor}" if self.divisor else ""
        return f"{self.function.__name__} of {self.dtype}{by}"

    def require(self, found: Array, terms: list[Array], what: str) -> None:
        """Compare with the result of the function; only a quotient may be rounded."""
        wanted = terms[0].copy()
        for term in terms[1:]:
            wanted = self.function(wanted, term)
        wanted = wanted.astype(self.dtype)
        if not self.divisor:
            compare(found, wanted, what)
            return
        kind = np.clongdouble if self.dtype.kind == "c" else np.longdouble
        small = 1e-2 if self.dtype.itemsize == 2 else 1e-5
        exact = wanted.astype(kind) / self.divisor
        if found.dtype != self.dtype or not np.allclose(
            found.astype(kind), exact, small
        ):
            raise Failed(f"{what}: {found[:5]} ... instead of {exact[:5]} ...")


class ReduceScatter(Recipe):
    """Part r of all ranks is combined on rank r."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain = domain
        self.how = _Combining(style, domain.size, divides=True)
        itemsize = self.how.dtype.itemsize * domain.size
        self.shapes = _shapes(domain, style, lengths, itemsize)
        memory = _memory(domain, lengths)
        whole, self.parts = partition(memory, self.how.dtype, self.shapes)
        self.result = _own(memory, whole, self.parts, self.parts[domain.rank])

    def __str__(self) -> str:
        return f"reduce_scatter, {self.how}, shapes {self.shapes}"

    def go(self, key: Key) -> None:
        domain, dtype = self.domain, self.how.dtype
        clear(self.result)
        inputs = []
        for rank, part in enumerate(self.parts):
            values = numbers(dtype, part.size, (*key, domain.rank, rank))
            part.reshape(-1)[...] = values
            inputs.append((part, values))
        domain.moves.collectives.parts.reduce_scatter(
            self.how.function,
            self.parts,
            self.result,
            "reduce_scatter",
            divisor=self.how.divisor,
        )
        if not any(np.may_share_memory(self.result, part) for part in self.parts):
            _require_kept(key, inputs)
        for part in self.parts:
            _scribble(part, self.result)
        count = self.result.size
        terms = [
            numbers(dtype, count, (*key, rank, domain.rank)) for rank in domain.ranks
        ]
        self.how.require(self.result.reshape(-1), terms, "the result")


class Combine(Recipe):
    """The arrays of all ranks are combined on every rank, or on the root."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain = domain
        self.root = lengths.randrange(domain.size) if style.random() < 0.5 else -1
        self.how = _Combining(style, domain.size, divides=self.root >= 0)
        dtype = self.how.dtype
        self.shape = shape_of(lengths, length(lengths, dtype.itemsize))
        self.array = empty(_memory(domain, lengths), dtype, self.shape)

    def __str__(self) -> str:
        where = f"to root {self.root}" if self.root >= 0 else "on all"
        return f"combine {where}, {self.how}, shape {self.shape}"

    def go(self, key: Key) -> None:
        domain, how, count = self.domain, self.how, math.prod(self.shape)
        terms = [numbers(how.dtype, count, (*key, rank)) for rank in domain.ranks]
        flat = self.array.reshape(-1)
        flat[...] = terms[domain.rank]
        if self.root < 0:
            domain.moves.collectives.parts.combine(how.function, self.array, "combine")
            how.require(flat, terms, "the array")
            return
        domain.moves.collectives.parts.reduce_to(
            how.function, self.array, self.root, "reduce_to", divisor=how.divisor
        )
        if domain.rank == self.root:
            how.require(flat, terms, "the root's array")
        else:
            compare(flat, terms[domain.rank], "the array of another rank")
            _scribble(self.array)


MOVES: list[type[Any]] = [
    AllGather,
    Gather,
    Scatter,
    Broadcast,
    AllToAll,
    Exchange,
    ReduceScatter,
    Combine,
    *FIELDS,
]
"""The kinds of calls of `Moves`, and of calls like these."""
