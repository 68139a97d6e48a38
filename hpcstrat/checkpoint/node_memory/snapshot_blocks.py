"""The division of a snapshot's blocks between ranks, and the copy of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from hpcstrat.checkpoint.file.extents import FileLayout, part_of
from hpcstrat.checkpoint.file.image import Source
from hpcstrat.engine.arrays.kinds import to_host
from hpcstrat.engine.native import load_hashed_copy
from hpcstrat.engine.typing import Array

__all__ = ["SnapshotDivision", "copy_block", "partners_of"]

_GROUP_BYTES = 1024
_CHUNK_BYTES = 256 << 10


def partners_of(workers: Sequence[int]) -> list[int]:
    """Return each replica's partner, the replica that keeps a copy of its part.

    ``workers`` has the worker of each replica. The partner is the replica at the same
    position in the next worker, because all ranks of a host may be lost together. If
    there is only one worker, the partner is the next replica.
    """
    count = len(workers)
    if len(set(workers)) == 1:
        return [(replica + 1) % count for replica in range(count)]
    members: dict[int, list[int]] = {}
    for replica, worker in enumerate(workers):
        members.setdefault(worker, []).append(replica)
    order = sorted(members)
    following = dict(zip(order, order[1:] + order[:1], strict=True))
    partners = []
    for replica, worker in enumerate(workers):
        others = members[following[worker]]
        # If the next worker has fewer replicas, several replicas share a partner.
        partners.append(others[members[worker].index(replica) % len(others)])
    return partners


@dataclass(frozen=True)
class SnapshotDivision:
    """The blocks that each rank copies into its node's memory; the same on all ranks.

    The ranks of each node copy all blocks with values that every rank has. A block of a
    dataset of which ranks have parts is copied by one rank, which then sends it to its
    partner on the next node. ``nodes`` has the node of each rank.
    """

    plan: FileLayout
    nodes: tuple[int, ...]

    @cached_property
    def own(self) -> list[list[int]]:
        """The blocks of each rank that only one node has."""
        plan = self.plan
        divided = {
            block
            for extent in plan.divided
            for block in plan.blocks_of(extent.offset, extent.stop)
        }
        parts = plan.parts(len(self.nodes))
        return [[block for block in part if block in divided] for part in parts]

    @cached_property
    def common(self) -> list[Sequence[int]]:
        """The blocks of each rank that all nodes have."""
        own = {block for part in self.own for block in part}
        rest = [block for block in range(self.plan.num_blocks) if block not in own]
        found: list[Sequence[int]] = []
        for rank, node in enumerate(self.nodes):
            ranks = self.ranks_of(node)
            part = part_of(len(rest), ranks.index(rank), len(ranks))
            found.append(rest[part.start : part.stop])
        return found

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.nodes) if other == node]

    @cached_property
    def partners(self) -> list[int]:
        """The rank that keeps a copy of each rank's blocks; itself if there is none."""
        if len(set(self.nodes)) == 1:
            return list(range(len(self.nodes)))
        return partners_of(self.nodes)

    def clients(self, rank: int) -> list[int]:
        """Return the ranks of which a rank keeps copies."""
        others = enumerate(self.partners)
        return [other for other, to in others if to == rank and other != rank]

    def held(self, node: int) -> list[int]:
        """Return the blocks in a node's memory, ascending."""
        found: set[int] = set()
        for rank in self.ranks_of(node):
            found.update(self.common[rank], self.own[rank])
            for client in self.clients(rank):
                found.update(self.own[client])
        return sorted(found)


def copy_block(
    target: Array, plan: FileLayout, block: int, values: Mapping[str, Source]
) -> int:
    """Copy a block into ``target``; return the hash of its bytes in ``values``.

    Each byte is read once. The hash is that of the values, not of the copy: a copy that
    is damaged later, or a value that changes meanwhile, does not fit the hash.
    """
    copying = _HashedCopy(target)
    for piece in plan.pieces(block):
        copying.skip_to(piece.place.start)
        copying.add(to_host(values[piece.path][piece.source]))
    copying.skip_to(target.size)
    return copying.hash()


class _HashedCopy:
    """A copy of pieces to ``target``, one behind the other, and the hash of all bytes.

    The kernel copies groups of 1024 bytes. The bytes of a group with parts of several
    pieces are first collected.
    """

    def __init__(self, target: Array) -> None:
        self._target, self._place, self._hash = target, 0, 0
        self._kernel = load_hashed_copy()
        # Without the kernel, the xxhash library hashes what NumPy copies.
        self._plain = xxhash.xxh3_64()
        self._sums = None if self._kernel is None else self._kernel.start()
        self._group, self._filled = np.empty(_GROUP_BYTES, np.uint8), 0

    def skip_to(self, place: int) -> None:
        """Write zeros up to a place in the target, as the format requires."""
        missing = place - self._place - self._filled
        if missing:
            self.add(np.zeros(missing, np.uint8))

    def add(self, piece: Array) -> None:
        start = 0
        if self._filled:
            start = min(_GROUP_BYTES - self._filled, piece.size)
            self._collect(piece[:start])
        whole = (piece.size - start) // _GROUP_BYTES * _GROUP_BYTES
        if whole:
            self._copy(piece[start : start + whole])
        if start + whole < piece.size:
            self._collect(piece[start + whole :])

    def _collect(self, piece: Array) -> None:
        self._group[self._filled : self._filled + piece.size] = piece
        self._filled += piece.size
        if self._filled == _GROUP_BYTES:
            self._filled = 0
            self._copy(self._group)

    def _copy(self, data: Array) -> None:
        start, self._place = self._place, self._place + data.size
        target = self._target[start : self._place]
        if self._kernel is not None:
            # The last part of an input names the length of the whole input.
            total = self._target.size if self._place == self._target.size else 0
            self._hash = self._kernel.copy(self._sums, target, data, total)
            return
        for begin in range(0, data.size, _CHUNK_BYTES):
            # The second use of a chunk finds it in the cache.
            chunk = data[begin : begin + _CHUNK_BYTES]
            self._plain.update(chunk.data)
            target[begin : begin + chunk.size] = chunk

    def hash(self) -> int:
        return self._hash if self._kernel is not None else self._plain.intdigest()
