"""Who reads which block, and how all get to see it.

The replicas of a worker share memory: each block lies there once, and all copy from it.
Between workers, the replicas with the same position pass on their blocks, so that all
links are busy. Together, the replicas with one position are called a column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.checkpoint.file.extents import part_of
from hpcstrat.topology.segment import Segment
from hpcstrat.typing import Array, Replicas

__all__ = ["Deal", "Shared"]

_PIECE_BYTES = 8 << 20


class Deal:
    """Which replica reads which blocks; the same on every replica.

    Parameters
    ----------
    blocks : list of int
        All that are needed.
    most_kept : int
        How many a replica keeps.
    strategy : Strategy
        Whose replicas.

    Attributes
    ----------
    own : list of int
        This replica's blocks.
    column : int
        This replica's position in its worker.
    columns : int
        Number of positions that all workers have; other replicas read nothing.
    """

    def __init__(self, blocks: list[int], most_kept: int, strategy: Replicas) -> None:
        self._blocks = blocks
        self.most_kept = most_kept
        self.size = strategy.num_replicas_in_sync
        self.column, self.columns, self._node, self._nodes = 0, 1, 0, 1
        if self.size > 1:
            topology = strategy.topology
            self.column = topology.worker_comm.rank
            self.columns = topology.smallest_worker
            self._node, self._nodes = topology.worker_id, topology.num_workers
        self._owner = self.column * self._nodes + self._node
        mine = self._part(self._owner) if self.column < self.columns else ()
        self.own = [blocks[index] for index in mine]

    def _part(self, owner: int) -> range:
        return part_of(len(self._blocks), owner, self.columns * self._nodes)

    def owns(self, owner: int) -> bool:
        """Whether this replica is an owner.

        Not collective.

        Parameters
        ----------
        owner : int
            From `rounds`.

        Returns
        -------
        bool
            True on one replica.
        """
        return owner == self._owner and self.column < self.columns

    def node_of(self, owner: int) -> int:
        """Return an owner's worker.

        Not collective.

        Parameters
        ----------
        owner : int
            From `rounds`.

        Returns
        -------
        int
            Its number.
        """
        return owner % self._nodes

    def kept(self, owner: int) -> set[int]:
        """Return the blocks that an owner keeps.

        Not collective.

        Parameters
        ----------
        owner : int
            From `rounds`.

        Returns
        -------
        set of int
            It reads its others twice.
        """
        indices = self._part(owner)[: self.most_kept]
        return {self._blocks[index] for index in indices}

    def rounds(self) -> Iterator[list[tuple[int, int]]]:
        """Yield blocks that are passed on at the same time.

        Not collective.

        Yields
        ------
        list of (int, int)
            A block and its owner for each of the first columns.
        """
        columns = [
            [
                (self._blocks[index], owner)
                for owner in range(first, first + self._nodes)
                for index in self._part(owner)
            ]
            for first in range(0, self.columns * self._nodes, self._nodes)
        ]
        # The first owners have as many blocks as the others or one more, so that no
        # column has more than the one before.
        for turn in range(len(columns[0])):
            yield [column[turn] for column in columns if turn < len(column)]


class Shared:
    """Memory of a worker, through which pieces of blocks go.

    Collective over the channel's replicas.

    Parameters
    ----------
    channel : Channel
        Of the replicas; inside of its ``moving``.

    Attributes
    ----------
    piece_bytes : int
        The most that one replica puts there at a time.
    """

    def __init__(self, channel: Any) -> None:
        topology = channel.topology
        self._worker = channel.patient(topology.worker_comm)
        self._across = channel.patient(topology.cross_worker_comm)
        self._several = topology.num_workers > 1
        self._segment = Segment(self._worker, 0, 2 * _PIECE_BYTES)
        # A worker whose memory file system is small decides for all.
        self.piece_bytes: int = channel.patient(topology.replica_comm).allreduce(
            self._segment.part_bytes // 2, op=topology.mpi.MIN
        )
        self._half = 0

    def _place(self, column: int, nbytes: int) -> Array:
        segment = self._segment
        start = segment.common_bytes + column * segment.part_bytes
        start += self._half * self.piece_bytes
        return np.frombuffer(segment.buffer, np.uint8, nbytes, start)

    def exchange(
        self, own: Array | None, pieces: Sequence[range], nodes: Sequence[int]
    ) -> list[Array]:
        """Show a piece of each column to all replicas.

        Collective over the channel's replicas.

        Parameters
        ----------
        own : ndarray of uint8 or None
            The piece, on the replicas that have one.
        pieces : sequence of range
            Whose lengths are those of the pieces.
        nodes : sequence of int
            Which worker has the piece of each column.

        Returns
        -------
        list of ndarray of uint8
            Valid until the next but one call.
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
                self._across.Bcast(mine, root=nodes[column])
        self._worker.Barrier()
        return [self._place(k, len(piece)) for k, piece in enumerate(pieces)]

    def close(self) -> None:
        """Give back the memory.

        Collective over the replicas of each worker.
        """
        self._segment.close()

    def release(self) -> None:
        """Let go of the memory where an error has ended all calls.

        Not collective.
        """
        self._segment.release()
