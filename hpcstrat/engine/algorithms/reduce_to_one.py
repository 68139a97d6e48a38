"""Reduction on one replica, which sends the result to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.work import Work, add_in_order, divide, drain, fill
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.interruptible import InterruptibleComm
from hpcstrat.engine.channel.waitable import HEADER, EveryRankError, WaitSteps
from hpcstrat.engine.typing import Array

__all__ = ["reduce_to_one"]

_TAG = 7


def reduce_to_one(
    work: Work,
    channel: Channel,
    root: int = 0,
    accumulate: Callable[[list[Array]], Any] | None = None,
) -> WaitSteps:
    """Accumulate the replicas' values on the root, in replica order, and broadcast.

    Collective over ``topology.replica_comm``. The work must be a single piece, so that
    one call of ``accumulate`` sees all values of one dtype. ``accumulate`` is called
    with a list of one flat buffer per replica, in replica order, and returns their
    element-wise combination, of shape (n,); if it is None, the buffers are summed. To
    sum, the root holds one buffer at a time; for ``accumulate``, all buffers. Raises
    ValueError on every rank if ``accumulate`` raises or returns another shape, or for
    ``accumulate`` with another operation than SUM and MEAN.
    """
    if accumulate is not None and work.function is not np.add:
        raise ValueError(
            "expected SUM or MEAN with a program's own accumulation_fn, found an "
            f"operation that compares elements, in {work.call.text}; reduce by another "
            "cross_device_ops"
        )
    comm = channel.interruptible(channel.topology.replica_comm)
    (piece,) = work.pieces
    flats = [np.empty(run.size, run.dtype) for run in piece]
    for run, flat in zip(piece, flats, strict=True):
        fill(run, work.sources, flat)
    yield HEADER
    for run, flat in zip(piece, flats, strict=True):
        _reduce(flat, comm, root, accumulate, work.function)
        divide(flat, work.divisor)
        drain(run, work.results, flat)


def _reduce(
    flat: Array,
    comm: InterruptibleComm,
    root: int,
    accumulate: Callable[[list[Array]], Any] | None,
    function: np.ufunc,
) -> None:
    error = None
    if comm.rank != root:
        comm.exchange({root: flat}, {}, _TAG)
    else:
        parts = _received(flat, comm, root)
        if accumulate is None:
            total = next(parts).copy()
            for part in parts:
                add_in_order([total, part], total, function=function)
            flat[:] = total
        else:
            # Receive all buffers first, because the user code may raise.
            held = [part.copy() for part in parts]
            try:
                result = np.asarray(accumulate(held))
                if result.shape != flat.shape:
                    raise ValueError(f"a result of shape {result.shape}")
                flat[:] = result
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
    if accumulate is not None:
        error = comm.bcast(error, root=root)
        if error is not None:
            raise EveryRankError(
                f"expected accumulation_fn to combine {comm.size} arrays "
                f"of shape {flat.shape}, found {error}; see replica {root}"
            )
    comm.Bcast(flat, root)


def _received(flat: Array, comm: InterruptibleComm, root: int) -> Iterator[Array]:
    """Yield every replica's buffer in order; each is valid until the next yield."""
    own, buffer = flat.copy(), np.empty_like(flat)
    for source in range(comm.size):
        if source != root:
            comm.exchange({}, {source: buffer}, _TAG)
        yield own if source == root else buffer
