"""Streams of batches: of elements, of the rows of other batches, and their rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from hpcstrat.data.batched import padded_spec
from hpcstrat.data.batches import batch_length
from hpcstrat.data.elements import (
    ArraySpec,
    batched_spec,
    pad_and_stack,
    row_of,
    stack,
)
from hpcstrat.data.rows import UNKNOWN, Stage
from hpcstrat.data.streams import END, Stream
from hpcstrat.engine.tree import flatten, tree_map
from hpcstrat.engine.typing import Tree

__all__ = ["batches", "padded", "rebatched", "unbatched"]


class _Batches(Iterator[Tree]):
    """Batches of successive elements, of sizes that come in turn."""

    def __init__(
        self,
        elements: Iterator[Tree],
        sizes: Sequence[int],
        drop_remainder: bool,
        collate: Callable[[Sequence[Tree]], Tree],
    ) -> None:
        self._elements = elements
        self._sizes = itertools.cycle(sizes)
        self._drop = drop_remainder
        self._collate = collate
        self._last: Tree = None

    def __next__(self) -> Tree:
        size = next(self._sizes)
        rows: list[Tree] = []
        while len(rows) < size:
            # An element that fails takes with it those of its batch that have come.
            element = next(self._elements, END)
            if element is END:
                break
            rows.append(element)
        if not size and self._last is not None:
            return tree_map(lambda leaf: leaf[:0], stack([self._last]))
        if not rows or (self._drop and len(rows) < size):
            raise StopIteration
        self._last = rows[-1]
        return self._collate(rows)


def _num_batches(cardinality: int, size: int, drop_remainder: bool) -> int:
    if cardinality < 0:
        return cardinality
    return cardinality // size if drop_remainder else -(-cardinality // size)


def batches(parent: Stage, size: int, drop_remainder: bool) -> Stream:
    """Return successive elements, stacked."""
    return Stream(
        lambda epoch: _Batches(parent.iterate(epoch), [size], drop_remainder, stack),
        lambda: batched_spec(parent.spec(), size if drop_remainder else None),
        f"{parent.describe()}, in batches of {size}",
        cardinality=_num_batches(parent.cardinality, size, drop_remainder),
        size=size,
    )


def padded(
    parent: Stage, size: int, drop_remainder: bool, shapes: Tree, values: Tree
) -> Stream:
    """Return successive elements, filled up to one shape and stacked."""

    def collate(rows: Sequence[Tree]) -> Tree:
        return pad_and_stack(rows, shapes, values)

    fixed = size if drop_remainder else None
    return Stream(
        lambda epoch: _Batches(parent.iterate(epoch), [size], drop_remainder, collate),
        lambda: padded_spec(batched_spec(parent.spec(), fixed), shapes),
        f"{parent.describe()}, in padded batches of {size}",
        cardinality=_num_batches(parent.cardinality, size, drop_remainder),
        size=size,
    )


class _Rows(Iterator[Tree]):
    """The rows of batches, one by one."""

    def __init__(self, elements: Iterator[Tree]) -> None:
        self._elements = elements
        self._batch: Tree = None
        self._next = self._length = 0

    def __next__(self) -> Tree:
        while self._next == self._length:
            batch = next(self._elements)
            self._length, self._next = batch_length(batch), 0
            self._batch = batch
        self._next += 1
        return row_of(self._batch, self._next - 1)


def unbatched(parent: Stage) -> Stream:
    """Return the rows of all batches."""

    def spec() -> Tree:
        return tree_map(
            lambda leaf: ArraySpec(leaf.shape and leaf.shape[1:], leaf.dtype),
            parent.spec(),
        )

    return Stream(
        lambda epoch: _Rows(parent.iterate(epoch)),
        spec,
        f"{parent.describe()}, unbatched",
        cardinality=_num_rows(parent),
    )


def _num_rows(parent: Stage) -> int:
    """Return the number of rows of batches, where all are known to have as many."""
    if parent.cardinality < 0:
        return parent.cardinality
    try:
        leaf = flatten(parent.spec())[0][0]
    # An error here comes again where the program asks for elements.
    except Exception:
        return UNKNOWN
    if not leaf.shape or leaf.shape[0] is None:
        return UNKNOWN
    return parent.cardinality * int(leaf.shape[0])


def rebatched(parent: Stage, sizes: Sequence[int], drop_remainder: bool) -> Stream:
    """Return all rows in batches of the given sizes, which come in turn."""
    size = sizes[0] if len(set(sizes)) == 1 else None

    def leading(length: int | None) -> int | None:
        """Return the length of all batches, made of batches of a length; or None."""
        is_fixed = size and (drop_remainder or (length and length % size == 0))
        return size if is_fixed else None

    def spec() -> Tree:
        return tree_map(
            lambda leaf: ArraySpec(
                leaf.shape and (leading(leaf.shape[0]), *leaf.shape[1:]), leaf.dtype
            ),
            parent.spec(),
        )

    return Stream(
        lambda epoch: _Batches(
            _Rows(parent.iterate(epoch)), sizes, drop_remainder, stack
        ),
        spec,
        f"{parent.describe()}, in batches of {list(sizes)}",
        size=size,
    )
