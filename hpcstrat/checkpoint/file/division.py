"""The division of a dataset into parts, of which each rank has one."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["Box", "Division", "Overlap", "of_regions", "of_rows"]

Box = tuple[slice, ...]
"""A part of an array, as one slice for each axis."""


class Overlap(NamedTuple):
    """Bytes that a range of a dataset and a part have in common.

    The bytes ``place`` of the range, as an array of shape ``shape``, have at ``there``
    the bytes that the part has at ``here``.
    """

    place: slice
    shape: tuple[int, ...]
    there: Box
    here: Box


@dataclass(frozen=True)
class Division:
    """The division of a dataset into parts: boxes of a grid.

    ``shape`` is that of the dataset, with the bytes of an element as the last axis.
    Each axis is cut at the ascending numbers in ``cuts``, which begin with 0 and end
    with the axis' length. Parts are numbered in C order. ``part_of`` has the number of
    each rank's part, or -1 for a rank without elements; several ranks may have the same
    part.
    """

    shape: tuple[int, ...]
    cuts: tuple[Sequence[int], ...]
    part_of: Sequence[int]

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(len(cuts) - 1 for cuts in self.cuts)

    @cached_property
    def holders(self) -> dict[int, list[int]]:
        """The ranks that have each part, ascending."""
        found: dict[int, list[int]] = {}
        for rank, part in enumerate(self.part_of):
            if part >= 0:
                found.setdefault(part, []).append(rank)
        return found

    def nearest(self, part: int, rank: int) -> int:
        """Return the rank nearest to ``rank`` that has a part."""
        ranks = self.holders[part]
        index = bisect_left(ranks, rank)
        return min(ranks[max(index - 1, 0) : index + 1], key=lambda r: abs(r - rank))

    def box(self, part: int) -> Box:
        """Return a part as one slice for each axis."""
        indices = []
        for count in reversed(self._counts):
            part, index = divmod(part, count)
            indices.append(index)
        places = zip(self.cuts, reversed(indices), strict=True)
        return tuple(slice(cuts[index], cuts[index + 1]) for cuts, index in places)

    def part_shape(self, part: int) -> tuple[int, ...]:
        """Return the shape of a part, with the bytes of an element as the last axis."""
        if part < 0:
            return (0,) * len(self.shape)
        return tuple(s.stop - s.start for s in self.box(part))

    def run(self, part: int) -> tuple[int, int] | None:
        """Return the range of the dataset's bytes that are a part, if it is one."""
        box = self.box(part)
        start, stop = 0, 1
        for own, length in zip(box, self.shape, strict=True):
            if own.stop - own.start != length and stop - start != 1:
                return None
            start, stop = start * length + own.start, (stop - 1) * length + own.stop
        return start, stop

    def parts_in(self, start: int, stop: int) -> Iterator[int]:
        """Yield each part with bytes ``start`` to ``stop`` of the dataset once."""
        seen = set()
        for _, _, box in self._boxes(start, stop):
            ranges = [
                range(bisect_right(cuts, b.start) - 1, bisect_left(cuts, b.stop))
                for cuts, b in zip(self.cuts, box, strict=True)
            ]
            for indices in itertools.product(*ranges):
                part = 0
                for count, index in zip(self._counts, indices, strict=True):
                    part = part * count + index
                if part not in seen:
                    seen.add(part)
                    yield part

    def overlaps(self, part: int, start: int, stop: int) -> Iterator[Overlap]:
        """Yield what a part and bytes ``start`` to ``stop`` of the dataset share."""
        if part < 0:
            return
        own = self.box(part)
        for first, last, box in self._boxes(start, stop):
            common = [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(own, box, strict=True)
            ]
            if all(each.start < each.stop for each in common):
                yield Overlap(
                    slice(first - start, last - start),
                    tuple(b.stop - b.start for b in box),
                    _from(box, common),
                    _from(own, common),
                )

    def _boxes(self, start: int, stop: int) -> Iterator[tuple[int, int, Box]]:
        """Yield boxes that make up a range of bytes, each with its own range."""
        while start < stop:
            # Find the largest box that begins at ``start``: some indices of one axis,
            # and all indices of the later axes, which are ``size`` bytes per index.
            axis, size = len(self.shape) - 1, 1
            while axis > 0:
                larger = size * self.shape[axis]
                if start % larger or start + larger > stop:
                    break
                axis, size = axis - 1, larger
            rest, box = start // size, []
            rest, index = divmod(rest, self.shape[axis])
            count = min(self.shape[axis] - index, (stop - start) // size)
            box.append(slice(index, index + count))
            for length in reversed(self.shape[:axis]):
                rest, index = divmod(rest, length)
                box.append(slice(index, index + 1))
            box.reverse()
            box += [slice(0, length) for length in self.shape[axis + 1 :]]
            yield start, start + count * size, tuple(box)
            start += count * size


def _from(outer: Sequence[slice], inner: Sequence[slice]) -> Box:
    """Return a box's slices, counted from the start of the box that contains it."""
    return tuple(
        slice(b.start - a.start, b.stop - a.start)
        for a, b in zip(outer, inner, strict=True)
    )


def of_rows(shape: Sequence[int], itemsize: int, row_of: Sequence[int]) -> Division:
    """Return the division of a dataset in rows; ``row_of`` has each rank's row."""
    whole = (*shape, itemsize)
    cuts = [range(shape[0] + 1), *((0, length) for length in whole[1:])]
    return Division(whole, tuple(cuts), row_of)


def of_regions(
    shape: Sequence[int], itemsize: int, regions: Sequence[Box], num_ranks: int
) -> Division:
    """Return a division by the regions of the ranks of a replica, one for each rank.

    The replicas have equal divisions, and their ranks are neighbors.
    """
    whole = (*shape, itemsize)
    cuts = [
        tuple(sorted({0, length, *(end for r in regions for end in _ends(r[axis]))}))
        for axis, length in enumerate(shape)
    ]
    cuts.append((0, itemsize))
    parts = []
    for region in regions:
        part = 0
        for each, own in zip(cuts, (*region, slice(0, itemsize)), strict=True):
            part = part * (len(each) - 1) + bisect_left(each, own.start)
        empty = math.prod(own.stop - own.start for own in region) == 0
        parts.append(-1 if empty else part)
    replicas = num_ranks // len(regions)
    return Division(whole, tuple(cuts), tuple(parts) * replicas)


def _ends(region: slice) -> tuple[int, int]:
    return region.start, region.stop
