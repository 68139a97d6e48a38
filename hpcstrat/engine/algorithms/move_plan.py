"""Calls that move data between the replicas without combining it.

Each replica has a stream of bytes: the values that it sends, one block after the other.
Each replica takes blocks from the streams of all replicas, and writes them into its
results. So a gather, a broadcast, an all-to-all and an exchange between neighbors
differ only in their blocks, which `hpcstrat.engine.algorithms.blocks` lists.

Inside one worker the streams are copied through shared memory, piece by piece, by the
compiled kernel or by this module. Between workers, short streams are sent in the header
of the call, and long streams in messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hpcstrat.engine.algorithms.blocks import Block, MoveBlocks
from hpcstrat.engine.algorithms.kernel_call import (
    KernelCall,
    SentValues,
    cached_piece_bytes,
)
from hpcstrat.engine.algorithms.move_messages import move_by_messages, same_memory
from hpcstrat.engine.algorithms.plan import is_plain
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, HeaderStep, WaitSteps
from hpcstrat.engine.channel.wire_headers import HeaderBlocks, carried_bytes
from hpcstrat.engine.native import load
from hpcstrat.engine.typing import Array

__all__ = ["MovePlan", "copy_own_blocks", "hand_over", "sent_in_header"]

# Ranks read streams from this size on in each other's memory, instead of copying them
# through the places of the rings: each byte is copied once. Below, this is slower: two
# ranks gather 256 KiB into given arrays in 227 us by reading, and in 126 us by copying.
_LEAST_READ_BYTES = 512 << 10
# Results from this size on use recycled memory; the kernel allocates smaller ones. The
# Python code of the recycler takes 10 us, longer than the allocation of 1 MiB.
_LEAST_RECYCLED_BYTES = 4 << 20
_MOST_READ_ARRAYS = 2000
# Streams begin at multiples of this size in a header between workers.
_ALIGNMENT_BYTES = 16
_Piece = TypeVar("_Piece")
# Shape and dtype of an array.
_Kind = tuple[tuple[int, ...], np.dtype[Any]]


class MovePlan:
    """The plan of a call that moves data; the same on every rank but for its blocks.

    ``kinds`` are the shapes and dtypes of this rank's arrays, and of its results.
    ``allocate`` makes new arrays for the results. `run` and `steps` are collective
    over ``topology.replica_comm``.
    """

    def __init__(
        self,
        call: Call,
        blocks: MoveBlocks,
        kinds: tuple[Sequence[_Kind], Sequence[_Kind]],
        channel: Channel,
        allocate: Any,
    ) -> None:
        sources, results = kinds
        self.call, self.results = call, list(results)
        self._blocks, self._channel, self._allocate = blocks, channel, allocate
        self._puts = blocks.puts
        self._takes, self._me = blocks.takes, channel.topology.replica_id
        self._carried: _Carried | None = None
        # The kernel's call, which can be repeated.
        self.kernel_call: KernelCall | None = None
        likes = [np.broadcast_to(np.empty((), d), s) for s, d in sources]
        result_likes = [np.broadcast_to(np.empty((), d), s) for s, d in results]
        kernel, wire, sent = channel.kernel, channel.wire, None
        piece_bytes = cached_piece_bytes(channel.topology.slot_bytes, channel.topology)
        ranks = list(range(channel.topology.num_replicas))
        if wire is not None:
            self._carried = _Carried.make(blocks.nbytes, channel)
            sent = sent_in_header(blocks.nbytes, channel)
            if sent is None:
                return
            piece_bytes = sent.place_bytes
            ranks = [worker for worker, _ in wire.where]
        if kernel is None:
            return
        longest = max((like.nbytes for like in result_likes), default=0)
        one = load().move(
            kernel,
            _numbers(self._puts, ranks),
            _numbers(self._takes, ranks),
            blocks.nbytes,
            *blocks.own,
            likes,
            result_likes,
            piece_bytes,
            call,
            call.digest,
            self.new_results if longest >= _LEAST_RECYCLED_BYTES else None,
            self._reads(len(sources), len(results)),
            _numbers([source for source, _ in blocks.copies], ranks),
            _numbers([*(b for _, b in blocks.copies), *blocks.zeros], ranks),
        )
        self.kernel_call = KernelCall(channel, call, one, sent)

    def _reads(self, *counts: int) -> bool:
        """Return whether ranks read each other's arrays; the same on every rank.

        ``counts`` are the numbers of this rank's arrays and results.
        """
        channel = self._channel
        most = max(*counts, channel.topology.num_replicas)
        large = self._blocks.nbytes >= _LEAST_READ_BYTES and most < _MOST_READ_ARRAYS
        large = large and self._blocks.readable
        return large and channel.wire is None and channel.reads_memory

    def new_results(self) -> list[Array]:
        """Allocate arrays for the results; not collective."""
        made: list[Array] = self._allocate(self.results)
        return made

    def run(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array] | None,
        timeout_seconds: float | None,
    ) -> Sequence[Array]:
        """Make the call; return ``outs``, or new arrays."""
        kernel = self.kernel_call
        if kernel is not None:
            given = list(arrays), None if outs is None else list(outs)
            found = kernel.repeat(*given, timeout_seconds)
            if found is not None:
                return list(found)
        results = self.new_results() if outs is None else outs
        if outs is not None:
            arrays = self._apart(arrays, outs)
        if kernel is not None:
            kernel.run(arrays, results, timeout_seconds)
        else:
            steps = self.steps(arrays, results, waits=True)
            self._channel.drive(steps, self.call, timeout_seconds)
        return results

    def _apart(self, arrays: Sequence[Array], outs: Sequence[Array]) -> list[Array]:
        """Return the arrays, with copies of those that results would overwrite."""
        source, result = self._blocks.own
        return [
            array.copy()
            if any(
                np.may_share_memory(array, out)
                and not ((i, j) == (source, result) and same_memory(array, out))
                for j, out in enumerate(outs)
            )
            else array
            for i, array in enumerate(arrays)
        ]

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Make the call step by step; see `hpcstrat.engine.channel.waitable`.

        Between workers, calls in which ranks send parts of their arrays to each other
        need ``waits``: then MPI's calls wait here, and not where the steps are awaited.
        """
        channel, blocks = self._channel, self._blocks
        flats = [a if is_plain(a) else np.require(a, requirements="C") for a in arrays]
        own = _stream([_octets(flat) for flat in flats], self._puts)
        into = [r if is_plain(r) else np.empty(r.shape, r.dtype) for r in results]
        octets = [_octets(array) for array in into]
        targets = [_target(octets[b.array], b) for b in self._takes]
        if self._carried is not None:
            yield from self._carried.steps(own, self._takes, targets)
        elif channel.wire is None:
            yield from self._in_memory(own, targets)
        else:
            yield from move_by_messages(blocks, own, targets, channel, waits=waits)
        i, j = blocks.own
        if i >= 0 and not any(b.rank == self._me for b in self._takes):
            octets[j][...] = _octets(flats[i])
        copy_own_blocks(blocks, flats, into)
        for block, target in zip(self._takes, targets, strict=True):
            if block.num_chunks > 1:
                _rows(octets[block.array], block)[...] = target.reshape(
                    block.num_chunks, -1
                )
        for array, result in zip(into, results, strict=True):
            if array is not result:
                result[...] = array

    def _in_memory(self, own: Array, targets: list[Array]) -> WaitSteps:
        """Copy the streams through the memory of one worker."""
        channel = self._channel
        me, octets = self._me, channel.rings.of(np.dtype(np.uint8))
        columns = channel.topology.slot_bytes

        def put(piece: slice, place: int) -> None:
            values = own[piece]
            octets[me, place : place + values.size] = values

        def take(piece: slice, place: int) -> None:
            for block, target in zip(self._takes, targets, strict=True):
                low = max(block.offset, piece.start)
                high = min(block.offset + target.size, piece.stop)
                if low < high:
                    at = place + low - piece.start
                    values = octets[block.rank, at : at + high - low]
                    target[low - block.offset : high - block.offset] = values

        starts = range(0, self._blocks.nbytes, columns)
        yield from hand_over(
            [slice(start, start + columns) for start in starts],
            put,
            take,
            place_bytes=channel.rings.place_bytes(min(self._blocks.nbytes, columns)),
            call=self.call,
            channel=channel,
        )


def hand_over(
    pieces: Sequence[_Piece],
    put: Callable[[_Piece, int], object],
    take: Callable[[_Piece, int], Any],
    *,
    place_bytes: int,
    call: Call,
    channel: Channel,
) -> WaitSteps:
    """Let each rank put pieces into its ring, and read the pieces of the other ranks.

    Collective over ``topology.worker_comm``. Each piece is put into its place before
    the ranks read the preceding piece, so that each piece needs only one step. ``put``
    and ``take`` are called with a piece and the byte offset of its place; ``take`` may
    return further steps to wait for.
    """
    rings, place = channel.rings, 0
    if pieces:
        place = rings.take(place_bytes)
        put(pieces[0], place)
    yield HEADER
    for number, piece in enumerate(pieces, start=1):
        after, step = 0, None
        if number < len(pieces):
            after = rings.take(place_bytes)
            put(pieces[number], after)
            step = channel.step(call)
        yield from take(piece, place) or ()
        if step is not None:
            yield step
        place = after


def sent_in_header(nbytes: int, channel: Channel) -> SentValues | None:
    """Return streams of a size in a header, from the kernel; None if it cannot."""
    wire: Any = channel.wire
    if wire.values is None or any(index for _, index in wire.where):
        return None
    row_bytes, num_rows = _rows_in_header(nbytes, channel)
    return SentValues(wire.values, wire, carried_bytes(row_bytes)) if num_rows else None


def _rows_in_header(nbytes: int, channel: Channel) -> tuple[int, int]:
    """Return the bytes of a stream in a header, and the number of a worker's streams.

    The number is 0 if the streams are too long.
    """
    assert channel.wire is not None
    row_bytes = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    num_rows = max(index for _, index in channel.wire.where) + 1
    each = carried_bytes(row_bytes * num_rows)
    slot_bytes, workers = channel.topology.slot_bytes, channel.wire.num_workers
    fits = each <= channel.wire.room_bytes and each * workers <= slot_bytes
    return row_bytes, num_rows * fits


class _Carried(HeaderBlocks):
    """Short streams of all replicas, in the header of a call between workers.

    A worker sends one row for each of its ranks. Its first rank copies the rows of all
    workers into its place, from which the worker's ranks take their blocks.
    """

    def __init__(self, channel: Channel, row_bytes: int, num_rows: int) -> None:
        wire = channel.wire
        assert wire is not None
        super().__init__(wire, carried_bytes(row_bytes * num_rows))
        self._channel, self._where = channel, wire.where
        self._row_bytes, self._alone = row_bytes, wire.alone
        self._index = channel.topology.worker_comm.rank
        # This worker's streams; only on its first rank.
        self._own = (
            self.in_order[wire.worker] if self.in_order else np.empty(0, np.uint8)
        )
        self._place = self._channel.rings.of(np.dtype(np.uint8))[:, :0]

    @classmethod
    def make(cls, nbytes: int, channel: Channel) -> _Carried | None:
        """Return the payload for streams of a size, or None if they are too long."""
        row_bytes, num_rows = _rows_in_header(nbytes, channel)
        return cls(channel, row_bytes, num_rows) if num_rows else None

    def steps(
        self, own: Array, takes: Sequence[Block], targets: Sequence[Array]
    ) -> WaitSteps:
        """Send this rank's stream in the header, and take blocks from all streams."""
        if self._alone:
            self._own[: own.size] = own
            yield HeaderStep(self)
            rows: Any = self.in_order
        else:
            rings = self._channel.rings
            place_bytes = rings.place_bytes(max(1, self.nbytes * self.num_workers))
            place = rings.take(place_bytes)
            self._place = rings.of(np.dtype(np.uint8))[:, place : place + place_bytes]
            self._place[self._index, : own.size] = own
            yield HeaderStep(self)
            whole = self._place[0, : self.nbytes * self.num_workers]
            rows = whole.reshape(self.num_workers, self.nbytes)
        for block, target in zip(takes, targets, strict=True):
            worker, index = self._where[block.rank]
            low = index * self._row_bytes + block.offset
            target[...] = rows[worker][low : low + target.size]

    def gather(self) -> None:
        """Write the streams of this worker's ranks behind the header of a message."""
        for index, row in enumerate(() if self._alone else self._place):
            low = index * self._row_bytes
            self._own[low : low + self._row_bytes] = row[: self._row_bytes]

    def finish(self) -> None:
        """Copy all workers' streams into the place of this worker's first rank."""
        for number, rows in enumerate(() if self._alone else self.in_order):
            self._place[0, number * self.nbytes :][: self.nbytes] = rows


def _numbers(blocks: Sequence[Block], ranks: Sequence[int]) -> Array:
    """Return the blocks as the kernel reads them: seven integers for each.

    ``ranks`` are the kernel's numbers of all replicas.
    """
    rows = [(ranks[block.rank], *block[1:]) for block in blocks]
    return np.array(rows, np.int64).reshape(-1)


def _octets(array: Array) -> Array:
    """Return the bytes of a contiguous array, as a flat array."""
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def copy_own_blocks(
    blocks: MoveBlocks, arrays: Sequence[Array], results: Sequence[Array]
) -> None:
    """Copy the blocks that this rank has itself, and fill others with zeros.

    The arrays and the results are contiguous.
    """
    for source, result in blocks.copies:
        values = _rows(_octets(arrays[source.array]), source)
        target = _rows(_octets(results[result.array]), result)
        target[...] = values.reshape(target.shape)
    for block in blocks.zeros:
        _rows(_octets(results[block.array]), block)[...] = 0


def _rows(octets: Array, block: Block) -> Array:
    """Return the bytes of a block in its array, one row for each chunk."""
    flat = octets[block.at :]
    shape, strides = (block.num_chunks, block.chunk), (block.stride, 1)
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


def _stream(octets: Sequence[Array], puts: Sequence[Block]) -> Array:
    """Return a rank's stream: a view of its array if possible, else a copy."""
    if len(puts) == 1 and puts[0].num_chunks == 1:
        block = puts[0]
        return octets[block.array][block.at : block.at + block.chunk]
    size = max((b.offset + b.nbytes for b in puts), default=0)
    stream = np.empty(size, np.uint8)
    for block in puts:
        part = stream[block.offset : block.offset + block.nbytes]
        part.reshape(block.num_chunks, -1)[...] = _rows(octets[block.array], block)
    return stream


def _target(octets: Array, block: Block) -> Array:
    """Return memory for a block: of the result if its bytes are adjacent, else new."""
    if block.num_chunks == 1:
        return octets[block.at : block.at + block.chunk]
    return np.empty(block.nbytes, np.uint8)
