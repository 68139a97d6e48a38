"""Calls that move data between workers, by messages.

Messages are received in the results themselves, where the bytes of a message are
adjacent there. All memory is allocated before the header, which reports a lack of
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.blocks import Block, MoveBlocks
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.interruptible import MOST_MESSAGE_BYTES, InterruptibleComm
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.typing import Array

__all__ = ["move_by_messages"]

_TAG = 23

# Blocks that a rank takes, in the order of their bytes in the streams, and the
# memory of each block, which is a part of a result if its bytes are adjacent there.
_Takes = Sequence[tuple[Block, Array]]


def move_by_messages(
    blocks: MoveBlocks,
    own: Array,
    targets: Sequence[Array],
    channel: Channel | None,
    *,
    waits: bool,
) -> WaitSteps:
    """Send each rank's stream, ``own``, to the ranks that take blocks of it.

    Collective over ``topology.replica_comm``. ``targets`` is the memory of the blocks
    that this rank takes. For ``waits``, see `MovePlan.steps`.
    """
    takes = list(zip(blocks.takes, targets, strict=True))
    if channel is None:
        yield HEADER
        _copy_out(own, takes)
        return
    comm = channel.interruptible(channel.topology.replica_comm)
    several = sum(size > 0 for size in blocks.streams) > 1
    steps: Iterator[Any]
    if blocks.spans is not None:
        parts = {rank: own[low:high] for rank, (low, high) in blocks.spans.items()}
        steps = _exchanged(parts, own, takes, comm)
    elif several and channel.topology.num_workers == comm.size:
        others = [rank for rank in range(comm.size) if rank != comm.rank and own.size]
        steps = _exchanged(dict.fromkeys(others, own), own, takes, comm)
    else:
        steps = _sent_to_all(blocks.streams, own, takes, comm)
    yield next(steps)
    if waits:
        comm.finish(steps)
    else:
        yield from steps


def _exchanged(
    parts: Mapping[int, Array], own: Array, takes: _Takes, comm: InterruptibleComm
) -> Iterator[Any]:
    """Send a part to each of some ranks, and receive a message from each sender."""
    taken = dict[int, list[tuple[Block, Array]]]()
    for block, target in takes:
        taken.setdefault(block.rank, []).append((block, target))
    memory = {rank: _memory(some) for rank, some in taken.items()}
    yield HEADER
    if comm.rank in memory:
        memory[comm.rank][...] = own
    messages = {rank: part for rank, part in memory.items() if rank != comm.rank}
    yield comm.start(parts, messages, _TAG, MOST_MESSAGE_BYTES)
    for rank, some in taken.items():
        _copy_out(memory[rank], some, some[0][0].offset)


def _sent_to_all(
    sizes: Sequence[int], own: Array, takes: _Takes, comm: InterruptibleComm
) -> Iterator[Any]:
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
    for block, target in takes:
        _copy_out(streams[block.rank], [(block, target)])


def _memory(takes: _Takes) -> Array:
    """Return memory for a rank's blocks: their targets, if these are adjacent."""
    found = _adjacent(takes)
    if found is not None:
        return found
    first, last = takes[0][0], takes[-1][0]
    return np.empty(last.offset + last.nbytes - first.offset, np.uint8)


def _adjacent(takes: _Takes) -> Array | None:
    """Return one array of targets that are adjacent in memory; None if they are not."""
    targets = [target for _, target in takes] or [np.empty(0, np.uint8)]
    if len(targets) == 1:
        return targets[0]
    starts = [target.ctypes.data for target in targets]
    ends = [start + t.size for start, t in zip(starts, targets, strict=True)]
    if starts[1:] != ends[:-1] or len({id(_owner(target)) for target in targets}) > 1:
        return None
    return np.lib.stride_tricks.as_strided(targets[0], (ends[-1] - starts[0],), (1,))


def _owner(array: Array) -> Any:
    """Return the object that owns an array's memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _copy_out(memory: Array, takes: _Takes, first: int = 0) -> None:
    """Copy blocks into their targets; ``memory`` begins at byte ``first``."""
    for block, target in takes:
        low = block.offset - first
        values = memory[low : low + target.size]
        if values.ctypes.data != target.ctypes.data:
            target[...] = values
