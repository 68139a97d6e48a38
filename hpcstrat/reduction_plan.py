"""What is worked out once for each kind of reduction, and what fits its results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from hpcstrat.collectives.call import Call, describe_call, signature_text
from hpcstrat.collectives.header import Channel
from hpcstrat.collectives.select import Choice
from hpcstrat.collectives.shared_memory import SmallReduction
from hpcstrat.cross_device_ops import CrossDeviceOps
from hpcstrat.options import CommunicationOptions, ReduceOp
from hpcstrat.packing import Piece, Signature, cut, wire_dtype
from hpcstrat.typing import Array

__all__ = ["ReductionPlan", "copied_where_overwritten", "misfit", "plan_reduction"]

# Pieces of larger calls are worked out each time: it is the smallest part of the work.
_MOST_KEPT_PIECES = 4096


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """All that is the same in each repetition of a reduction.

    Parameters
    ----------
    call : Call
        What ranks agree on.
    signatures : tuple of (dtype, shape)
        Of the arrays.
    results : tuple of (shape, dtype)
        Of the results.
    divisor : int
        By what to divide the sums; 0 for sums.
    choice : Choice, optional
        How to reduce; None where nothing moves.
    pieces : tuple of Piece, optional
        What to reduce, where it is little enough to be kept.
    small : SmallReduction, optional
        What reduces a single small piece.
    """

    call: Call
    signatures: tuple[Signature, ...]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    divisor: int
    choice: Choice | None = None
    pieces: tuple[Piece, ...] | None = None
    small: SmallReduction | None = None

    def cut(self) -> Iterable[Piece]:
        """Return what to reduce.

        Not collective.

        Returns
        -------
        iterable of Piece
            In order.
        """
        if self.pieces is not None:
            return self.pieces
        assert self.choice is not None
        return cut(self.signatures, bool(self.divisor), self.choice.piece_bytes)


def plan_reduction(
    arrays: list[Array],
    channel: Channel | None,
    ops: CrossDeviceOps,
    *,
    op: ReduceOp,
    what: str,
    structure: Any,
    options: CommunicationOptions,
) -> ReductionPlan:
    """Plan a reduction.

    Not collective; the same on every rank.

    Parameters
    ----------
    arrays : list of ndarray
        What is to be reduced, each of a type that has a sum.
    channel : Channel or None
        Of the replicas; None for a single one.
    ops : CrossDeviceOps
        What chooses the algorithm.
    op : ReduceOp
        ``SUM`` or ``MEAN``.
    what : str
        The call, for messages.
    structure : optree.PyTreeSpec or None
        What holds the arrays; None for a single array.
    options : CommunicationOptions
        Of the call.

    Returns
    -------
    ReductionPlan
        The plan.

    Raises
    ------
    ValueError
        If the algorithm does not serve the topology. On every rank.
    """
    means = op is ReduceOp.MEAN
    details = signature_text(structure, arrays)
    if ops.describe():
        details += f" by {ops.describe()}"
    if options.bytes_per_pack:
        details += f" in pieces of {options.bytes_per_pack} bytes"
    if options.wire_dtype is not None:
        details += f" as {options.wire_dtype} between workers"
    nbytes = sum(a.size * wire_dtype(a.dtype, means)[0].itemsize for a in arrays)
    call = describe_call(f"{what}({op.name})", details, nbytes)
    signatures = tuple((a.dtype, a.shape) for a in arrays)
    results = tuple((a.shape, _result_dtype(a.dtype, means)) for a in arrays)
    if channel is None or not nbytes:
        return ReductionPlan(call, signatures, results, int(means))
    topology = channel.topology
    divisor = topology.num_replicas if means else 0
    choice = ops.choose(nbytes, topology, options)
    cuts = cut(signatures, means, choice.piece_bytes)
    some = tuple(itertools.islice(cuts, _MOST_KEPT_PIECES + 1))
    pieces = some if len(some) <= _MOST_KEPT_PIECES else None
    small = None
    if choice.small and len(some) == 1:
        small = SmallReduction(some[0], signatures, channel)
    return ReductionPlan(call, signatures, results, divisor, choice, pieces, small)


def _result_dtype(dtype: np.dtype[Any], means: bool) -> np.dtype[Any]:
    wire, narrows = wire_dtype(dtype, means)
    return dtype.newbyteorder("=") if narrows else wire


def misfit(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ValueError:
    """Return the error for an array that cannot take a result.

    Not collective.

    Parameters
    ----------
    out : object
        What was given.
    shape : tuple of int
        Of the result.
    dtype : dtype
        Of the result.

    Returns
    -------
    ValueError
        To be raised.
    """
    kind = f"a {type(out).__name__}"
    if isinstance(out, np.ndarray):
        locked = "" if out.flags.writeable else "read-only "
        kind = f"a {locked}{kind[2:]} {out.dtype}{list(out.shape)}"
    return ValueError(
        f"expected a writable numpy.ndarray {dtype}{list(shape)} as out, found {kind}; "
        "make it with numpy.empty"
    )


def copied_where_overwritten(arrays: list[Array], outs: list[Array]) -> list[Array]:
    """Copy the arrays over which another array's result would be written.

    Not collective.

    Parameters
    ----------
    arrays : list of ndarray
        What is to be reduced.
    outs : list of ndarray
        Where the results go, in the same order.

    Returns
    -------
    list of ndarray
        The arrays, or copies of them.
    """
    extents = [_extent(array) for array in arrays]
    ends = [(start, end, -1 - i) for i, (start, end) in enumerate(extents)]
    for index, out in enumerate(outs):
        own = extents[index]
        if (out.dtype, out.strides) != (arrays[index].dtype, arrays[index].strides):
            own = (0, 0)
        if _extent(out) != own:
            ends.append((*_extent(out), index))
    ends.sort()
    copied: set[int] = set()
    open_until, holders = 0, list[int]()
    for start, end, number in ends:
        if start >= open_until:
            holders = []
        holders.append(number)
        open_until = max(open_until, end)
        if len(holders) > 1:
            copied.update(-1 - h for h in holders if h < 0)
    return [a.copy() if i in copied else a for i, a in enumerate(arrays)]


def _extent(array: Array) -> tuple[int, int]:
    if not array.size:
        return 0, 0
    if array.flags.c_contiguous:
        start = array.__array_interface__["data"][0]
        return start, start + array.nbytes
    return byte_bounds(array)
