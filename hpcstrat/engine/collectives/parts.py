"""Exchanges in parts between replicas: sums by parts, gathers, all-to-all.

Each is a generator, see `hpcstrat.engine.channel.waitable`, over flat, contiguous
arrays in host memory. The header compares whatever ranks must know of the sizes.
Inside one worker, data pass through shared memory in pieces, see
`hpcstrat.engine.collectives.double_buffer`. Several workers send each other messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings, is_half
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.double_buffer import hand_over
from hpcstrat.engine.collectives.work import add_in_order, divide
from hpcstrat.engine.typing import Array

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "reduce_scatter"]

_TAG = 23
_PIECE_BYTES = 512 << 10
_MESSAGE_BYTES = 64 << 20
_LARGE_BYTES = 1 << 30

# Where a piece begins and ends, in elements.
_Piece = tuple[int, int]
# Takes where a piece begins and ends, and the others' terms of it, in their order.
_Combine = Callable[[int, int, list[Array]], None]


def reduce_scatter(
    parts: Sequence[Array],
    result: Array,
    function: np.ufunc,
    call: Call,
    channel: Channel,
    *,
    divisor: int = 0,
) -> WaitSteps:
    """Combine part ``r`` of all replicas' parts on replica ``r``, in replica order.

    Collective over ``topology.replica_comm``. ``result`` may be this replica's own
    part; it overlaps with no other one. Half-precision numbers are added in float32.
    """
    me, size, dtype = channel.topology.replica_id, len(parts), result.dtype
    wide = dtype
    if is_half(dtype) and function in (np.add, np.multiply):
        wide = np.dtype(np.float32)
    topology = channel.topology
    room = min(_PIECE_BYTES, topology.slot_bytes)
    columns = max(1, room // (max(dtype.itemsize, wide.itemsize) * (size - 1)))
    scratch = channel.rings.scratch(wide)

    def combine(start: int, stop: int, terms: list[Array]) -> None:
        total = result[start:stop]
        if total.size:
            terms.insert(me, parts[me][start:stop])
            _combine(terms, total, function, scratch, divisor)

    place_bytes = columns * (size - 1) * dtype.itemsize
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
    me, size, places = channel.topology.replica_id, len(parts), channel.rings
    itemsize, rings = parts[0].itemsize, places.of(parts[0].dtype)

    def put(piece: _Piece, place: int) -> None:
        at = place // itemsize
        for shift in range(1, size):
            part = parts[(me + shift) % size][slice(*piece)]
            rings[me, at : at + part.size] = part
            at += columns

    def take(piece: _Piece, place: int) -> None:
        count, terms = parts[me][slice(*piece)].size, []
        for rank in range(size):
            if rank != me:
                # Place at which that rank has put the values for this one.
                at = place // itemsize + ((me - rank) % size - 1) * columns
                terms.append(rings[rank, at : at + count])
        combine(*piece, terms)

    pieces = list(_pieces(max(part.size for part in parts), columns))
    place_bytes = places.place_bytes(columns * (size - 1) * itemsize)
    yield from hand_over(
        pieces, put, take, place_bytes=place_bytes, call=call, channel=channel
    )


def _scatter_messages(
    parts: Sequence[Array], columns: int, combine: _Combine, channel: Channel
) -> WaitSteps:
    me, dtype = channel.topology.replica_id, parts[0].dtype
    buffers = {r: np.empty(columns, dtype) for r in range(len(parts)) if r != me}
    yield HEADER
    comm = channel.interruptible(channel.topology.replica_comm)
    for start, stop in _pieces(max(part.size for part in parts), columns):
        count = parts[me][start:stop].size
        sent = {rank: parts[rank][start:stop] for rank in buffers}
        came = {rank: buffer[:count] for rank, buffer in buffers.items()}
        exchange = {rank: array.view(np.uint8) for rank, array in came.items()}
        comm.exchange(
            {rank: array.view(np.uint8) for rank, array in sent.items()}, exchange, _TAG
        )
        combine(start, stop, list(came.values()))


def all_gather(
    own: Array,
    parts: Sequence[Array],
    whole: Array | None,
    call: Call,
    channel: Channel,
    *,
    begins: bool = True,
) -> WaitSteps:
    """Copy every replica's array into the part of its number, on every replica.

    Collective over ``topology.replica_comm``. ``own`` may be this replica's part.
    ``whole`` is the memory of all parts, where they lie side by side in order.
    ``begins`` says whether it is the first half of a call.
    """
    if channel.topology.num_workers == 1:
        lengths = [part.size for part in parts]
        yield from _gather_in_memory(
            own, parts, lengths, call=call, channel=channel, begins=begins
        )
        return
    sizes, mpi = [part.nbytes for part in parts], channel.topology.mpi
    into = np.empty(sum(sizes), np.uint8) if whole is None else whole.view(np.uint8)
    if begins:
        yield HEADER
    comm = channel.interruptible(channel.topology.replica_comm)
    start = sum(sizes[: comm.rank])
    mine = into[start : start + own.nbytes]
    if not _same(own, mine):
        mine[...] = own.view(np.uint8)
    if into.nbytes < _LARGE_BYTES:
        comm.Allgatherv(mpi.IN_PLACE, [into, sizes, mpi.BYTE])
    start = 0
    for rank, (part, nbytes) in enumerate(zip(parts, sizes, strict=True)):
        row = into[start : start + nbytes]
        start += nbytes
        if into.nbytes >= _LARGE_BYTES:
            # Displacements past 2**31 - 1 bytes are beyond many MPIs.
            comm.cast_array(row, rank)
        if whole is None:
            part.view(np.uint8)[...] = row


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
    """Copy every replica's array into the part of its number, on the root.

    Collective over ``topology.replica_comm``. ``parts``, of the given lengths, are None
    on the other replicas.
    """
    if channel.topology.num_workers == 1:
        yield from _gather_in_memory(
            own, parts, lengths, call=call, channel=channel, begins=begins
        )
        return
    nothing = own[:0]
    if parts is None:
        sends = [own if rank == root else nothing for rank in range(len(lengths))]
        yield from all_to_all(sends, [nothing] * len(lengths), channel, begins=begins)
        return
    sends = [nothing] * len(lengths)
    sends[root] = own
    yield from all_to_all(sends, parts, channel, begins=begins)


def _gather_in_memory(
    own: Array,
    parts: Sequence[Array] | None,
    lengths: Sequence[int],
    *,
    call: Call,
    channel: Channel,
    begins: bool,
) -> WaitSteps:
    me, places = channel.topology.replica_id, channel.rings
    itemsize, rings = own.dtype.itemsize, places.of(own.dtype)
    columns = min(_PIECE_BYTES, channel.topology.slot_bytes) // itemsize

    def put(piece: _Piece, place: int) -> None:
        values, at = own[slice(*piece)], place // itemsize
        rings[me, at : at + values.size] = values

    def take(piece: _Piece, place: int) -> None:
        at = place // itemsize
        for rank, part in enumerate(parts or ()):
            target = part[slice(*piece)]
            if rank != me:
                target[...] = rings[rank, at : at + target.size]
            elif not _same(own, part):
                target[...] = own[slice(*piece)]

    pieces = list(_pieces(max(lengths), columns))
    place_bytes = places.place_bytes(columns * itemsize)
    yield from hand_over(
        pieces,
        put,
        take,
        place_bytes=place_bytes,
        call=call,
        channel=channel,
        begins=begins,
    )


def broadcast(array: Array, root: int, call: Call, channel: Channel) -> WaitSteps:
    """Give every replica the root's values, in place.

    Collective over ``topology.replica_comm``.
    """
    if channel.topology.num_workers > 1:
        yield HEADER
        channel.interruptible(channel.topology.replica_comm).cast_array(array, root)
        return
    me, places = channel.topology.replica_id, channel.rings
    data = array.view(np.uint8)
    columns = min(_PIECE_BYTES, channel.topology.slot_bytes)
    ring = places.of(data.dtype)[root]

    def put(piece: _Piece, place: int) -> None:
        if me == root:
            values = data[slice(*piece)]
            ring[place : place + values.size] = values

    def take(piece: _Piece, place: int) -> None:
        if me != root:
            values = data[slice(*piece)]
            values[...] = ring[place : place + values.size]

    pieces = list(_pieces(data.size, columns))
    place_bytes = places.place_bytes(columns)
    yield from hand_over(
        pieces, put, take, place_bytes=place_bytes, call=call, channel=channel
    )


def all_to_all(
    sends: Sequence[Array],
    receives: Sequence[Array],
    channel: Channel,
    *,
    begins: bool = True,
) -> WaitSteps:
    """Send a part to each replica, and receive one of each.

    Collective over ``topology.replica_comm``. No array that is received overlaps with
    one that is sent, this replica's own excepted, if they are the same.
    """
    if begins:
        yield HEADER
    comm = channel.interruptible(channel.topology.replica_comm)
    me, others = comm.rank, [rank for rank in range(comm.size) if rank != comm.rank]
    if not _same(sends[me], receives[me]):
        receives[me][...] = sends[me]
    out = {rank: sends[rank].view(np.uint8) for rank in others}
    into = {rank: receives[rank].view(np.uint8) for rank in others}
    longest = max((a.size for a in (*out.values(), *into.values())), default=0)
    for start, stop in _pieces(longest, _MESSAGE_BYTES):
        # Both ends know how long a part is: none is sent where nothing is left.
        sent = {rank: a[start:stop] for rank, a in out.items() if a.size > start}
        came = {rank: a[start:stop] for rank, a in into.items() if a.size > start}
        comm.exchange(sent, came, _TAG)


def _pieces(length: int, columns: int) -> Iterator[_Piece]:
    for start in range(0, length, columns):
        yield start, min(start + columns, length)


def _same(one: Array, other: Array) -> bool:
    """Whether two flat arrays are the same memory."""
    return one.nbytes == other.nbytes and one.ctypes.data == other.ctypes.data


def _combine(
    terms: Sequence[Array],
    total: Array,
    function: np.ufunc,
    scratch: Array,
    divisor: int,
) -> None:
    """Combine terms in their order into ``total``, which may be one of them."""
    if scratch.dtype == total.dtype:
        add_in_order(terms, total, scratch, function)
        divide(total, divisor)
        return
    wide = scratch[: total.size]
    call_without_fp_warnings(assign, wide, ..., terms[0])
    add_in_order([wide, *terms[1:]], wide, function=function)
    divide(wide, divisor)
    call_without_fp_warnings(assign, total, ..., wide)
