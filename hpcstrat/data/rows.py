"""Stages of a data set whose elements can be read at random, by their places.

Each stage reads the rows at places of an epoch, in blocks: the elements stacked along a
first dimension. So every replica can read its own part of any batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data.elements import (
    ArraySpec,
    CallIterator,
    as_element,
    call_with,
    made_spec,
    name_of,
    row_of,
    spec_of,
    stack,
)
from hpcstrat.data.order import Order, Permutation, generator_of
from hpcstrat.data.sources import Columns
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.tree import tree_map
from hpcstrat.engine.typing import Array, Tree

__all__ = [
    "INFINITE",
    "UNKNOWN",
    "CachedRows",
    "MappedRows",
    "OneRow",
    "Places",
    "RangeRows",
    "Rows",
    "ShuffledRows",
    "SourceRows",
    "Stage",
    "StridedRows",
    "as_places",
    "count_of",
    "epoch_of_repetition",
    "in_words",
]

INFINITE = -1
"""Cardinality of a data set without an end."""

UNKNOWN = -2
"""Cardinality of a data set whose elements have to be gone through to be counted."""

Places = slice | Array
"""Places of an epoch: a slice with start and stop, or an array of int64."""

_BLOCK_ROWS = 256


def in_words(count: int) -> str:
    """Return a number of elements, or why there is none."""
    return {INFINITE: "no end", UNKNOWN: "unknown"}.get(count, str(count))


class Stage:
    """A step of a chain: gives elements, epoch after epoch."""

    cardinality: int = UNKNOWN
    # Rows of all its elements.
    num_rows: int = UNKNOWN
    # Rows of its elements where these are batches, and all of a known size.
    batch_size: int | None = None
    drop_remainder = False
    # The stages that it reads, and its own part of the description.
    parents: Sequence[Any] = ()
    words = ""

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Give the elements of an epoch; goes on behind an element that failed."""
        raise NotImplementedError

    def spec(self) -> Tree:
        """Return an ArraySpec for each array of an element."""
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the stage, on which ranks must agree."""
        return ", ".join([*(each.describe() for each in self.parents), self.words])

    def is_on_gpu(self) -> bool:
        """Whether rows are taken on a GPU: in the order of the program's stream."""
        return any(stage.is_on_gpu() for stage in self.parents)


class Rows(Stage):
    """A stage with random access."""

    # Rows to read at once where elements are wanted one by one.
    block_rows: int = _BLOCK_ROWS
    # The stage whose rows this one has in every epoch, all of them; or None.
    origin: Rows | None = None

    def read(self, places: Places, epoch: int) -> Tree:
        """Read the elements at places, stacked, in the order given."""
        raise NotImplementedError

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        """Read the elements at places one by one; they may differ in shape."""
        block = self.read(places, epoch)
        return [row_of(block, index) for index in range(count_of(places))]

    def homes(self, places: Places, epoch: int) -> Array:
        """Return a number of each row that it has in every epoch, below `num_homes`."""
        return as_places(places)

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        return self.cardinality

    @property
    def num_homes(self) -> int:
        """The number of different rows."""
        return self.cardinality if self.origin is None else self.origin.num_homes

    def keep(self, first: int, last: int) -> None:
        """Let a cache keep the rows of these homes only."""
        if self.origin is not None:
            self.origin.keep(first, last)

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Give the elements of an epoch, which are read in blocks."""
        ready: deque[Tree] = deque()
        # After an error its block is read row by row, up to here.
        place = careful = 0

        def step() -> Tree:
            nonlocal place, careful
            while not ready:
                start, end = place, self.cardinality
                if start == end:
                    raise StopIteration
                stop = start + (1 if start < careful else self.block_rows)
                place = stop if end == INFINITE else min(stop, end)
                try:
                    ready.extend(self.elements(slice(start, place), epoch))
                except Exception:
                    if place == start + 1:
                        raise
                    place, careful = start, place
            return ready.popleft()

        return CallIterator(step)

    def spec(self) -> Tree:
        """Return the specs of an array of no rows, without the first dimension."""
        block = self.read(slice(0, 0), 0)
        return tree_map(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), block)


def count_of(places: Places) -> int:
    """Return the number of places."""
    return places.stop - places.start if isinstance(places, slice) else len(places)


def as_places(places: Places) -> Array:
    """Return places as an array of int64."""
    if isinstance(places, slice):
        return np.arange(places.start, places.stop)
    return places


def epoch_of_repetition(epoch: int, count: int, repetition: int) -> int:
    """Return the epoch of the parent of ``repeat``: another one each time."""
    if count == INFINITE:
        return (epoch << 32) | repetition
    return epoch * count + repetition


class SourceRows(Rows):
    """The rows of columns."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.cardinality = columns.num_rows
        self.words = columns.describe()

    def read(self, places: Places, epoch: int) -> Tree:
        """Read rows; slices of arrays in memory are views that cannot be written."""
        return self.columns.read(places)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        found = self.columns.elements(places)
        return super().elements(places, epoch) if found is None else found

    def is_on_gpu(self) -> bool:
        return any(map(is_device, self.columns.columns))


class RangeRows(Rows):
    """Integers in even steps, int64."""

    def __init__(self, start: int, step: int, cardinality: int) -> None:
        self._start, self._step = start, step
        self.cardinality = cardinality
        self.words = f"a range of {cardinality} from {start} by {step}"

    def read(self, places: Places, epoch: int) -> Tree:
        return self._start + as_places(places) * self._step


class OneRow(Rows):
    """One element."""

    def __init__(self, element: Tree) -> None:
        self._element = element
        self.cardinality = 1
        self.words = f"one element of {spec_of(element)}"

    def read(self, places: Places, epoch: int) -> Tree:
        count = count_of(places)
        return tree_map(
            lambda leaf: np.repeat(np.asarray(leaf)[np.newaxis], count, axis=0),
            self._element,
        )


class _RowsOfParent(Rows):
    """A stage whose rows are some of another one's, or made of them."""

    def __init__(self, parent: Rows, words: str) -> None:
        self.parent = parent
        self.parents, self.words = [parent], words
        self.cardinality, self.block_rows = parent.cardinality, parent.block_rows

    def rows(self, places: Places, epoch: int) -> Places:
        """Return the places of rows in the other stage."""
        return places

    def read(self, places: Places, epoch: int) -> Tree:
        return self.parent.read(self.rows(places, epoch), epoch)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        return self.parent.elements(self.rows(places, epoch), epoch)

    def spec(self) -> Tree:
        return self.parent.spec()


class StridedRows(_RowsOfParent):
    """Every ``step``-th row of another stage, from ``first``: take, skip and shard."""

    def __init__(self, parent: Rows, first: int, step: int, cardinality: int) -> None:
        super().__init__(parent, f"of these {cardinality} from {first} by {step}")
        self._first, self._step = first, step
        self.cardinality = cardinality

    def rows(self, places: Places, epoch: int) -> Places:
        if isinstance(places, slice) and self._step == 1:
            return slice(places.start + self._first, places.stop + self._first)
        return self._first + as_places(places) * self._step


class ShuffledRows(_RowsOfParent):
    """Rows in an order of each epoch's own, or in that of epoch 0 only."""

    def __init__(
        self,
        parent: Rows,
        make_order: Callable[[int], Order],
        words: str,
        *,
        reshuffles: bool = True,
    ) -> None:
        super().__init__(parent, words if reshuffles else f"{words}, always the same")
        self.origin = parent
        self._make_order = make_order
        self._reshuffles = reshuffles
        # Orders of epochs that began under version 1 of the order.
        self._exact: dict[int, Order] = {}
        self._orders: dict[int, Order] = {}

    def keep_exact(self, epoch: int, seed: int) -> None:
        """Give an epoch the order that version 1 of a position means."""
        order = Permutation(self.cardinality, seed, epoch, exact=True)
        self._exact = {epoch: order}

    def rows(self, places: Places, epoch: int) -> Array:
        if not self._reshuffles:
            epoch = 0
        order = self._exact.get(epoch) or self._orders.get(epoch)
        if order is None:
            order = self._make_order(epoch)
            # A batch, or readers, may use two epochs at the same time.
            kept = list(self._orders.items())[-1:]
            self._orders = dict([*kept, (epoch, order)])
        return order.rows(as_places(places))

    def homes(self, places: Places, epoch: int) -> Array:
        return self.parent.homes(self.rows(places, epoch), epoch)


class MappedRows(_RowsOfParent):
    """The results of a function for each row.

    If there is a seed, the function also gets ``rng``, a generator for each row.
    """

    def __init__(
        self, parent: Rows, function: Callable[..., Any], seed: int | None
    ) -> None:
        seeded = "" if seed is None else f" with seed {seed}"
        super().__init__(parent, f"mapped by {name_of(function)}{seeded}")
        self.origin = parent
        # One, as the function may fail.
        self.block_rows = 1
        self._function = function
        self._seed = seed

    def _made(self, element: Tree, epoch: int, place: int) -> Tree:
        if self._seed is None:
            return as_element(call_with(self._function, element))
        rng = generator_of(self._seed, epoch, place)
        return as_element(call_with(self._function, element, rng=rng))

    def homes(self, places: Places, epoch: int) -> Array:
        return self.parent.homes(places, epoch)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        numbers, rows = as_places(places).tolist(), self.parent.elements(places, epoch)
        return [
            self._made(row, epoch, place)
            for place, row in zip(numbers, rows, strict=True)
        ]

    def read(self, places: Places, epoch: int) -> Tree:
        if count_of(places):
            return stack(self.elements(places, epoch))
        # The results for one row show the form of no rows.
        start = places.start if isinstance(places, slice) else 0
        last = self.cardinality - 1 if self.cardinality != INFINITE else start
        start = max(min(start, last), 0)
        block = stack(self.elements(slice(start, start + 1), epoch))
        return tree_map(lambda leaf: leaf[:0], block)

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Call the function when an element is asked for."""
        places = iter(range(1 << 62))

        def make(element: Tree) -> Tree:
            return self._made(element, epoch, next(places))

        return map(make, self.parent.iterate(epoch))

    def spec(self) -> Tree:
        """Return the spec of the results; calls the function."""
        return made_spec(self.parent, lambda row: spec_of(self._made(row, 0, 0)))


class CachedRows(_RowsOfParent):
    """Rows of epoch 0, kept in memory as they are read."""

    def __init__(self, parent: Rows) -> None:
        super().__init__(parent, "cached")
        # One, as each is copied by itself.
        self.block_rows = 1
        self._lock = threading.Lock()
        self._kept: dict[int, Tree] = {}
        # The rows that it keeps: all, or a replica's.
        self._first, self._last = 0, self.cardinality

    def keep(self, first: int, last: int) -> None:
        with self._lock:
            self._first, self._last = first, last
            for place in [p for p in self._kept if not first <= p < last]:
                del self._kept[place]

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        wanted = as_places(places).tolist()
        with self._lock:
            found = {p: self._kept[p] for p in wanted if p in self._kept}
        missing = sorted({place for place in wanted if place not in found})
        if missing:
            rows = self.parent.elements(np.array(missing), 0)
            # A view of a block would keep the whole block in memory.
            copies = [tree_map(_frozen, element) for element in rows]
            found.update(zip(missing, copies, strict=True))
            with self._lock:
                first, last = self._first, self._last
                for place in missing:
                    if last == INFINITE or first <= place < last:
                        self._kept[place] = found[place]
        return [found[place] for place in wanted]

    def read(self, places: Places, epoch: int) -> Tree:
        if not count_of(places):
            return self.parent.read(places, 0)
        return stack(self.elements(places, epoch))


def _frozen(leaf: Any) -> Any:
    """Return a copy that programs cannot write; on a GPU, where none is, a copy."""
    copy = leaf.copy()
    if isinstance(copy, np.ndarray):
        copy.flags.writeable = False
    return copy
