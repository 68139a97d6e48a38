"""Layout of a checkpoint: the offset of each value, and the rank that writes it.

The layout depends only on names, shapes and types. A file consists of the prefix
(HDF5's structures and the table of hashes), the data blocks, and the commit record::

    0          table_start    data_start                         data_end   size
    | structures | hashes       | block 0 | block 1 | ... | block n | record |
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpcstrat.checkpoint.file.division import Division

__all__ = [
    "RECORD_BYTES",
    "Extent",
    "FileLayout",
    "Piece",
    "choose_block_bytes",
    "is_block_size",
    "part_of",
]


RECORD_BYTES = 4096
"""Size of the commit record."""

_LEAST_BLOCK_BYTES = 1 << 20
_MOST_BLOCK_BYTES = 16 << 20
# With 8 blocks, each thread of a rank has several, and the ranks' loads are similar.
_BLOCKS_PER_RANK = 8


@dataclass(frozen=True, slots=True)
class Extent:
    """The offset and size, in bytes, of the values of a dataset that is not empty.

    ``division`` is None if every rank has all values. If not, each rank has a part.
    """

    path: str
    offset: int
    nbytes: int
    division: Division | None = None

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a block: bytes ``source`` of a dataset, at ``place`` in the block."""

    path: str
    source: slice
    place: slice


@dataclass(frozen=True)
class FileLayout:
    """The layout of a checkpoint file: the offsets of all its parts.

    The data begin at ``data_start``, after the table of hashes, and end at
    ``data_end``, where the commit record begins. Both offsets are multiples of a page.
    The last block may be shorter. ``extents`` is sorted by offset.
    """

    table_start: int
    data_start: int
    data_end: int
    block_bytes: int
    extents: tuple[Extent, ...] = ()

    @property
    def size(self) -> int:
        return self.data_end + RECORD_BYTES

    @property
    def num_blocks(self) -> int:
        return -(-(self.data_end - self.data_start) // self.block_bytes)

    @cached_property
    def divided(self) -> tuple[Extent, ...]:
        """The datasets of which ranks have only parts."""
        return tuple(e for e in self.extents if e.division is not None)

    # Cache for `parts`: many saves use the same layout and number of ranks.
    @cached_property
    def _parts(self) -> dict[int, tuple[Sequence[int], ...]]:
        return {}

    def parts(self, size: int) -> tuple[Sequence[int], ...]:
        """Return, for each of ``size`` ranks, the blocks that it writes, ascending.

        If a part of a dataset is one range of bytes that fills more than half of a
        block, a rank that has the part writes the block. The other blocks are divided
        so that all ranks write equally many.
        """
        if size not in self._parts:
            self._parts[size] = _deal(self, size)
        return self._parts[size]

    # Cache for `mixed_blocks`.
    @cached_property
    def _mixed(self) -> dict[int, tuple[list[int], ...]]:
        return {}

    def mixed_blocks(self, size: int) -> tuple[list[int], ...]:
        """Return, for each of ``size`` ranks, its blocks with bytes that it lacks."""
        if size not in self._mixed:
            parts = self.parts(size)
            owners = {block: rank for rank, own in enumerate(parts) for block in own}
            mixed: list[set[int]] = [set() for _ in parts]
            for extent in self.divided:
                division, begin = extent.division, extent.offset
                assert division is not None
                for block in self.blocks_of(begin, extent.stop):
                    start, stop = self.span(block)
                    span = max(start, begin) - begin, min(stop, extent.stop) - begin
                    own = division.part_of[owners[block]]
                    if any(part != own for part in division.parts_in(*span)):
                        mixed[owners[block]].add(block)
            self._mixed[size] = tuple(map(sorted, mixed))
        return self._mixed[size]

    def span(self, block: int) -> tuple[int, int]:
        """Return the start and end offset of a block, which are multiples of a page."""
        start = self.data_start + block * self.block_bytes
        return start, min(start + self.block_bytes, self.data_end)

    def blocks_of(self, start: int, stop: int) -> range:
        """Return the blocks that contain bytes ``start`` to ``stop`` of the file."""
        if start == stop:
            return range(0)
        first = (start - self.data_start) // self.block_bytes
        return range(first, (stop - 1 - self.data_start) // self.block_bytes + 1)

    @cached_property
    def _ends(self) -> list[int]:
        return [extent.stop for extent in self.extents]

    def pieces(self, block: int) -> Iterator[Piece]:
        """Yield the parts of datasets in a block, by offset; zeros fill the gaps."""
        start, stop = self.span(block)
        first = bisect.bisect_right(self._ends, start)
        for extent in self.extents[first:]:
            if extent.offset >= stop:
                return
            low, high = max(extent.offset, start), min(extent.stop, stop)
            yield Piece(
                extent.path,
                slice(low - extent.offset, high - extent.offset),
                slice(low - start, high - start),
            )


def choose_block_bytes(nbytes: int, num_ranks: int) -> int:
    """Return a block size for which all ranks write nearly equal numbers of bytes.

    The size is a power of two from 1 MiB (a usual stripe of file systems) to 16 MiB.
    """
    wanted = nbytes // (_BLOCKS_PER_RANK * num_ranks)
    power = 1 << max(wanted, 1).bit_length() - 1
    return min(max(power, _LEAST_BLOCK_BYTES), _MOST_BLOCK_BYTES)


def is_block_size(nbytes: int) -> bool:
    """Return whether ``nbytes`` is a size that `choose_block_bytes` can return."""
    within = _LEAST_BLOCK_BYTES <= nbytes <= _MOST_BLOCK_BYTES
    return within and nbytes.bit_count() == 1


def part_of(count: int, rank: int, size: int) -> range:
    """Return a rank's range of ``count`` items; the first ranks get one item more."""
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _deal(plan: FileLayout, size: int) -> tuple[Sequence[int], ...]:
    if not plan.divided:
        return tuple(part_of(plan.num_blocks, rank, size) for rank in range(size))
    owners = _part_owners(plan)
    parts: list[list[int]] = [[] for _ in range(size)]
    for block, rank in owners.items():
        parts[rank].append(block)
    free = [block for block in range(plan.num_blocks) if block not in owners]
    start = 0
    for part, count in zip(parts, _shares(parts, len(free)), strict=True):
        part.extend(free[start : start + count])
        part.sort()
        start += count
    return tuple(parts)


def _part_owners(plan: FileLayout) -> dict[int, int]:
    """Return the writing rank of each block that one part fills by more than half."""
    owners = {}
    for extent in plan.divided:
        assert extent.division is not None
        for part, holders in extent.division.holders.items():
            run = extent.division.run(part)
            # A smaller part fills at most half of a block, which any rank may write.
            if run is None or 2 * (run[1] - run[0]) <= plan.block_bytes:
                continue
            start, stop = extent.offset + run[0], extent.offset + run[1]
            blocks = plan.blocks_of(start, stop)
            for index, block in enumerate(blocks):
                low, high = plan.span(block)
                if 2 * (min(stop, high) - max(start, low)) > plan.block_bytes:
                    # Each rank that has the part writes adjacent blocks of the part.
                    owners[block] = holders[index * len(holders) // len(blocks)]
    return owners


def _shares(parts: list[list[int]], count: int) -> list[int]:
    """Return how many of ``count`` items to add to each part, to equalize lengths."""
    has = [len(part) for part in parts]

    def needed(level: int) -> int:
        return sum(max(level - each, 0) for each in has)

    # Find the least length such that filling all parts up to it uses all items.
    level = bisect.bisect_left(range(max(has) + count + 1), count, key=needed)
    takes = [max(level - each, 0) for each in has]
    for rank in reversed(range(len(takes))):
        # If that needs more items than there are, the last parts receive one item less.
        if takes[rank] and sum(takes) > count:
            takes[rank] -= 1
    return takes
