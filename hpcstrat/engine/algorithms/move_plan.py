"""Calls that move data between the replicas without combining it.

Each replica has a stream of bytes: the values that it sends, one block after the other.
Each replica takes blocks from the streams of all replicas, and writes them into its
results. So a gather, a broadcast, an all-to-all and an exchange between neighbors
differ only in their blocks, which `hpcstrat.engine.algorithms.blocks` lists.

Inside one worker the compiled kernel copies the streams through shared memory, piece by
piece. Between workers, short streams are sent in the header of the call. All other
streams are sent in messages. If workers have one replica each, and the bytes of each
message are adjacent in an array, the kernel exchanges the headers before them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.blocks import Block, MoveBlocks
from hpcstrat.engine.algorithms.move_messages import (
    Takes,
    array_messages,
    move_by_messages,
)
from hpcstrat.engine.algorithms.plan import (
    CopyPlan,
    KernelPlan,
    Kinds,
    Plan,
    cached_piece_bytes,
    is_plain,
    without_memory,
)
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.channel.wire_headers import HeaderValues, carried_bytes
from hpcstrat.engine.native import load, type_codes
from hpcstrat.engine.typing import Array

__all__ = ["plan_move", "plan_scatter"]

# Ranks may read streams from this size on in each other's memory, instead of copying
# them through the places of the rings. The kernel measures which way is faster.
_LEAST_READ_BYTES = 128 << 10
# Results from this size on use recycled memory; the kernel allocates smaller ones. The
# Python code of the recycler takes 10 us, longer than the allocation of 1 MiB.
_LEAST_RECYCLED_BYTES = 4 << 20
_MOST_READ_ARRAYS = 2000
# Streams begin at multiples of this size in a header between workers.
_ALIGNMENT_BYTES = 16


def plan_move(
    call: Call,
    blocks: MoveBlocks,
    kinds: tuple[Kinds, Kinds],
    channel: Channel | None,
    allocate: Any,
) -> Plan:
    """Return the plan of a call that moves data; only its blocks differ between ranks.

    ``kinds`` are those of this rank's arrays, and of its results.
    """
    if channel is None and kinds[1] == kinds[0][: len(kinds[1])]:
        return CopyPlan(call, kinds[1], None, allocate)
    kernel = None if channel is None else channel.kernel
    sent = messages = None
    if channel is not None and channel.wire is not None:
        sent = _sent_in_header(blocks.streams, channel)
        empty = _sent_in_header([0] * len(blocks.streams), channel)
        if sent is None and empty is not None:
            messages = array_messages(blocks, channel)
        if messages is not None:
            # The kernel only exchanges headers, and copies what this rank keeps.
            sent, blocks = empty, _kept(blocks, channel.topology.replica_id)
    if channel is None or kernel is None or (channel.wire is not None and sent is None):
        return MovePlan(call, blocks, kinds[1], channel, allocate)
    topology = channel.topology
    ranks = list(range(topology.num_replicas))
    piece_bytes = topology.slot_bytes
    if channel.wire is not None and sent is not None:
        ranks = [worker for worker, _ in channel.wire.where]
        piece_bytes = channel.wire.places.shape[1]
    likes, result_likes = map(without_memory, kinds)
    longest = max((like.nbytes for like in result_likes), default=0)
    recycles = longest >= _LEAST_RECYCLED_BYTES
    one = load().move(
        kernel,
        _numbers(blocks.puts, ranks),
        _numbers(blocks.takes, ranks),
        blocks.nbytes,
        *blocks.own,
        likes,
        result_likes,
        piece_bytes,
        call,
        call.digest,
        functools.partial(allocate, kinds[1]) if recycles else None,
        _reads(blocks, max(map(len, kinds)), channel),
        _numbers([source for source, _ in blocks.copies], ranks),
        _numbers([*(b for _, b in blocks.copies), *blocks.zeros], ranks),
    )
    plan = KernelPlan(
        call, kinds[1], channel, allocate, one=one, carried=sent, messages=messages
    )
    plan.own = blocks.own
    return plan


def _kept(blocks: MoveBlocks, me: int) -> MoveBlocks:
    """Return a call without streams, with copies of the values that a rank keeps."""
    copies = [
        (Block(me, put.array, 0, put.at + b.offset - put.offset, b.nbytes), b)
        for b in blocks.takes
        for put in blocks.puts
        if b.rank == me and blocks.own[0] < 0
    ]
    streams, copies = [0] * len(blocks.streams), [*blocks.copies, *copies]
    return replace(blocks, puts=[], takes=[], streams=streams, copies=copies)


def plan_scatter(
    call: Call, kinds: tuple[Kinds, Kinds], divisor: int, channel: Channel
) -> KernelPlan | None:
    """Return the plan of a sum of parts, by the kernel; None if it cannot make it.

    Each rank sums the ranks' values of its part. ``kinds`` are those of a rank's parts
    and of its result. If ``divisor`` is not 0, the sums are divided by it.
    """
    likes, ((shape, dtype),) = without_memory(kinds[0]), kinds[1]
    codes = type_codes([dtype], "SUM")
    if channel.kernel is None or codes is None or (divisor and dtype.kind not in "fc"):
        return None
    size, nbytes, sent = len(likes), max(like.nbytes for like in likes), None
    piece_bytes = cached_piece_bytes(channel.topology.slot_bytes, channel.topology)
    if channel.wire is not None:
        # The kernel sends parts of equal sizes as an all-to-all sends them.
        sent = _sent_in_header([nbytes * (size - 1)] * size, channel)
        piece_bytes = channel.wire.places.shape[1]
        equal = all(like.nbytes == nbytes for like in likes)
        if sent is None or not equal or nbytes * size > piece_bytes:
            return None
    columns = piece_bytes // (dtype.itemsize * size)
    how = columns, divisor, call, call.digest
    one = load().scatter(
        channel.kernel, codes[0], likes, without_memory(kinds[1]), *how
    )
    plan = KernelPlan(call, [(shape, dtype)], channel, None, one=one, carried=sent)
    plan.own = channel.topology.replica_id, 0
    return plan


def _reads(blocks: MoveBlocks, most: int, channel: Channel) -> bool:
    """Return whether ranks may read each other's arrays; the same on every rank.

    ``most`` is the number of this rank's arrays or results.
    """
    large = blocks.nbytes >= _LEAST_READ_BYTES and blocks.readable
    few = max(most, channel.topology.num_replicas) < _MOST_READ_ARRAYS
    return large and few and channel.wire is None and channel.reads_memory


class MovePlan(Plan):
    """A call that moves data without the kernel, or in messages between workers."""

    def __init__(
        self,
        call: Call,
        blocks: MoveBlocks,
        results: Kinds,
        channel: Channel | None,
        allocate: Any,
    ) -> None:
        super().__init__(call, results, channel, allocate)
        self._blocks, self.own = blocks, blocks.own
        rows = None if channel is None else _rows_in_header(blocks.streams, channel)
        self._carried = None if rows is None else _Carried(channel, *rows)

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Make the call step by step; see `Plan.steps`."""
        blocks = self._blocks
        flats = [a if is_plain(a) else np.require(a, requirements="C") for a in arrays]
        sources = [_octets(flat) for flat in flats]
        own = _stream(sources, blocks.puts)
        into = [r if is_plain(r) else np.empty(r.shape, r.dtype) for r in results]
        targets = [_octets(array) for array in into]
        takes = [(block, _rows(targets[block.array], block)) for block in blocks.takes]
        if self._carried is not None:
            yield from self._carried.steps(own, takes)
        else:
            yield from move_by_messages(blocks, own, takes, self.channel)
        i, j = blocks.own
        if i >= 0 and blocks.spans is not None:
            targets[j][...] = sources[i]
        for source, copied in blocks.copies:
            rows = _rows(targets[copied.array], copied)
            rows[...] = _rows(sources[source.array], source).reshape(rows.shape)
        for block in blocks.zeros:
            _rows(targets[block.array], block)[...] = 0
        for array, result in zip(into, results, strict=True):
            if array is not result:
                result[...] = array


def _sent_in_header(streams: Sequence[int], channel: Channel) -> HeaderValues | None:
    """Return streams of these sizes in a header, from the kernel; None if it cannot."""
    rows, wire = _rows_in_header(streams, channel), channel.wire
    several = wire is not None and any(index for _, index in wire.where)
    if rows is None or wire is None or wire.kernel is None or several:
        return None
    return HeaderValues(wire, *rows[1])


def _rows_in_header(
    streams: Sequence[int], channel: Channel
) -> tuple[int, tuple[int, int]] | None:
    """Return the bytes of each stream in a header, and the sizes of `HeaderValues`.

    Returns None if the streams are too long, or inside of one worker.
    """
    if channel.wire is None:
        return None
    row_bytes = -(-max(streams) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    num_rows = max(index for _, index in channel.wire.where) + 1
    each = carried_bytes(row_bytes * num_rows)
    slot_bytes, workers = channel.topology.slot_bytes, channel.wire.num_workers
    if each > channel.wire.room_bytes or each * workers > slot_bytes:
        return None
    sizes = each, each
    if len(streams) == 2:
        me = channel.topology.replica_id
        sizes = carried_bytes(streams[me]), carried_bytes(streams[1 - me])
    return row_bytes, sizes


class _Carried(HeaderValues):
    """Short streams of all replicas, in the header of a call between workers.

    A worker sends one row for each of its ranks. Its first rank copies the rows of all
    workers into its place, from which the worker's ranks take their blocks.
    """

    def __init__(self, channel: Any, row_bytes: int, sizes: tuple[int, int]) -> None:
        super().__init__(channel.wire, *sizes)
        self._channel, self._row_bytes = channel, row_bytes
        self._index = channel.topology.worker_comm.rank
        # The places of this worker's ranks, if there are several.
        self._place = channel.rings.of(np.dtype(np.uint8))[:0]

    def steps(self, own: Array, takes: Takes) -> WaitSteps:
        """Send this rank's stream in the header, and take blocks from all streams."""
        wire, streams = self.headers, self.rows
        if wire.alone:
            streams[wire.worker, : own.size] = own
        else:
            rings, whole_bytes = self._channel.rings, self.nbytes * wire.num_workers
            place_bytes = rings.place_bytes(max(1, whole_bytes))
            place = rings.take(place_bytes)
            self._place = rings.of(np.dtype(np.uint8))[:, place : place + place_bytes]
            self._place[self._index, : own.size] = own
            whole = self._place[0, :whole_bytes]
            streams = whole.reshape(wire.num_workers, self.nbytes)
        yield self
        for block, rows in takes:
            worker, index = wire.where[block.rank]
            low = index * self._row_bytes + block.offset
            rows[...] = streams[worker, low : low + block.nbytes].reshape(rows.shape)

    def gather(self) -> None:
        """Write the streams of this worker's ranks behind the header of a message."""
        for index, row in enumerate(self._place):
            low = index * self._row_bytes
            own = self.rows[self.headers.worker, low : low + self._row_bytes]
            own[...] = row[: self._row_bytes]
        super().gather()

    def finish(self) -> None:
        """Copy all workers' streams into the place of this worker's first rank."""
        if len(self._place):
            self._place[0, : self.rows.size] = self.rows.reshape(-1)


def _numbers(blocks: Sequence[Block], ranks: Sequence[int]) -> Array:
    """Return blocks as the kernel reads them, with its numbers of the ranks."""
    rows = [(ranks[block.rank], *block[1:]) for block in blocks]
    return np.array(rows, np.int64).reshape(-1)


def _octets(array: Array) -> Array:
    """Return the bytes of a contiguous array, as a flat array."""
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def _rows(octets: Array, block: Block) -> Array:
    """Return the bytes of a block in its array, with a row for each of its chunks.

    A single chunk is a flat array.
    """
    if block.num_chunks == 1:
        return octets[block.at : block.at + block.chunk]
    shape, strides = (block.num_chunks, block.chunk), (block.stride, 1)
    rows: Array = np.lib.stride_tricks.as_strided(octets[block.at :], shape, strides)
    return rows


def _stream(octets: Sequence[Array], puts: Sequence[Block]) -> Array:
    """Return a rank's stream: a view of its array if possible, else a copy."""
    if len(puts) == 1 and puts[0].num_chunks == 1:
        return _rows(octets[puts[0].array], puts[0])
    size = max((b.offset + b.nbytes for b in puts), default=0)
    stream = np.empty(size, np.uint8)
    for block in puts:
        part = stream[block.offset : block.offset + block.nbytes]
        part.reshape(block.num_chunks, -1)[...] = _rows(octets[block.array], block)
    return stream
