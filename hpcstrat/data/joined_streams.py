"""Streams whose elements come from several stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data.elements import (
    call_with,
    made_spec,
    merged_spec,
    require_same_structure,
)
from hpcstrat.data.order import generator_of
from hpcstrat.data.rows import INFINITE, UNKNOWN, Stage
from hpcstrat.data.streams import END, Chained, Stream
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Tree

__all__ = ["chosen", "concatenated", "interleaved", "sampled", "zipped"]


class _Interleaved(Iterator[Tree]):
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

    def __next__(self) -> Tree:
        while self._is_open or any(slot is not None for slot in self._slots):
            current = self._slots[self._slot]
            if current is not None:
                element = next(current, END)
                if element is not END:
                    self._given += 1
                    if self._given == self._block:
                        self._advance()
                    return element
                self._slots[self._slot] = None
                self._advance()
            elif self._is_open:
                source = next(self._elements, END)
                if source is END:
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


class _Chosen(Iterator[Tree]):
    def __init__(
        self,
        choices: Iterator[Any],
        sources: Sequence[Iterator[Tree]],
        stop_on_empty: bool,
    ) -> None:
        self._choices = choices
        self._sources: list[Iterator[Tree] | None] = list(sources)
        self._stops = stop_on_empty

    def __next__(self) -> Tree:
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
            element = next(source, END)
            if element is not END:
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


class _Draws(Iterator[Tree]):
    """Numbers of data sets, drawn by weight among those that have not ended."""

    def __init__(self, weights: Any, key: Any) -> None:
        self._ends = np.cumsum(weights / np.sum(weights))
        self._generator = generator_of(*key)

    def __next__(self) -> int:
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


def concatenated(first: Stage, second: Stage) -> Stream:
    """Return the elements of one stage, and then those of another."""
    lengths = first.cardinality, second.cardinality
    cardinality = min(lengths) if min(lengths) < 0 else sum(lengths)
    if INFINITE in lengths:
        cardinality = INFINITE
    sizes = {stage.batch_size for stage in (first, second)}

    def start(epoch: int) -> Iterator[Tree]:
        def elements(stage: Stage) -> Iterator[Tree]:
            return stage.iterate(epoch)

        # No generator, which an error would end.
        return Chained(map(elements, (first, second)))

    return Stream(
        start,
        _same_spec([first, second]),
        f"({first.describe()}, then {second.describe()})",
        cardinality=cardinality,
        size=sizes.pop() if len(sizes) == 1 else None,
    )
