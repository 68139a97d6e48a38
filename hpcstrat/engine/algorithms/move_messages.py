"""Calls that move data between workers, by messages.

Messages are received in the results themselves, where the bytes of a message are
adjacent there. All memory is allocated before the header, which reports a lack of
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.blocks import Block, MoveBlocks
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.interruptible import MOST_MESSAGE_BYTES, InterruptibleComm
from hpcstrat.engine.channel.waitable import HEADER, Exchange, WaitSteps
from hpcstrat.engine.typing import Array

__all__ = ["Takes", "array_messages", "move_by_messages"]

_TAG = 23

# Blocks that a rank takes, in the order of their bytes in the streams, and the bytes of
# each block in a result: flat, or one row for each of several chunks.
Takes = Sequence[tuple[Block, Array]]
# The other rank of a message, the index of its array, and where the bytes begin
# and end there.
_Part = tuple[int, int, int, int]


def array_messages(
    blocks: MoveBlocks, channel: Channel
) -> Callable[[Sequence[Array], Sequence[Array]], Exchange] | None:
    """Return a function that starts a call's messages between arrays and results.

    They are the messages of `move_by_messages`, which other ranks may call, but nothing
    is copied. The arrays are contiguous. Returns None if the bytes of a message are not
    adjacent in an array. Neither function is collective.
    """
    me, spans = channel.topology.replica_id, _spans(blocks, channel)
    takes = [block for block in blocks.takes if block.rank != me]
    sends = [
        (rank, put.array, put.at + low - put.offset, put.at + high - put.offset)
        for rank, (low, high) in (spans or {}).items()
        for put in blocks.puts
        if put.num_chunks == 1 and put.offset <= low < high <= put.offset + put.chunk
    ]
    receives = [(b.rank, b.array, b.at, b.at + b.chunk) for b in takes]
    adjacent = all(block.num_chunks == 1 for block in takes)
    alone = len({block.rank for block in takes}) == len(takes)
    if spans is None or len(sends) < len(spans) or not (adjacent and alone):
        return None
    comm = channel.interruptible(channel.topology.replica_comm)

    def start(arrays: Sequence[Array], results: Sequence[Array]) -> Exchange:
        sent, received = _views(arrays, sends), _views(results, receives)
        return comm.start(sent, received, _TAG, MOST_MESSAGE_BYTES)

    return start


def _views(arrays: Sequence[Array], parts: Sequence[_Part]) -> dict[int, Array]:
    """Return the bytes of messages in contiguous arrays, by the other rank."""
    return {
        rank: arrays[i].reshape(-1).view(np.uint8)[low:high]
        for rank, i, low, high in parts
    }


def _spans(
    blocks: MoveBlocks, channel: Channel
) -> Mapping[int, tuple[int, int]] | None:
    """Return the spans of a call, also if every rank takes the streams of all ranks.

    Returns None if MPI passes on what a worker has received: for one stream of several
    receivers, or workers of several replicas.
    """
    streams, me = blocks.streams, channel.topology.replica_id
    size, num_senders = len(streams), sum(nbytes > 0 for nbytes in streams)
    passes_on = channel.topology.num_workers < size or (num_senders == 1 and size > 2)
    if blocks.spans is not None or passes_on:
        return blocks.spans
    own = streams[me]
    return {rank: (0, own) for rank in range(size) if rank != me and own}


def move_by_messages(
    blocks: MoveBlocks, own: Array, takes: Takes, channel: Channel | None
) -> WaitSteps:
    """Send each rank's stream, ``own``, to the ranks that take blocks of it.

    Collective over ``topology.replica_comm``.
    """
    if channel is None:
        yield HEADER
        _copy_out(own, takes)
        return
    comm = channel.interruptible(channel.topology.replica_comm)
    spans = _spans(blocks, channel)
    if spans is not None:
        parts = {rank: own[low:high] for rank, (low, high) in spans.items()}
        yield from _exchanged(parts, own, takes, comm)
    else:
        yield from _sent_to_all(blocks.streams, own, takes, comm)


def _exchanged(
    parts: Mapping[int, Array], own: Array, takes: Takes, comm: InterruptibleComm
) -> WaitSteps:
    """Send a part to each of some ranks, and receive a message from each sender."""
    taken = dict[int, list[tuple[Block, Array]]]()
    for block, rows in takes:
        taken.setdefault(block.rank, []).append((block, rows))
    memory = dict[int, Array]()
    for rank, some in taken.items():
        first, last = some[0][0], some[-1][0]
        size = last.offset + last.nbytes - first.offset
        found = _adjacent(some)
        memory[rank] = np.empty(size, np.uint8) if found is None else found
    yield HEADER
    if comm.rank in memory:
        memory[comm.rank][...] = own
    messages = {rank: part for rank, part in memory.items() if rank != comm.rank}
    yield comm.start(parts, messages, _TAG, MOST_MESSAGE_BYTES)
    for rank, some in taken.items():
        _copy_out(memory[rank], some, some[0][0].offset)


def _sent_to_all(
    sizes: Sequence[int], own: Array, takes: Takes, comm: InterruptibleComm
) -> WaitSteps:
    """Send all streams to all ranks; MPI passes on what a worker has received."""
    [root, *more] = np.flatnonzero(sizes).tolist() or [comm.rank]
    found = own if root == comm.rank and not more else _adjacent(takes)
    whole = np.empty(sum(sizes), np.uint8) if found is None else found
    streams = np.split(whole, np.cumsum(sizes)[:-1])
    yield HEADER
    if more:
        streams[comm.rank][...] = own
        yield from comm.gathering(whole, sizes)
    else:
        yield from comm.casting(whole, root)
    for block, rows in takes:
        _copy_out(streams[block.rank], [(block, rows)])


def _adjacent(takes: Takes) -> Array | None:
    """Return the bytes of blocks that are adjacent in memory; None if they are not."""
    if any(block.num_chunks > 1 for block, _ in takes):
        return None
    targets = [rows for _, rows in takes] or [np.empty(0, np.uint8)]
    if len(targets) == 1:
        return targets[0]
    starts = [target.ctypes.data for target in targets]
    ends = [start + t.size for start, t in zip(starts, targets, strict=True)]
    if starts[1:] != ends[:-1] or len({id(_owner(target)) for target in targets}) > 1:
        return None
    size = ends[-1] - starts[0]
    found: Array = np.lib.stride_tricks.as_strided(targets[0], (size,), (1,))
    return found


def _owner(array: Array) -> Any:
    """Return the object that owns an array's memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _copy_out(memory: Array, takes: Takes, first: int = 0) -> None:
    """Copy blocks into results; ``memory`` begins at byte ``first`` of a stream."""
    for block, rows in takes:
        low = block.offset - first
        values = memory[low : low + block.nbytes].reshape(rows.shape)
        if values.ctypes.data != rows.ctypes.data:
            rows[...] = values
