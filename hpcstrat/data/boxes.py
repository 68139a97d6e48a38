"""Boxes: the part of each row that a rank reads, as ranges of the row's dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcstrat.data.elements import ArraySpec
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree

__all__ = ["WHOLE", "Box", "Boxes"]

WHOLE = (0, None)
"""The range of a whole dimension."""


@dataclass(frozen=True)
class Box:
    """A part of each row of one column.

    ``ranges`` has the first and the last index (exclusive) in each dimension of a row,
    or `WHOLE`. ``lengths`` is the shape of whole rows, with None for lengths that
    differ between rows. ``name`` is the column's name, for errors.
    """

    name: str
    lengths: tuple[int | None, ...]
    ranges: tuple[tuple[int, int | None], ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The ranges as slices."""
        return tuple(slice(*each) for each in self.ranges)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of the part; None for lengths that differ between rows."""
        both = zip(self.lengths, self.ranges, strict=True)
        return tuple(n if stop is None else stop - start for n, (start, stop) in both)

    def of(self, array: Array, before: int) -> Array:
        """Return the part of an array of rows, with ``before`` dimensions before it.

        Raises ValueError if the rows do not have the lengths of the first rows.
        """
        found = array.shape[before:]
        expected = tuple(
            n if length is None else length
            for n, length in zip(found, self.lengths, strict=False)
        )
        if found != expected or len(found) != len(self.lengths):
            raise ValueError(
                f"expected rows of shape {list(self.lengths)} in "
                f"{self.name or 'the data set'}, as in the first rows, found "
                f"{list(found)}; give all rows one shape, or leave the column out of "
                "split()"
            )
        part: Array = array[(slice(None),) * before + self.slices]
        return part

    def within(self, outer: Box | None) -> Box:
        """Return this box of the rows' part in ``outer`` as a box of whole rows."""
        if outer is None:
            return self
        both = zip(self.ranges, outer.ranges, strict=True)
        ranges = tuple(
            (begin + start, end if stop is None else begin + stop)
            for (start, stop), (begin, end) in both
        )
        return Box(self.name, outer.lengths, ranges)

    def selections(
        self, chunks: tuple[int, ...] | None, ndim: int
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the slices that HDF5 is to read, and the slices of the box in these.

        ``chunks`` and ``ndim`` are those of the dataset. HDF5 reads a range of a row's
        first dimension as fast as whole rows, but a range of a later dimension up to 17
        times more slowly: there, all chunks that overlap are read, or whole rows.
        """
        read, own = [], []
        for axis, (start, stop) in enumerate(self.ranges, start=1):
            first, last = WHOLE
            if axis < ndim and (axis == 1 or chunks) and stop is not None:
                size = 1 if axis == 1 or not chunks else chunks[axis]
                first, last = start // size * size, -(-stop // size) * size
            read.append(slice(first, last))
            own.append(slice(start - first, None if stop is None else stop - first))
        return tuple(read[: ndim - 1]), tuple(own)


class Boxes(tuple[Box | None, ...]):
    """A box for each array of an element, in the order of the leaves; None: whole.

    ``words`` describe the split; they are equal on all ranks.
    """

    words: str

    def __new__(cls, boxes: Sequence[Box | None], words: str) -> Boxes:
        made = super().__new__(cls, boxes)
        made.words = words
        return made

    def of(self, tree: Tree, before: int) -> Tree:
        """Return the parts of arrays, as new arrays that keep no whole row in memory.

        ``before`` is the number of dimensions before the dimensions of a row.
        """
        return self._changed(tree, lambda leaf, box: box.of(leaf, before).copy())

    def spec(self, spec: Tree, before: int) -> Tree:
        """Return the spec of the parts, given the spec of whole elements."""
        return self._changed(
            spec,
            lambda leaf, box: ArraySpec((*leaf.shape[:before], *box.shape), leaf.dtype),
        )

    def _changed(self, tree: Tree, change: Callable[[Any, Box], Any]) -> Tree:
        leaves, structure = flatten(tree)
        parts = [
            leaf if box is None else change(leaf, box)
            for leaf, box in zip(leaves, self, strict=True)
        ]
        return unflatten(structure, parts)
