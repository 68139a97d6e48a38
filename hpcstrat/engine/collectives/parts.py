"""Algorithms that exchange parts of arrays: reduce-scatter, gathers, all-to-all.

Each algorithm is a generator, see `hpcstrat.engine.channel.waitable`, and works on
flat, contiguous arrays in host memory. The caller's header compares the sizes between
ranks. Inside one worker the data are copied through shared memory in pieces; several
workers send each other messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings, is_half
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.work import add_in_order, divide
from hpcstrat.engine.typing import Array

__all__ = [
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "hand_over",
    "reduce_scatter",
]

_TAG = 23
_PIECE_BYTES = 512 << 10

_Piece = TypeVar("_Piece")
# Combines a piece of this replica's part with the other replicas' values, in order.
_Combine = Callable[[slice, list[Array]], None]


def hand_over(
    pieces: Sequence[_Piece],
    put: Callable[[_Piece, int], object],
    take: Callable[[_Piece, int], Any],
    *,
    place_bytes: int,
    call: Call,
    channel: Channel,
    begins: bool = True,
) -> WaitSteps:
    """Let each rank put pieces into its ring, and read the pieces of the other ranks.

    Collective over ``topology.worker_comm``. Each piece is put into its place before
    the ranks read the preceding piece, so that each piece needs only one step. ``put``
    and ``take`` are called with a piece and the byte offset of its place; ``take`` may
    return further steps to wait for. If ``begins``, the first step is the header of the
    call; if not, the header has been posted before.
    """
    rings, place = channel.rings, 0
    if pieces:
        place = rings.take(place_bytes)
        put(pieces[0], place)
    if begins:
        yield HEADER
    elif pieces:
        yield channel.step(call)
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


def reduce_scatter(
    parts: Sequence[Array],
    result: Array,
    function: np.ufunc,
    call: Call,
    channel: Channel,
    *,
    divisor: int = 0,
) -> WaitSteps:
    """Combine part ``r`` of all replicas on replica ``r``, in replica order.

    Collective over ``topology.replica_comm``. ``result`` may be this replica's own
    part, but must not overlap with another part. Half-precision numbers are added and
    multiplied in float32.
    """
    topology, size, dtype = channel.topology, len(parts), result.dtype
    widens = is_half(dtype) and function in (np.add, np.multiply)
    wide = np.dtype(np.float32) if widens else dtype
    scratch = channel.rings.scratch(wide)
    room = min(_PIECE_BYTES, topology.slot_bytes)
    columns = max(1, room // (wide.itemsize * (size - 1)))
    place_bytes = columns * (size - 1) * dtype.itemsize

    def combine(piece: slice, terms: list[Array]) -> None:
        total = result[piece]
        if not total.size:
            return
        terms.insert(topology.replica_id, parts[topology.replica_id][piece])
        if not widens:
            add_in_order(terms, total, scratch, function)
            divide(total, divisor)
            return
        sums = scratch[: total.size]
        call_without_fp_warnings(assign, sums, ..., terms[0])
        add_in_order([sums, *terms[1:]], sums, function=function)
        divide(sums, divisor)
        call_without_fp_warnings(assign, total, ..., sums)

    if topology.num_workers == 1 and place_bytes <= topology.slot_bytes:
        yield from _scatter_in_memory(parts, columns, combine, call, channel)
    else:
        yield from _scatter_messages(parts, columns, combine, channel)


def _scatter_in_memory(
    parts: Sequence[Array],
    columns: int,
    combine: _Combine,
    call: Call,
    channel: Channel,
) -> WaitSteps:
    me, size, itemsize = channel.topology.replica_id, len(parts), parts[0].itemsize
    rings = channel.rings.of(parts[0].dtype)

    def put(piece: slice, place: int) -> None:
        at = place // itemsize
        for shift in range(1, size):
            part = parts[(me + shift) % size][piece]
            rings[me, at : at + part.size] = part
            at += columns

    def take(piece: slice, place: int) -> None:
        count, terms = parts[me][piece].size, []
        for rank in range(size):
            if rank != me:
                # The offset at which that rank has put its values for this rank.
                at = place // itemsize + ((me - rank) % size - 1) * columns
                terms.append(rings[rank, at : at + count])
        combine(piece, terms)

    yield from hand_over(
        _pieces(max(part.size for part in parts), columns),
        put,
        take,
        place_bytes=channel.rings.place_bytes(columns * (size - 1) * itemsize),
        call=call,
        channel=channel,
    )


def _scatter_messages(
    parts: Sequence[Array], columns: int, combine: _Combine, channel: Channel
) -> WaitSteps:
    me, dtype = channel.topology.replica_id, parts[0].dtype
    buffers = {r: np.empty(columns, dtype) for r in range(len(parts)) if r != me}
    yield HEADER
    comm = channel.interruptible(channel.topology.replica_comm)
    for piece in _pieces(max(part.size for part in parts), columns):
        count = parts[me][piece].size
        came = {rank: buffer[:count] for rank, buffer in buffers.items()}
        comm.exchange({rank: parts[rank][piece] for rank in came}, came, _TAG)
        combine(piece, list(came.values()))


def all_gather(
    own: Array,
    parts: Sequence[Array],
    whole: Array | None,
    call: Call,
    channel: Channel,
    *,
    begins: bool = True,
) -> WaitSteps:
    """Copy replica ``r``'s array into part ``r``, on every replica, for each ``r``.

    Collective over ``topology.replica_comm``. ``own`` may be this replica's part. If
    the parts are adjacent in memory and in order, ``whole`` may be the array that
    contains them all. ``begins`` says whether to begin with the header of the call.
    """
    if channel.topology.num_workers == 1:
        longest = max(part.size for part in parts)
        yield from _gather_in_memory(own, parts, longest, call, channel, begins=begins)
        return
    sizes = [part.nbytes for part in parts]
    into = np.empty(sum(sizes), np.uint8) if whole is None else _octets(whole)
    if begins:
        yield HEADER
    comm = channel.interruptible(channel.topology.replica_comm)
    rows = np.split(into, np.cumsum(sizes)[:-1])
    if not _same(own, rows[comm.rank]):
        rows[comm.rank][...] = _octets(own)
    comm.gather_in_place(into, sizes)
    if whole is None:
        for part, row in zip(parts, rows, strict=True):
            _octets(part)[...] = row


def gather(
    own: Array,
    parts: Sequence[Array] | None,
    lengths: Sequence[int],
    *,
    root: int,
    call: Call,
    channel: Channel,
    begins: bool = True,
) -> WaitSteps:
    """Copy replica ``r``'s array into part ``r`` on the root, for each ``r``.

    Collective over ``topology.replica_comm``. Part ``r`` has length ``lengths[r]``.
    ``parts`` is None on all replicas but the root. ``begins`` says whether to begin
    with the header of the call.
    """
    if channel.topology.num_workers == 1:
        longest = max(lengths)
        yield from _gather_in_memory(own, parts, longest, call, channel, begins=begins)
        return
    sends = [own if rank == root else own[:0] for rank in range(len(lengths))]
    receives = [own[:0]] * len(lengths) if parts is None else parts
    yield from all_to_all(sends, receives, channel, begins=begins)


def _gather_in_memory(
    own: Array,
    parts: Sequence[Array] | None,
    longest: int,
    call: Call,
    channel: Channel,
    *,
    begins: bool = True,
) -> WaitSteps:
    """Copy each replica's array, of at most ``longest`` elements, into its part."""
    me, itemsize = channel.topology.replica_id, own.dtype.itemsize
    rings = channel.rings.of(own.dtype)
    columns = min(_PIECE_BYTES, channel.topology.slot_bytes) // itemsize

    def put(piece: slice, place: int) -> None:
        values, at = own[piece], place // itemsize
        rings[me, at : at + values.size] = values

    def take(piece: slice, place: int) -> None:
        at = place // itemsize
        for rank, part in enumerate(parts or ()):
            target = part[piece]
            if rank != me:
                target[...] = rings[rank, at : at + target.size]
            elif not _same(own, part):
                target[...] = own[piece]

    yield from hand_over(
        _pieces(longest, columns),
        put,
        take,
        place_bytes=channel.rings.place_bytes(columns * itemsize),
        call=call,
        channel=channel,
        begins=begins,
    )


def broadcast(array: Array, root: int, call: Call, channel: Channel) -> WaitSteps:
    """Copy the root's values into ``array`` of every replica.

    Collective over ``topology.replica_comm``.
    """
    topology, data = channel.topology, _octets(array)
    if topology.num_workers > 1:
        yield HEADER
        channel.interruptible(topology.replica_comm).cast_array(array, root)
        return
    # A broadcast is a gather on all ranks in which only the root's part has values.
    parts = [data if r == root else data[:0] for r in range(topology.num_replicas)]
    own = parts[topology.replica_id]
    yield from _gather_in_memory(own, parts, data.size, call, channel)


def all_to_all(
    sends: Sequence[Array],
    receives: Sequence[Array],
    channel: Channel,
    *,
    begins: bool = True,
) -> WaitSteps:
    """Send one part to each replica, and receive one part from each replica.

    Collective over ``topology.replica_comm``. Arrays of ``receives`` and ``sends`` must
    not overlap, but the part that this replica sends to itself may be the same memory
    in both.
    """
    if begins:
        yield HEADER
    comm = channel.interruptible(channel.topology.replica_comm)
    me, sent, into = comm.rank, dict(enumerate(sends)), dict(enumerate(receives))
    own, target = sent.pop(me), into.pop(me)
    if not _same(own, target):
        target[...] = own
    comm.exchange(sent, into, _TAG)


def _pieces(length: int, columns: int) -> list[slice]:
    return [slice(start, start + columns) for start in range(0, length, columns)]


def _octets(array: Array) -> Array:
    return array.view(np.uint8)


def _same(one: Array, other: Array) -> bool:
    """Return whether two flat arrays are the same memory."""
    return one.nbytes == other.nbytes and one.ctypes.data == other.ctypes.data
