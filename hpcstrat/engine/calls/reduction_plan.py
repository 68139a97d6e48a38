"""Choice of the plan for a reduction; no other module makes this choice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.engine.algorithms.kernel_call import SentValues
from hpcstrat.engine.algorithms.mapped_memory import (
    LEAST_MAPPED_BYTES,
    MappedMemory,
    MappedSum,
)
from hpcstrat.engine.algorithms.plan import (
    IN_HEADER,
    HeaderSum,
    KernelSum,
    OrderPlan,
    Plan,
    Request,
    fits_header,
    header_bytes,
    is_plain,
    kernel_codes,
)
from hpcstrat.engine.algorithms.work import Choice
from hpcstrat.engine.arrays.packing import Piece, cut, wire_dtype
from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.channel.call import describe_call, signature_text
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)
from hpcstrat.engine.typing import Array

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.transports.device_group import DeviceGroup

__all__ = ["marked", "plan_reduction", "result_dtype"]


def plan_reduction(
    kind: tuple[ReduceOp, str, Any],
    arrays: list[Array],
    options: CommunicationOptions,
    channel: Channel | None,
    ops: CrossDeviceOps,
    *,
    recycler: Recycler,
    group: DeviceGroup | None = None,
    areas: MappedMemory | None = None,
) -> Plan:
    """Return the plan of a reduction, which is the same on every rank.

    ``kind`` is the operation, the name of the call, and the tree structure of the
    arrays (None for a single array). ``recycler`` allocates the results. ``group``
    moves arrays between the GPUs of several replicas. If there is a single array, it
    may lie in one of ``areas``. Raises ValueError on every rank if the algorithm does
    not support the topology.
    """
    op, what, structure = kind
    means = op is ReduceOp.MEAN
    nbytes, signatures, results = 0, [], []
    for array in arrays:
        signatures.append((array.dtype, array.shape))
        wire, _ = wire_dtype(array.dtype, means)
        nbytes += array.size * wire.itemsize
        results.append((array.shape, result_dtype(array.dtype, means)))
    details = _details(structure, arrays, ops, options, on_gpu=group is not None)
    request = Request(
        describe_call(f"{what}({op.name})", details, nbytes),
        tuple(signatures),
        tuple(results),
        channel.topology.num_replicas if channel is not None and means else 0,
        recycler.arrays,
        op,
    )
    # No rank sends anything: there is one replica, or all arrays are empty.
    if channel is None or not nbytes:
        return Plan(request, None, channel)
    if group is not None:
        choice = ops.choose_on_gpu(nbytes, group, options)
        return _ordered(request, Plan, choice, channel)
    choice = ops.choose(nbytes, channel.topology, options)
    plan = _kind_of_plan(request, choice, channel)
    if areas is None or not choice.in_worker or channel.topology.num_workers > 1:
        return plan
    if not op.adds:
        return plan
    if len(arrays) > 1 or nbytes < LEAST_MAPPED_BYTES or wire != arrays[0].dtype:
        return plan
    return MappedSum(request, plan, areas)


def _details(
    structure: Any,
    arrays: list[Array],
    ops: CrossDeviceOps,
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


def _kind_of_plan(request: Request, choice: Choice, channel: Channel) -> Plan:
    """Return a KernelSum or HeaderSum if one can make the call, else a general Plan."""
    codes = kernel_codes(request, channel) if choice.in_worker else None
    if codes is not None:
        return KernelSum(request, choice, channel, codes)
    return _ordered(request, _plan_without_kernel, choice, channel)


def _ordered(
    request: Request, make: Callable[..., Plan], choice: Choice, channel: Channel
) -> Plan:
    """Return the plan that ``make`` makes: of the arrays, or of their order keys."""
    if request.op.adds:
        return make(request, choice, channel)
    return OrderPlan(request, make(request.of_keys(), choice, channel))


def _plan_without_kernel(request: Request, choice: Choice, channel: Channel) -> Plan:
    if choice.small and channel.topology.num_workers > 1:
        means = bool(request.divisor)
        pieces = cut(request.signatures, means, choice.piece_bytes)
        first, *more = itertools.islice(pieces, 2)
        if not more and fits_header(first, channel):
            choice = replace(choice, how=IN_HEADER)
            return _in_header(request, choice, channel, first)
    return Plan(request, choice, channel)


def _in_header(
    request: Request, choice: Choice, channel: Channel, piece: Piece
) -> Plan:
    """Return the plan of a sum in the header, by the kernel if it can add the values.

    Only some workers may use the kernel: the messages and the bits are the same.
    """
    assert channel.wire is not None
    values, codes = channel.wire.values, kernel_codes(request, channel)
    if values is None or codes is None or not _laid_out_alike(request, codes):
        return HeaderSum(request, choice, channel, piece)
    carried = SentValues(values, channel.wire, header_bytes(piece))
    choice = replace(choice, piece_bytes=values.place_bytes)
    return KernelSum(request, choice, channel, codes, carried)


def _laid_out_alike(request: Request, codes: bytes) -> bool:
    """Return whether the kernel lays out values as messages of other workers have them.

    The kernel adds narrow integers as they are, where messages have int32, and puts
    integers of one size together, with and without sign.
    """
    dtypes = [dtype for dtype, _ in request.signatures]
    kinds = [wire_dtype(dtype, bool(request.divisor)) for dtype in dtypes]
    widened = any(narrows and wire.kind == "i" for wire, narrows in kinds)
    return not widened and len(set(codes)) == len(set(dtypes))


def result_dtype(dtype: np.dtype[Any], means: bool) -> np.dtype[Any]:
    """Return the dtype of the sum, or of the mean, of arrays of ``dtype``."""
    wire, narrows = wire_dtype(dtype, means)
    return dtype.newbyteorder("=") if narrows else wire


def marked(
    planned: Plan, arrays: list[Array], results: list[Array]
) -> tuple[Plan, list[Array], Callable[[], None]]:
    """Order a started call on GPUs after the work in this thread's current stream.

    Other threads, which have other current streams, may advance the call. Returns a
    plan for this call alone, the arrays (copied if they are not contiguous), and a
    function that makes the caller's current stream wait for the results. Raises
    ValueError if a result is not contiguous.
    """
    from hpcstrat.engine.gpu.streams import Mark

    if not all(is_plain(result) for result in results):
        raise ValueError(
            "expected contiguous arrays as out of a reduction that is started on a "
            "GPU, found others; make them with cupy.empty"
        )
    arrays = [array if is_plain(array) else array.copy("C") for array in arrays]
    begin, end = Mark().record(), Mark()
    return planned.with_options(begin=begin, end=end), arrays, end.join
