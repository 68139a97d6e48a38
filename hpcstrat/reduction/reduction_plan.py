"""What is worked out once for each kind of reduction."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.arrays.kinds import is_device
from hpcstrat.arrays.packing import Piece, Signature, cut, wire_dtype
from hpcstrat.channel.call import Call, describe_call, signature_text
from hpcstrat.channel.channel import Channel
from hpcstrat.collectives.areas import LEAST_AREA_BYTES
from hpcstrat.collectives.inlined import INLINE, InlineReduction, fits_header
from hpcstrat.collectives.kernel_sum import KernelSum, reduce_by_kernel, serves
from hpcstrat.collectives.select import Choice
from hpcstrat.collectives.shared_memory import SmallReduction
from hpcstrat.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)
from hpcstrat.reduction.cross_device_ops import CrossDeviceOps
from hpcstrat.reduction.reduction_arrays import is_plain
from hpcstrat.typing import Array

if TYPE_CHECKING:
    from hpcstrat.gpu.transports.device_group import DeviceGroup

__all__ = ["ReductionPlan", "Repetition", "marked", "plan_reduction"]

# Pieces of larger calls are worked out each time: it is the smallest part of the work.
_MOST_KEPT_PIECES = 4096


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """All that is the same in each repetition of a reduction."""

    # What ranks agree on.
    call: Call
    signatures: tuple[Signature, ...]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    # By what to divide the sums; 0 for sums.
    divisor: int
    # How to reduce; None where nothing moves.
    choice: Choice | None = None
    # What to reduce, where it is little enough to be kept.
    pieces: tuple[Piece, ...] | None = None
    # What reduces a single small piece, or any number of pieces in the kernel.
    small: SmallReduction | InlineReduction | KernelSum | None = None
    # Whether it is of one array, which may lie in areas.
    in_areas: bool = False
    # Whether the arrays are on GPUs; else all are in host memory.
    on_gpu: bool = False

    def cut(self) -> Iterable[Piece]:
        """Return what to reduce, in order."""
        if self.pieces is not None:
            return self.pieces
        assert self.choice is not None
        return cut(self.signatures, bool(self.divisor), self.choice.piece_bytes)


class Repetition:
    """A reduction that a loop makes in each step, of arrays of the same kinds.

    The arrays are plain ones of NumPy, of native byte order. Each repetition overwrites
    ``results``, which lie side by side in ``flat``, in their order and of the one type
    that the arrays have, too; without them, each has arrays of its own.
    """

    __slots__ = ("flat", "key", "op", "results", "what")

    def __init__(
        self,
        op: ReduceOp,
        what: str,
        flat: Array | None = None,
        results: list[Array] | None = None,
    ) -> None:
        self.op = op
        self.what = what
        self.flat = flat
        self.results = results
        # Found by its identity. Plans outlive this, and must not keep its memory.
        self.key = object()


def plan_reduction(
    arrays: list[Array],
    channel: Channel | None,
    ops: CrossDeviceOps,
    *,
    op: ReduceOp,
    what: str,
    structure: Any,
    options: CommunicationOptions,
    group: DeviceGroup | None = None,
) -> ReductionPlan:
    """Plan a reduction; the same on every rank.

    ``structure`` holds the arrays; None for a single array. ``group`` moves them
    between GPUs of several replicas. Raises ValueError on every rank, if the algorithm
    does not serve the topology.
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
    call = describe_call(f"{what}({op.name})", details, nbytes)
    signatures = tuple((a.dtype, a.shape) for a in arrays)
    results = tuple((a.shape, _result_dtype(a.dtype, means)) for a in arrays)
    on_gpu = bool(arrays) and is_device(arrays[0])
    # Nothing to move: results are the arrays, or empty. Other ranks have none, either.
    if channel is None or not nbytes:
        return ReductionPlan(call, signatures, results, int(means), on_gpu=on_gpu)
    topology = channel.topology
    divisor = topology.num_replicas if means else 0
    if group is None:
        choice = ops.choose(nbytes, topology, options)
    else:
        choice = ops.choose_on_gpu(nbytes, group, options)
    call = replace(call, how=choice.how)
    cuts = cut(signatures, means, choice.piece_bytes)
    # Of huge arrays the pieces are cut anew in each call, which costs little then.
    some = tuple(itertools.islice(cuts, _MOST_KEPT_PIECES + 1))
    pieces = some if len(some) <= _MOST_KEPT_PIECES else None
    choice, small = _at_once(choice, some, signatures, divisor, channel)
    if isinstance(small, InlineReduction):
        call = replace(call, how=INLINE)
    in_areas = (
        len(arrays) == 1
        and topology.num_workers == 1
        and choice.in_worker
        and nbytes >= LEAST_AREA_BYTES
        and wire_dtype(arrays[0].dtype, means)[0] == arrays[0].dtype
    )
    return ReductionPlan(
        *(call, signatures, results, divisor, choice, pieces, small, in_areas),
        on_gpu=on_gpu,
    )


def _at_once(
    choice: Choice,
    pieces: Sequence[Piece],
    signatures: Sequence[Signature],
    divisor: int,
    channel: Channel,
) -> tuple[Choice, SmallReduction | InlineReduction | KernelSum | None]:
    """Return what makes the whole call at once, if anything does; and the choice.

    The kernel also takes the place of the algorithm, in calls that are started.
    """
    whole, topology = len(pieces) == 1, channel.topology
    if choice.in_worker and serves([dtype for dtype, _ in signatures], channel):
        scattered = topology.num_replicas > 2 and not (choice.small and whole)
        algorithm = functools.partial(reduce_by_kernel, scattered=scattered)
        made = signatures, divisor, choice.piece_bytes, channel
        choice = replace(choice, algorithm=algorithm)
        return choice, KernelSum(*made, scattered=scattered)
    if not (choice.small and whole):
        return choice, None
    if topology.num_workers == 1:
        return choice, SmallReduction(pieces[0], signatures, divisor, channel)
    if fits_header(pieces[0], channel):
        return choice, InlineReduction(pieces[0], signatures, divisor, channel)
    return choice, None


def _result_dtype(dtype: np.dtype[Any], means: bool) -> np.dtype[Any]:
    wire, narrows = wire_dtype(dtype, means)
    return dtype.newbyteorder("=") if narrows else wire


def marked(
    planned: ReductionPlan, arrays: list[Array], results: list[Array]
) -> tuple[ReductionPlan, list[Array], Callable[[], None]]:
    """Order a started call on a GPU after the stream that starts it.

    Its steps may be taken by other threads, which have streams of their own. Returns a
    plan for this call alone, the arrays, contiguous, and what lets the current stream
    of the thread that calls it wait for the results. ValueError if a result is not
    contiguous.
    """
    from hpcstrat.gpu.streams import Mark

    assert planned.choice is not None
    if not all(is_plain(result) for result in results):
        raise ValueError(
            "expected contiguous arrays as out of a reduction that is started on a "
            "GPU, found others; make them with cupy.empty"
        )
    arrays = [array if is_plain(array) else array.copy("C") for array in arrays]
    begin, end = Mark().record(), Mark()
    algorithm: Any = planned.choice.algorithm
    algorithm = functools.partial(algorithm, begin=begin, end=end)
    choice = replace(planned.choice, algorithm=algorithm)
    return replace(planned, choice=choice), arrays, end.join
