"""Slabs: the parts of each row that the ranks of a replica read.

`Dataset.split` stores a `RowSplit`. When the data set is distributed, the split becomes
a box for each column. Boxes are passed on to the stages that read the rows, so that a
rank reads only its own slab where the source allows it; otherwise whole rows are cut.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hpcstrat.data.batched import (
    Batch,
    Batched,
    BatchesOfParent,
    CachedBatches,
    RepeatedBatches,
    RowBatches,
    SomeBatches,
)
from hpcstrat.data.boxes import WHOLE, Box, Boxes
from hpcstrat.data.elements import ArraySpec
from hpcstrat.data.files.rows import FileRows
from hpcstrat.data.joined_rows import (
    ConcatenatedRows,
    MixedRows,
    RepeatedRows,
    ZippedRows,
)
from hpcstrat.data.rows import (
    CachedRows,
    Places,
    Rows,
    RowsOfParent,
    ShuffledRows,
    SourceRows,
    Stage,
    StridedRows,
)
from hpcstrat.data.streams import Stream
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array, Tree

__all__ = ["RowSplit"]


class RowSplit:
    """The axis of each column along which the ranks of a replica divide its rows.

    ``axis`` is one axis for all columns, or maps names of columns to axes; axes count
    the dimensions of a row. ``along`` is an axis of the strategy's ``replica_shape``,
    or None for all ranks of a replica.
    """

    def __init__(
        self, axis: int | Mapping[str | int, int], along: str | None = None
    ) -> None:
        self.along = along
        self._axes: dict[str, int] | int
        if isinstance(axis, Mapping):
            # Sort the names, because ranks compare the words.
            self._axes = {
                str(name): _index(axis[name]) for name in sorted(axis, key=str)
            }
        else:
            self._axes = _index(axis)
        over = f" over the ranks along {along}" if along is not None else ""
        self.words = f"split along {self._axes}{over}"

    def overlaps(self, other: RowSplit) -> bool:
        """Return whether two splits divide rows over the same ranks."""
        return None in (self.along, other.along) or self.along == other.along

    def check(self, stage: Stage) -> None:
        """Raise ValueError if the elements of a stage cannot be split."""
        self._boxes(stage, lambda length: slice(0, length))

    def apply(self, stage: Stage, inside: Any) -> Stage:
        """Return a stage of this rank's slabs; ``inside`` is that of the strategy."""
        place = () if self.along is None else (self.along,)
        return _boxed(stage, self._boxes(stage, lambda n: inside.part(n, *place)))

    def _boxes(self, stage: Stage, part: Callable[[int], slice]) -> Boxes:
        leaves, structure = flatten(stage.spec())
        names = ["/".join(map(str, path)) for path in structure.paths()]
        axes = self._axes
        if isinstance(axes, int):
            axes = dict.fromkeys(names, axes)
        if wrong := [name for name in axes if name not in names]:
            found = "a single array" if names == [""] else ", ".join(map(repr, names))
            raise ValueError(
                f"expected columns of the data set in split(), found {wrong[0]!r}, but "
                f"its elements are {found}; change the name, or pass only an axis"
            )
        before = int(_holds_batches(stage))
        boxes = [
            _box(name, leaf, before, axes[name], part) if name in axes else None
            for name, leaf in zip(names, leaves, strict=True)
        ]
        return Boxes(boxes, self.words)


def _index(axis: Any) -> int:
    try:
        return operator.index(axis)
    except TypeError as error:
        raise TypeError(
            f"expected an integer as axis of split(), found {axis!r}; pass the number "
            "of a row's dimension"
        ) from error


def _box(
    name: str, spec: ArraySpec, before: int, axis: int, part: Callable[[int], slice]
) -> Box:
    """Return the box of a part of an axis; ValueError if rows cannot be split."""
    column, advice = name or "the data set", "or name other columns: split({'a': 0})"
    lengths = (spec.shape or ())[before:]
    ndim = len(lengths)
    if not ndim:
        found = "a different number of dimensions" if spec.shape is None else "none"
        raise ValueError(
            f"expected rows with dimensions in {column} to split, found rows with "
            f"{found}; give them one shape by map(), {advice}"
        )
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"expected an axis from {-ndim} to {ndim - 1} to split {column}, whose "
            f"rows have the shape {list(lengths)}, found {axis}; count the dimensions "
            "of one row, without the batch's"
        )
    length = lengths[axis]
    if length is None:
        raise ValueError(
            f"expected rows of one length along axis {axis} of {column} to split, "
            f"found lengths that differ; pad the rows by map(), {advice}"
        )
    own = part(length)
    ranges: list[tuple[int, int | None]] = [WHOLE] * ndim
    ranges[axis] = own.start, own.stop
    return Box(name, lengths, tuple(ranges))


def _holds_batches(stage: Stage) -> bool:
    """Return whether elements are batches; ValueError if this is not known."""
    if _is_batched(stage):
        return True
    above = list(stage.parents)
    while above:
        parent = above.pop()
        if _is_batched(parent):
            raise ValueError(
                "expected rows, or the result of batch(), to split, found elements "
                f"made of batches: {stage.describe()}; call split() before batch()"
            )
        above += parent.parents
    return False


def _is_batched(stage: Stage) -> bool:
    return isinstance(stage, Batched) or stage.batch_size is not None


def _boxed(stage: Stage, boxes: Boxes) -> Stage:
    """Return a stage of the same elements, of which only boxes are read."""
    if isinstance(stage, Rows):
        return _boxed_rows(stage, boxes)
    if isinstance(stage, Batched):
        return _boxed_batches(stage, boxes)
    before = int(_is_batched(stage))
    return _BoxedStream.after(
        stage,
        boxes.words,
        lambda elements, _: map(partial(boxes.of, before=before), elements),
        lambda: boxes.spec(stage.spec(), before),
        cardinality=stage.cardinality,
        size=stage.batch_size,
    )


def _boxed_rows(rows: Rows, boxes: Boxes) -> Rows:
    """Return the same rows; their boxes are read by the first stage that can."""
    found: Rows | None = None
    if not any(boxes):
        return rows
    if isinstance(rows, (SourceRows, FileRows)):
        found = rows.boxed(boxes)
    elif isinstance(rows, CachedRows):
        return CachedRows(_boxed_rows(rows.parent, boxes))
    elif isinstance(rows, ZippedRows):
        parents, start = [], 0
        for parent in rows.parents:
            count = len(flatten(parent.spec())[0])
            own = Boxes(boxes[start : start + count], boxes.words)
            parents.append(_boxed_rows(parent, own))
            start += count
        return _with_parents(rows, parents)
    elif isinstance(
        rows, (StridedRows, ShuffledRows, RepeatedRows, ConcatenatedRows, MixedRows)
    ):
        return _with_parents(rows, [_boxed_rows(p, boxes) for p in rows.parents])
    return _BoxedRows(rows, boxes) if found is None else found


def _with_parents(rows: Rows, parents: list[Rows]) -> Rows:
    made = copy.copy(rows)
    made.parents = parents
    if isinstance(made, RowsOfParent):
        made.parent = parents[0]
    if made.origin is not None:
        made.origin = parents[0]
    return made


def _boxed_batches(batches: Batched, boxes: Boxes) -> Batched:
    if type(batches) is RowBatches:
        made = copy.copy(batches)
        made.rows = _boxed_rows(batches.rows, boxes)
        made.parents = [made.rows]
        return made
    if isinstance(batches, CachedBatches):
        return CachedBatches(_boxed_batches(batches.parent, boxes))
    if isinstance(batches, (RepeatedBatches, SomeBatches)):
        return batches.after(_boxed_batches(batches.parent, boxes))
    return _BoxedBatches(batches, boxes)


class _BoxedRows(RowsOfParent):
    """Boxes of rows that the parent stage reads whole."""

    def __init__(self, parent: Rows, boxes: Boxes) -> None:
        super().__init__(parent, boxes.words)
        self.origin = parent
        self._boxes = boxes

    def read(self, places: Places, epoch: int) -> Tree:
        return self._boxes.of(super().read(places, epoch), 1)

    def elements(self, places: Places, epoch: int) -> list[Tree]:
        return [self._boxes.of(each, 0) for each in super().elements(places, epoch)]

    def homes(self, places: Places, epoch: int) -> Array:
        return self.parent.homes(places, epoch)

    def order_words(self) -> str:
        return self.parent.order_words()

    def spec(self) -> Tree:
        return self._boxes.spec(super().spec(), 0)


class _BoxedBatches(BatchesOfParent):
    """Boxes of the rows of batches that the parent stage reads whole."""

    def __init__(self, parent: Batched, boxes: Boxes) -> None:
        super().__init__(parent, boxes.words)
        self._boxes = boxes

    def read(self, batch: Batch, first: int, last: int) -> Tree:
        return self._boxes.of(self.parent.read(batch, first, last), 1)

    def order_words(self) -> str:
        return self.parent.order_words()

    def spec(self) -> Tree:
        return self._boxes.spec(super().spec(), 1)


class _BoxedStream(Stream):
    """Boxes of the rows of a stream."""

    def order_words(self) -> str:
        (parent,) = self.parents
        words: str = parent.order_words()
        return words
