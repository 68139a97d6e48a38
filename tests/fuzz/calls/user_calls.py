"""Calls that users make: gathers and sums that return new arrays, objects, barriers."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.fuzz.calls.arrays import (
    NUMBERS,
    TYPES,
    Array,
    Key,
    contents,
    difference,
    formed,
    length,
    numbers,
)
from tests.fuzz.calls.domain import Domain, Failed, Recipe, compare

__all__ = ["USER_CALLS"]


def _spoil(array: Array) -> None:
    """Overwrite an input after its call: other ranks must not need it any more."""
    if array.flags.writeable and array.size:
        array[...] = array.reshape(-1)[0]


def _dimensions(draw: Random, itemsize: int) -> tuple[list[int], int]:
    """Draw a shape of one to three dimensions, and an axis."""
    rest = [draw.randrange(4) for _ in range(draw.choice((0, 0, 1, 2)))]
    axis = draw.randrange(len(rest) + 1)
    shape = [*rest[:axis], 0, *rest[axis:]]
    return shape, axis


class GatherNew(Recipe):
    """Arrays are concatenated along an axis, in new memory."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain = domain
        self.dtypes = [
            style.choice(TYPES) for _ in range(style.choice((1, 1, 1, 2, 3)))
        ]
        if style.random() < 0.2:
            self.dtypes = [np.dtype(style.choice((">i4", ">f8", ">c8", ">U2")))]
        equal, dimensions = style.random() < 0.5, style.random() < 0.6
        self.axis, self.shapes = 0, list[list[tuple[int, ...]]]()
        for dtype in self.dtypes:
            shape, axis = [0], 0
            if dimensions and len(self.dtypes) == 1:
                shape, axis = _dimensions(lengths, dtype.itemsize)
            others = max(math.prod(shape[:axis] + shape[axis + 1 :]), 1)
            count = length(lengths, dtype.itemsize * others)
            shapes = []
            for _ in domain.ranks:
                if not equal:
                    count = length(lengths, dtype.itemsize * others)
                shape[axis] = count
                shapes.append(tuple(shape))
            self.axis = axis
            self.shapes.append(shapes)
        self.as_dict = lengths.random() < 0.5
        # A gather that is started needs equal shapes.
        self.started = style.random() < 0.5 and equal

    def __str__(self) -> str:
        kinds = ", ".join(map(str, self.dtypes))
        how = "started, " * self.started
        return f"gather to new arrays of {kinds}, {how}{self.shapes}, axis {self.axis}"

    def _values(self, key: Key, leaf: int, rank: int) -> Array:
        dtype, shape = self.dtypes[leaf], self.shapes[leaf][rank]
        flat = contents(dtype.newbyteorder("="), math.prod(shape), (*key, leaf, rank))
        return flat.astype(dtype).reshape(shape)

    def go(self, key: Key) -> None:
        domain, memory = self.domain, Random(hash((*key, self.domain.rank)))
        own = [
            formed(memory, self._values(key, leaf, domain.rank))
            for leaf in range(len(self.dtypes))
        ]
        tree: Any = own[0]
        if len(own) > 1:
            tree = dict(zip("abc", own, strict=False)) if self.as_dict else own
        context: Any = hs.get_replica_context() if domain.inside else None
        if self.started and domain.inside:
            started = context.start_all_gather(tree, self.axis)
            domain.pending.append(lambda: self._compare(key, started.wait()))
            return
        gather = context.all_gather if domain.inside else domain.strategy.gather
        found = gather(tree, self.axis)
        for array in own:
            _spoil(array)
        self._compare(key, found)
        for array in own:
            if any(np.may_share_memory(array, other) for other in self._leaves(found)):
                raise Failed("a result shares memory with its input")

    def _leaves(self, found: Any) -> list[Any]:
        if len(self.dtypes) == 1:
            return [found]
        return list(found.values() if self.as_dict else found)

    def _compare(self, key: Key, found: Any) -> None:
        for leaf, array in enumerate(self._leaves(found)):
            every = [self._values(key, leaf, rank) for rank in self.domain.ranks]
            wanted = np.concatenate(every, self.axis)
            wanted = wanted.astype(wanted.dtype.newbyteorder("="))
            compare(array, wanted, f"array {leaf}")
            if not array.flags.c_contiguous or not array.flags.writeable:
                raise Failed(f"array {leaf} has {array.flags}")


class BroadcastNew(Recipe):
    """The root's arrays are copied to new arrays on every rank."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain, self.root = domain, lengths.randrange(domain.size)
        self.dtypes = [style.choice(TYPES) for _ in range(style.randrange(1, 4))]
        self.shapes = [
            () if lengths.random() < 0.1 else (length(lengths, dtype.itemsize),)
            for dtype in self.dtypes
        ]

    def __str__(self) -> str:
        kinds = list(zip(map(str, self.dtypes), self.shapes, strict=True))
        return f"broadcast to new arrays of {kinds} from root {self.root}"

    def go(self, key: Key) -> None:
        domain, memory = self.domain, Random(hash((*key, self.domain.rank)))

        def values(rank: int) -> list[Array]:
            return [
                contents(dtype, math.prod(shape), (*key, rank, leaf)).reshape(shape)
                for leaf, (dtype, shape) in enumerate(
                    zip(self.dtypes, self.shapes, strict=True)
                )
            ]

        own = [formed(memory, array) for array in values(domain.rank)]
        broadcast = domain.strategy.collectives.broadcast
        found = broadcast(own, self.root, "broadcast of new arrays")
        for array in own:
            _spoil(array)
        for leaf, wanted in enumerate(values(self.root)):
            compare(found[leaf], wanted, f"array {leaf}")


class Reduce(Recipe):
    """Arrays are added, or their extremes found, on every rank."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain = domain
        self.op = style.choice(("sum", "sum", "max", "min"))
        types = [
            dtype
            for dtype in NUMBERS
            if self.op == "sum" or (dtype.kind not in "cV" and dtype.char != "g")
        ]
        count = style.choice((1, 1, 1, 2, 5))
        self.dtypes = [style.choice(types) for _ in range(count)]
        self.lengths = [length(lengths, 4 * dtype.itemsize) for dtype in self.dtypes]
        self.memory = style.choice(("new", "out", "in place"))
        self.started = style.random() < 0.3
        self.outs: list[Array] = []

    def __str__(self) -> str:
        kinds = list(zip(map(str, self.dtypes), self.lengths, strict=True))
        how = "started, " * self.started
        return f"{self.op} of {kinds}, {how}{self.memory}"

    def _values(self, key: Key, rank: int) -> list[Array]:
        pairs = zip(self.dtypes, self.lengths, strict=True)
        return [numbers(d, n, (*key, rank, leaf)) for leaf, (d, n) in enumerate(pairs)]

    def _compare(self, key: Key, found: list[Array]) -> None:
        add = {"sum": np.add, "max": np.maximum, "min": np.minimum}[self.op]
        every = [self._values(key, rank) for rank in self.domain.ranks]
        for leaf, terms in enumerate(zip(*every, strict=True)):
            wanted = terms[0].copy()
            for term in terms[1:]:
                wanted = add(wanted, term).astype(wanted.dtype)
            compare(found[leaf], wanted, f"{self.op}, array {leaf}")

    def go(self, key: Key) -> None:
        domain, memory = self.domain, Random(hash((*key, self.domain.rank)))
        own = self._values(key, domain.rank)
        out: list[Array] | None = None
        if self.memory == "in place":
            out = own
        else:
            own = [formed(memory, array) for array in own]
        if self.memory == "out":
            pairs = zip(self.dtypes, self.lengths, strict=True)
            out = [np.zeros(n, dtype) for dtype, n in pairs]
        one = len(own) == 1
        value, target = (own[0], out and out[0]) if one else (own, out)
        if self.started and domain.inside:
            context = hs.get_replica_context()
            started = context.start_all_reduce(self.op, value, out=target)

            def end() -> None:
                found = started.wait()
                self._compare(key, [found] if one else found)

            domain.pending.append(end)
            return
        reduce = domain.strategy.reduce
        if domain.inside:
            found = hs.get_replica_context().all_reduce(self.op, value, out=target)
        else:
            found = reduce(self.op, value, axis=None, out=target)
        if self.memory != "in place":
            for array in own:
                _spoil(array)
        self._compare(key, [found] if one else found)


class Objects(Recipe):
    """Python objects are sent from a root, or gathered."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain = domain
        self.root = lengths.randrange(domain.size) if style.random() < 0.6 else -1
        self.lengths = [length(lengths, 1, 2_000_000) for _ in domain.ranks]

    def __str__(self) -> str:
        where = f"from root {self.root}" if self.root >= 0 else "of all"
        return f"objects {where}, of {self.lengths} bytes"

    def _value(self, key: Key, rank: int) -> Any:
        array = contents(np.dtype("u1"), self.lengths[rank], (*key, rank))
        return {"array": array, "rank": rank, "key": key}

    def go(self, key: Key) -> None:
        domain = self.domain
        own = self._value(key, domain.rank)
        if self.root >= 0:
            found = {self.root: domain.strategy.broadcast_object(own, self.root)}
        else:
            gather = domain.strategy.collectives.all_gather_object
            found = dict(enumerate(gather(own, "objects")))
        for rank, value in found.items():
            wanted = self._value(key, rank)
            array = wanted.pop("array")
            text = difference(value["array"], array)
            if text or {k: v for k, v in value.items() if k != "array"} != wanted:
                raise Failed(f"the object of rank {rank}: {text or value}")


class Barrier(Recipe):
    """All ranks wait for each other."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain = domain

    def __str__(self) -> str:
        return "barrier"

    def go(self, key: Key) -> None:
        self.domain.strategy.barrier()


USER_CALLS: list[type[Any]] = [
    GatherNew,
    GatherNew,
    GatherNew,
    BroadcastNew,
    Reduce,
    Reduce,
    Objects,
    Barrier,
]
"""The kinds of calls, as often as they are drawn."""
