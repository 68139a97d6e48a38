"""Batches of sequences of similar length, and rows of several sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data.batches import batch_length
from hpcstrat.data.elements import ArraySpec, batched_spec, call_with
from hpcstrat.data.rows import Stage
from hpcstrat.data.streams import END, Stream
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Tree

__all__ = ["bucketed", "packed"]


class _Packed(Iterator[Tree]):
    """Sequences one behind the other, in rows of a fixed length."""

    def __init__(self, elements: Iterator[Tree], length: int, pad: Any) -> None:
        self._elements = elements
        self._length = length
        self._pad = pad
        self._left: Tree = None

    def __next__(self) -> Tree:
        parts, free = [], self._length
        while True:
            element = self._left
            if element is None:
                element = next(self._elements, END)
            if element is END:
                break
            size = _length_of(element)
            if size > self._length:
                self._left = None
                raise ValueError(
                    f"expected sequences of at most {self._length} to be packed, found "
                    f"one of {size}; cut it by map, or choose a greater length"
                )
            self._left = element
            if size > free:
                break
            self._left = None
            parts.append(element)
            free -= size
        if not parts:
            raise StopIteration
        return _joined(parts, self._length, self._pad)


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


def packed(parent: Stage, length: int, pad: Any) -> Stream:
    """Return sequences packed into rows of a length, in their order."""

    def spec() -> Tree:
        number = ArraySpec((length,), np.dtype(np.int32))
        values = tree_map(
            lambda leaf: ArraySpec((length, *(leaf.shape or ())[1:]), leaf.dtype),
            parent.spec(),
        )
        return {"positions": number, "segments": number, "values": values}

    return Stream(
        lambda epoch: _Packed(parent.iterate(epoch), length, pad),
        spec,
        f"{parent.describe()}, packed to {length}",
    )


def bucketed(
    parent: Stage,
    length_of: Callable[..., int],
    boundaries: Sequence[int],
    sizes: Sequence[int],
    *,
    pad: Callable[[Sequence[Tree], Any], Tree],
    to_boundary: bool,
    drop_remainder: bool,
) -> Stream:
    """Return batches of elements of similar length; see `Dataset`.

    ``pad`` stacks elements, given the shapes of their arrays, or None.
    """
    if len(sizes) != len(boundaries) + 1 or list(boundaries) != sorted(boundaries):
        raise ValueError(
            "expected increasing bucket_boundaries and one batch size more, found "
            f"{list(boundaries)} and {list(sizes)}; change them"
        )

    def collate(bucket: int, rows: Sequence[Tree]) -> Tree:
        if not to_boundary:
            return pad(rows, None)
        if bucket == len(boundaries):
            raise ValueError(
                f"expected elements shorter than {boundaries[-1]} to be padded to a "
                "boundary, found a longer one; filter them out, or add a boundary"
            )
        shapes = tree_map(
            lambda leaf: (boundaries[bucket] - 1, *np.shape(leaf)[1:]), rows[0]
        )
        return pad(rows, flatten(shapes)[0])

    def start(epoch: int) -> Iterator[Tree]:
        return _Buckets(
            parent.iterate(epoch),
            lambda element: int(call_with(length_of, element)),
            boundaries,
            sizes,
            collate=collate,
            drop_remainder=drop_remainder,
        )

    def spec() -> Tree:
        return batched_spec(collated_spec(parent), None)

    return Stream(start, spec, f"{parent.describe()}, in buckets of {list(boundaries)}")


def collated_spec(parent: Stage) -> Tree:
    """Return a stage's spec without lengths that padding may change."""
    return tree_map(
        lambda leaf: ArraySpec(
            None if leaf.shape is None else (None,) * len(leaf.shape), leaf.dtype
        ),
        parent.spec(),
    )


class _Buckets(Iterator[Tree]):
    """Batches of elements of similar length, in tf.data's order."""

    def __init__(
        self,
        elements: Iterator[Tree],
        length_of: Callable[[Tree], int],
        boundaries: Sequence[int],
        sizes: Sequence[int],
        *,
        collate: Callable[[int, Sequence[Tree]], Tree],
        drop_remainder: bool,
    ) -> None:
        self._elements: Iterator[Tree] | None = elements
        self._length_of = length_of
        self._boundaries = np.asarray(boundaries)
        self._sizes = sizes
        self._collate = collate
        self._drop = drop_remainder
        self._waiting: dict[int, list[Tree]] = {}

    def __next__(self) -> Tree:
        while self._elements is not None:
            element = next(self._elements, END)
            if element is END:
                self._elements = None
                break
            length = self._length_of(element)
            bucket = int(np.searchsorted(self._boundaries, length, side="right"))
            waiting = self._waiting.setdefault(bucket, [])
            waiting.append(element)
            if len(waiting) == self._sizes[bucket]:
                del self._waiting[bucket]
                return self._collate(bucket, waiting)
        if not self._waiting or self._drop:
            raise StopIteration
        first = min(self._waiting)
        return self._collate(first, self._waiting.pop(first))
