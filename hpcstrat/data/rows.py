"""Stages of a data set with random access: elements are read by their places.

Each stage reads the rows at given places of an epoch as a block, in which the elements
are stacked along the first dimension. Every replica can therefore read its own part of
any batch.
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
"""Cardinality of a dataset without an end."""

UNKNOWN = -2
"""Cardinality of a dataset whose elements must be read to count them."""

Places = slice | Array
"""Places in an epoch: a slice with start and stop, or an array of int64."""

_BLOCK_ROWS = 256


def in_words(count: int) -> str:
    """Return a cardinality as text, such as "120", "no end" or "unknown"."""
    return {INFINITE: "no end", UNKNOWN: "unknown"}.get(count, str(count))


class Stage:
    """A step of a data set's chain, which yields the elements of each epoch."""

    cardinality: int = UNKNOWN
    # Number of rows of all elements together.
    num_rows: int = UNKNOWN
    # Number of rows of an element, if elements are batches of one known size.
    batch_size: int | None = None
    drop_remainder = False
    # The stages that this stage reads, and its own part of the description.
    parents: Sequence[Any] = ()
    words = ""

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Yield the elements of an epoch; continue after an element that failed."""
        raise NotImplementedError

    def spec(self) -> Tree:
        """Return an ArraySpec for each array of an element."""
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the stage; the text must be equal on all ranks."""
        return ", ".join([*(each.describe() for each in self.parents), self.words])

    def is_on_gpu(self) -> bool:
        """Return whether rows are read on a GPU, in the program's stream."""
        return any(stage.is_on_gpu() for stage in self.parents)


class Rows(Stage):
    """A stage with random access."""

    # Number of rows to read at once when elements are requested one by one.
    block_rows: int = _BLOCK_ROWS
    # The stage whose rows all occur in every epoch of this stage, or None.
    origin: Rows | None = None

    def read(self, places: Places, epoch: int) -> Tree:
        """Read the elements at places, and stack them in the order of ``places``."""
        raise NotImplementedError

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        """Read the elements at places one by one; they may differ in shape."""
        block = self.read(places, epoch)
        return [row_of(block, index) for index in range(count_of(places))]

    def homes(self, places: Places, epoch: int) -> Array:
        """Return each row's fixed number (below `num_homes`), equal in every epoch."""
        return as_places(places)

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        return self.cardinality

    @property
    def num_homes(self) -> int:
        """Number of different rows in an epoch."""
        return self.cardinality if self.origin is None else self.origin.num_homes

    def keep(self, first: int, last: int) -> None:
        """Let a cache keep only rows whose `homes` are in ``range(first, last)``."""
        if self.origin is not None:
            self.origin.keep(first, last)

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Yield the elements of an epoch, and read them in blocks."""
        ready: deque[Tree] = deque()
        # After an error, the rows before ``careful`` are read one by one.
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
        """Return the specs of an element, from a block that is read without rows."""
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
    """Return the parent's epoch for a repetition; each repetition has another epoch."""
    if count == INFINITE:
        return (epoch << 32) | repetition
    return epoch * count + repetition


class SourceRows(Rows):
    """A stage of the rows of columns."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.cardinality = columns.num_rows
        self.words = columns.describe()

    def read(self, places: Places, epoch: int) -> Tree:
        """Read rows; slices of arrays in memory are read-only views."""
        return self.columns.read(places)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        found = self.columns.elements(places)
        return super().elements(places, epoch) if found is None else found

    def is_on_gpu(self) -> bool:
        return any(map(is_device, self.columns.columns))


class RangeRows(Rows):
    """A stage of evenly spaced integers (int64)."""

    def __init__(self, start: int, step: int, cardinality: int) -> None:
        self._start, self._step = start, step
        self.cardinality = cardinality
        self.words = f"a range of {cardinality} from {start} by {step}"

    def read(self, places: Places, epoch: int) -> Tree:
        return self._start + as_places(places) * self._step


class OneRow(Rows):
    """A stage of one element."""

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
    """A stage whose rows are read, or made, from rows of another stage."""

    def __init__(self, parent: Rows, words: str) -> None:
        self.parent = parent
        self.parents, self.words = [parent], words
        self.cardinality, self.block_rows = parent.cardinality, parent.block_rows

    def rows(self, places: Places, epoch: int) -> Places:
        """Return the places of rows in the parent stage."""
        return places

    def read(self, places: Places, epoch: int) -> Tree:
        return self.parent.read(self.rows(places, epoch), epoch)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        return self.parent.elements(self.rows(places, epoch), epoch)

    def spec(self) -> Tree:
        return self.parent.spec()


class StridedRows(_RowsOfParent):
    """Every ``step``-th row of a stage, from ``first``, for take, skip and shard."""

    def __init__(self, parent: Rows, first: int, step: int, cardinality: int) -> None:
        super().__init__(parent, f"of these {cardinality} from {first} by {step}")
        self._first, self._step = first, step
        self.cardinality = cardinality

    def rows(self, places: Places, epoch: int) -> Places:
        if isinstance(places, slice) and self._step == 1:
            return slice(places.start + self._first, places.stop + self._first)
        return self._first + as_places(places) * self._step


class ShuffledRows(_RowsOfParent):
    """Rows in another order in each epoch, or always in the order of epoch 0."""

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
        # Orders of epochs that began with order version 1.
        self._exact: dict[int, Order] = {}
        self._orders: dict[int, Order] = {}

    def keep_exact(self, epoch: int, seed: int) -> None:
        """Use order version 1, of an older checkpoint, for an epoch."""
        order = Permutation(self.cardinality, seed, epoch, exact=True)
        self._exact = {epoch: order}

    def rows(self, places: Places, epoch: int) -> Array:
        if not self._reshuffles:
            epoch = 0
        order = self._exact.get(epoch) or self._orders.get(epoch)
        if order is None:
            order = self._make_order(epoch)
            # Keep two orders, because a batch or the readers may use two epochs at
            # once.
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
        # Read single rows, because the function may fail for one of them.
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
        # Map one row, to learn the shapes and dtypes of a block without rows.
        start = places.start if isinstance(places, slice) else 0
        last = self.cardinality - 1 if self.cardinality != INFINITE else start
        start = max(min(start, last), 0)
        block = stack(self.elements(slice(start, start + 1), epoch))
        return tree_map(lambda leaf: leaf[:0], block)

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Yield the results; call the function only when an element is requested."""
        places = iter(range(1 << 62))

        def make(element: Tree) -> Tree:
            return self._made(element, epoch, next(places))

        return map(make, self.parent.iterate(epoch))

    def spec(self) -> Tree:
        """Return the spec of the results; calls the function."""
        return made_spec(self.parent, lambda row: spec_of(self._made(row, 0, 0)))


class CachedRows(_RowsOfParent):
    """Rows of epoch 0, kept in memory once they were read."""

    def __init__(self, parent: Rows) -> None:
        super().__init__(parent, "cached")
        # Read single rows, because each row is copied by itself.
        self.block_rows = 1
        self._lock = threading.Lock()
        self._kept: dict[int, Tree] = {}
        # The rows to keep: all rows, or the rows that this rank's replicas own.
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
    """Return a read-only copy of an array; a copy on a GPU stays writable."""
    copy = leaf.copy()
    if isinstance(copy, np.ndarray):
        copy.flags.writeable = False
    return copy
