"""Exchanges in parts between replicas: sums by parts, gathers, all-to-all.

Each is a generator, see `hpcstrat.engine.channel.waitable`, over flat, contiguous
arrays in host memory. The header compares whatever ranks must know of the sizes.
Inside one worker, data pass through shared memory in pieces: while the ranks take one
piece, the next lies in its place already, as in
`hpcstrat.engine.collectives.shared_memory`. Several workers send each other messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings, is_half
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.collectives.work import divide
from hpcstrat.engine.typing import Array

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "reduce_scatter"]

_TAG = 23
_PIECE_BYTES = 512 << 10
_MESSAGE_BYTES = 64 << 20
_LARGE_BYTES = 1 << 30

# Takes where a piece begins and ends, and its place.
_Copy = Callable[[int, int, int], None]
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

    def put(start: int, stop: int, place: int) -> None:
        at = place // itemsize
        for shift in range(1, size):
            part = parts[(me + shift) % size][start:stop]
            rings[me, at : at + part.size] = part
            at += columns

    def take(start: int, stop: int, place: int) -> None:
        count, terms = parts[me][start:stop].size, []
        for rank in range(size):
            if rank != me:
                # Place at which that rank has put the values for this one.
                at = place // itemsize + ((me - rank) % size - 1) * columns
                terms.append(rings[rank, at : at + count])
        combine(start, stop, terms)

    pieces = list(_pieces(max(part.size for part in parts), columns))
    place_bytes = places.place_bytes(columns * (size - 1) * itemsize)
    yield from _through_memory(call, channel, pieces, place_bytes, (put, take))


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

    def put(start: int, stop: int, place: int) -> None:
        values, at = own[start:stop], place // itemsize
        rings[me, at : at + values.size] = values

    def take(start: int, stop: int, place: int) -> None:
        at = place // itemsize
        for rank, part in enumerate(parts or ()):
            target = part[start:stop]
            if rank != me:
                target[...] = rings[rank, at : at + target.size]
            elif not _same(own, part):
                target[...] = own[start:stop]

    pieces = list(_pieces(max(lengths), columns))
    place_bytes = places.place_bytes(columns * itemsize)
    copies = put, take
    yield from _through_memory(
        call, channel, pieces, place_bytes, copies, begins=begins
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

    def put(start: int, stop: int, place: int) -> None:
        if me == root:
            ring[place : place + stop - start] = data[start:stop]

    def take(start: int, stop: int, place: int) -> None:
        if me != root:
            data[start:stop] = ring[place : place + stop - start]

    pieces = list(_pieces(data.size, columns))
    place_bytes = places.place_bytes(columns)
    yield from _through_memory(call, channel, pieces, place_bytes, (put, take))


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


def _through_memory(
    call: Call,
    channel: Channel,
    pieces: Sequence[tuple[int, int]],
    place_bytes: int,
    copies: tuple[_Copy, _Copy],
    *,
    begins: bool = True,
) -> WaitSteps:
    """Let each rank put pieces into its ring, and take those of others.

    Collective over ``topology.worker_comm``, which is all replicas. ``begins`` says
    whether a header comes first, or a step of a call that goes on.
    """
    put, take = copies
    places, step = channel.rings, None
    place = places.take(place_bytes)
    for number, (start, stop) in enumerate(pieces):
        if number == 0:
            put(start, stop, place)
            yield HEADER if begins else channel.step(call)
        after = 0
        if number + 1 < len(pieces):
            after = places.take(place_bytes)
            put(*pieces[number + 1], after)
            step = channel.step(call)
        take(start, stop, place)
        if step is not None:
            yield step
        place, step = after, None
    if not pieces and begins:
        yield HEADER


def _pieces(length: int, columns: int) -> Iterator[tuple[int, int]]:
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
    partial: Any = terms[0]
    if scratch.dtype != total.dtype:
        partial = scratch[: total.size]
        call_without_fp_warnings(assign, partial, ..., terms[0])
    for number in range(1, len(terms)):
        last = number == len(terms) - 1 and scratch.dtype == total.dtype
        out = total if last else scratch[: total.size]
        # By name: NumPy wants that for the extremes.
        into = functools.partial(function, out=out)
        call_without_fp_warnings(into, partial, terms[number])
        partial = out
    divide(partial, divisor)
    if partial is not total:
        call_without_fp_warnings(assign, total, ..., partial)
