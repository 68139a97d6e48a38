"""Chooses how a reduction is made; the only place that does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.engine.arrays.packing import cut, wire_dtype
from hpcstrat.engine.channel.call import describe_call, signature_text
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.collectives.header_sum import IN_HEADER, HeaderSum, fits_header
from hpcstrat.engine.collectives.kernel_sum import KernelSum, serves
from hpcstrat.engine.collectives.mapped_memory import (
    LEAST_MAPPED_BYTES,
    MappedMemory,
    reduce_in_mapped_memory,
)
from hpcstrat.engine.collectives.plan import Plan, Request, is_plain
from hpcstrat.engine.collectives.work import Choice
from hpcstrat.engine.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)
from hpcstrat.engine.reduction.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.typing import Array

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.transports.device_group import DeviceGroup

__all__ = ["marked", "plan_reduction", "result_dtype"]


def plan_reduction(
    arrays: list[Array],
    channel: Channel | None,
    ops: CrossDeviceOps,
    *,
    op: ReduceOp,
    what: str,
    structure: Any,
    options: CommunicationOptions,
    allocate: Callable[..., list[Array]],
    group: DeviceGroup | None = None,
    areas: MappedMemory | None = None,
) -> Plan:
    """Plan a reduction; the same on every rank.

    ``structure`` holds the arrays; None for a single array. ``allocate`` makes the
    arrays of the results. ``group`` moves them between GPUs of several replicas; the
    memory of one array may lie in ``areas``. Raises ValueError on every rank, if the
    algorithm does not serve the topology.
    """
    means = op is ReduceOp.MEAN
    # Whatever changes what is sent is in the text, so that headers tell it apart.
    details = signature_text(structure, arrays)
    if ops.describe():
        details += f" by {ops.describe()}"
    automatic = CommunicationImplementation.AUTO
    if group is not None and options.implementation is not automatic:
        details += f" by {options.implementation}"
    if options.bytes_per_pack:
        details += f" in pieces of {options.bytes_per_pack} bytes"
    if options.wire_dtype is not None:
        details += f" as {options.wire_dtype} between workers"
    nbytes = sum(a.size * wire_dtype(a.dtype, means)[0].itemsize for a in arrays)
    request = Request(
        describe_call(f"{what}({op.name})", details, nbytes),
        tuple((a.dtype, a.shape) for a in arrays),
        tuple((a.shape, result_dtype(a.dtype, means)) for a in arrays),
        channel.topology.num_replicas if channel is not None and means else 0,
        allocate,
    )
    # Nothing to move: results are the arrays, or empty. Other ranks have none, either.
    if channel is None or not nbytes:
        return Plan(request, None, channel)
    topology = channel.topology
    if group is None:
        choice = ops.choose(nbytes, topology, options)
    else:
        choice = ops.choose_on_gpu(nbytes, group, options)
    request = request.made(choice.how)
    in_mapped_memory = (
        areas is not None
        and len(arrays) == 1
        and topology.num_workers == 1
        and choice.in_worker
        and nbytes >= LEAST_MAPPED_BYTES
        and wire_dtype(arrays[0].dtype, means)[0] == arrays[0].dtype
    )
    plan = _kind_of_plan(request, choice, channel)
    if in_mapped_memory:
        usual = plan.choice
        return Plan(
            request, usual, channel, functools.partial(_in_mapped_memory, areas)
        )
    return plan


def _kind_of_plan(request: Request, choice: Choice, channel: Channel) -> Plan:
    """Return what makes the whole call at once, if anything does."""
    topology, means = channel.topology, bool(request.divisor)
    dtypes = [dtype for dtype, _ in request.signatures]
    if choice.in_worker and serves(dtypes, channel):
        return KernelSum(request, choice, channel)
    if choice.small and topology.num_workers > 1:
        pieces = cut(request.signatures, means, choice.piece_bytes)
        first, *more = itertools.islice(pieces, 2)
        if not more and fits_header(first, channel):
            return HeaderSum(request.made(IN_HEADER), choice, channel, first)
    return Plan(request, choice, channel)


def _in_mapped_memory(areas: Any, usual: Any) -> Any:
    return functools.partial(reduce_in_mapped_memory, areas, usual)


def result_dtype(dtype: np.dtype[Any], means: bool) -> np.dtype[Any]:
    """Return the type of the sum, or mean, of arrays of a type."""
    wire, narrows = wire_dtype(dtype, means)
    return dtype.newbyteorder("=") if narrows else wire


def marked(
    planned: Plan, arrays: list[Array], results: list[Array]
) -> tuple[Plan, list[Array], Callable[[], None]]:
    """Order a started call on a GPU after the stream that starts it.

    Its steps may be taken by other threads, which have streams of their own. Returns a
    plan for this call alone, the arrays, contiguous, and what lets the current stream
    of the thread that calls it wait for the results. ValueError if a result is not
    contiguous.
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
