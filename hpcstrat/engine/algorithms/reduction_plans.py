"""The plans of reductions, and the choice of a plan; no other module makes this choice.

A `KernelPlan` adds in the same order as `hpcstrat.engine.algorithms.shared_memory`, so
that the results have the same bits. Each rank copies a piece of its values into its
place, and adds the pieces of all ranks. With three or more ranks and large pieces, each
rank adds only one segment of the piece, and all ranks copy the sums of all segments
into their results.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.header_sum import HeaderSum, fits_header, header_bytes
from hpcstrat.engine.algorithms.mapped_memory import (
    LEAST_MAPPED_BYTES,
    MappedMemory,
    MappedSum,
)
from hpcstrat.engine.algorithms.plan import (
    CopyPlan,
    KernelPlan,
    Kinds,
    Plan,
    cached_piece_bytes,
    is_plain,
    without_memory,
)
from hpcstrat.engine.algorithms.work import IN_HEADER, Choice, Work
from hpcstrat.engine.arrays.kinds import array_module
from hpcstrat.engine.arrays.order_keys import from_keys, to_keys
from hpcstrat.engine.arrays.packing import Piece, Signature, cut, wire_dtype
from hpcstrat.engine.channel.call import Call, describe_call, signature_text
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.channel.wire_headers import HeaderValues
from hpcstrat.engine.native import load, type_codes
from hpcstrat.engine.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)
from hpcstrat.engine.typing import Array

__all__ = ["AlgorithmPlan", "plan_reduction", "result_dtype"]

# The kernel allocates results below this size; larger results use recycled memory.
_SMALL_BYTES = 32 << 10
# A plan keeps at most this many pieces. Larger calls compute their pieces each time,
# which takes little time compared with the sums.
_MOST_KEPT_PIECES = 4096


@dataclass(frozen=True, slots=True)
class _Request:
    """The arrays to reduce, and their results; the same on every rank."""

    call: Call
    signatures: tuple[Signature, ...]
    results: Kinds
    # Divisor for a mean; 0 for a sum.
    divisor: int
    op: ReduceOp
    allocate: Callable[[Kinds], list[Array]]

    def of_keys(self) -> _Request:
        """Return the request for the maximum of the order keys of these arrays."""
        keys = tuple((np.dtype(f"u{d.itemsize}"), s) for d, s in self.signatures)
        results = tuple((shape, dtype) for dtype, shape in keys)
        return replace(self, op=ReduceOp.MAX, signatures=keys, results=results)


class AlgorithmPlan(Plan):
    """A reduction by an algorithm; its call names it, for timelines."""

    def __init__(self, request: _Request, choice: Choice, channel: Channel) -> None:
        call = replace(request.call, how=choice.how)
        super().__init__(call, request.results, channel, request.allocate)
        self.starts, self._choice, self._request = choice.starts, choice, request
        self._pieces: Sequence[Piece] = ()

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Reduce arrays of any memory order; see `Plan.steps`.

        Each result is the memory of its own array, or overlaps with no array.
        """
        request, choice = self._request, self._choice
        flats = [
            result.reshape(-1)
            if is_plain(result)
            else array_module(result).empty(result.size, result.dtype)
            for result in results
        ]
        work = Work(
            self.call,
            pieces=self._pieces or self._cut(),
            sources=[(a if is_plain(a) else a.copy("C")).reshape(-1) for a in arrays],
            results=flats,
            piece_bytes=choice.piece_bytes,
            divisor=request.divisor,
            function=_function(request.op),
        )
        yield from choice.algorithm(work, self.channel)
        for result, flat in zip(results, flats, strict=True):
            if not is_plain(result):
                result[...] = flat.reshape(result.shape)

    def with_options(self, **options: Any) -> AlgorithmPlan:
        """Return a copy of this plan that passes more arguments to its algorithm."""
        plan = copy.copy(self)
        plan._choice = self._choice.with_options(**options)
        return plan

    def _cut(self) -> Iterable[Piece]:
        """Return the pieces of the arrays; keep them, unless there are many."""
        means, piece_bytes = bool(self._request.divisor), self._choice.piece_bytes
        pieces = cut(self._request.signatures, means, piece_bytes)
        some = tuple(itertools.islice(pieces, _MOST_KEPT_PIECES + 1))
        if len(some) > _MOST_KEPT_PIECES:
            return itertools.chain(some, pieces)
        self._pieces = some
        return some


class OrderPlan(Plan):
    """A MAX, MIN, ALL or ANY: the maximum of order keys, which ``inner`` reduces."""

    def __init__(self, op: ReduceOp, results: Kinds, inner: Plan) -> None:
        super().__init__(inner.call, results, inner.channel, inner.allocate)
        self.starts, self._op, self._inner = inner.starts, op, inner

    def steps(
        self, arrays: Sequence[Array], results: Sequence[Array], *, waits: bool = False
    ) -> WaitSteps:
        """Reduce arrays step by step; see `Plan.steps`."""
        keys = [to_keys(array, self._op) for array in arrays]
        yield from self._inner.steps(keys, keys, waits=waits)
        for key, result in zip(keys, results, strict=True):
            result[...] = from_keys(key, result.dtype, self._op)

    def with_options(self, **options: Any) -> Plan:
        """Raise ValueError, as a started call on a GPU cannot convert its results."""
        del options
        raise ValueError(
            "expected SUM or MEAN in a reduction of a GPU's arrays that is started, "
            f"found {self._op.name}; use all_reduce"
        )


def plan_reduction(
    kind: tuple[ReduceOp, str, Any],
    arrays: list[Array],
    options: CommunicationOptions,
    channel: Channel | None,
    ops: Any,
    *,
    allocate: Callable[[Kinds], list[Array]],
    group: Any = None,
    areas: MappedMemory | None = None,
) -> Plan:
    """Return the plan of a reduction, which is the same on every rank.

    ``kind`` is the operation, the name of the call, and the tree structure of the
    arrays (None for a single array). The `CrossDeviceOps` ``ops`` chooses the
    algorithm. The `DeviceGroup` ``group`` moves arrays between the GPUs of several
    replicas. If there is a single array, it may lie in one of ``areas``. Raises
    ValueError on every rank if the algorithm does not support the topology.
    """
    op, what, structure = kind
    means = op is ReduceOp.MEAN
    wires = [wire_dtype(array.dtype, means)[0] for array in arrays]
    nbytes = sum(a.size * d.itemsize for a, d in zip(arrays, wires, strict=True))
    details = _details(structure, arrays, ops, options, on_gpu=group is not None)
    request = _Request(
        describe_call(f"{what}({op.name})", details, nbytes),
        tuple((array.dtype, array.shape) for array in arrays),
        tuple((array.shape, result_dtype(array.dtype, means)) for array in arrays),
        channel.topology.num_replicas if channel is not None and means else 0,
        op,
        allocate,
    )
    if channel is None or not nbytes:
        return CopyPlan(request.call, request.results, channel, allocate)
    if group is not None:
        choice = ops.choose_on_gpu(nbytes, group, options)
    else:
        choice = ops.choose(nbytes, channel.topology, options)
    plan = _plan(request, choice, channel)
    mapped = choice.in_worker and channel.topology.num_workers == 1 and op.adds
    if areas is None or not mapped or nbytes < LEAST_MAPPED_BYTES:
        return plan
    alone = wires == [arrays[0].dtype]
    return MappedSum(plan, request.divisor, areas) if alone else plan


def _details(
    structure: Any,
    arrays: list[Array],
    ops: Any,
    options: CommunicationOptions,
    *,
    on_gpu: bool,
) -> str:
    """Return a text of everything that changes the bytes sent; headers compare it."""
    details = signature_text(structure, arrays)
    if ops.describe():
        details += f" by {ops.describe()}"
    if on_gpu and options.implementation is not CommunicationImplementation.AUTO:
        details += f" by {options.implementation}"
    if options.bytes_per_pack:
        details += f" in pieces of {options.bytes_per_pack} bytes"
    if options.wire_dtype is not None:
        details += f" as {options.wire_dtype} between workers"
    return details


def _plan(request: _Request, choice: Choice, channel: Channel) -> Plan:
    """Return the plan that makes the call with the fewest steps."""
    codes = _kernel_codes(request, channel) if choice.in_worker else None
    if codes is not None:
        return _kernel_plan(request, choice, channel, codes)
    inner = request if request.op.adds else request.of_keys()
    plan: Plan = AlgorithmPlan(inner, choice, channel)
    if choice.small and channel.topology.num_workers > 1:
        pieces = cut(inner.signatures, bool(inner.divisor), choice.piece_bytes)
        first, *more = itertools.islice(pieces, 2)
        if not more and fits_header(first, channel):
            choice = replace(choice, how=IN_HEADER)
            plan = _in_header(inner, choice, channel, first)
    if request.op.adds:
        return plan
    return OrderPlan(request.op, request.results, plan)


def _in_header(
    request: _Request, choice: Choice, channel: Channel, piece: Piece
) -> Plan:
    """Return the plan of a sum in the header, by the kernel if it can add the values.

    Only some workers may use the kernel: the messages and the bits are the same.
    """
    assert channel.wire is not None
    wire, codes = channel.wire, _kernel_codes(request, channel)
    if wire.kernel is None or codes is None or not _laid_out_alike(request, codes):
        function = _function(request.op)
        algorithm = HeaderSum(piece, channel, request.divisor, function)
        return AlgorithmPlan(request, replace(choice, algorithm=algorithm), channel)
    carried = HeaderValues(wire, header_bytes(piece))
    choice = replace(choice, piece_bytes=wire.places.shape[1])
    return _kernel_plan(request, choice, channel, codes, carried)


def _kernel_codes(request: _Request, channel: Channel) -> bytes | None:
    """Return the kernel's codes for the arrays; None if it cannot sum them."""
    if channel.kernel is None:
        return None
    return type_codes([dtype for dtype, _ in request.signatures], request.op.name)


def _laid_out_alike(request: _Request, codes: bytes) -> bool:
    """Return whether the kernel lays out values as messages of other workers have them.

    The kernel adds narrow integers as they are, where messages have int32, and puts
    integers of one size together, with and without sign.
    """
    dtypes = [dtype for dtype, _ in request.signatures]
    kinds = [wire_dtype(dtype, bool(request.divisor)) for dtype in dtypes]
    widened = any(narrows and wire.kind == "i" for wire, narrows in kinds)
    return not widened and len(set(codes)) == len(set(dtypes))


def _kernel_plan(
    request: _Request,
    choice: Choice,
    channel: Channel,
    codes: bytes,
    carried: HeaderValues | None = None,
) -> KernelPlan:
    """Return the plan of a sum by the kernel, for replicas that are all on one worker.

    For workers of one replica, ``carried`` has the values of all workers, which are
    sent in the header; one piece contains all arrays.
    """
    call, topology = replace(request.call, how=choice.how), channel.topology
    # Each of three or more ranks adds a segment, unless the call is small.
    scattered = topology.num_replicas > 2 and not choice.small
    likes = without_memory([(shape, dtype) for dtype, shape in request.signatures])
    result_likes = without_memory(request.results)
    piece_bytes = choice.piece_bytes
    if sum(like.nbytes for like in likes) > piece_bytes:
        piece_bytes = cached_piece_bytes(piece_bytes, topology)
    allocate = None
    if max(like.nbytes for like in result_likes) >= _SMALL_BYTES:
        allocate = functools.partial(request.allocate, request.results)
    made = channel.kernel, codes, likes, result_likes, piece_bytes
    how = request.divisor, scattered, call, call.digest, allocate
    one = load().Sum(*made, *how)
    kind = call, request.results, channel, request.allocate
    return KernelPlan(*kind, one=one, carried=carried)


def _function(op: ReduceOp) -> np.ufunc:
    return np.add if op.adds else np.maximum


def result_dtype(dtype: np.dtype[Any], means: bool) -> np.dtype[Any]:
    """Return the dtype of the sum, or of the mean, of arrays of ``dtype``."""
    wire, narrows = wire_dtype(dtype, means)
    return dtype.newbyteorder("=") if narrows else wire
