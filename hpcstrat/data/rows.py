"""Stages of a data set with random access: any elements of an epoch can be read.

``read(places, epoch)`` returns the elements at these places as a block, stacked along
the first dimension. Every replica can therefore read its own part of any batch.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data.array_comparison import arrays_among
from hpcstrat.data.boxes import Boxes
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
from hpcstrat.data.file_lists import digest_of, names_of
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
    "RowsOfParent",
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
    """Return a cardinality as text: "no end", "unknown", or a number such as "120"."""
    return {INFINITE: "no end", UNKNOWN: "unknown"}.get(count, str(count))


class Stage:
    """A step of a data set's chain, which yields the elements of each epoch."""

    cardinality: int = UNKNOWN
    # Number of examples in an epoch, in all elements together.
    num_rows: int = UNKNOWN
    # Number of rows of an element, if elements are batches of one known size.
    batch_size: int | None = None
    drop_remainder = False
    # The stages that this stage reads, and its own words for `describe`.
    parents: Sequence[Any] = ()
    words = ""
    # Paths of files that this stage itself names or reads, if it has a list of them.
    paths: Sequence[str] = ()

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Return an iterator over an epoch, which continues after an error."""
        raise NotImplementedError

    def spec(self) -> Tree:
        """Return an ArraySpec for each array of an element."""
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the stage; the text must be equal on all ranks."""
        return self.told([each.describe() for each in self.parents])

    def order_words(self) -> str:
        """Describe which row of the source has which position.

        A saved position is valid for all stages with an equal text. The functions of
        `map`, and the size of batches with random access, are not part of the text.
        """
        return self.told([each.order_words() for each in self.parents])

    def told(self, parents: Sequence[str]) -> str:
        """Describe the stage, given descriptions of its parents."""
        return ", ".join(text for text in (*parents, self.words) if text)

    def files(self) -> list[str]:
        """Describe the files of the elements, in order; equal on all ranks."""
        own = names_of(self.paths)
        return own + [file for each in self.parents for file in each.files()]

    def arrays(self) -> list[Array]:
        """Return the arrays in memory from which elements are read."""
        return [array for each in self.parents for array in each.arrays()]

    def is_on_gpu(self) -> bool:
        """Return whether elements are read on a GPU, in the program's stream."""
        return any(stage.is_on_gpu() for stage in self.parents)


class Rows(Stage):
    """A stage with random access."""

    # Number of rows that `iterate` reads in one block.
    block_rows: int = _BLOCK_ROWS
    # The parent stage, if each epoch of this stage has all rows of the parent.
    origin: Rows | None = None

    def read(self, places: Places, epoch: int) -> Tree:
        """Read the elements at places, and stack them in the order of ``places``."""
        raise NotImplementedError

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        """Read the elements at places one by one; they may differ in shape."""
        block = self.read(places, epoch)
        return [row_of(block, index) for index in range(count_of(places))]

    def homes(self, places: Places, epoch: int) -> Array:
        """Return numbers below `num_homes` that identify the rows in all epochs."""
        return as_places(places)

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        return self.cardinality

    @property
    def num_homes(self) -> int:
        """Number of different rows in an epoch."""
        return self.cardinality if self.origin is None else self.origin.num_homes

    def column_alone(self, name: str) -> Rows | None:
        """Return the rows of one column, without reading others; None if not possible.

        Only a stage that is a source of columns can do this.
        """
        return None

    def keep(self, first: int, last: int) -> None:
        """Let caches keep only rows whose `homes` are in ``range(first, last)``."""
        if self.origin is not None:
            self.origin.keep(first, last)

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Return an iterator over an epoch, which reads the elements in blocks."""
        ready: deque[Tree] = deque()
        # If a block cannot be read, its rows (before ``careful``) are read singly.
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
        """Return the specs of an element, from a block of 0 rows."""
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
    """Return the parent's epoch for a repetition; no two repetitions have the same."""
    if count == INFINITE:
        return (epoch << 32) | repetition
    return epoch * count + repetition


class SourceRows(Rows):
    """A stage of the rows of a source, such as arrays or an HDF5 group."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.cardinality = columns.num_rows
        self.words = columns.describe()

    def order_words(self) -> str:
        names = f" of names ({digest_of(self.files()):x})" if self.paths else ""
        return f"{self.cardinality} rows{names}"

    def read(self, places: Places, epoch: int) -> Tree:
        """Read rows; a slice of a NumPy array is returned as a read-only view."""
        return self.columns.read(places)

    def column_alone(self, name: str) -> Rows | None:
        column = self.columns.alone(name)
        return None if column is None else SourceRows(column)

    def boxed(self, boxes: Boxes) -> SourceRows | None:
        """Return the same rows, of which only boxes are read; None if not possible."""
        columns = self.columns.boxed(boxes)
        if columns is None:
            return None
        made = copy.copy(self)
        made.columns, made.words = columns, f"{self.words}, {boxes.words}"
        return made

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        found = self.columns.elements(places)
        return super().elements(places, epoch) if found is None else found

    def arrays(self) -> list[Array]:
        return arrays_among(self.columns.columns)

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

    def arrays(self) -> list[Array]:
        return arrays_among(flatten(self._element)[0])

    def read(self, places: Places, epoch: int) -> Tree:
        count = count_of(places)
        return tree_map(
            lambda leaf: np.repeat(np.asarray(leaf)[np.newaxis], count, axis=0),
            self._element,
        )


class RowsOfParent(Rows):
    """A stage whose rows are read, or made, from rows of another stage."""

    def __init__(self, parent: Rows, words: str) -> None:
        self.parent = parent
        self.parents, self.words = [parent], words
        self.cardinality, self.block_rows = parent.cardinality, parent.block_rows

    def rows(self, places: Places, epoch: int) -> Places:
        """Return the places in the parent stage of the rows at ``places``."""
        return places

    def read(self, places: Places, epoch: int) -> Tree:
        return self.parent.read(self.rows(places, epoch), epoch)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        return self.parent.elements(self.rows(places, epoch), epoch)

    def spec(self) -> Tree:
        return self.parent.spec()


class StridedRows(RowsOfParent):
    """Every ``step``-th row of a stage from row ``first``, for take, skip and shard."""

    def __init__(self, parent: Rows, first: int, step: int, cardinality: int) -> None:
        super().__init__(parent, f"of these {cardinality} from {first} by {step}")
        self._first, self._step = first, step
        self.cardinality = cardinality

    def rows(self, places: Places, epoch: int) -> Places:
        if isinstance(places, slice) and self._step == 1:
            return slice(places.start + self._first, places.stop + self._first)
        return self._first + as_places(places) * self._step


class ShuffledRows(RowsOfParent):
    """The parent's rows, shuffled anew in each epoch, or always as in epoch 0."""

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
        # True if each epoch has its own order.
        self.reshuffles = reshuffles
        # The order of the epoch that began with order version 1, if there is one.
        self._exact: dict[int, Order] = {}
        self._orders: dict[int, Order] = {}

    def keep_exact(self, epoch: int, seed: int) -> None:
        """Use order version 1 for an epoch that an older library version began."""
        order = Permutation(self.cardinality, seed, epoch, exact=True)
        self._exact = {epoch: order}

    def rows(self, places: Places, epoch: int) -> Array:
        if not self.reshuffles:
            epoch = 0
        order = self._exact.get(epoch) or self._orders.get(epoch)
        if order is None:
            order = self._make_order(epoch)
            # Keep two orders: after repeat(), a batch may have rows of two epochs.
            kept = list(self._orders.items())[-1:]
            self._orders = dict([*kept, (epoch, order)])
        return order.rows(as_places(places))

    def homes(self, places: Places, epoch: int) -> Array:
        return self.parent.homes(self.rows(places, epoch), epoch)


class MappedRows(RowsOfParent):
    """The results of a function that is called with each row.

    With a seed, the function also gets ``rng``, a random generator for this row.
    """

    def __init__(
        self, parent: Rows, function: Callable[..., Any], seed: int | None
    ) -> None:
        seeded = "" if seed is None else f" with seed {seed}"
        super().__init__(parent, f"mapped by {name_of(function)}{seeded}")
        self.origin = parent
        # Map rows one by one, because the function may fail for a row.
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

    def order_words(self) -> str:
        return self.parent.order_words()

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        numbers, rows = as_places(places).tolist(), self.parent.elements(places, epoch)
        return [
            self._made(row, epoch, place)
            for place, row in zip(numbers, rows, strict=True)
        ]

    def read(self, places: Places, epoch: int) -> Tree:
        if count_of(places):
            return stack(self.elements(places, epoch))
        # Map one row, because a block of 0 rows has the shapes and dtypes of results.
        start = places.start if isinstance(places, slice) else 0
        last = self.cardinality - 1 if self.cardinality != INFINITE else start
        start = max(min(start, last), 0)
        block = stack(self.elements(slice(start, start + 1), epoch))
        return tree_map(lambda leaf: leaf[:0], block)

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Return an iterator that calls the function when a result is requested."""
        places = iter(range(1 << 62))

        def make(element: Tree) -> Tree:
            return self._made(element, epoch, next(places))

        return map(make, self.parent.iterate(epoch))

    def spec(self) -> Tree:
        """Call the function for some rows, and return the spec of its results."""
        return made_spec(self.parent, lambda row: spec_of(self._made(row, 0, 0)))


class CachedRows(RowsOfParent):
    """The rows of the parent's epoch 0, which stay in memory after they were read."""

    def __init__(self, parent: Rows) -> None:
        super().__init__(parent, "cached")
        # A block of more rows is not faster, because each row is copied by itself.
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
