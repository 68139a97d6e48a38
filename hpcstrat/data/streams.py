"""Stages of a data set without random access: each gives elements one by one.

Iterators here go on behind an element whose making raised, if the stage before does.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data.elements import (
    ArraySpec,
    as_element,
    call_with,
    made_spec,
    spec_of,
)
from hpcstrat.data.order import generator_of
from hpcstrat.data.rows import INFINITE, UNKNOWN, Stage, epoch_of_repetition
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Tree

__all__ = [
    "END",
    "Chained",
    "Stream",
    "buffered",
    "cached",
    "generated",
    "kept_errors_out",
    "mapped",
    "repeated",
    "selected",
    "strided",
    "taken_while",
    "text_lines",
]

END = object()
"""Comes from ``next`` in place of StopIteration."""


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


def _of_elements(
    parent: Stage,
    start: Callable[[int], Iterator[Tree]],
    words: str,
    cardinality: int = UNKNOWN,
) -> Stream:
    """Return a stage of elements of another one, which say in words what they are."""
    return Stream(
        start,
        parent.spec,
        f"{parent.describe()}, {words}",
        cardinality=cardinality,
        size=parent.batch_size,
    )


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


def generated(
    function: Callable[..., Any], args: tuple[Any, ...], signature: Tree | None
) -> Stream:
    """Return the elements of what a function returns for each epoch."""
    if not callable(function):
        raise TypeError(
            "expected a function that returns an iterable, found "
            f"{type(function).__name__}; pass the function, not what it returns"
        )

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
        return probed(Stream(start, spec, ""), _same)

    def start(_: int) -> Iterator[Tree]:
        return map(convert, iter(function(*args)))

    return Stream(start, spec, "a generator")


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


class _Buffered(Iterator[Tree]):
    """Elements in the order of tf.data's shuffle."""

    def __init__(self, elements: Iterator[Tree], size: int | None, key: Any) -> None:
        self._elements = elements
        self._size = size
        self._buffer: list[Tree] = []
        self._generator = generator_of(*key)
        self._is_open = True

    def __next__(self) -> Tree:
        while self._is_open and (self._size is None or len(self._buffer) < self._size):
            element = next(self._elements, END)
            if element is END:
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

    return _of_elements(parent, start, f"shuffled by seed {seed}", parent.cardinality)


class _KeptErrorsOut(Iterator[Tree]):
    def __init__(self, elements: Iterator[Tree], logs: bool) -> None:
        self._elements = elements
        self._logs = logs

    def __next__(self) -> Tree:
        while True:
            try:
                return next(self._elements)
            except StopIteration:
                raise
            except Exception as error:
                if self._logs:
                    get_logger("data").warning("left out an element: %r", error)


def kept_errors_out(parent: Stage, logs: bool) -> Stream:
    """Return the elements that can be made; with logs, warn of the others."""
    return _of_elements(
        parent,
        lambda epoch: _KeptErrorsOut(parent.iterate(epoch), logs),
        "without errors",
    )


class Chained(Iterator[Tree]):
    """The elements of iterators, one behind the other.

    ``ends_if_empty``: where the first of them have none, it does not go on for ever.
    """

    def __init__(
        self, iterators: Iterator[Iterator[Tree]], *, ends_if_empty: bool = False
    ) -> None:
        self._iterators = iterators
        self._elements: Iterator[Tree] | None = None
        self._is_empty = ends_if_empty

    def __next__(self) -> Tree:
        while True:
            if self._elements is None:
                self._elements = next(self._iterators)
            element = next(self._elements, END)
            if element is not END:
                self._is_empty = False
                return element
            self._elements = None
            if self._is_empty:
                raise StopIteration


def repeated(parent: Stage, count: int) -> Stream:
    """Return the elements several times; each time is an epoch of its own."""
    known = parent.cardinality
    cardinality = INFINITE if count < 0 else known if known < 0 else known * count
    if not known or not count:
        cardinality = 0

    def start(epoch: int) -> Iterator[Tree]:
        def elements(number: int) -> Iterator[Tree]:
            return parent.iterate(epoch_of_repetition(epoch, count, number))

        numbers = itertools.count() if count < 0 else range(count)
        return Chained(map(elements, numbers), ends_if_empty=True)

    return _of_elements(parent, start, f"{count} times", cardinality)


class _Strided(Iterator[Tree]):
    """Every ``step``-th element from ``first``, at most ``count``."""

    def __init__(
        self, elements: Iterator[Tree], first: int, step: int, count: int | None
    ) -> None:
        self._elements = elements
        self._wait = first
        self._step = step
        self._left = count

    def __next__(self) -> Tree:
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
    return _of_elements(
        parent,
        lambda epoch: _Strided(parent.iterate(epoch), first, step, count),
        f"of these every {step} from {first}, at most {count}",
        cardinality,
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


class _FromCache(Iterator[Tree]):
    def __init__(self, cache: _Cache) -> None:
        self._cache = cache
        self._number = 0

    def __next__(self) -> Tree:
        element = self._cache.element(self._number)
        self._number += 1
        return element


def cached(parent: Stage) -> Stream:
    """Return the elements of epoch 0, kept in memory."""
    cache = _Cache(parent)
    return _of_elements(
        parent, lambda _: _FromCache(cache), "cached", parent.cardinality
    )


def selected(parent: Stage, function: Callable[..., Any]) -> Stream:
    """Return the elements for which a function is true."""
    return _of_elements(
        parent,
        lambda epoch: filter(
            lambda element: bool(call_with(function, element)), parent.iterate(epoch)
        ),
        "filtered",
    )


def taken_while(parent: Stage, function: Callable[..., Any]) -> Stream:
    """Return the elements up to the first for which a function is false."""
    return _of_elements(
        parent,
        lambda epoch: itertools.takewhile(
            lambda element: bool(call_with(function, element)), parent.iterate(epoch)
        ),
        "up to a condition",
    )


class _Lines(Iterator[Tree]):
    """Lines of files, one file behind the other."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = deque(paths)
        self._lines: deque[str] = deque()
        self._file: Any = None

    def __next__(self) -> Tree:
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
