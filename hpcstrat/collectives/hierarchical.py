"""Reduction over several workers: inside each through shared memory, then across.

Rank ``r`` of every worker sums segment ``r`` of a piece over its worker, then over the
ranks with the same position in all workers, so that every worker's links are busy and
each byte crosses them as seldom as it can; all ranks of a worker copy the sums out.
Where the workers differ in size, as many ranks of each take part in the second stage as
the smallest one has.

The second stage may send half-precision numbers: see `CommunicationOptions.wire_dtype`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hpcstrat.arrays.casting import assign, quietly
from hpcstrat.arrays.packing import Run
from hpcstrat.channel.awaited import Awaits, Message
from hpcstrat.channel.channel import Channel
from hpcstrat.channel.patient import PatientComm
from hpcstrat.collectives.shared_memory import reduce_scattered
from hpcstrat.collectives.work import Work
from hpcstrat.typing import Array

__all__ = ["reduce_hierarchically", "sum_over_workers"]

# Of messages by itself, a part of the time of MPI's nonblocking all-reduce.
_PARTS_BYTES = 64 << 10
_MOST_DIRECT = 8
_TAG = 19
_EXPONENT_BYTES = 8
# Scaled values lie below 2**15, and float16 ends at 65504.
_TOP_EXPONENT = 15


def reduce_hierarchically(
    work: Work, channel: Channel, wire_dtype: np.dtype[Any] | None = None
) -> Awaits:
    """Sum inside each worker, then over the workers.

    Collective over ``topology.replica_comm``. In ``wire_dtype``, ``float16`` or
    ``bfloat16`` of ml_dtypes, float32 and float64 travel between workers.
    """

    cross = functools.partial(sum_over_workers, work, channel, wire_dtype)
    return reduce_scattered(work, channel, cross)


def sum_over_workers(
    work: Work,
    channel: Channel,
    wire_dtype: np.dtype[Any] | None,
    segments: list[tuple[Run, Array]],
) -> Awaits:
    """Sum segments over the workers, in place.

    Collective over ``topology.cross_worker_comm``. ``segments`` are this rank's, in
    memory of the host, each with the run of ``work`` to which it belongs.
    """
    for run, segment in segments:
        # The mean of integers is summed in float64.
        source = work.sources[run.spans[0][0]].dtype
        exact = source.kind in "iu" or segment.dtype.char not in "fd"
        if wire_dtype is not None and not exact:
            yield from _all_reduce_halves(segment, channel, wire_dtype)
        else:
            yield from _all_reduce(segment, work, channel)


def _all_reduce(segment: Array, work: Work, channel: Channel) -> Awaits:
    """Sum a segment over the ranks of this position, in place."""
    mpi, comm = channel.topology.mpi, channel.topology.cross_worker_comm
    patient = channel.patient(comm)
    if work.waits and segment.nbytes >= _PARTS_BYTES and comm.size <= _MOST_DIRECT:
        _all_reduce_parts(segment, patient)
        return
    # Never in place, see hpcstrat.collectives.flat.
    own = segment.copy()
    if work.waits:
        patient.Allreduce(own, segment, op=mpi.SUM)
    else:
        yield Message(comm.Iallreduce(own, segment, op=mpi.SUM), own)


def _all_reduce_parts(segment: Array, comm: PatientComm) -> None:
    """Sum a segment in place, each rank a part, in the order of the workers."""
    size, me = comm.size, comm.rank
    bounds = [segment.size * part // size for part in range(size + 1)]
    parts = [segment[bounds[p] : bounds[p + 1]] for p in range(size)]
    rows = [np.empty_like(parts[me]) if p != me else parts[me] for p in range(size)]
    others = [rank for rank in range(size) if rank != me]
    comm.exchange({r: parts[r] for r in others}, {r: rows[r] for r in others}, _TAG)
    # The sum may lie where the own values are.
    total = quietly(np.add, rows[0], rows[1], rows[1 if me == 1 else 0])
    for row in rows[2:]:
        total = quietly(np.add, total, row, total if row is not parts[me] else row)
    own = dict.fromkeys(others, parts[me])
    comm.exchange(own, {r: parts[r] for r in others}, _TAG)


def _all_reduce_halves(
    segment: Array, channel: Channel, wire_dtype: np.dtype[Any]
) -> Awaits:
    """Sum a segment over the ranks of this position, sending half-precision numbers.

    Each rank sends every other the part of its segment that the other sums, scaled by a
    power of two so that its largest value lies just below 2**15; the sums, made in the
    order of the workers in the segment's own type, come back in the same way. A value
    ``x`` of a part whose largest value is ``M`` is then off by at most
    ``u |x| + 2**-39 M`` in each of the two steps, where ``u`` is 2**-11 for float16 and
    2**-8 for bfloat16: half a unit in the last place, or half of float16's smallest
    subnormal number.
    """
    mpi, comm = channel.topology.mpi, channel.topology.cross_worker_comm
    size, me = comm.size, comm.rank
    bounds = [segment.size * part // size for part in range(size + 1)]
    parts = [segment[bounds[p] : bounds[p + 1]] for p in range(size)]
    sizes = [_EXPONENT_BYTES + part.size * wire_dtype.itemsize for part in parts]
    sent = np.concatenate([_encoded(part, wire_dtype) for part in parts])
    received = np.empty((size, sizes[me]), np.uint8)
    yield Message(
        comm.Ialltoallv(
            [sent, sizes, mpi.BYTE], [received, [sizes[me]] * size, mpi.BYTE]
        )
    )
    total = np.zeros_like(parts[me])
    for worker, message in enumerate(received):
        # The own values stay exact, and in their place in the order.
        own = parts[me] if worker == me else _decoded(message, segment, wire_dtype)
        quietly(np.add, total, own, total)
    sums = np.empty(sum(sizes), np.uint8)
    message = _encoded(total, wire_dtype)
    yield Message(comm.Iallgatherv([message, mpi.BYTE], [sums, sizes, mpi.BYTE]))
    start = 0
    for part, nbytes in zip(parts, sizes, strict=True):
        part[:] = _decoded(sums[start : start + nbytes], segment, wire_dtype)
        start += nbytes


def _encoded(values: Array, wire_dtype: np.dtype[Any]) -> Array:
    """Return a message: the exponent of the scale, then the scaled values."""
    message = np.empty(_EXPONENT_BYTES + values.size * wire_dtype.itemsize, np.uint8)
    magnitudes = np.abs(values)
    largest = magnitudes.max(initial=0)
    if not np.isfinite(largest):
        largest = magnitudes.max(initial=0, where=np.isfinite(magnitudes))
    exponent = _TOP_EXPONENT - int(np.frexp(largest)[1]) if largest else 0
    message[:_EXPONENT_BYTES].view(np.int64)[0] = exponent
    scaled = quietly(np.ldexp, values, exponent)
    quietly(assign, message[_EXPONENT_BYTES:].view(wire_dtype), ..., scaled)
    return message


def _decoded(message: Array, like: Array, wire_dtype: np.dtype[Any]) -> Array:
    exponent = int(message[:_EXPONENT_BYTES].view(np.int64)[0])
    values = message[_EXPONENT_BYTES:].view(wire_dtype).astype(like.dtype)
    scaled: Array = quietly(np.ldexp, values, -exponent)
    return scaled
