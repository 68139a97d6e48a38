"""Sums over a worker's replicas, made by one call of the compiled kernel.

The kernel adds in the same order as `hpcstrat.engine.algorithms.shared_memory`, so
that the results have the same bits. Each rank copies a piece of its values into its
place, and adds the pieces of all ranks. With three or more ranks and large pieces, each
rank adds only one segment of the piece, and all ranks copy the sums of all segments
into their results.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.kernel_call import (
    SMALL_BYTES,
    KernelCall,
    SentValues,
    cached_piece_bytes,
)
from hpcstrat.engine.algorithms.plan import Plan, Request
from hpcstrat.engine.algorithms.work import Choice, Work
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.native import load, type_codes
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.engine.typing import Array

__all__ = ["KernelSum", "kernel_codes"]


def kernel_codes(request: Request, channel: Channel) -> bytes | None:
    """Return the kernel's codes for the arrays' dtypes, the same on every rank.

    Returns None if the kernel cannot sum the arrays, or if there is no kernel.
    """
    if channel.kernel is None:
        return None
    return type_codes([dtype for dtype, _ in request.signatures], request.op.name)


def _piece_bytes(arrays: Sequence[Array], piece_bytes: int, topology: Topology) -> int:
    """Return the size of the kernel's pieces; the same on every rank."""
    large = sum(array.nbytes for array in arrays) > piece_bytes
    return cached_piece_bytes(piece_bytes, topology) if large else piece_bytes


class KernelSum(Plan):
    """The plan of a sum by the kernel, for replicas that are all on one worker.

    For workers of one replica, ``carried`` has the values of all workers, which are
    sent in the header; one piece contains all arrays. `run` and `repeat` are collective
    over ``topology.replica_comm``.
    """

    def __init__(
        self,
        request: Request,
        choice: Choice,
        channel: Channel,
        codes: bytes,
        carried: SentValues | None = None,
    ) -> None:
        # Each of three or more ranks adds a segment, unless the call is small.
        scattered = channel.topology.num_replicas > 2 and not choice.small
        algorithm = functools.partial(
            _reduce, codes=codes, scattered=scattered, carried=carried
        )
        super().__init__(request, replace(choice, algorithm=algorithm), channel)
        # Arrays with the right shapes and dtypes, but without memory for each element.
        likes = [np.broadcast_to(np.empty((), d), s) for d, s in self.signatures]
        result_likes = [np.broadcast_to(np.empty((), d), s) for s, d in self.results]
        large = max(like.nbytes for like in result_likes) >= SMALL_BYTES
        piece_bytes = _piece_bytes(likes, choice.piece_bytes, channel.topology)
        made = channel.kernel, codes, likes, result_likes, piece_bytes
        how = self.divisor, scattered, self.call, self.call.digest
        one = load().Sum(*made, *how, self._allocate if large else None)
        self._kernel_call = KernelCall(channel, self.call, one, carried)

    def keep(self, repeat: Any, request: Any, timeout_seconds: float | None) -> None:
        """Let the kernel make later calls of this kind itself, see `Plan.keep`."""
        op, what, structure = request
        # All forms in which callers pass the operation: "sum", ReduceOp.SUM, "SUM".
        names = sys.intern(op.name.lower()), op, op.name
        listed = structure is not None
        self._kernel_call.keep(repeat, what, names, listed, timeout_seconds)

    def repeat(self, arrays: Any, outs: Any, timeout_seconds: float | None) -> Any:
        """Make the whole call in the kernel if possible, see `Plan.repeat`."""
        return self._kernel_call.repeat(arrays, outs, timeout_seconds)

    def run(
        self,
        arrays: Sequence[Array],
        results: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        """Reduce arrays by the kernel; `repeat` has already ended all started calls."""
        self._kernel_call.run(arrays, results, timeout_seconds)


def _reduce(
    work: Work,
    channel: Channel,
    *,
    codes: bytes,
    scattered: bool,
    carried: SentValues | None,
) -> WaitSteps:
    """Sum by the kernel in separate steps, so that a started call can use it."""
    sources, results = list(work.sources), list(work.results)
    piece_bytes = _piece_bytes(sources, work.piece_bytes, channel.topology)
    made = channel.kernel, codes, sources, results, piece_bytes, work.divisor
    one = load().Sum(*made, scattered, work.call, work.call.digest, None)
    return KernelCall(channel, work.call, one, carried).steps(sources, results)
