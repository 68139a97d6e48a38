"""Exchange of datasets' parts in a save, for datasets of which each rank has a part.

A dataset has a row for each replica or for each group of replicas, or the ranks of a
replica divide it. Several ranks may have the same part; each of them then writes some
of its blocks. If a block has bytes of several parts, one rank writes the block. It
needs all bytes of the block for the hash, and receives those of parts that it does not
have. Blocks are exchanged in rounds, so that a rank needs memory only for few of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.checkpoint.file.extents import Extent, FileLayout
from hpcstrat.checkpoint.file.image import as_bytes
from hpcstrat.engine.arrays.kinds import to_host
from hpcstrat.engine.typing import Array, Replicas

__all__ = ["DividedDataset", "PartExchange"]

# In one round, each rank receives at most one block, or blocks of this total size.
_ROUND_BYTES = 16 << 20


class DividedDataset:
    """One dataset of which ranks have parts: the bytes that this rank has and receives.

    ``own`` are the bytes of this rank's part, and may be on a GPU.
    """

    def __init__(self, extent: Extent, rank: int, own: Array) -> None:
        assert extent.division is not None
        self.division, self._rank = extent.division, rank
        self.part = self.division.part_of[rank]
        self._own = own
        self._box = own.reshape(self.division.part_shape(self.part))
        self._run = None if self.part < 0 else self.division.run(self.part)
        # Received bytes, by the offset of a piece's start and the number of the part.
        self._received: dict[tuple[int, int], Array] = {}
        self._sends: dict[int, bool] = {}

    def __getitem__(self, source: slice, /) -> Array:
        """Return the bytes of a piece: a view of the own part, or a new array."""
        run = self._run
        if run is not None and run[0] <= source.start and source.stop <= run[1]:
            return self._own[source.start - run[0] : source.stop - run[0]]
        piece: Array = np.empty(source.stop - source.start, np.uint8)
        for part in self.division.parts_in(source.start, source.stop):
            start = 0
            for overlap in self.division.overlaps(part, source.start, source.stop):
                target = piece[overlap.place].reshape(overlap.shape)[overlap.there]
                if part == self.part:
                    target[...] = to_host(self._box[overlap.here])
                    continue
                data = self._received[source.start, part]
                target[...] = data[start : start + target.size].reshape(target.shape)
                start += target.size
        return piece

    def sends_to(self, rank: int) -> bool:
        """Return whether this rank sends bytes of its part to a rank without them."""
        if rank not in self._sends:
            division = self.division
            self._sends[rank] = self.part not in (-1, division.part_of[rank]) and (
                division.nearest(self.part, rank) == self._rank
            )
        return self._sends[rank]

    def nbytes(self, part: int, source: slice) -> int:
        """Return how many bytes of a piece are in a part."""
        overlaps = self.division.overlaps(part, source.start, source.stop)
        return sum(
            int(np.prod([s.stop - s.start for s in overlap.here]))
            for overlap in overlaps
        )

    def pack(self, source: slice, target: Array) -> int:
        """Copy this rank's bytes of a piece to ``target``; return their number."""
        done = 0
        for overlap in self.division.overlaps(self.part, source.start, source.stop):
            own = self._box[overlap.here]
            target[done : done + own.size].reshape(own.shape)[...] = to_host(own)
            done += own.size
        return done

    def keep(self, source: slice, part: int, data: Array) -> None:
        """Use received bytes of a piece, until `forget`."""
        self._received[source.start, part] = data

    def forget(self) -> None:
        self._received.clear()


@dataclass(frozen=True, slots=True)
class _Send:
    """Bytes of this rank's part to send: those in the piece ``source``."""

    dataset: DividedDataset
    source: slice
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Receipt:
    """Bytes of another part to receive: those in the piece ``source``."""

    dataset: DividedDataset
    source: slice
    part: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Round:
    """The messages of one round: for each rank, those that are sent and received.

    ``blocks`` are blocks that this rank can write after the round.
    """

    blocks: list[int]
    sent: list[list[_Send]]
    received: list[list[_Receipt]]


class PartExchange:
    """The exchange of parts for one save on one rank; ``name`` is that of the file."""

    def __init__(self, plan: FileLayout, ranks: Replicas, name: str) -> None:
        self._plan, self._ranks = plan, ranks
        self._collectives: Any = ranks.collectives
        self._what = f"exchange of parts for the save of {name}"
        self._rounds: list[_Round] = []
        # True if an error in the preparation is raised on all ranks.
        self.raises = bool(plan.divided)
        self._sent: Array
        self._received: Array

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """A block in which this rank prepares the save, by `plan` and other functions.

        Collective over all ranks if they have parts of datasets: an error of one rank
        is then raised on all, because the others would wait for it in a round.
        """
        if not self.raises:
            yield
            return
        with self._collectives.all_raise(self._what):
            yield
        self._collectives.barrier(self._what)
        self.raises = False

    def plan(self, values: Mapping[str, Array]) -> dict[str, DividedDataset]:
        """Plan all messages, and return the divided datasets by path; no collective.

        ``values`` are this rank's parts, to which the returned objects refer.
        """
        plan, rank = self._plan, self._ranks.rank
        if not plan.divided:
            return {}
        datasets = {
            extent.path: DividedDataset(extent, rank, as_bytes(values[extent.path]))
            for extent in plan.divided
        }
        self._rounds = _rounds(plan, datasets, (rank, self._ranks.num_ranks))
        # Allocate before any message, so that all ranks raise if memory is short.
        sent = max((_size(each.sent) for each in self._rounds), default=0)
        received = max((_size(each.received) for each in self._rounds), default=0)
        self._sent = np.empty(sent, np.uint8)
        self._received = np.empty(received, np.uint8)
        return datasets

    def rounds(self) -> Iterator[Sequence[int]] | None:
        """Return an iterator that makes one round after the other; None without rounds.

        It yields blocks that this rank can then write, and which the caller must copy
        before the next round. Each round is collective over all ranks.
        """
        return self._make_rounds() if self._rounds else None

    def _make_rounds(self) -> Iterator[Sequence[int]]:
        for each in self._rounds:
            with self._collectives.moving(self._what) as comm:
                _exchange(each, self._sent, self._received, comm)
            yield each.blocks
            for receipt in itertools.chain(*each.received):
                receipt.dataset.forget()


def _rounds(
    plan: FileLayout, datasets: Mapping[str, DividedDataset], place: tuple[int, int]
) -> list[_Round]:
    """Return the messages that this rank sends and receives in each round."""
    rank, size = place
    # All ranks find the same blocks, without a message.
    mixed = plan.mixed_blocks(size)
    count = max(_ROUND_BYTES // plan.block_bytes, 1)
    rounds = []
    for first in range(0, max(map(len, mixed), default=0), count):
        made = _Round([], [[] for _ in range(size)], [[] for _ in range(size)])
        made.blocks.extend(mixed[rank][first : first + count])
        # Sender and receiver both order the bytes as in the file, so that they match.
        for owner, blocks in enumerate(mixed):
            if owner != rank and not any(d.sends_to(owner) for d in datasets.values()):
                continue
            for block in blocks[first : first + count]:
                for piece in plan.pieces(block):
                    if piece.path in datasets:
                        _add(made, datasets[piece.path], piece.source, owner, rank)
        rounds.append(made)
    return rounds


def _add(
    made: _Round, dataset: DividedDataset, source: slice, owner: int, rank: int
) -> None:
    """Add the messages of a rank for one piece of a block that ``owner`` writes."""
    if owner == rank:
        for part in dataset.division.parts_in(source.start, source.stop):
            if part != dataset.part:
                receipt = _Receipt(dataset, source, part, dataset.nbytes(part, source))
                made.received[dataset.division.nearest(part, owner)].append(receipt)
    elif dataset.sends_to(owner) and (n := dataset.nbytes(dataset.part, source)):
        made.sent[owner].append(_Send(dataset, source, n))


def _exchange(each: _Round, sent: Array, received: Array, comm: Any) -> None:
    done = 0
    for send in itertools.chain(*each.sent):
        done += send.dataset.pack(send.source, sent[done:])
    byte = comm.mpi.BYTE
    comm.Alltoallv(
        [sent, (_counts(each.sent), None), byte],
        [received, (_counts(each.received), None), byte],
    )
    done = 0
    for receipt in itertools.chain(*each.received):
        data = received[done : done + receipt.nbytes]
        receipt.dataset.keep(receipt.source, receipt.part, data)
        done += receipt.nbytes


def _counts(messages: Sequence[Sequence[_Send | _Receipt]]) -> list[int]:
    return [sum(each.nbytes for each in some) for some in messages]


def _size(messages: Sequence[Sequence[_Send | _Receipt]]) -> int:
    return sum(_counts(messages))
