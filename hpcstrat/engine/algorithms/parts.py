"""The algorithm of a reduce-scatter: each replica combines one part of all arrays.

It is a generator, see `hpcstrat.engine.channel.waitable`, and works on flat, contiguous
arrays in host memory. The caller's header compares the sizes between ranks. Inside one
worker the data are copied through shared memory in pieces; several workers send each
other messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.move_plan import hand_over
from hpcstrat.engine.algorithms.work import add_in_order, divide
from hpcstrat.engine.arrays.casting import assign, call_without_fp_warnings, is_half
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import HEADER, WaitSteps
from hpcstrat.engine.typing import Array

__all__ = ["combine_terms", "reduce_scatter"]

_TAG = 23
_PIECE_BYTES = 512 << 10

# Combines a piece of this replica's part with the other replicas' values, in order.
_Combine = Callable[[slice, list[Array]], None]


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
    wide = _wide(dtype, function)
    scratch = channel.rings.scratch(wide)
    room = min(_PIECE_BYTES, topology.slot_bytes)
    columns = max(1, room // (wide.itemsize * (size - 1)))
    place_bytes = columns * (size - 1) * dtype.itemsize

    def combine(piece: slice, terms: list[Array]) -> None:
        terms.insert(topology.replica_id, parts[topology.replica_id][piece])
        combine_terms(terms, result[piece], function, scratch, divisor)

    if topology.num_workers == 1 and place_bytes <= topology.slot_bytes:
        yield from _scatter_in_memory(parts, columns, combine, call, channel)
    else:
        yield from _scatter_messages(parts, columns, combine, channel)


def combine_terms(
    terms: Sequence[Array],
    total: Array,
    function: np.ufunc,
    scratch: Array | None = None,
    divisor: int = 0,
) -> None:
    """Combine flat arrays in their order, as `reduce_scatter` does; not collective."""
    if not total.size:
        return
    wide = _wide(total.dtype, function)
    if wide == total.dtype:
        # A ufunc whose output overlaps an input may have other bits.
        scratch = np.empty_like(total) if scratch is None else scratch
        add_in_order(terms, total, scratch, function)
        divide(total, divisor)
        return
    sums = np.empty(total.size, wide) if scratch is None else scratch[: total.size]
    call_without_fp_warnings(assign, sums, ..., terms[0])
    add_in_order([sums, *terms[1:]], sums, function=function)
    divide(sums, divisor)
    call_without_fp_warnings(assign, total, ..., sums)


def _wide(dtype: np.dtype[Any], function: np.ufunc) -> np.dtype[Any]:
    """Return the dtype in which numbers are combined."""
    widens = is_half(dtype) and function in (np.add, np.multiply)
    return np.dtype(np.float32) if widens else dtype


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


def _pieces(length: int, columns: int) -> list[slice]:
    return [slice(start, start + columns) for start in range(0, length, columns)]
