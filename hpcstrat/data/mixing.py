"""Mixing data sets by weights; batches of sequences of similar or fixed length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data.elements import ArraySpec, batched_spec, require_same_structure
from hpcstrat.data.order import generator_of
from hpcstrat.data.rows import (
    INFINITE,
    Places,
    Rows,
    Stage,
    as_places,
    join_blocks,
)
from hpcstrat.data.streams import Stream
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Array, Tree

__all__ = ["MixedRows", "bucketed", "packed"]

_WINDOW_ROWS = 4096


class MixedRows(Rows):
    """Rows of several stages, by weights, without an end.

    Windows of 4,096 rows hold of each stage as many rows as its weight says, to one
    row, in random order. A stage that has been gone through begins its next epoch: each
    of its rows comes exactly once in each of its epochs.
    """

    def __init__(
        self, parents: Sequence[Rows], weights: Sequence[float] | None, seed: int
    ) -> None:
        self.parents = list(parents)
        first, *others = (parent.spec() for parent in parents)
        for other in others:
            require_same_structure(first, other)
        self._quotas = _quotas(weights, len(self.parents))
        self._ends = np.cumsum(self._quotas)
        self._seed = seed
        self.cardinality = INFINITE
        self._latest: tuple[Any, Any] = ((-1, -1), None)

    def _window(self, window: int, epoch: int) -> Array:
        """Return for each place of a window its number among those of all stages."""
        kept, numbers = self._latest
        if kept != (window, epoch):
            generator = generator_of(self._seed, epoch, window + 1)
            order = generator.permutation(_WINDOW_ROWS)
            # Those of one stage in the order of that stage.
            numbers = np.empty(_WINDOW_ROWS, np.int64)
            stages = np.searchsorted(self._ends, order, side="right")
            for index, end in enumerate(self._ends):
                mine = np.flatnonzero(stages == index)
                numbers[mine] = end - self._quotas[index] + np.arange(len(mine))
            self._latest = (window, epoch), numbers
        found: Array = numbers
        return found

    def _parts(self, places: Places, epoch: int) -> Iterator[tuple[Any, Any, int, Any]]:
        """Give stages, their rows, the epoch of each, and where these belong."""
        flat = as_places(places)
        windows, inside = np.divmod(flat, _WINDOW_ROWS)
        numbers = np.empty(len(flat), np.int64)
        for window in np.unique(windows):
            here = windows == window
            numbers[here] = self._window(int(window), epoch)[inside[here]]
        stages = np.searchsorted(self._ends, numbers, side="right")
        for index, parent in enumerate(self.parents):
            mine = np.flatnonzero(stages == index)
            if not mine.size:
                continue
            quota = self._quotas[index]
            rows = windows[mine] * quota + numbers[mine] - (self._ends[index] - quota)
            if parent.cardinality == INFINITE:
                yield parent, rows, epoch, mine
                continue
            repetitions, rows = np.divmod(rows, parent.cardinality)
            for repetition in np.unique(repetitions):
                own = repetitions == repetition
                yield parent, rows[own], (epoch << 32) | int(repetition), mine[own]

    def read(self, places: Places, epoch: int) -> Tree:
        """Read from each stage, and put the parts together."""
        count = len(as_places(places))
        if not count:
            return self.parents[0].read(slice(0, 0), epoch)
        parts = [
            (inside, parent.read(rows, own))
            for parent, rows, own, inside in self._parts(places, epoch)
        ]
        return join_blocks(parts, count)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        """Read from each stage."""
        found: list[Tree] = [None] * len(as_places(places))
        for parent, rows, own, inside in self._parts(places, epoch):
            for index, element in zip(inside, parent.elements(rows, own), strict=True):
                found[index] = element
        return found

    @property
    def block_rows(self) -> int:
        """The number of rows to read at once."""
        return min(parent.block_rows for parent in self.parents)

    def spec(self) -> Tree:
        """Return the specs of the first stage."""
        return self.parents[0].spec()

    def describe(self) -> str:
        """Return what is mixed."""
        parts = ", ".join(
            f"{quota}/{_WINDOW_ROWS} of {parent.describe()}"
            for quota, parent in zip(self._quotas, self.parents, strict=True)
        )
        return f"a mix by seed {self._seed} of ({parts})"


def _quotas(weights: Sequence[float] | None, count: int) -> Array:
    """Return how many rows of a window each stage has; at least one."""
    shares = np.ones(count) if weights is None else np.asarray(weights, float)
    if shares.shape != (count,) or not (shares > 0).all() or not count:
        raise ValueError(
            f"expected a weight > 0 for each of {count} data sets, found {weights}; "
            "leave out those that are not wanted"
        )
    exact = shares / shares.sum() * _WINDOW_ROWS
    quotas: Array = np.maximum(np.floor(exact), 1).astype(np.int64)
    # The largest remainders get what is left.
    for index in np.argsort(np.floor(exact) - exact, kind="stable"):
        quotas[index] += quotas.sum() < _WINDOW_ROWS
    quotas[np.argmax(quotas)] += _WINDOW_ROWS - quotas.sum()
    return quotas


class _Packed:
    """Sequences one behind the other, in rows of a fixed length."""

    def __init__(self, elements: Iterator[Tree], length: int, pad: Any) -> None:
        self._elements = elements
        self._length = length
        self._pad = pad
        self._left: Tree = None

    def __iter__(self) -> _Packed:
        return self

    def __next__(self) -> Tree:
        parts, free = [], self._length
        while True:
            element = self._left
            if element is None:
                element = next(self._elements, None)
            if element is None:
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
    shapes = [np.shape(leaf) for leaf in flatten(element)[0]]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            f"expected sequences of one length in an element, found shapes {shapes}; "
            "pack before batch()"
        )
    return int(lengths.pop())


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
    length_of: Callable[[Tree], int],
    boundaries: Sequence[int],
    sizes: Sequence[int],
    *,
    collate: Callable[[int, Sequence[Tree]], Tree],
    drop_remainder: bool,
) -> Stream:
    """Return batches of elements of similar length; see `Dataset`."""
    if len(sizes) != len(boundaries) + 1 or list(boundaries) != sorted(boundaries):
        raise ValueError(
            "expected increasing bucket_boundaries and one batch size more, found "
            f"{list(boundaries)} and {list(sizes)}; change them"
        )

    def start(epoch: int) -> Iterator[Tree]:
        return _Buckets(
            parent.iterate(epoch),
            length_of,
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


class _Buckets:
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

    def __iter__(self) -> _Buckets:
        return self

    def __next__(self) -> Tree:
        while self._elements is not None:
            element = next(self._elements, None)
            if element is None:
                self._elements = None
                break
            length = int(self._length_of(element))
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
