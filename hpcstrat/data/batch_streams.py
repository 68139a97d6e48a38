"""Stages without random access that make batches of elements, or split batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data.batched import padded_spec
from hpcstrat.data.batches import batch_length
from hpcstrat.data.elements import (
    ArraySpec,
    CallIterator,
    batched_spec,
    call_with,
    code_words,
    pad_and_stack,
    row_of,
    stack,
)
from hpcstrat.data.rows import UNKNOWN, Stage
from hpcstrat.data.streams import END, Stream
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Tree

__all__ = ["batches", "bucketed", "packed", "padded", "rebatched", "unbatched"]


def _batched(
    elements: Iterator[Tree],
    sizes: Sequence[int],
    drop_remainder: bool,
    collate: Callable[[Sequence[Tree]], Tree] = stack,
) -> Iterator[Tree]:
    """Return an iterator over batches of elements; ``sizes`` are used in turn."""
    turns = itertools.cycle(sizes)
    last: Tree = None

    def step() -> Tree:
        nonlocal last
        size = next(turns)
        rows: list[Tree] = []
        while len(rows) < size:
            # If an element raises an error, the batch's elements before it are lost.
            element = next(elements, END)
            if element is END:
                break
            rows.append(element)
        if not size and last is not None:
            return tree_map(lambda leaf: leaf[:0], stack([last]))
        if not rows or (drop_remainder and len(rows) < size):
            raise StopIteration
        last = rows[-1]
        return collate(rows)

    return CallIterator(step)


def _dropping(drop_remainder: bool) -> str:
    return ", the last only if full" if drop_remainder else ""


def _num_batches(cardinality: int, size: int, drop_remainder: bool) -> int:
    if cardinality < 0:
        return cardinality
    return cardinality // size if drop_remainder else -(-cardinality // size)


def batches(parent: Stage, size: int, drop_remainder: bool) -> Stream:
    return Stream.after(
        parent,
        f"in batches of {size}{_dropping(drop_remainder)}",
        lambda elements, _: _batched(elements, [size], drop_remainder),
        lambda: batched_spec(parent.spec(), size if drop_remainder else None),
        cardinality=_num_batches(parent.cardinality, size, drop_remainder),
        size=size,
    )


def padded(
    parent: Stage, size: int, drop_remainder: bool, shapes: Tree, values: Tree
) -> Stream:

    def collate(rows: Sequence[Tree]) -> Tree:
        return pad_and_stack(rows, shapes, values)

    fixed = size if drop_remainder else None
    return Stream.after(
        parent,
        f"in padded batches of {size}{_dropping(drop_remainder)}",
        lambda elements, _: _batched(elements, [size], drop_remainder, collate),
        lambda: padded_spec(batched_spec(parent.spec(), fixed), shapes),
        cardinality=_num_batches(parent.cardinality, size, drop_remainder),
        size=size,
    )


def _rows(elements: Iterator[Tree]) -> Iterator[Tree]:
    """Return an iterator over the rows of batches."""
    batch: Tree = None
    row = length = 0

    def step() -> Tree:
        nonlocal batch, row, length
        while row == length:
            batch = next(elements)
            length, row = batch_length(batch), 0
        row += 1
        return row_of(batch, row - 1)

    return CallIterator(step)


def unbatched(parent: Stage) -> Stream:

    def spec() -> Tree:
        return tree_map(
            lambda leaf: ArraySpec(leaf.shape and leaf.shape[1:], leaf.dtype),
            parent.spec(),
        )

    return Stream.after(
        parent,
        "unbatched",
        lambda elements, _: _rows(elements),
        spec,
        cardinality=_num_rows(parent),
    )


def _num_rows(parent: Stage) -> int:
    """Return the number of rows of all batches, or UNKNOWN if their lengths differ."""
    if parent.cardinality < 0:
        return parent.cardinality
    try:
        leaf = flatten(parent.spec())[0][0]
    # Ignore the error, because an iteration will raise it again.
    except Exception:
        return UNKNOWN
    if not leaf.shape or leaf.shape[0] is None:
        return UNKNOWN
    return parent.cardinality * int(leaf.shape[0])


def rebatched(parent: Stage, sizes: Sequence[int], drop_remainder: bool) -> Stream:
    size = sizes[0] if len(set(sizes)) == 1 else None

    def leading(length: int | None) -> int | None:
        """Return the new batches' length, given the old one; None means it varies."""
        is_fixed = size and (drop_remainder or (length and length % size == 0))
        return size if is_fixed else None

    def spec() -> Tree:
        return tree_map(
            lambda leaf: ArraySpec(
                leaf.shape and (leading(leaf.shape[0]), *leaf.shape[1:]), leaf.dtype
            ),
            parent.spec(),
        )

    return Stream.after(
        parent,
        f"in batches of {list(sizes)}{_dropping(drop_remainder)}",
        lambda elements, _: _batched(_rows(elements), sizes, drop_remainder),
        spec,
        size=size,
    )


def packed(parent: Stage, length: int, pad: Any) -> Stream:

    def start(elements: Iterator[Tree], _: int) -> Iterator[Tree]:
        # The sequence that did not fit into the previous row.
        left: Tree = None

        def step() -> Tree:
            nonlocal left
            parts, free = [], length
            while True:
                element = next(elements, END) if left is None else left
                left = None
                if element is END:
                    break
                size = _length_of(element)
                if size > length:
                    raise ValueError(
                        f"expected sequences of at most {length} to be packed, found "
                        f"one of {size}; cut it by map, or choose a greater length"
                    )
                if size > free:
                    left = element
                    break
                parts.append(element)
                free -= size
            if not parts:
                raise StopIteration
            return _joined(parts, length, pad)

        return CallIterator(step)

    def spec() -> Tree:
        number = ArraySpec((length,), np.dtype(np.int32))
        values = tree_map(
            lambda leaf: ArraySpec((length, *(leaf.shape or ())[1:]), leaf.dtype),
            parent.spec(),
        )
        return {"positions": number, "segments": number, "values": values}

    return Stream.after(parent, f"packed to {length}", start, spec)


def _length_of(element: Tree) -> int:
    return batch_length(
        element,
        expected="sequences of one length in an element",
        advice="pack before batch()",
    )


def _joined(parts: list[Tree], length: int, pad: Any) -> Tree:
    sizes = [_length_of(part) for part in parts]
    flat = [flatten(part) for part in parts]
    columns = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        whole = np.full((length, *leaves[0].shape[1:]), pad, leaves[0].dtype)
        whole[: sum(sizes)] = np.concatenate(leaves)
        columns.append(whole)
    segments, positions = np.zeros((2, length), np.int32)
    start = 0
    for number, size in enumerate(sizes):
        segments[start : start + size] = number + 1
        positions[start : start + size] = np.arange(size)
        start += size
    values = unflatten(flat[0][1], columns)
    return {"positions": positions, "segments": segments, "values": values}


def bucketed(
    parent: Stage,
    length_of: Callable[..., int],
    boundaries: Sequence[int],
    sizes: Sequence[int],
    *,
    shapes: Tree,
    values: Tree,
    to_boundary: bool,
    no_padding: bool,
    drop_remainder: bool,
) -> Stream:
    if len(sizes) != len(boundaries) + 1 or list(boundaries) != sorted(boundaries):
        raise ValueError(
            "expected increasing bucket_boundaries and one batch size more, found "
            f"{list(boundaries)} and {list(sizes)}; change them"
        )

    def collate(bucket: int, rows: Sequence[Tree]) -> Tree:
        if no_padding:
            return stack(rows)
        if not to_boundary:
            return pad_and_stack(rows, shapes, values)
        if bucket == len(boundaries):
            raise ValueError(
                f"expected elements shorter than {boundaries[-1]} to be padded to a "
                "boundary, found a longer one; filter them out, or add a boundary"
            )
        length = boundaries[bucket] - 1
        lengths = [(length, *np.shape(leaf)[1:]) for leaf in flatten(rows[0])[0]]
        return pad_and_stack(rows, lengths or shapes, values)

    def start(elements: Iterator[Tree], _: int) -> Iterator[Tree]:
        def bucket_of(element: Tree) -> int:
            length = int(call_with(length_of, element))
            return int(np.searchsorted(boundaries, length, side="right"))

        return _bucketed(elements, bucket_of, sizes, collate, drop_remainder)

    def spec() -> Tree:
        unpadded = tree_map(
            lambda leaf: ArraySpec(
                None if leaf.shape is None else (None,) * len(leaf.shape), leaf.dtype
            ),
            parent.spec(),
        )
        return batched_spec(unpadded, None)

    words = f"in buckets of {list(boundaries)} by {code_words(length_of)}"
    words += f", in batches of {list(sizes)}"
    words += _dropping(drop_remainder)
    return Stream.after(parent, words, start, spec)


def _bucketed(
    elements: Iterator[Tree],
    bucket_of: Callable[[Tree], int],
    sizes: Sequence[int],
    collate: Callable[[int, Sequence[Tree]], Tree],
    drop_remainder: bool,
) -> Iterator[Tree]:
    """Return an iterator over batches of full buckets and, at the end, partial ones."""
    waiting: dict[int, list[Tree]] = {}
    is_open = True

    def step() -> Tree:
        nonlocal is_open
        while is_open:
            element = next(elements, END)
            if element is END:
                is_open = False
                break
            bucket = bucket_of(element)
            rows = waiting.setdefault(bucket, [])
            rows.append(element)
            if len(rows) == sizes[bucket]:
                return collate(bucket, waiting.pop(bucket))
        if not waiting or drop_remainder:
            raise StopIteration
        first = min(waiting)
        return collate(first, waiting.pop(first))

    return CallIterator(step)
