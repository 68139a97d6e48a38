"""Where each value lies in the file, and which replica writes which part of it.

Pure functions of names, shapes and types: no file is touched here. A file is a prefix
(HDF5's own structures and the table of hashes), the data, cut into blocks, and the
commit record::

    0          table_start    data_start                         data_end   size
    | structures | hashes       | block 0 | block 1 | ... | block n | record |
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "RECORD_BYTES",
    "Extent",
    "Piece",
    "Plan",
    "choose_block_bytes",
    "is_block_size",
    "part_of",
]


RECORD_BYTES = 4096
"""Size of the commit record."""

_LEAST_BLOCK_BYTES = 1 << 20
_MOST_BLOCK_BYTES = 16 << 20
_BLOCKS_PER_REPLICA = 8


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of a dataset's values.

    Parameters
    ----------
    path : str
        Of the dataset.
    offset : int
        Where in the file it begins.
    nbytes : int
        How long it is; at least 1.
    num_rows : int
        One for each replica, which alone has it; 0 where all have all values.
    """

    path: str
    offset: int
    nbytes: int
    num_rows: int = 0

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.offset + self.nbytes

    @property
    def row_bytes(self) -> int:
        """Size of a row; there must be rows."""
        return self.nbytes // self.num_rows


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a dataset that lies in a block.

    Parameters
    ----------
    path : str
        Of the dataset.
    source : slice
        Which of its bytes.
    place : slice
        Where they are in the block.
    """

    path: str
    source: slice
    place: slice


@dataclass(frozen=True)
class Plan:
    """The layout of a checkpoint file.

    Parameters
    ----------
    table_start : int
        Where the table of hashes begins; it ends at ``data_start``.
    data_start : int
        Where the data begin; a multiple of a page, as ``data_end`` is.
    data_end : int
        Where they end, and the commit record begins.
    block_bytes : int
        Size of a block; the last one may be shorter.
    extents : tuple of Extent
        In the order of the file, without overlap.
    """

    table_start: int
    data_start: int
    data_end: int
    block_bytes: int
    extents: tuple[Extent, ...] = ()

    @property
    def size(self) -> int:
        """Number of bytes of the file."""
        return self.data_end + RECORD_BYTES

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return -(-(self.data_end - self.data_start) // self.block_bytes)

    @cached_property
    def has_rows(self) -> bool:
        """Whether a replica has values that the others do not have."""
        return any(extent.num_rows for extent in self.extents)

    @cached_property
    def _parts(self) -> dict[int, tuple[Sequence[int], ...]]:
        return {}

    def parts(self, size: int) -> tuple[Sequence[int], ...]:
        """Return which blocks each replica writes.

        Not collective. A block more than half of which is one replica's row is that
        replica's. All others are dealt out so that all have equally many, as far as
        that goes.

        Parameters
        ----------
        size : int
            Number of replicas; that of the rows where there are any.

        Returns
        -------
        tuple of sequence of int
            By replica; ascending. Each block is in one of them.
        """
        if size not in self._parts:
            self._parts[size] = _deal(self, size)
        return self._parts[size]

    def span(self, block: int) -> tuple[int, int]:
        """Return where a block is in the file.

        Not collective.

        Parameters
        ----------
        block : int
            Its number, from 0.

        Returns
        -------
        start, stop : int
            Multiples of a page.
        """
        start = self.data_start + block * self.block_bytes
        return start, min(start + self.block_bytes, self.data_end)

    def blocks_of(self, start: int, stop: int) -> range:
        """Return the blocks in which a part of the file lies.

        Not collective.

        Parameters
        ----------
        start, stop : int
            Within the data.

        Returns
        -------
        range
            Numbers of blocks; empty where ``start == stop``.
        """
        if start == stop:
            return range(0)
        first = (start - self.data_start) // self.block_bytes
        return range(first, (stop - 1 - self.data_start) // self.block_bytes + 1)

    @cached_property
    def _ends(self) -> list[int]:
        return [extent.stop for extent in self.extents]

    def pieces(self, block: int) -> Iterator[Piece]:
        """Yield what lies in a block, in the order of the file.

        Not collective.

        Parameters
        ----------
        block : int
            Its number.

        Yields
        ------
        Piece
            A part of a dataset; what is between them is zero.
        """
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


def choose_block_bytes(nbytes: int, num_replicas: int) -> int:
    """Return the size of blocks with which all replicas have about as much to do.

    Not collective.

    Parameters
    ----------
    nbytes : int
        Size of all values.
    num_replicas : int
        How many write.

    Returns
    -------
    int
        A power of two from 1 MiB, so that blocks are stripes of parallel file systems,
        to 16 MiB, with which disks are as fast as they get.
    """
    wanted = nbytes // (_BLOCKS_PER_REPLICA * num_replicas)
    power = 1 << max(wanted, 1).bit_length() - 1
    return min(max(power, _LEAST_BLOCK_BYTES), _MOST_BLOCK_BYTES)


def is_block_size(nbytes: int) -> bool:
    """Whether `choose_block_bytes` may have returned a number.

    Not collective.

    Parameters
    ----------
    nbytes : int
        Which.

    Returns
    -------
    bool
        For sizes of blocks.
    """
    within = _LEAST_BLOCK_BYTES <= nbytes <= _MOST_BLOCK_BYTES
    return within and nbytes.bit_count() == 1


def part_of(count: int, rank: int, size: int) -> range:
    """Return one rank's run of equal things, as long as the others' or one longer.

    Not collective.

    Parameters
    ----------
    count : int
        Number of things.
    rank : int
        Whose.
    size : int
        Number of ranks.

    Returns
    -------
    range
        The first ranks have one more; all runs together are ``range(count)``.
    """
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _deal(plan: Plan, size: int) -> tuple[Sequence[int], ...]:
    if not plan.has_rows:
        return tuple(part_of(plan.num_blocks, rank, size) for rank in range(size))
    owners = _row_owners(plan)
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


def _row_owners(plan: Plan) -> dict[int, int]:
    """Return the replica of each block of which one row fills more than half."""
    owners = {}
    for extent in plan.extents:
        if not extent.num_rows or 2 * extent.row_bytes <= plan.block_bytes:
            continue
        for rank in range(extent.num_rows):
            start = extent.offset + rank * extent.row_bytes
            stop = start + extent.row_bytes
            for block in plan.blocks_of(start, stop):
                low, high = plan.span(block)
                if 2 * (min(stop, high) - max(start, low)) > plan.block_bytes:
                    owners[block] = rank
    return owners


def _shares(parts: list[list[int]], count: int) -> list[int]:
    """Return how many more each takes of some things, so that all end up level."""
    has = [len(part) for part in parts]

    def needed(level: int) -> int:
        return sum(max(level - each, 0) for each in has)

    level = bisect.bisect_left(range(max(has) + count + 1), count, key=needed)
    takes = [max(level - each, 0) for each in has]
    for rank in reversed(range(len(takes))):
        # The last ones have one less.
        if takes[rank] and sum(takes) > count:
            takes[rank] -= 1
    return takes
