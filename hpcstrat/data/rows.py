"""Stages of a data set whose elements can be read at random, by their places.

Each stage reads the rows at places of an epoch, in blocks: the elements stacked along a
first dimension. So every replica can read its own part of any batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcstrat.data.elements import (
    ArraySpec,
    as_element,
    call_with,
    made_spec,
    row_of,
    spec_of,
    stack,
)
from hpcstrat.data.order import Order, Permutation, generator_of
from hpcstrat.data.sources import Columns
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.tree import flatten, tree_map
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
# Attributes that hold the stages before one.
_PARENTS = ("parent", "parents", "rows")


def in_words(count: int) -> str:
    """Return a number of elements, or why there is none."""
    return {INFINITE: "no end", UNKNOWN: "unknown"}.get(count, str(count))


class Stage:
    """A step of a chain: gives elements, epoch after epoch."""

    cardinality: int = UNKNOWN
    # Rows of its elements where these are batches, and all of a known size.
    batch_size: int | None = None
    drop_remainder = False

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Give the elements of an epoch; goes on behind an element that failed."""
        raise NotImplementedError

    def spec(self) -> Tree:
        """Return an ArraySpec for each array of an element."""
        raise NotImplementedError

    def describe(self) -> str:
        """Say what ranks must agree on."""
        raise NotImplementedError

    def is_on_gpu(self) -> bool:
        """Whether rows are taken on a GPU: in the order of the program's stream."""
        found = vars(self)
        parents = [found[name] for name in _PARENTS if name in found]
        stages = [part for one in parents for part in flatten(one)[0]]
        return any(stage.is_on_gpu() for stage in stages)


class Rows(Stage):
    """A stage with random access."""

    @property
    def block_rows(self) -> int:
        """The number of rows to read at once where elements are wanted one by one."""
        return _BLOCK_ROWS

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
    def num_homes(self) -> int:
        """The number of different rows."""
        return self.cardinality

    def keep(self, first: int, last: int) -> None:
        """Let a cache keep rows of these homes alone, and read the others anew."""

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Give the elements of an epoch."""
        return _Elements(self, epoch)

    def spec(self) -> Tree:
        """Return the specs of an array of no rows, without the first dimension."""
        block = self.read(slice(0, 0), 0)
        return tree_map(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), block)


class _Elements(Iterator[Tree]):
    """Elements one after another, read in blocks."""

    def __init__(self, rows: Rows, epoch: int) -> None:
        self._rows = rows
        self._epoch = epoch
        self._place = 0
        self._ready: deque[Tree] = deque()
        # Behind an error rows are read one by one, up to here.
        self._careful = 0

    def __next__(self) -> Tree:
        if not self._ready:
            if self._place == self._rows.cardinality:
                raise StopIteration
            self._fetch()
        return self._ready.popleft()

    def _fetch(self) -> None:
        place, end = self._place, self._rows.cardinality
        stop = place + (1 if place < self._careful else self._rows.block_rows)
        if end != INFINITE:
            stop = min(stop, end)
        self._place = stop
        try:
            self._ready.extend(self._rows.elements(slice(place, stop), self._epoch))
        except Exception:
            if stop == place + 1:
                raise
            self._place, self._careful = place, stop
            self._fetch()


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

    def read(self, places: Places, epoch: int) -> Tree:
        """Read rows; slices of arrays in memory are views that cannot be written."""
        return self.columns.read(places)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        """Read rows one by one, where they are items that may differ in shape."""
        found = self.columns.elements(places)
        return super().elements(places, epoch) if found is None else found

    def is_on_gpu(self) -> bool:
        """Whether a column is in the memory of a GPU."""
        return any(map(is_device, self.columns.columns))

    def describe(self) -> str:
        """Return number and types of the rows."""
        return self.columns.describe()


class RangeRows(Rows):
    """Integers in even steps, int64."""

    def __init__(self, start: int, step: int, cardinality: int) -> None:
        self._start, self._step = start, step
        self.cardinality = cardinality

    def read(self, places: Places, epoch: int) -> Tree:
        """Compute the integers."""
        return self._start + as_places(places) * self._step

    def describe(self) -> str:
        """Return the numbers."""
        return f"a range of {self.cardinality} from {self._start} by {self._step}"


class OneRow(Rows):
    """One element."""

    def __init__(self, element: Tree) -> None:
        self._element = element
        self.cardinality = 1

    def read(self, places: Places, epoch: int) -> Tree:
        """Repeat it as often as it is asked for."""
        count = count_of(places)
        return tree_map(
            lambda leaf: (
                np.stack([np.asarray(leaf)] * count)
                if count
                else np.asarray(leaf)[np.newaxis][:0]
            ),
            self._element,
        )

    def describe(self) -> str:
        """Return its types."""
        return f"one element of {spec_of(self._element)}"


class _RowsOfParent(Rows):
    """A stage whose rows are some of another one's, or made of them."""

    def __init__(self, parent: Rows) -> None:
        self.parent = parent
        self.cardinality = parent.cardinality

    @property
    def block_rows(self) -> int:
        """The number of rows to read at once."""
        return self.parent.block_rows

    def spec(self) -> Tree:
        """Return the other stage's."""
        return self.parent.spec()


class _AllRowsOfParent(_RowsOfParent):
    """A stage whose rows are in every epoch all of another one's."""

    @property
    def num_homes(self) -> int:
        """The number of different rows of the other stage."""
        return self.parent.num_homes

    def keep(self, first: int, last: int) -> None:
        """Tell the other stage."""
        self.parent.keep(first, last)


class StridedRows(_RowsOfParent):
    """Every ``step``-th row of another stage, from ``first``: take, skip and shard."""

    def __init__(self, parent: Rows, first: int, step: int, cardinality: int) -> None:
        super().__init__(parent)
        self._first, self._step = first, step
        self.cardinality = cardinality

    def _inner(self, places: Places) -> Places:
        if isinstance(places, slice) and self._step == 1:
            return slice(places.start + self._first, places.stop + self._first)
        return self._first + as_places(places) * self._step

    def read(self, places: Places, epoch: int) -> Tree:
        """Read from the other stage."""
        return self.parent.read(self._inner(places), epoch)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        """Read from the other stage."""
        return self.parent.elements(self._inner(places), epoch)

    def describe(self) -> str:
        """Describe the range of rows."""
        return (
            f"{self.parent.describe()}, of these {self.cardinality} from "
            f"{self._first} by {self._step}"
        )


class ShuffledRows(_AllRowsOfParent):
    """Rows in an order of each epoch's own, or in that of epoch 0 only."""

    def __init__(
        self,
        parent: Rows,
        make_order: Callable[[int], Order],
        name: str,
        *,
        reshuffles: bool = True,
    ) -> None:
        super().__init__(parent)
        self._make_order = make_order
        self._name = name
        self._reshuffles = reshuffles
        # Epochs that were begun under version 1 of the order, with their orders.
        self._exact: dict[int, Order] = {}
        self._orders: dict[int, Order] = {}

    def keep_exact(self, epoch: int, seed: int) -> None:
        """Give an epoch the order that version 1 of a position means."""
        order = Permutation(self.cardinality, seed, epoch, exact=True)
        self._exact = {epoch: order}

    def rows(self, places: Places, epoch: int) -> Array:
        """Return which rows of the other stage stand at places."""
        if not self._reshuffles:
            epoch = 0
        order = self._exact.get(epoch) or self._orders.get(epoch)
        if order is None:
            order = self._make_order(epoch)
            # Two are used where a batch, or a reader, is across the end of an epoch.
            kept = list(self._orders.items())[-1:]
            self._orders = dict([*kept, (epoch, order)])
        return order.rows(as_places(places))

    def homes(self, places: Places, epoch: int) -> Array:
        """Return those of the rows at places."""
        return self.parent.homes(self.rows(places, epoch), epoch)

    def read(self, places: Places, epoch: int) -> Tree:
        """Read the rows of the epoch's order."""
        return self.parent.read(self.rows(places, epoch), epoch)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        """Read the rows of the epoch's order."""
        return self.parent.elements(self.rows(places, epoch), epoch)

    def describe(self) -> str:
        """Return how they are shuffled."""
        return f"{self.parent.describe()}, {self._name}"


class MappedRows(_AllRowsOfParent):
    """The results of a function for each row.

    With a seed the function also gets ``rng``, a generator of the row's own.
    """

    def __init__(
        self, parent: Rows, function: Callable[..., Any], seed: int | None
    ) -> None:
        super().__init__(parent)
        self._function = function
        self._seed = seed

    def _made(self, element: Tree, epoch: int, place: int) -> Tree:
        if self._seed is None:
            return as_element(call_with(self._function, element))
        rng = generator_of(self._seed, epoch, place)
        return as_element(call_with(self._function, element, rng=rng))

    def homes(self, places: Places, epoch: int) -> Array:
        """Return those of the rows that the function gets."""
        return self.parent.homes(places, epoch)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        """Call the function with each row."""
        return [
            self._made(element, epoch, int(place))
            for place, element in zip(
                as_places(places).tolist(),
                self.parent.elements(places, epoch),
                strict=True,
            )
        ]

    def read(self, places: Places, epoch: int) -> Tree:
        """Call the function with each row; of no rows, with one to know their form."""
        if count_of(places):
            return stack(self.elements(places, epoch))
        start = places.start if isinstance(places, slice) else 0
        last = self.cardinality - 1 if self.cardinality != INFINITE else start
        start = max(min(start, last), 0)
        block = stack(self.elements(slice(start, start + 1), epoch))
        return tree_map(lambda leaf: leaf[:0], block)

    @property
    def block_rows(self) -> int:
        """The number of rows to read at once: one, for a function that may fail."""
        return 1

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Call the function when an element is asked for."""
        places = iter(range(1 << 62))

        def make(element: Tree) -> Tree:
            return self._made(element, epoch, next(places))

        return map(make, self.parent.iterate(epoch))

    def spec(self) -> Tree:
        """Return what its results have in common; calls the function."""
        return made_spec(
            self.parent.iterate(0),
            self.parent.spec,
            lambda element: spec_of(self._made(element, 0, 0)),
        )

    def describe(self) -> str:
        """Return the function's name."""
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        seed = "" if self._seed is None else f" with seed {self._seed}"
        return f"{self.parent.describe()}, mapped by {name}{seed}"


class CachedRows(_RowsOfParent):
    """Rows of epoch 0, kept in memory as they are read."""

    def __init__(self, parent: Rows) -> None:
        super().__init__(parent)
        self._lock = threading.Lock()
        self._kept: dict[int, Tree] = {}
        # The rows that it keeps: all, or a replica's.
        self._first, self._last = 0, self.cardinality

    def keep(self, first: int, last: int) -> None:
        """Keep these rows alone."""
        with self._lock:
            self._first, self._last = first, last
            for place in [p for p in self._kept if not first <= p < last]:
                del self._kept[place]

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        """Read what is not yet kept."""
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

    @property
    def block_rows(self) -> int:
        """The number of rows to read at once: one, as each is copied by itself."""
        return 1

    def read(self, places: Places, epoch: int) -> Tree:
        """Stack the rows that are kept, having read those that are not."""
        if not count_of(places):
            return self.parent.read(places, 0)
        return stack(self.elements(places, epoch))

    def describe(self) -> str:
        """Describe the stage, which is cached."""
        return f"{self.parent.describe()}, cached"


def _frozen(leaf: Any) -> Any:
    """Return a copy that programs cannot write; on a GPU, where none is, a copy."""
    copy = leaf.copy()
    if isinstance(copy, np.ndarray):
        copy.flags.writeable = False
    return copy
