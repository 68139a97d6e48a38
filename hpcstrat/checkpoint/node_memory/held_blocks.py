"""The search for the newest snapshot in node memory, and the reading of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.checkpoint.file.commit_record import Blocks, Vouched
from hpcstrat.checkpoint.file.image import Image
from hpcstrat.checkpoint.file.reader import CheckpointFile
from hpcstrat.checkpoint.node_memory.slot_files import Key, SnapshotFolder
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.errors import CorruptCheckpointError

__all__ = ["BlockBroadcasts", "HeldDeal", "HeldSnapshot", "find_newest"]

EVERYONE = -1
"""The owner of a block that is on all nodes, so that each rank reads it."""

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A snapshot of which each block is intact on at least one node.

    ``owners`` has the rank that sends each block, or `EVERYONE`. ``file`` has the path
    of the data on this node, which may be missing.
    """

    key: Key
    file: CheckpointFile
    owners: Array

    @property
    def digest(self) -> bytes:
        """See `Record.digest`."""
        assert self.file.vouched is not None
        return self.file.vouched.root

    @property
    def name(self) -> str:
        """A text that is the same on all ranks, and differs for other contents."""
        about = f"step {self.key[2]} in node memory ({self.digest.hex()})"
        return f"the snapshot of {about}"


def find_newest(
    folder: SnapshotFolder,
    ranks: Replicas,
    nodes: Sequence[int],
    passed_over: set[bytes],
) -> HeldSnapshot | None:
    """Return the newest snapshot whose blocks are all intact on some node, or None.

    Collective over ``ranks``. The ranks of a node read and check its blocks together.
    """
    gather = ranks.collectives.all_gather_object
    own = {record.digest: (slot, record) for slot, record in folder.records().items()}
    keys = {record.about.key: digest for digest, (_, record) in own.items()}
    found = gather(keys, "search for snapshots in node memory")
    every = {(key, digest) for one in found for key, digest in one.items()}
    mates = [rank for rank, node in enumerate(nodes) if node == nodes[ranks.rank]]
    for key, digest in sorted(every, reverse=True):
        if digest in passed_over:
            continue
        slot, record = own.get(digest, (0, None))
        owner = next(r for r, one in enumerate(found) if digest in one.values())
        what = f"check of the snapshot of step {key[2]} in node memory"
        known = ranks.collectives.broadcast_object(record, owner, what)
        path = folder.data_path(slot)
        file = known.file(path)
        held = [] if record is None else np.flatnonzero(record.held).tolist()
        share = held[mates.index(ranks.rank) :: len(mates)]
        intact = gather(_intact(path, file.vouched, share), what)
        owners = _owners(intact, nodes, len(known.hashes))
        if (owners >= EVERYONE).all():
            return HeldSnapshot(key, file, owners)
        if ranks.rank == 0:
            lost = int((owners < EVERYONE).sum())
            get_logger("checkpoint").warning(
                "expected all blocks of the snapshot of step %d in node memory, found "
                "%d of %d missing or changed on all nodes; an older one is restored",
                *(key[2], lost, len(known.hashes)),
            )
    return None


def _intact(path: str, vouched: Vouched, blocks: Sequence[int]) -> Array:
    """Return those of the blocks that have the bytes that were copied."""
    found = []
    if len(blocks):
        slot = Image(1, vouched.plan.block_bytes).slot(0)
        try:
            with Blocks(path, vouched, False) as reading:
                for block in blocks:
                    try:
                        reading.read(block, slot)
                    except (CorruptCheckpointError, OSError):
                        continue
                    found.append(int(block))
        except OSError:
            # The file is missing: this node has none of the blocks.
            found = []
    return np.array(found, np.int64)


def _owners(intact: Sequence[Array], nodes: Sequence[int], count: int) -> Array:
    """Return the owner of each block; one less than `EVERYONE` if there is none."""
    owners = np.full(count, EVERYONE - 1)
    on_node = np.zeros((max(nodes) + 1, count), bool)
    for rank, blocks in reversed([*enumerate(intact)]):
        owners[blocks] = rank
        on_node[nodes[rank], blocks] = True
    owners[on_node.all(axis=0)] = EVERYONE
    return owners


class HeldDeal:
    """The order in which the blocks of a snapshot are read; see `BlockDeal`.

    A rank reads a block when its turn comes, because all blocks have been checked.
    """

    most_kept, column = 0, 0
    own: tuple[int, ...] = ()

    def __init__(self, blocks: list[int], owners: Array, ranks: Replicas) -> None:
        self._blocks, self._owners = blocks, owners
        self._rank, self.size = ranks.rank, ranks.num_ranks

    def owns(self, owner: int) -> bool:
        return owner in (self._rank, EVERYONE)

    def is_here(self, owner: int) -> bool:
        """Return whether every rank reads the block itself."""
        return owner == EVERYONE

    def worker_of(self, owner: int) -> int:
        return owner

    def kept(self, owner: int) -> set[int]:
        del owner
        return set()

    def rounds(self) -> Iterator[list[tuple[int, int]]]:
        for block in self._blocks:
            yield [(block, int(self._owners[block]))]


class BlockBroadcasts:
    """Sends blocks from the ranks that have them to all ranks; see `Shared`."""

    def __init__(self, channel: Any) -> None:
        self._comm = channel.interruptible(channel.topology.replica_comm)
        self.piece_bytes = _PIECE_BYTES
        self._buffer: Array = np.empty(_PIECE_BYTES, np.uint8)

    def exchange(
        self, own: Array | None, pieces: Sequence[range], workers: Sequence[int]
    ) -> list[Array]:
        place = self._buffer[: len(pieces[0])]
        if own is not None:
            place[:] = own
        self._comm.Bcast(place, root=workers[0])
        return [place]

    def close(self) -> None:
        """Free nothing: the memory is this rank's own."""

    def release(self) -> None:
        """Free nothing, as `close`."""
