"""Divides the reading of blocks among replicas, which then share them.

The replicas of a worker share memory: each block lies there once, and all copy from it.
Between workers, the replicas with the same position pass on their blocks, so that all
links are busy. Together, the replicas with one position are called a column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.checkpoint.file.extents import part_of
from hpcstrat.engine.topology.segment import Segment
from hpcstrat.engine.typing import Array, Replicas

__all__ = ["BlockDeal", "Shared"]

_PIECE_BYTES = 8 << 20


class BlockDeal:
    """The blocks that each replica reads, and how many of them it keeps.

    The same on every replica. ``own`` are this replica's blocks, ``column`` is its
    position in its worker. ``columns`` is the number of positions that all workers
    have; other replicas read nothing. An owner is a number from `rounds`.
    """

    def __init__(self, blocks: list[int], most_kept: int, strategy: Replicas) -> None:
        self._blocks = blocks
        self.most_kept = most_kept
        self.size = strategy.num_ranks
        self.column, self.columns, self._worker, self._workers = 0, 1, 0, 1
        if self.size > 1:
            topology = strategy.topology
            self.column = topology.worker_comm.rank
            # A column needs a replica on each worker, also on the smallest.
            self.columns = topology.smallest_worker
            self._worker, self._workers = topology.worker_id, topology.num_workers
        self._owner = self.column * self._workers + self._worker
        mine = self._part(self._owner) if self.column < self.columns else ()
        self.own = [blocks[index] for index in mine]

    def _part(self, owner: int) -> range:
        return part_of(len(self._blocks), owner, self.columns * self._workers)

    def owns(self, owner: int) -> bool:
        """Whether this replica is an owner; so on one replica only."""
        return owner == self._owner and self.column < self.columns

    def worker_of(self, owner: int) -> int:
        """Return the number of an owner's worker."""
        return owner % self._workers

    def kept(self, owner: int) -> set[int]:
        """Return the blocks that an owner keeps; it reads its others twice."""
        indices = self._part(owner)[: self.most_kept]
        return {self._blocks[index] for index in indices}

    def rounds(self) -> Iterator[list[tuple[int, int]]]:
        """Yield blocks that are passed on at the same time.

        Each is a list with a block and its owner for each of the first columns.
        """
        columns = [
            [
                (self._blocks[index], owner)
                for owner in range(first, first + self._workers)
                for index in self._part(owner)
            ]
            for first in range(0, self.columns * self._workers, self._workers)
        ]
        # The first owners have as many blocks as the others or one more, so that no
        # column has more than the one before.
        for turn in range(len(columns[0])):
            yield [column[turn] for column in columns if turn < len(column)]


class Shared:
    """Memory of a worker, through which pieces of blocks go.

    Collective over the channel's replicas, inside of its ``moving``. ``piece_bytes`` is
    the most that one replica puts there at a time.
    """

    def __init__(self, channel: Any) -> None:
        topology = channel.topology
        self._worker = channel.interruptible(topology.worker_comm)
        self._across = channel.interruptible(topology.cross_worker_comm)
        self._several = topology.num_workers > 1
        self._segment = Segment(self._worker, 0, 2 * _PIECE_BYTES)
        # A worker whose memory file system is small decides for all.
        self.piece_bytes: int = channel.interruptible(topology.replica_comm).allreduce(
            self._segment.part_bytes // 2, op=topology.mpi.MIN
        )
        self._half = 0

    def _place(self, column: int, nbytes: int) -> Array:
        segment = self._segment
        start = segment.common_bytes + column * segment.part_bytes
        start += self._half * self.piece_bytes
        return np.frombuffer(segment.buffer, np.uint8, nbytes, start)

    def exchange(
        self, own: Array | None, pieces: Sequence[range], workers: Sequence[int]
    ) -> list[Array]:
        """Show a piece of each column to all replicas.

        Collective over the channel's replicas. The lengths of ``pieces`` are those of
        the pieces, ``workers`` the workers that have them; ``own`` is that of a replica
        that has one. What is returned is valid until the next but one call.
        """
        column = self._worker.rank
        # While some still copy from one half, the next pieces go into the other: who
        # passes the barrier below has copied all of the pieces before.
        self._half = 1 - self._half
        if column < len(pieces) and len(pieces[column]):
            mine = self._place(column, len(pieces[column]))
            if own is not None:
                mine[:] = own
            if self._several:
                self._across.Bcast(mine, root=workers[column])
        self._worker.Barrier()
        return [self._place(k, len(piece)) for k, piece in enumerate(pieces)]

    def close(self) -> None:
        """Give back the memory.

        Collective over the replicas of each worker.
        """
        self._segment.close()

    def release(self) -> None:
        """Let go of the memory alone, where an error has ended all calls."""
        self._segment.release()
