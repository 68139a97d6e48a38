"""The blocks of calls that move data: what each rank sends, and where it arrives.

See `hpcstrat.engine.algorithms.move_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["Block", "MoveBlocks", "broadcast_blocks", "gathered_blocks", "sent_blocks"]


class Block(NamedTuple):
    """Bytes of an array, and their position in a rank's stream.

    The array has ``num_chunks`` chunks of ``chunk`` bytes, which begin at multiples of
    ``stride`` bytes from byte ``at`` on. In the stream, they are adjacent.
    """

    # The rank whose stream has the block; the index of the array among this rank's
    # sources or results.
    rank: int
    array: int
    # The block's first byte in the stream, and in the array.
    offset: int
    at: int
    chunk: int
    num_chunks: int = 1
    stride: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the block in bytes."""
        return self.chunk * self.num_chunks


@dataclass(frozen=True)
class MoveBlocks:
    """The blocks of one rank in a call, none of which is empty."""

    puts: Sequence[Block]
    takes: Sequence[Block]
    # The size of each rank's stream in bytes.
    streams: Sequence[int]
    # The first byte, and the end, of the values in this rank's stream for each other
    # rank that takes some; None if every rank takes the whole streams of all ranks.
    spans: Mapping[int, tuple[int, int]] | None
    # The source and the result of the values that this rank sends to itself, if they
    # may be the same memory; else (-1, -1). If ``takes`` has no block of this rank,
    # the whole array is copied.
    own: tuple[int, int] = (-1, -1)
    # Values that this rank copies itself: pairs of a block of a source and a block of a
    # result, of equal sizes.
    copies: Sequence[tuple[Block, Block]] = ()
    # Blocks of results that are filled with zeros.
    zeros: Sequence[Block] = ()
    # Whether ranks may read each other's blocks in place: the same on every rank.
    readable: bool = True

    @property
    def nbytes(self) -> int:
        """The size of the longest stream in bytes."""
        return max(self.streams, default=0)


def gathered_blocks(
    lengths: Sequence[Sequence[int]],
    inner: Sequence[int],
    outer: Sequence[int],
    me: int,
) -> MoveBlocks:
    """Return the blocks of a call that concatenates arrays of all ranks along an axis.

    ``lengths[r][i]`` is the length of rank ``r``'s array ``i`` along the axis. The
    array consists of ``outer[i]`` parts, one after the other; one element along the
    axis has ``inner[i]`` bytes of each part.
    """
    wholes = [sum(column) for column in zip(*lengths, strict=True)]
    before = [0] * len(wholes)
    puts, takes, streams = list[Block](), list[Block](), list[int]()
    for rank, row in enumerate(lengths):
        offset = 0
        for i, length in enumerate(row):
            chunk, stride = length * inner[i], wholes[i] * inner[i]
            nbytes = chunk * outer[i]
            if nbytes:
                shape = (nbytes, 1, 0) if chunk == stride else (chunk, outer[i], stride)
                takes.append(Block(rank, i, offset, before[i] * inner[i], *shape))
                if rank == me:
                    puts.append(Block(rank, i, offset, 0, nbytes))
            offset += nbytes
            before[i] += length
        streams.append(offset)
    return MoveBlocks(puts, takes, streams, None)


def broadcast_blocks(
    sizes: Sequence[int], root: int, me: int, num_ranks: int
) -> MoveBlocks:
    """Return the blocks of a call that copies the root's arrays of these ``sizes``."""
    lengths = [sizes if r == root else [0] * len(sizes) for r in range(num_ranks)]
    ones = [1] * len(sizes)
    return gathered_blocks(lengths, ones, ones, me)


def sent_blocks(
    table: Array,
    me: int,
    sources: Mapping[int, int],
    results: Mapping[int, int],
) -> MoveBlocks:
    """Return the blocks of a call in which ``a`` sends ``table[a, b]`` bytes to ``b``.

    ``sources`` and ``results`` have the indices of this rank's arrays by the numbers of
    the other ranks.
    """
    size, keeps = len(table), bool(table[me, me])
    table = np.where(np.eye(size, dtype=bool), 0, table)
    # Each stream begins with the part for the next rank, so that all ranks read at the
    # same time. In row ``a`` of ``ends``, column ``s`` is the end of the part for rank
    # ``a + 1 + s``.
    shifts = (np.arange(size)[:, None] + np.arange(1, size + 1)) % size
    ends = np.cumsum(np.take_along_axis(table, shifts, axis=1), axis=1)

    def end(source: int, to: int) -> int:
        return int(ends[source, (to - source - 1) % size])

    spans = {
        to: (end(me, to) - int(table[me, to]), end(me, to))
        for to in np.flatnonzero(table[me]).tolist()
    }
    takes = [
        Block(
            source,
            results[source],
            end(source, me) - int(table[source, me]),
            0,
            int(table[source, me]),
        )
        for source in np.flatnonzero(table[:, me]).tolist()
    ]
    puts = [
        Block(me, sources[to], low, 0, high - low) for to, (low, high) in spans.items()
    ]
    own = (sources[me], results[me]) if keeps else (-1, -1)
    streams = table.sum(axis=1).tolist()
    return MoveBlocks(puts, takes, streams, spans, own)
