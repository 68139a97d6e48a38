"""Stages of a data set without random access: each yields elements one by one.

After an element that raises an error, these iterators continue with the next element,
if the parent stage's iterator can continue.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any

import numpy as np

from hpcstrat.data.elements import (
    ArraySpec,
    CallIterator,
    as_element,
    call_program,
    call_with,
    code_words,
    made_spec,
    merged_spec,
    name_of,
    probed,
    require_same_structure,
    spec_of,
)
from hpcstrat.data.file_lists import digest_of, names_of
from hpcstrat.data.files.open_files import OpenFiles
from hpcstrat.data.order import generator_of
from hpcstrat.data.rows import INFINITE, UNKNOWN, Stage, epoch_of_repetition
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Tree

__all__ = [
    "END",
    "Stream",
    "buffered",
    "cached",
    "chosen",
    "concatenated",
    "generated",
    "interleaved",
    "kept_errors_out",
    "mapped",
    "repeated",
    "sampled",
    "selected",
    "strided",
    "taken_while",
    "text_lines",
    "zipped",
]

END = object()
"""Result of ``next(elements, END)`` at the end of the elements."""


class Stream(Stage):
    """A stage whose ``start(epoch)`` returns the iterator over an epoch's elements.

    ``size`` is the number of rows in a batch, if elements are batches of a known size.
    """

    def __init__(
        self,
        words: str,
        start: Callable[[int], Iterator[Tree]],
        spec: Callable[[], Tree],
        *,
        parents: Sequence[Stage] = (),
        cardinality: int = UNKNOWN,
        size: int | None = None,
    ) -> None:
        self.words = words
        self.parents = parents
        self._start = start
        self._spec = spec
        self.cardinality = cardinality
        self.batch_size = size

    def told(self, parents: Sequence[str]) -> str:
        if len(parents) < 2:
            return super().told(parents)
        return f"{self.words} of ({', '.join(parents)})"

    def iterate(self, epoch: int) -> Iterator[Tree]:
        return self._start(epoch)

    def spec(self) -> Tree:
        return self._spec()

    @classmethod
    def after(
        cls,
        parent: Stage,
        words: str,
        start: Callable[[Iterator[Tree], int], Iterator[Tree]],
        spec: Callable[[], Tree] | None = None,
        **options: Any,
    ) -> Stream:
        """Return a stage whose ``start`` gets the parent's iterator and the epoch.

        Without ``spec``, elements have the same specs and batch size as in the parent.
        """
        if spec is None:
            options["size"] = parent.batch_size
        return cls(
            words,
            lambda epoch: start(parent.iterate(epoch), epoch),
            spec or parent.spec,
            parents=[parent],
            **options,
        )


def mapped(parent: Stage, function: Callable[..., Any], seed: int | None) -> Stream:
    """Call a function with each element, and return its results."""

    def made(element: Tree, epoch: int, number: int) -> Tree:
        if seed is None:
            return as_element(call_with(function, element))
        rng = generator_of(seed, epoch, number)
        return as_element(call_with(function, element, rng=rng))

    def start(elements: Iterator[Tree], epoch: int) -> Iterator[Tree]:
        # Use ``map`` here, because an error would end a generator.
        return map(made, elements, itertools.repeat(epoch), itertools.count())

    return Stream.after(
        parent,
        "mapped" if seed is None else f"mapped with seed {seed}",
        start,
        lambda: made_spec(parent, lambda element: spec_of(made(element, 0, 0))),
        cardinality=parent.cardinality,
    )


def generated(
    function: Callable[..., Any], args: tuple[Any, ...], signature: Tree | None
) -> Stream:
    """Call a function in each epoch, and return the elements of its iterable."""
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
        found, _ = probed(start(0), spec_of)
        if not found:
            raise ValueError(
                f"expected elements from the generator {name_of(function)}, which show "
                "the shapes and dtypes, found none; pass output_signature"
            )
        return merged_spec(found)

    def start(_: int) -> Iterator[Tree]:
        return map(convert, call_program(iter, call_program(function, *args)))

    return Stream(f"a generator by {code_words(function)}", start, spec)


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


def buffered(parent: Stage, size: int | None, seed: int, reshuffles: bool) -> Stream:
    """Shuffle the elements through a buffer of ``size`` (None: of all) elements."""

    def start(elements: Iterator[Tree], epoch: int) -> Iterator[Tree]:
        buffer: list[Tree] = []
        generator = generator_of(seed, epoch if reshuffles else 0)
        is_open = True

        def step() -> Tree:
            nonlocal is_open
            while is_open and (size is None or len(buffer) < size):
                element = next(elements, END)
                if element is END:
                    is_open = False
                else:
                    buffer.append(element)
            if not buffer:
                raise StopIteration
            place = int(generator.integers(len(buffer)))
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            return buffer.pop()

        return CallIterator(step)

    words = f"shuffled by seed {seed} through a buffer of {size or 'all'}"
    words += "" if reshuffles else ", always the same"
    return Stream.after(parent, words, start, cardinality=parent.cardinality)


def kept_errors_out(parent: Stage, logs: bool) -> Stream:
    """Leave out the elements that raise an error; with ``logs``, log each error."""

    def start(elements: Iterator[Tree], _: int) -> Iterator[Tree]:
        def step() -> Tree:
            while True:
                try:
                    return next(elements)
                except StopIteration:
                    raise
                except Exception as error:
                    if logs:
                        get_logger("data").warning("left out an element: %r", error)

        return CallIterator(step)

    return Stream.after(parent, "without errors", start)


def _chained(
    iterators: Iterator[Iterator[Tree]], *, ends_if_empty: bool = False
) -> Iterator[Tree]:
    """Yield the elements of one iterator after another.

    With ``ends_if_empty``, end if the first iterator has no elements, because repeating
    an empty data set forever would never return.
    """
    elements: Iterator[Tree] | None = None
    is_empty = ends_if_empty

    def step() -> Tree:
        nonlocal elements, is_empty
        while True:
            if elements is None:
                elements = next(iterators)
            element = next(elements, END)
            if element is not END:
                is_empty = False
                return element
            elements = None
            if is_empty:
                raise StopIteration

    return CallIterator(step)


def repeated(parent: Stage, count: int) -> Stream:
    """Repeat the elements ``count`` times; each repetition is a new epoch."""
    known = parent.cardinality
    cardinality = INFINITE if count < 0 else known if known < 0 else known * count

    def start(epoch: int) -> Iterator[Tree]:
        numbers = itertools.count() if count < 0 else range(count)
        epochs = (epoch_of_repetition(epoch, count, number) for number in numbers)
        return _chained(map(parent.iterate, epochs), ends_if_empty=True)

    return Stream(
        f"{count} times",
        start,
        parent.spec,
        parents=[parent],
        cardinality=cardinality,
        size=parent.batch_size,
    )


def strided(
    parent: Stage, first: int, step: int, count: int | None, cardinality: int
) -> Stream:
    """Return every ``step``-th element from ``first``, for take, skip and shard."""

    def start(elements: Iterator[Tree], _: int) -> Iterator[Tree]:
        wait, left = first, count

        def next_one() -> Tree:
            nonlocal wait, left
            if left == 0:
                raise StopIteration
            while wait:
                wait -= 1
                next(elements)
            element = next(elements)
            wait = step - 1
            if left is not None:
                left -= 1
            return element

        return CallIterator(next_one)

    words = f"of these every {step} from {first}, at most {count}"
    return Stream.after(parent, words, start, cardinality=cardinality)


def cached(parent: Stage) -> Stream:
    """Keep the elements of epoch 0 in memory, and return them in each epoch."""
    kept: list[Tree] = []
    source: Iterator[Tree] | None = None
    lock = threading.Lock()

    def start(_elements: Iterator[Tree], _: int) -> Iterator[Tree]:
        number = 0

        def step() -> Tree:
            nonlocal source, number
            with lock:
                if source is None:
                    source = parent.iterate(0)
                while number >= len(kept):
                    kept.append(next(source))
                found = kept[number]
            number += 1
            return tree_map(lambda leaf: leaf.copy(), found)

        return CallIterator(step)

    return Stream.after(parent, "cached", start, cardinality=parent.cardinality)


def _picked(
    parent: Stage,
    words: str,
    pick: Callable[..., Iterator[Tree]],
    function: Callable[..., Any],
) -> Stream:
    def start(elements: Iterator[Tree], _: int) -> Iterator[Tree]:
        return pick(lambda each: bool(call_with(function, each)), elements)

    return Stream.after(parent, words, start)


def selected(parent: Stage, function: Callable[..., Any]) -> Stream:
    """Return the elements for which a function is true."""
    return _picked(parent, "filtered", filter, function)


def taken_while(parent: Stage, function: Callable[..., Any]) -> Stream:
    """Return the elements before the first one for which a function is false."""
    words = f"up to the end of {code_words(function)}"
    return _picked(parent, words, itertools.takewhile, function)


def text_lines(paths: Sequence[str]) -> Stream:
    """Return the lines of files, without line ends, one file after another."""
    files = OpenFiles()

    def start(_: int) -> Iterator[Tree]:
        left = deque(paths)
        file: Any = None

        def step() -> Tree:
            nonlocal file
            while True:
                if file is None:
                    if not left:
                        raise StopIteration
                    path = left.popleft()
                    files.note(path)
                    files.check([path])
                    file = open(path, encoding="utf-8", newline="")  # noqa: SIM115
                if line := file.readline():
                    return np.str_(line.rstrip("\r\n"))
                path = file.name
                file.close()
                file = None
                # The file may end here because it was shortened.
                files.check([path])

        return CallIterator(step)

    spec = ArraySpec((), np.dtype(np.str_))
    words = f"lines of {len(paths)} files ({digest_of(names_of(paths)):x})"
    stream = Stream(words, start, lambda: spec)
    stream.paths = paths
    return stream


def interleaved(
    parent: Stage,
    function: Callable[..., Any],
    as_stage: Callable[[Any], Stage],
    cycle_length: int,
    block_length: int,
) -> Stream:
    """Make a data set from each element; return blocks of their elements in turn.

    As in tf.data, a slot whose data set has ended gets the next data set only when it
    is the slot's turn again.
    """

    def made(element: Tree) -> Stage:
        return as_stage(call_with(function, element))

    def start(elements: Iterator[Tree], epoch: int) -> Iterator[Tree]:
        slots: list[Iterator[Tree] | None] = [None] * cycle_length
        slot = given = 0
        is_open = True

        def step() -> Tree:
            nonlocal slot, given, is_open
            while is_open or any(each is not None for each in slots):
                current = slots[slot]
                if current is None and is_open:
                    source = next(elements, END)
                    if source is END:
                        is_open = False
                    else:
                        slots[slot] = made(source).iterate(epoch)
                    continue
                element = END if current is None else next(current, END)
                given += 1
                if element is END:
                    slots[slot] = None
                if element is END or given == block_length:
                    slot, given = (slot + 1) % cycle_length, 0
                if element is not END:
                    return element
            raise StopIteration

        return CallIterator(step)

    return Stream.after(
        parent,
        f"interleaved by {code_words(function)}, {cycle_length} in blocks of "
        f"{block_length}",
        start,
        lambda: made_spec(parent, lambda element: made(element).spec()),
    )


def _chosen(
    choices: Iterator[Any], sources: Sequence[Iterator[Tree]], stop_on_empty: bool
) -> Iterator[Tree]:
    """Yield the next element of ``sources[number]`` for each number in ``choices``."""
    left: list[Iterator[Tree] | None] = list(sources)

    def step() -> Tree:
        while any(source is not None for source in left):
            number = int(next(choices))
            if not 0 <= number < len(left):
                raise ValueError(
                    f"expected the number of one of {len(left)} data sets, found "
                    f"{number}; change the choices"
                )
            source = left[number]
            if source is None:
                continue
            element = next(source, END)
            if element is not END:
                return element
            left[number] = None
            if stop_on_empty:
                left[:] = [None] * len(left)
        raise StopIteration

    return CallIterator(step)


def _same_spec(parents: Sequence[Stage]) -> Callable[[], Tree]:
    specs = [parent.spec() for parent in parents]
    for spec in specs[1:]:
        require_same_structure(specs[0], spec)
    return lambda: merged_spec(specs)


def chosen(parents: Sequence[Stage], choices: Stage, stop_on_empty: bool) -> Stream:
    """Return the next element of ``parents[number]`` for each number in ``choices``."""

    def start(epoch: int) -> Iterator[Tree]:
        sources = [parent.iterate(epoch) for parent in parents]
        return _chosen(choices.iterate(epoch), sources, stop_on_empty)

    words = f"a choice {'to the end of one' if stop_on_empty else 'to all ends'}"
    return Stream(words, start, _same_spec(parents), parents=[choices, *parents])


def sampled(
    parents: Sequence[Stage],
    weights: Sequence[float] | None,
    seed: int,
    stop_on_empty: bool,
) -> Stream:
    """Return elements of several stages, each from a stage drawn by weights."""
    shares = np.ones(len(parents)) if weights is None else np.array(weights, float)
    if shares.shape != (len(parents),) or (shares < 0).any() or not shares.sum() > 0:
        raise ValueError(
            f"expected a weight >= 0 for each of {len(parents)} data sets, found "
            f"{weights}; change the weights"
        )
    # Leave out data sets of weight 0: the stream would run forever to find their ends.
    drawn = [p for p, share in zip(parents, shares, strict=True) if share > 0]
    positive = shares[shares > 0]
    ends = np.cumsum(positive / np.sum(positive))

    def start(epoch: int) -> Iterator[Tree]:
        generator = generator_of(seed, epoch)
        draws = iter(generator.random, None)
        numbers = (np.searchsorted(ends, draw, side="right") for draw in draws)
        # Because of rounding, the last value of ``ends`` may be below 1.
        choices = (min(int(number), len(ends) - 1) for number in numbers)
        sources = [parent.iterate(epoch) for parent in drawn]
        return _chosen(choices, sources, stop_on_empty)

    words = f"a sample by seed {seed}, by weights {shares.tolist()},"
    words += f" {'to the end of one' if stop_on_empty else 'to all ends'}"
    return Stream(words, start, _same_spec(parents), parents=parents)


def zipped(parents: Tree) -> Stream:
    """Combine one element of each stage into one, until the shortest stage ends."""
    stages, structure = flatten(parents)
    lengths = [stage.cardinality for stage in stages]
    # The minimum is UNKNOWN (-2) if any length is unknown.
    shortest = min((n for n in lengths if n != INFINITE), default=INFINITE)

    def start(epoch: int) -> Iterator[Tree]:
        iterators = [stage.iterate(epoch) for stage in stages]

        def step() -> Tree:
            row: list[Tree] = []
            failure: Exception | None = None
            for iterator in iterators:
                # After an error, advance the other iterators, too, so that elements
                # after it are still combined with those at the same place.
                try:
                    row.append(next(iterator))
                except StopIteration as end:
                    raise failure or end from None
                except Exception as error:
                    failure = failure or error
            if failure is not None:
                raise failure
            return unflatten(structure, row)

        return CallIterator(step)

    return Stream(
        "one element of each",
        start,
        lambda: unflatten(structure, [stage.spec() for stage in stages]),
        parents=stages,
        cardinality=shortest,
    )


def concatenated(first: Stage, second: Stage) -> Stream:
    """Return the elements of ``first``, and then the elements of ``second``."""
    both = [first, second]
    lengths = [stage.cardinality for stage in both]
    unknown = INFINITE if INFINITE in lengths else UNKNOWN
    cardinality = unknown if min(lengths) < 0 else sum(lengths)
    sizes = {stage.batch_size for stage in both}
    return Stream(
        "a concatenation",
        lambda epoch: _chained(map(methodcaller("iterate", epoch), both)),
        _same_spec(both),
        parents=both,
        cardinality=cardinality,
        size=sizes.pop() if len(sizes) == 1 else None,
    )
