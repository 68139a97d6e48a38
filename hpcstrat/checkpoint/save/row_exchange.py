"""Exchange of rows before a save, for datasets with a row per replica or per group.

A replica that has a large row writes it; the replicas of a group each write a part of
their row. If a block has bytes of several rows, one replica writes the block. It needs
all bytes of the block for the hash, and receives those of rows that it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.checkpoint.file.extents import Extent, FileLayout
from hpcstrat.checkpoint.file.image import as_bytes
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.typing import Array, Replicas

__all__ = ["DatasetRows", "exchange_rows"]

# The blocks whose rows are exchanged in one round have at most this total size.
_ROUND_BYTES = 256 << 20


class DatasetRows:
    """One dataset with rows: the bytes that this replica has, receives and writes."""

    def __init__(self, extent: Extent, row: int, own: Array) -> None:
        self.extent = extent
        self._each, self.row, self._own = extent.row_bytes, row, own
        # Buffers for pieces with bytes of other rows, by the offset of a piece's start.
        self._mixed: dict[int, Array] = {}
        # Copies that the caller must make: pairs (bytes on a GPU, memory on the host).
        self.missing: list[tuple[Array, Array]] = []

    def __getitem__(self, source: slice, /) -> Array:
        """Return a piece's bytes: a view of the own row, or a buffer of `prepare`."""
        mixed = self._mixed.get(source.start)
        return self.own(source) if mixed is None else mixed

    def own(self, source: slice) -> Array:
        """Return a view of the bytes of a piece in this replica's row; maybe none."""
        before = self.row * self._each
        low, high = max(source.start - before, 0), max(source.stop - before, 0)
        return self._own[low:high]

    def sent(self, source: slice) -> Array:
        """Return this replica's bytes of a piece in host memory, to send in a message.

        If the bytes are on a GPU, the result is valid when ``missing`` has been copied.
        """
        own = self.own(source)
        if not is_device(own):
            return own
        there = np.empty(own.size, np.uint8)
        self.missing.append((own, there))
        return there

    def prepare(self, source: slice) -> Iterator[tuple[int, Array]]:
        """Allocate a buffer for a piece that has bytes of other rows.

        Yields the number of each other row, and the part of the buffer for its bytes.
        """
        first, last = source.start // self._each, (source.stop - 1) // self._each
        if first == last == self.row:
            return
        piece: Array = np.empty(source.stop - source.start, np.uint8)
        self._mixed[source.start] = piece
        for row in range(first, last + 1):
            low = max(row * self._each, source.start) - source.start
            high = min((row + 1) * self._each, source.stop) - source.start
            if row == self.row:
                own = self.own(source)
                if is_device(own):
                    self.missing.append((own, piece[low:high]))
                else:
                    piece[low:high] = own
            else:
                yield row, piece[low:high]


@dataclass(frozen=True, slots=True)
class _Round:
    """Arrays to send and to receive in one round: a list for each replica."""

    sent: list[list[Array]]
    received: list[list[Array]]


def exchange_rows(
    plan: FileLayout,
    values: Mapping[str, Array],
    strategy: Replicas,
    name: str,
    *,
    fetch: Callable[[list[tuple[Array, Array]]], Any] | None = None,
) -> dict[str, DatasetRows]:
    """Send bytes of rows to the replicas that write the blocks with these bytes.

    Collective over the strategy's replicas; if memory is short on one rank, all ranks
    raise an error. ``values`` are this replica's rows, to which the returned objects
    refer. ``fetch`` (`Downloads.fetch`) copies bytes to send from a GPU to the host.
    """
    collectives, what = strategy.collectives, f"exchange of rows for the save of {name}"
    place = strategy.replica_id, strategy.num_replicas_in_sync
    try:
        rows = {
            extent.path: DatasetRows(
                extent, plan.row_of(extent, place[0]), as_bytes(values[extent.path])
            )
            for extent in plan.extents
            if extent.num_rows
        }
        rounds = _rounds(plan, rows, place)
        missing = [pair for row in rows.values() for pair in row.missing]
        if fetch is not None and missing:
            fetch(missing)
        # Allocate before any message, so that all ranks raise if memory is short.
        sent = np.empty(max((_size(r.sent) for r in rounds), default=0), np.uint8)
        received = np.empty(
            max((_size(r.received) for r in rounds), default=0), np.uint8
        )
    except Exception as error:
        collectives.fail(what, error)
        raise
    if rounds:
        collectives.barrier(what)
        with collectives.moving(what) as comm:
            for each in rounds:
                _exchange(each, sent, received, comm)
    return rows


def _mixed_blocks(plan: FileLayout, owners: Array) -> list[int]:
    """Return the blocks with bytes of rows that the block's writer does not have."""
    found = set()
    for extent in plan.extents:
        if not extent.num_rows:
            continue
        for block in plan.blocks_of(extent.offset, extent.stop):
            start, stop = plan.span(block)
            first = max(start - extent.offset, 0) // extent.row_bytes
            last = (min(stop, extent.stop) - 1 - extent.offset) // extent.row_bytes
            if not first == last == plan.row_of(extent, int(owners[block])):
                found.add(block)
    return sorted(found)


def _rounds(
    plan: FileLayout, rows: Mapping[str, DatasetRows], place: tuple[int, int]
) -> list[_Round]:
    """Return the arrays that this replica sends and receives in each round."""
    rank, size = place
    # All replicas compute the same owners and blocks, without a message.
    owners = np.zeros(plan.num_blocks, np.intp)
    for owner, part in enumerate(plan.parts(size)):
        owners[list(part)] = owner
    mixed = _mixed_blocks(plan, owners)
    count = max(_ROUND_BYTES // plan.block_bytes, 1)
    rounds = []
    for first in range(0, len(mixed), count):
        made = _Round([[] for _ in range(size)], [[] for _ in range(size)])
        # Sender and receiver both order the bytes as in the file, so that they match.
        for block in mixed[first : first + count]:
            for piece in plan.pieces(block):
                if piece.path not in rows:
                    continue
                own, owner = rows[piece.path], int(owners[block])
                if owner == rank:
                    for row, there in own.prepare(piece.source):
                        sender = plan.holders(own.extent, row)[0]
                        made.received[sender].append(there)
                elif plan.holders(own.extent, own.row)[0] == rank and own.row != (
                    plan.row_of(own.extent, owner)
                ):
                    made.sent[owner].append(own.sent(piece.source))
        rounds.append(made)
    return rounds


def _exchange(each: _Round, sent: Array, received: Array, comm: Any) -> None:
    arrays = [array for arrays in each.sent for array in arrays]
    if arrays:
        np.concatenate(arrays, out=sent[: _size(each.sent)])
    byte = comm.mpi.BYTE
    comm.Alltoallv(
        [sent, (_counts(each.sent), None), byte],
        [received, (_counts(each.received), None), byte],
    )
    start = 0
    for arrays in each.received:
        for array in arrays:
            array[:] = received[start : start + array.size]
            start += array.size


def _counts(parts: Sequence[Sequence[Array]]) -> list[int]:
    return [sum(array.size for array in arrays) for arrays in parts]


def _size(parts: Sequence[Sequence[Array]]) -> int:
    return sum(_counts(parts))
