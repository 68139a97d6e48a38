"""Stages of a data set without random access: each gives elements one by one.

Iterators here go on behind an element whose making raised, if the stage before does.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from hpcstrat.data.elements import (
    ArraySpec,
    as_element,
    batched_spec,
    call_with,
    made_spec,
    merged_spec,
    pad_and_stack,
    require_same_structure,
    row_of,
    spec_of,
    stack,
)
from hpcstrat.data.order import generator_of
from hpcstrat.data.rows import INFINITE, UNKNOWN, Stage, epoch_of_repetition
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Tree

__all__ = [
    "Stream",
    "batches",
    "buffered",
    "cached",
    "chosen",
    "concatenated",
    "generated",
    "interleaved",
    "kept_errors_out",
    "mapped",
    "padded",
    "rebatched",
    "repeated",
    "sampled",
    "selected",
    "strided",
    "taken_while",
    "text_lines",
    "unbatched",
    "zipped",
]

_END = object()


class Stream(Stage):
    """A stage that starts an iterator for each epoch.

    ``size`` is the number of rows of its batches, where it is known.
    """

    def __init__(
        self,
        start: Callable[[int], Iterator[Tree]],
        spec: Callable[[], Tree],
        name: str,
        *,
        cardinality: int = UNKNOWN,
        size: int | None = None,
    ) -> None:
        self._start = start
        self._spec = spec
        self._name = name
        self.cardinality = cardinality
        self.batch_size = size

    def iterate(self, epoch: int) -> Iterator[Tree]:
        """Start an epoch."""
        return self._start(epoch)

    def spec(self) -> Tree:
        """Return the specs."""
        return self._spec()

    def describe(self) -> str:
        """Return the name."""
        return self._name


class _Iterator:
    """Calls ``_make`` for each element; that raises StopIteration at the end."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tree:
        return self._make()

    def _make(self) -> Tree:
        raise NotImplementedError


def probed(stage: Stage, function: Callable[..., Any]) -> Tree:
    """Return the spec of what a function makes of a stage's elements."""
    return made_spec(
        stage.iterate(0),
        stage.spec,
        lambda element: spec_of(as_element(call_with(function, element))),
    )


def mapped(parent: Stage, function: Callable[..., Any], seed: int | None) -> Stream:
    """Return what a function makes of each element."""

    def start(epoch: int) -> Iterator[Tree]:
        numbers = iter(range(1 << 62))

        def make(element: Tree) -> Tree:
            if seed is None:
                return as_element(call_with(function, element))
            rng = generator_of(seed, epoch, next(numbers))
            return as_element(call_with(function, element, rng=rng))

        return map(make, parent.iterate(epoch))

    def spec() -> Tree:
        if seed is None:
            return probed(parent, function)
        rng = generator_of(seed, 0, 0)
        return probed(parent, lambda *parts: function(*parts, rng=rng))

    return Stream(
        start,
        spec,
        f"{parent.describe()}, mapped",
        cardinality=parent.cardinality,
    )


def generated(make: Callable[[], Any], signature: Tree | None) -> Stream:
    """Return the elements of what a function returns for each epoch."""

    def convert(value: Any) -> Tree:
        element = as_element(value)
        if signature is None:
            return element
        leaves, structure = flatten(element)
        wanted, expected = flatten(signature)
        if structure != expected:
            raise TypeError(
                f"expected elements like {signature} from the generator, found "
                f"{spec_of(element)}; change output_signature"
            )
        return unflatten(structure, list(map(_typed, leaves, wanted)))

    def spec() -> Tree:
        if signature is not None:
            return signature
        return probed(Stream(lambda _: map(convert, iter(make())), spec, ""), _same)

    return Stream(lambda _: map(convert, iter(make())), spec, "a generator")


def _same(*parts: Tree) -> Tree:
    return parts if len(parts) != 1 else parts[0]


def _typed(leaf: Any, spec: Any) -> Any:
    dtype, shape = np.dtype(spec.dtype), spec.shape
    if not np.can_cast(leaf.dtype, dtype, "same_kind"):
        raise TypeError(
            f"expected arrays of {dtype} from the generator, found {leaf.dtype}; "
            "change output_signature"
        )
    found = np.shape(leaf)
    if shape is not None and (
        len(shape) != len(found)
        or any(a is not None and a != b for a, b in zip(shape, found, strict=True))
    ):
        raise TypeError(
            f"expected arrays of shape {tuple(shape)} from the generator, found "
            f"{found}; change output_signature"
        )
    return leaf.astype(dtype, copy=False)


class _Batches(_Iterator):
    def __init__(
        self,
        elements: Iterator[Tree],
        size: int,
        drop_remainder: bool,
        collate: Callable[[Sequence[Tree]], Tree],
    ) -> None:
        self._elements = elements
        self._size = size
        self._drop = drop_remainder
        self._collate = collate

    def _make(self) -> Tree:
        rows: list[Tree] = []
        while len(rows) < self._size:
            # An element that fails takes with it those of its batch that have come.
            element = next(self._elements, _END)
            if element is _END:
                break
            rows.append(element)
        if not rows or (self._drop and len(rows) < self._size):
            raise StopIteration
        return self._collate(rows)


def _num_batches(cardinality: int, size: int, drop_remainder: bool) -> int:
    if cardinality < 0:
        return cardinality
    return cardinality // size if drop_remainder else -(-cardinality // size)


def batches(parent: Stage, size: int, drop_remainder: bool) -> Stream:
    """Return successive elements, stacked."""
    return Stream(
        lambda epoch: _Batches(parent.iterate(epoch), size, drop_remainder, stack),
        lambda: batched_spec(parent.spec(), size if drop_remainder else None),
        f"{parent.describe()}, in batches of {size}",
        cardinality=_num_batches(parent.cardinality, size, drop_remainder),
        size=size,
    )


def padded(
    parent: Stage, size: int, drop_remainder: bool, shapes: Tree, values: Tree
) -> Stream:
    """Return successive elements, filled up to one shape and stacked."""
    from hpcstrat.data.batched import padded_spec

    def collate(rows: Sequence[Tree]) -> Tree:
        return pad_and_stack(rows, shapes, values)

    fixed = size if drop_remainder else None
    return Stream(
        lambda epoch: _Batches(parent.iterate(epoch), size, drop_remainder, collate),
        lambda: padded_spec(batched_spec(parent.spec(), fixed), shapes),
        f"{parent.describe()}, in padded batches of {size}",
        cardinality=_num_batches(parent.cardinality, size, drop_remainder),
        size=size,
    )


class _Rows(_Iterator):
    """The rows of batches, one by one."""

    def __init__(self, elements: Iterator[Tree]) -> None:
        self._elements = elements
        self._batch: Tree = None
        self._next = self._length = 0

    def _make(self) -> Tree:
        while self._next == self._length:
            batch = next(self._elements)
            self._length, self._next = _length_of(batch), 0
            self._batch = batch
        self._next += 1
        return row_of(self._batch, self._next - 1)


def _length_of(batch: Tree) -> int:
    shapes = [np.shape(leaf) for leaf in flatten(batch)[0]]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            "expected batches whose arrays have one first dimension, found shapes "
            f"{shapes}; batch the data set first"
        )
    return int(lengths.pop())


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


class _Rebatches(_Iterator):
    """Rows of batches in batches of other sizes, which come in turn."""

    def __init__(
        self, rows: Iterator[Tree], sizes: Sequence[int], drop_remainder: bool
    ) -> None:
        self._rows = rows
        self._sizes = sizes
        self._drop = drop_remainder
        self._number = 0
        self._last: Tree = None

    def _make(self) -> Tree:
        size = self._sizes[self._number % len(self._sizes)]
        self._number += 1
        rows: list[Tree] = []
        while len(rows) < size:
            row = next(self._rows, _END)
            if row is _END:
                break
            rows.append(row)
            self._last = row
        if size == 0 and self._last is not None:
            return tree_map(lambda leaf: leaf[:0], stack([self._last]))
        if not rows or (self._drop and len(rows) < size):
            raise StopIteration
        return stack(rows)


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
        lambda epoch: _Rebatches(_Rows(parent.iterate(epoch)), sizes, drop_remainder),
        spec,
        f"{parent.describe()}, in batches of {list(sizes)}",
        size=size,
    )


class _Buffered(_Iterator):
    """Elements in the order of tf.data's shuffle."""

    def __init__(self, elements: Iterator[Tree], size: int | None, key: Any) -> None:
        self._elements = elements
        self._size = size
        self._buffer: list[Tree] = []
        self._generator = generator_of(*key)
        self._is_open = True

    def _make(self) -> Tree:
        while self._is_open and (self._size is None or len(self._buffer) < self._size):
            element = next(self._elements, _END)
            if element is _END:
                self._is_open = False
            else:
                self._buffer.append(element)
        if not self._buffer:
            raise StopIteration
        place = int(self._generator.integers(len(self._buffer)))
        element = self._buffer[place]
        self._buffer[place] = self._buffer[-1]
        self._buffer.pop()
        return element


def buffered(parent: Stage, size: int | None, seed: int, reshuffles: bool) -> Stream:
    """Return the elements shuffled through a buffer of a size, or of all."""

    def start(epoch: int) -> Iterator[Tree]:
        key = seed, epoch if reshuffles else 0
        return _Buffered(parent.iterate(epoch), size, key)

    return Stream(
        start,
        parent.spec,
        f"{parent.describe()}, shuffled by seed {seed}",
        cardinality=parent.cardinality,
        size=getattr(parent, "batch_size", None),
    )


class _Interleaved(_Iterator):
    """Blocks of elements of several data sets in turn; tf.data's algorithm.

    A slot whose data set ends is passed on, and filled anew when its turn comes again.
    """

    def __init__(
        self,
        elements: Iterator[Tree],
        make: Callable[[Tree], Iterator[Tree]],
        cycle_length: int,
        block_length: int,
    ) -> None:
        self._elements = elements
        self._make_iterator = make
        self._slots: list[Iterator[Tree] | None] = [None] * cycle_length
        self._block = block_length
        self._slot = self._given = 0
        self._is_open = True

    def _advance(self) -> None:
        self._slot = (self._slot + 1) % len(self._slots)
        self._given = 0

    def _make(self) -> Tree:
        while self._is_open or any(slot is not None for slot in self._slots):
            current = self._slots[self._slot]
            if current is not None:
                element = next(current, _END)
                if element is not _END:
                    self._given += 1
                    if self._given == self._block:
                        self._advance()
                    return element
                self._slots[self._slot] = None
                self._advance()
            elif self._is_open:
                source = next(self._elements, _END)
                if source is _END:
                    self._is_open = False
                else:
                    self._slots[self._slot] = self._make_iterator(source)
            else:
                self._advance()
        raise StopIteration


def interleaved(
    parent: Stage,
    function: Callable[..., Any],
    as_stage: Callable[[Any], Stage],
    cycle_length: int,
    block_length: int,
) -> Stream:
    """Return the elements of the data sets that a function makes of each element."""

    def start(epoch: int) -> Iterator[Tree]:
        return _Interleaved(
            parent.iterate(epoch),
            lambda source: as_stage(call_with(function, source)).iterate(epoch),
            cycle_length,
            block_length,
        )

    def spec() -> Tree:
        return made_spec(
            parent.iterate(0),
            parent.spec,
            lambda element: as_stage(call_with(function, element)).spec(),
        )

    return Stream(start, spec, f"{parent.describe()}, interleaved")


class _KeptErrorsOut(_Iterator):
    def __init__(self, elements: Iterator[Tree], warn: Callable[[Exception], None]):
        self._elements = elements
        self._warn = warn

    def _make(self) -> Tree:
        while True:
            try:
                return next(self._elements)
            except StopIteration:
                raise
            except Exception as error:
                self._warn(error)


def kept_errors_out(parent: Stage, warn: Callable[[Exception], None]) -> Stream:
    """Return the elements that can be made."""
    return Stream(
        lambda epoch: _KeptErrorsOut(parent.iterate(epoch), warn),
        parent.spec,
        f"{parent.describe()}, without errors",
        size=getattr(parent, "batch_size", None),
    )


class _Repeated(_Iterator):
    def __init__(self, parent: Stage, count: int, epoch: int) -> None:
        self._parent = parent
        self._count = count
        self._epoch = epoch
        self._repetition = 0
        self._elements: Iterator[Tree] | None = None
        self._is_empty = True

    def _make(self) -> Tree:
        while True:
            if self._elements is None:
                if self._repetition == self._count:
                    raise StopIteration
                own = epoch_of_repetition(self._epoch, self._count, self._repetition)
                self._elements = self._parent.iterate(own)
                self._repetition += 1
            element = next(self._elements, _END)
            if element is not _END:
                self._is_empty = False
                return element
            self._elements = None
            # Repeating nothing without an end would never return.
            if self._is_empty:
                raise StopIteration


def repeated(parent: Stage, count: int) -> Stream:
    """Return the elements several times; each time is an epoch of its own."""
    known = parent.cardinality
    cardinality = INFINITE if count < 0 else known if known < 0 else known * count
    if not known or not count:
        cardinality = 0
    return Stream(
        lambda epoch: _Repeated(parent, count, epoch),
        parent.spec,
        f"{parent.describe()}, {count} times",
        cardinality=cardinality,
        size=getattr(parent, "batch_size", None),
    )


class _Chosen(_Iterator):
    def __init__(
        self,
        choices: Iterator[Any],
        sources: Sequence[Iterator[Tree]],
        stop_on_empty: bool,
    ) -> None:
        self._choices = choices
        self._sources: list[Iterator[Tree] | None] = list(sources)
        self._stops = stop_on_empty

    def _make(self) -> Tree:
        while any(source is not None for source in self._sources):
            number = int(next(self._choices))
            if not 0 <= number < len(self._sources):
                raise ValueError(
                    f"expected the number of one of {len(self._sources)} data sets, "
                    f"found {number}; change the choices"
                )
            source = self._sources[number]
            if source is None:
                continue
            element = next(source, _END)
            if element is not _END:
                return element
            self._sources[number] = None
            if self._stops:
                self._sources = [None] * len(self._sources)
        raise StopIteration


def _same_spec(parents: Sequence[Stage]) -> Callable[[], Tree]:
    specs = [parent.spec() for parent in parents]
    for spec in specs[1:]:
        require_same_structure(specs[0], spec)
    return lambda: merged_spec(specs)


def chosen(parents: Sequence[Stage], choices: Stage, stop_on_empty: bool) -> Stream:
    """Return elements of several data sets, each time of that which a number names."""
    return Stream(
        lambda epoch: _Chosen(
            choices.iterate(epoch),
            [parent.iterate(epoch) for parent in parents],
            stop_on_empty,
        ),
        _same_spec(parents),
        f"a choice of ({', '.join(parent.describe() for parent in parents)})",
    )


class _Draws(_Iterator):
    """Numbers of data sets, drawn by weight among those that have not ended."""

    def __init__(self, weights: Any, key: Any) -> None:
        self._ends = np.cumsum(weights / np.sum(weights))
        self._generator = generator_of(*key)

    def _make(self) -> int:
        drawn = np.searchsorted(self._ends, self._generator.random(), side="right")
        return min(int(drawn), len(self._ends) - 1)


def sampled(
    parents: Sequence[Stage],
    weights: Sequence[float] | None,
    seed: int,
    stop_on_empty: bool,
) -> Stream:
    """Return elements of several data sets, drawn by weights."""
    shares = np.ones(len(parents)) if weights is None else np.array(weights, float)
    if shares.shape != (len(parents),) or (shares < 0).any() or not shares.sum() > 0:
        raise ValueError(
            f"expected a weight >= 0 for each of {len(parents)} data sets, found "
            f"{weights}; change the weights"
        )
    # One of weight 0 would be waited for when the others have ended.
    drawn = [p for p, share in zip(parents, shares, strict=True) if share > 0]
    return Stream(
        lambda epoch: _Chosen(
            _Draws(shares[shares > 0], (seed, epoch)),
            [parent.iterate(epoch) for parent in drawn],
            stop_on_empty,
        ),
        _same_spec(parents),
        f"a sample of ({', '.join(parent.describe() for parent in parents)})",
    )


class _Strided(_Iterator):
    """Every ``step``-th element from ``first``, at most ``count``."""

    def __init__(
        self, elements: Iterator[Tree], first: int, step: int, count: int | None
    ) -> None:
        self._elements = elements
        self._wait = first
        self._step = step
        self._left = count

    def _make(self) -> Tree:
        if self._left == 0:
            raise StopIteration
        while self._wait:
            self._wait -= 1
            next(self._elements)
        element = next(self._elements)
        self._wait = self._step - 1
        if self._left is not None:
            self._left -= 1
        return element


def strided(
    parent: Stage, first: int, step: int, count: int | None, cardinality: int
) -> Stream:
    """Return every ``step``-th element from ``first``: take, skip and shard."""
    return Stream(
        lambda epoch: _Strided(parent.iterate(epoch), first, step, count),
        parent.spec,
        f"{parent.describe()}, of these every {step} from {first}, at most {count}",
        cardinality=cardinality,
        size=getattr(parent, "batch_size", None),
    )


def zipped(parents: Tree) -> Stream:
    """Return elements of several stages side by side, as many as the shortest has."""
    stages, structure = flatten(parents)
    lengths = [stage.cardinality for stage in stages]
    known = [length for length in lengths if length >= 0]
    cardinality = min(known, default=INFINITE)
    # The shortest may be one whose elements were not counted.
    if UNKNOWN in lengths:
        cardinality = UNKNOWN

    def beside(row: tuple[Tree, ...]) -> Tree:
        return unflatten(structure, list(row))

    def start(epoch: int) -> Iterator[Tree]:
        rows = zip(*(stage.iterate(epoch) for stage in stages), strict=False)
        return map(beside, rows)

    return Stream(
        start,
        lambda: unflatten(structure, [stage.spec() for stage in stages]),
        f"({' beside '.join(stage.describe() for stage in stages)})",
        cardinality=cardinality,
    )


class _Concatenated(_Iterator):
    def __init__(self, stages: Sequence[Stage], epoch: int) -> None:
        self._left = deque(stages)
        self._epoch = epoch
        self._elements: Iterator[Tree] = iter(())

    def _make(self) -> Tree:
        while True:
            element = next(self._elements, _END)
            if element is not _END:
                return element
            if not self._left:
                raise StopIteration
            self._elements = self._left.popleft().iterate(self._epoch)


def concatenated(first: Stage, second: Stage) -> Stream:
    """Return the elements of one stage, and then those of another."""
    lengths = first.cardinality, second.cardinality
    cardinality = min(lengths) if min(lengths) < 0 else sum(lengths)
    if INFINITE in lengths:
        cardinality = INFINITE
    sizes = {getattr(stage, "batch_size", None) for stage in (first, second)}
    return Stream(
        lambda epoch: _Concatenated([first, second], epoch),
        _same_spec([first, second]),
        f"({first.describe()}, then {second.describe()})",
        cardinality=cardinality,
        size=sizes.pop() if len(sizes) == 1 else None,
    )


class _Cache:
    """Elements of epoch 0, made once."""

    def __init__(self, parent: Stage) -> None:
        self._parent = parent
        self._elements: Iterator[Tree] | None = None
        self._kept: list[Tree] = []
        self._lock = threading.Lock()

    def element(self, number: int) -> Tree:
        """Return an element; raises StopIteration at the end."""
        with self._lock:
            if self._elements is None:
                self._elements = self._parent.iterate(0)
            while number >= len(self._kept):
                self._kept.append(next(self._elements))
            return tree_map(lambda leaf: leaf.copy(), self._kept[number])


class _FromCache(_Iterator):
    def __init__(self, cache: _Cache) -> None:
        self._cache = cache
        self._number = 0

    def _make(self) -> Tree:
        element = self._cache.element(self._number)
        self._number += 1
        return element


def cached(parent: Stage) -> Stream:
    """Return the elements of epoch 0, kept in memory."""
    cache = _Cache(parent)
    return Stream(
        lambda _: _FromCache(cache),
        parent.spec,
        f"{parent.describe()}, cached",
        cardinality=parent.cardinality,
        size=getattr(parent, "batch_size", None),
    )


def selected(parent: Stage, function: Callable[..., Any]) -> Stream:
    """Return the elements for which a function is true."""
    return Stream(
        lambda epoch: filter(
            lambda element: bool(call_with(function, element)), parent.iterate(epoch)
        ),
        parent.spec,
        f"{parent.describe()}, filtered",
        size=getattr(parent, "batch_size", None),
    )


def taken_while(parent: Stage, function: Callable[..., Any]) -> Stream:
    """Return the elements up to the first for which a function is false."""
    return Stream(
        lambda epoch: itertools.takewhile(
            lambda element: bool(call_with(function, element)), parent.iterate(epoch)
        ),
        parent.spec,
        f"{parent.describe()}, up to a condition",
        size=getattr(parent, "batch_size", None),
    )


class _Lines(_Iterator):
    """Lines of files, one file behind the other."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = deque(paths)
        self._lines: deque[str] = deque()
        self._file: Any = None

    def _make(self) -> Tree:
        while True:
            if self._file is None:
                if not self._paths:
                    raise StopIteration
                self._file = open(self._paths.popleft(), encoding="utf-8", newline="")  # noqa: SIM115
            line = self._file.readline()
            if line:
                return np.str_(line.rstrip("\r\n"))
            self._file.close()
            self._file = None


def text_lines(paths: Sequence[str]) -> Stream:
    """Return the lines of files without their ends."""
    spec = ArraySpec((), np.dtype(np.str_))
    return Stream(lambda _: _Lines(paths), lambda: spec, f"lines of {len(paths)} files")
