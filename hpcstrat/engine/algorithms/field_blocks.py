"""The blocks of calls that move parts of a field: halos, their adjoints, transposes.

A field is an array that is divided along an axis among the ranks of a *line*: the first
rank of the line has the first rows, and the number of rows may differ between ranks.
All ranks compute the same blocks from the shapes of all ranks' arrays.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcstrat.engine.algorithms.blocks import Block, MoveBlocks

__all__ = [
    "Addition",
    "Halo",
    "Lines",
    "Shapes",
    "halo_adjoint_blocks",
    "halo_blocks",
    "longer",
    "part",
    "transpose_blocks",
]

# The ranks of each line, in the order of their rows.
Lines = tuple[tuple[int, ...], ...]
# The shapes of each rank's arrays.
Shapes = Sequence[Sequence[tuple[int, ...]]]
# A rank searches the list of another rank's blocks for each that it reads in place.
_MOST_READ_BLOCKS = 64


class Halo(NamedTuple):
    """The rows of other ranks that a halo adds before and after a rank's own rows."""

    axis: int
    before: int
    after: int
    # Whether the last row of the field is followed by its first row.
    periodic: bool


class Addition(NamedTuple):
    """Values of an array's pads that are added to a result, for a halo's adjoint."""

    array: int
    # The rows of the result.
    rows: range
    # The first value, and the end, in the flat array of contributions.
    values: tuple[int, int]


class _BlockTransfer(NamedTuple):
    """Values that a rank sends to another rank, or copies itself.

    The offsets of both blocks in a stream are not set yet.
    """

    source: int
    target: int
    sent: Block
    taken: Block


class _BlockRun(NamedTuple):
    """Adjacent rows of a rank's padded array, which are rows of another rank."""

    # The owner's position in the line, or -1 for rows outside of the field.
    owner: int
    # The rows in the owner's array, and in the padded array.
    rows: range
    padded: range


def part(length: int, position: int, count: int) -> range:
    """Return the rows of a position if ``length`` rows are divided among ``count``."""
    return range(position * length // count, (position + 1) * length // count)


def halo_blocks(
    shapes: Shapes, itemsizes: Sequence[int], halo: Halo, lines: Lines, me: int
) -> MoveBlocks:
    """Return the blocks of a call that adds rows of neighbors to each rank's rows."""
    transfers, zeros, axis = list[_BlockTransfer](), list[Block](), halo.axis
    for line, i in itertools.product(lines, range(len(itemsizes))):
        lengths = [shapes[rank][i][axis] for rank in line]
        for position, rank in enumerate(line):
            own = *shapes[rank][i], itemsizes[i]
            whole = longer(own, axis, halo.before + halo.after)
            sent = _rows(rank, i, own, axis, range(own[axis]))
            rows = range(halo.before, halo.before + own[axis])
            taken = _rows(rank, i, whole, axis, rows)
            transfers.append(_BlockTransfer(rank, rank, sent, taken))
            for run in _pads(lengths, position, halo):
                source = line[run.owner]
                taken = _rows(source, i, whole, axis, run.padded)
                if run.owner < 0:
                    zeros += [taken] * (rank == me and taken.nbytes > 0)
                    continue
                shape = *shapes[source][i], itemsizes[i]
                sent = _rows(source, i, shape, axis, run.rows)
                transfers.append(_BlockTransfer(source, rank, sent, taken))
    return _blocks(transfers, zeros, len(shapes), me)


def halo_adjoint_blocks(
    shapes: Shapes, itemsizes: Sequence[int], halo: Halo, lines: Lines, me: int
) -> tuple[MoveBlocks, list[Addition], list[int]]:
    """Return the blocks of a call that sends the values of pads to their owners.

    ``shapes`` are those of the padded arrays. Array ``i`` has two results: result ``2 *
    i`` has the own rows, and the flat result ``2 * i + 1`` the rows that other ranks,
    or this one, have in their pads: those of the nearest ranks first. Returns also how
    this rank adds them, and the size of each flat result.
    """
    transfers, additions, axis = list[_BlockTransfer](), list[Addition](), halo.axis
    counts = [0] * len(itemsizes)
    for line, i in itertools.product(lines, range(len(itemsizes))):
        pads, size = halo.before + halo.after, itemsizes[i]
        lengths = [shapes[rank][i][axis] - pads for rank in line]
        runs = list[tuple[int, int, int, _BlockRun]]()
        for position, rank in enumerate(line):
            whole, length = (*shapes[rank][i], size), lengths[position]
            rows = range(halo.before, halo.before + length)
            sent = _rows(rank, i, whole, axis, rows)
            own = longer(whole, axis, -pads)
            taken = _rows(rank, 2 * i, own, axis, range(length))
            transfers.append(_BlockTransfer(rank, rank, sent, taken))
            runs += [
                (abs(position - run.owner), position, run.padded.start, run)
                for run in _pads(lengths, position, halo)
                if run.owner >= 0
            ]
        filled = Counter[int]()
        for _, position, _, run in sorted(runs, key=lambda r: r[:3]):
            rank, owner = line[position], line[run.owner]
            shape = *shapes[rank][i], size
            sent = _rows(rank, i, shape, axis, run.padded)
            first = filled[owner]
            filled[owner] += sent.nbytes
            taken = Block(rank, 2 * i + 1, 0, first, sent.nbytes)
            transfers.append(_BlockTransfer(rank, owner, sent, taken))
            if owner == me and sent.nbytes:
                values = first // size, filled[owner] // size
                additions.append(Addition(i, run.rows, values))
        if me in line:
            counts[i] = filled[me] // size
    return _blocks(transfers, [], len(shapes), me), additions, counts


def transpose_blocks(
    shapes: Shapes,
    itemsizes: Sequence[int],
    axes: tuple[int, int],
    lines: Lines,
    me: int,
) -> MoveBlocks:
    """Return the blocks of a call that divides arrays along another axis.

    ``axes`` are the axis along which ``shapes`` are divided, and the axis along which
    the results are divided, by the rule of `part`.
    """
    transfers = list[_BlockTransfer]()
    split, whole = axes
    for line, i in itertools.product(lines, range(len(itemsizes))):
        lengths = [shapes[rank][i][split] for rank in line]
        starts = [0, *itertools.accumulate(lengths)]
        for (p, source), (q, target) in itertools.product(enumerate(line), repeat=2):
            shape = *shapes[source][i], itemsizes[i]
            rows = part(shape[whole], q, len(line))
            sent = _rows(source, i, shape, whole, rows)
            result = longer(shape, whole, len(rows) - shape[whole])
            result = longer(result, split, starts[-1] - shape[split])
            taken = _rows(source, i, result, split, range(*starts[p : p + 2]))
            transfers.append(_BlockTransfer(source, target, sent, taken))
    return _blocks(transfers, [], len(shapes), me)


def _pads(lengths: Sequence[int], position: int, halo: Halo) -> Iterator[_BlockRun]:
    """Return the rows that a rank has before and after its own rows.

    ``lengths`` are those of the line. If the field is periodic, it has a row at least.
    """
    starts = [0, *itertools.accumulate(lengths)]
    low, high = starts[position], starts[position + 1]
    yield from _runs(starts, low - halo.before, low, 0, halo)
    at = halo.before + high - low
    yield from _runs(starts, high, high + halo.after, at, halo)


def _runs(
    starts: Sequence[int], low: int, high: int, at: int, halo: Halo
) -> Iterator[_BlockRun]:
    """Divide rows of the field by their owners, from row ``low`` to row ``high``."""
    whole = starts[-1]
    while low < high:
        if halo.periodic or 0 <= low < whole:
            row = low % whole
            # Of several ranks that begin at the same row, the last one owns it.
            owner = bisect.bisect_right(starts, row) - 1
            end = min(high, low + starts[owner + 1] - row)
            start, count = row - starts[owner], end - low
            yield _BlockRun(owner, range(start, start + count), range(at, at + count))
        else:
            end = high if low >= whole else min(high, 0)
            yield _BlockRun(-1, range(0), range(at, at + end - low))
        low, at = end, at + end - low


def longer(shape: tuple[int, ...], axis: int, more: int) -> tuple[int, ...]:
    """Return the shape of an array that is longer along an axis."""
    return (*shape[:axis], shape[axis] + more, *shape[axis + 1 :])


def _rows(
    rank: int, array: int, shape: tuple[int, ...], axis: int, rows: range
) -> Block:
    """Return the block of some rows along an axis of an array of bytes."""
    inner, outer = math.prod(shape[axis + 1 :]), math.prod(shape[:axis])
    at, chunk, stride = rows.start * inner, len(rows) * inner, shape[axis] * inner
    if chunk == stride or outer == 1:
        return Block(rank, array, 0, at, chunk * outer)
    return Block(rank, array, 0, at, chunk, outer, stride)


def _blocks(
    transfers: Sequence[_BlockTransfer], zeros: Sequence[Block], size: int, me: int
) -> MoveBlocks:
    """Return one rank's blocks of a call with the transfers of all ranks."""
    puts, takes = list[Block](), list[Block]()
    copies = list[tuple[Block, Block]]()
    streams, spans, counts = [0] * size, dict[int, tuple[int, int]](), Counter[int]()
    adjacent = True
    # Each stream begins with the values for the next rank, so that all ranks read at
    # the same time.
    for one in sorted(
        transfers, key=lambda t: (t.source, (t.target - t.source) % size)
    ):
        source, target, nbytes = one.source, one.target, one.sent.nbytes
        if not nbytes:
            continue
        if source == target:
            copies += [(one.sent, one.taken)] * (source == me)
            continue
        offset = streams[source]
        streams[source] += nbytes
        counts[source] += 1
        adjacent &= one.sent.num_chunks == 1
        if source == me:
            puts.append(one.sent._replace(offset=offset))
            spans[target] = spans.get(target, (offset, 0))[0], streams[source]
        if target == me:
            takes.append(one.taken._replace(offset=offset))
    readable = adjacent and max(counts.values(), default=0) <= _MOST_READ_BLOCKS
    return MoveBlocks(
        puts, takes, streams, spans, copies=copies, zeros=zeros, readable=readable
    )
