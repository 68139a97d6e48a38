"""Stages with random access that join rows of several stages, or repeat rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data.elements import merged_spec, require_same_structure
from hpcstrat.data.order import generator_of
from hpcstrat.data.rows import (
    INFINITE,
    Places,
    Rows,
    as_places,
    count_of,
    epoch_of_repetition,
)
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree

__all__ = ["ConcatenatedRows", "MixedRows", "RepeatedRows", "ZippedRows"]

_WINDOW_ROWS = 4096

_Part = tuple[Rows, Places, int, Any]
"""A stage, places in one of its epochs, this epoch, and the rows' indices in a read."""


class _JoinedRows(Rows):
    """A stage whose rows are rows of one or several parents."""

    def __init__(self, parents: Sequence[Rows]) -> None:
        self.parents = parents
        self.block_rows = min(parent.block_rows for parent in parents)

    def parts(self, places: Places, epoch: int) -> Iterator[_Part]:
        """Yield the parts to read from parents; ``places`` must not be empty."""
        raise NotImplementedError

    def read(self, places: Places, epoch: int) -> Tree:
        if not count_of(places):
            return self.parents[0].read(slice(0, 0), epoch)
        parts = [
            (inside, rows.read(inner, own))
            for rows, inner, own, inside in self.parts(places, epoch)
        ]
        return _join_blocks(parts, count_of(places))

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        found: list[Tree] = [None] * count_of(places)
        for rows, inner, own, inside in self.parts(places, epoch):
            for index, element in zip(inside, rows.elements(inner, own), strict=True):
                found[index] = element
        return found

    def spec(self) -> Tree:
        return merged_spec([parent.spec() for parent in self.parents])


def _inner(flat: Array, places: Places) -> Places:
    """Return the parent's places ``flat``, as a slice if ``places`` is a slice."""
    if isinstance(places, slice):
        return slice(int(flat[0]), int(flat[-1]) + 1)
    return flat


def _join_blocks(parts: list[tuple[Any, Tree]], count: int) -> Tree:
    """Join pairs of (indices, block) to one block, with each block at its indices."""
    if len(parts) == 1:
        return parts[0][1]
    flat = [(inside, *flatten(block)) for inside, block in parts]
    columns = []
    for index, first in enumerate(flat[0][1]):
        dtype = np.result_type(*(leaves[index].dtype for _, leaves, _ in flat))
        shapes = {leaves[index].shape[1:] for _, leaves, _ in flat}
        if len(shapes) > 1:
            raise ValueError(
                "expected elements of one shape in a batch, found "
                f"{' and '.join(map(str, sorted(shapes)))}; use padded_batch"
            )
        library = sys.modules["cupy"] if is_device(first) else np
        whole = library.empty((count, *first.shape[1:]), dtype)
        for inside, leaves, _ in flat:
            whole[inside] = leaves[index]
        columns.append(whole)
    return unflatten(flat[0][2], columns)


class RepeatedRows(_JoinedRows):
    """All rows of a stage ``count`` times, each time as a new epoch of the stage."""

    def __init__(self, parent: Rows, count: int) -> None:
        super().__init__([parent])
        self.origin = parent
        self.words = f"{count} times"
        self._repetitions = count
        self.cardinality = INFINITE if count < 0 else parent.cardinality * count

    def parts(self, places: Places, epoch: int) -> Iterator[_Part]:
        (parent,) = self.parents
        repetitions, flat = np.divmod(as_places(places), parent.cardinality)
        for number in np.unique(repetitions):
            inside = np.flatnonzero(repetitions == number)
            own = epoch_of_repetition(epoch, self._repetitions, int(number))
            yield parent, _inner(flat[inside], places), own, inside

    def homes(self, places: Places, epoch: int) -> Array:
        found = np.empty(count_of(places), np.int64)
        for rows, inner, own, inside in self.parts(places, epoch):
            found[inside] = rows.homes(inner, own)
        return found


class ConcatenatedRows(_JoinedRows):
    """The rows of one stage, then of another; TypeError if their specs do not match."""

    def __init__(self, first: Rows, second: Rows) -> None:
        require_same_structure(first.spec(), second.spec())
        super().__init__([first, second])
        lengths = first.cardinality, second.cardinality
        self.cardinality = INFINITE if INFINITE in lengths else sum(lengths)

    def parts(self, places: Places, epoch: int) -> Iterator[_Part]:
        first, second = self.parents
        border, flat = first.cardinality, as_places(places)
        is_second = (flat >= border) & (border != INFINITE)
        for rows, mine, offset in ((first, ~is_second, 0), (second, is_second, border)):
            inside = np.flatnonzero(mine)
            if inside.size:
                yield rows, _inner(flat[inside] - offset, places), epoch, inside

    def told(self, parents: Sequence[str]) -> str:
        return f"({', then '.join(parents)})"


class MixedRows(_JoinedRows):
    """Rows of several stages, mixed by weights, without an end.

    Each window of 4,096 rows has rows of all stages, in proportion to their weights, in
    random order. A stage begins its next epoch after its last row.
    """

    def __init__(
        self, parents: Sequence[Rows], weights: Sequence[float] | None, seed: int
    ) -> None:
        super().__init__(parents)
        first, *others = (parent.spec() for parent in parents)
        for other in others:
            require_same_structure(first, other)
        self._quotas = _quotas(weights, len(self.parents))
        self._ends = np.cumsum(self._quotas)
        self._seed = seed
        self.cardinality = INFINITE
        self._latest: tuple[Any, Any] = ((-1, -1), None)

    def _window(self, window: int, epoch: int) -> Array:
        """Return each place's row number in a window, counted parent by parent."""
        kept, numbers = self._latest
        if kept != (window, epoch):
            generator = generator_of(self._seed, epoch, window + 1)
            order = generator.permutation(_WINDOW_ROWS)
            # The rows of one stage keep their order; only stages alternate randomly.
            numbers = np.empty(_WINDOW_ROWS, np.int64)
            stages = np.searchsorted(self._ends, order, side="right")
            for index, end in enumerate(self._ends):
                mine = np.flatnonzero(stages == index)
                numbers[mine] = end - self._quotas[index] + np.arange(len(mine))
            self._latest = (window, epoch), numbers
        found: Array = numbers
        return found

    def parts(self, places: Places, epoch: int) -> Iterator[_Part]:
        """Yield the parts to read from each stage, in this stage's own epochs."""
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

    def spec(self) -> Tree:
        return self.parents[0].spec()

    def told(self, parents: Sequence[str]) -> str:
        parts = ", ".join(
            f"{quota}/{_WINDOW_ROWS} of {parent}"
            for quota, parent in zip(self._quotas, parents, strict=True)
        )
        return f"a mix by seed {self._seed} of ({parts})"


def _quotas(weights: Sequence[float] | None, count: int) -> Array:
    """Return the number of rows of each stage in a window, at least one per stage."""
    shares = np.ones(count) if weights is None else np.asarray(weights, float)
    if shares.shape != (count,) or not (shares > 0).all() or not count:
        raise ValueError(
            f"expected a weight > 0 for each of {count} data sets, found {weights}; "
            "leave out those that are not wanted"
        )
    exact = shares / shares.sum() * _WINDOW_ROWS
    quotas: Array = np.maximum(np.floor(exact), 1).astype(np.int64)
    # Rows that are left go, one each, to the stages with the largest remainders.
    for index in np.argsort(np.floor(exact) - exact, kind="stable"):
        quotas[index] += quotas.sum() < _WINDOW_ROWS
    quotas[np.argmax(quotas)] += _WINDOW_ROWS - quotas.sum()
    return quotas


class ZippedRows(Rows):
    """Combines one element of each stage into one, until the shortest stage ends."""

    def __init__(self, parents: Tree) -> None:
        self.parents, self._structure = flatten(parents)
        lengths = [p.cardinality for p in self.parents if p.cardinality != INFINITE]
        self.cardinality = min(lengths, default=INFINITE)
        self.block_rows = min(parent.block_rows for parent in self.parents)

    def read(self, places: Places, epoch: int) -> Tree:
        parts = [parent.read(places, epoch) for parent in self.parents]
        return unflatten(self._structure, parts)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        columns = [parent.elements(places, epoch) for parent in self.parents]
        return [
            unflatten(self._structure, list(row)) for row in zip(*columns, strict=True)
        ]

    def spec(self) -> Tree:
        return unflatten(self._structure, [parent.spec() for parent in self.parents])

    def told(self, parents: Sequence[str]) -> str:
        return f"({' beside '.join(parents)})"
