"""The one reduction path: tree, plan, header, algorithm, tree."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hpcstrat.arrays.casting import assign, quiet, quietly
from hpcstrat.arrays.indexed_slices import IndexedSlices
from hpcstrat.arrays.kinds import array_module, is_device, to_reducible
from hpcstrat.arrays.overlaps import copied_where_overwritten
from hpcstrat.arrays.recycling import DeviceRecycler, Recycler
from hpcstrat.channel.awaited import HEADER, Awaits, exhaust
from hpcstrat.channel.channel import Channel
from hpcstrat.channel.entries import collective
from hpcstrat.channel.started import Started
from hpcstrat.collectives.areas import Areas, reduce_in_areas
from hpcstrat.collectives.inlined import InlineReduction
from hpcstrat.collectives.kernel_sum import KernelSum
from hpcstrat.collectives.work import Work
from hpcstrat.observe.timeline import active
from hpcstrat.options import CommunicationOptions, ReduceOp
from hpcstrat.reduction.cross_device_ops import CrossDeviceOps
from hpcstrat.reduction.gathers import Gathers
from hpcstrat.reduction.one_array import OneArray
from hpcstrat.reduction.reduction_arrays import (
    all_plain,
    by_memory,
    checked_outs,
    is_plain,
    list_structure,
    require_fitting,
)
from hpcstrat.reduction.reduction_plan import (
    ReductionPlan,
    Repetition,
    marked,
    plan_reduction,
)
from hpcstrat.tree import flatten, unflatten
from hpcstrat.typing import Array, Tree

if TYPE_CHECKING:
    from hpcstrat.gpu.transports.device_group import DeviceGroup

__all__ = ["Reductions"]

_MOST_PLANS = 1024
# Of a call that no header carries.
_LARGE_BYTES = 1 << 20

# Operation, name of the call, and what holds the arrays; None for a single array.
_Request = tuple[ReduceOp, str, Any]


class Reductions:
    """Calls that sum the arrays of all replicas, or take their mean.

    They plan once for each kind of call, and then act: ``ops`` chooses how, by the
    ``options`` of the call, or the ones given here.
    """

    def __init__(
        self, gathers: Gathers, ops: CrossDeviceOps, options: CommunicationOptions
    ) -> None:
        # What an entry asks for its channel.
        self.collectives = gathers.collectives
        self._gathers = gathers
        self._ops = ops
        self._options = options
        self._plans: dict[Any, ReductionPlan] = {}
        # Of single small arrays, by call, operation, type and shape, for who calls as
        # nearly all do.
        self.ones: dict[Any, OneArray] = {}
        # Of lists of arrays, by call, operation and length: the plan used last.
        self._lists: dict[Any, ReductionPlan] = {}
        # Where arrays may lie that the ranks of a worker have all mapped; if there are
        # any, on all ranks.
        self.areas: Areas | None = None
        self._recycler = Recycler()
        self._device_recycler = DeviceRecycler()

    def close(self) -> None:
        """Forget the plans, which hold shared memory."""
        self._plans.clear()
        self.ones.clear()
        self._lists.clear()
        self._device_recycler.clear()

    def reduce_inside(
        self,
        op: ReduceOp,
        trees: Tree,
        what: str,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
    ) -> Tree:
        """Reduce all arrays of a tree over the replicas, in as few messages as fit.

        Collective over ``topology.replica_comm``; the only call of what is an entry of
        the library by itself, see `hpcstrat.channel.entries`. ``MEAN`` divides once,
        after the sum; of integers it is float64. Rows of IndexedSlices are concatenated
        in replica order. ``trees``, of the same structure, shapes and dtypes on every
        replica, are not modified, unless they are ``out``, see `Strategy.reduce`: that
        reduces in place. The results may be written by the caller, and are equal bit
        for bit on every replica. CollectiveError on every replica, if they disagree on
        structure, shape or dtype. ValueError if an array has no sum, or ``out`` does
        not fit: the others raise ReplicaError.
        """
        # One array, or a list of them: nearly all calls of a loop, which need no tree.
        plain = out is None or type(out) is np.ndarray
        if options is None:
            options = self._options
            if plain and type(trees) is np.ndarray:
                one = self.ones.get((what, op, trees.dtype, trees.shape))
                if one is not None and (result := one(trees, out)) is not None:
                    return result
        if plain and type(trees) is np.ndarray and trees.dtype.isnative:
            outs = None if out is None else [out]
            return self._reduce((op, what, None), [trees], options, outs)[0]
        if type(trees) is list and (out is None or type(out) is list):
            results = self._reduce_list(op, trees, what, options, out)
            if results is not None:
                return results
        leaves, structure = flatten(trees)
        sparse = [i for i, v in enumerate(leaves) if isinstance(v, IndexedSlices)]
        arrays = [
            to_reducible(leaf.values if isinstance(leaf, IndexedSlices) else leaf)
            for leaf in leaves
        ]
        outs = None if out is None else checked_outs(out, arrays, structure, sparse)
        # Calls of their own: in one order, and before the others, on all replicas.
        for index in sparse:
            leaves[index] = self._reduce_rows(op, leaves[index], what)
        dense = [i for i in range(len(leaves)) if i not in sparse]
        if dense or not leaves:
            dense_arrays = [arrays[i] for i in dense] if sparse else arrays
            request = op, what, structure
            reduced = self._reduce_by_memory(request, dense_arrays, options, outs)
            for index, array in zip(dense, reduced, strict=True):
                leaves[index] = array
        return unflatten(structure, leaves) if out is None else out

    def _reduce_list(
        self,
        op: ReduceOp,
        arrays: list[Any],
        what: str,
        options: CommunicationOptions,
        out: list[Any] | None,
    ) -> list[Array] | None:
        """Reduce a list of plain arrays, which needs no tree; None for other values."""
        planned = self._lists.get((what, op, len(arrays)))
        if planned is not None and options is self._options:
            # By the kernel, and of the same kinds as in the call before.
            small: Any = planned.small
            seconds = options.timeout_seconds
            results = small.reduce_list(arrays, out, planned.call, seconds)
            if results is not None:
                return cast("list[Array]", results)
        if out is not None or not all_plain(arrays):
            return None
        return self._reduce(
            (op, what, list_structure(len(arrays))), arrays, options, None
        )

    batch_reduce = collective(reduce_inside)

    @property
    def overlaps(self) -> bool:
        """Whether data of a reduction that is started travel while ranks compute.

        Not collective; the same on every rank. Inside a worker the ranks move them.
        """
        channel: Any = self.collectives.channel
        if channel is None or channel.topology.num_workers == 1:
            return False
        return self._ops.choose(_LARGE_BYTES, channel.topology, self._options).starts

    def start_inside(
        self,
        op: ReduceOp,
        trees: Tree,
        what: str,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
        part: bool = False,
    ) -> Started:
        """Start `reduce_inside`, without waiting for its end.

        Collective over ``topology.replica_comm``. Neither ``trees`` nor ``out`` may be
        written before the end, nor ``out`` be read; IndexedSlices are refused by
        ValueError. `Started.wait` returns the result; it says what ``part`` means.
        """
        options = options or self._options
        leaves, structure = flatten(trees)
        if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
            raise ValueError(
                "expected arrays in a reduction that is started, found IndexedSlices; "
                "reduce them with all_reduce"
            )
        arrays = [to_reducible(leaf) for leaf in leaves]
        if len(by_memory(arrays)) > 1:
            raise ValueError(
                "expected arrays in one kind of memory in a reduction that is started, "
                "found host memory and a GPU's; start two reductions"
            )
        outs = None if out is None else checked_outs(out, arrays, structure, [])
        request = op, what, structure
        if arrays and is_device(arrays[0]):
            # To make it takes calls, which a call that is being started cannot make.
            self._group(what, options)
        begin = functools.partial(self._start, request, arrays, options, part=part)
        return cast("Started", self.collectives.call(what, begin, outs, out))

    def _start(
        self,
        request: _Request,
        arrays: list[Array],
        options: CommunicationOptions,
        outs: list[Array] | None,
        out: Tree,
        *,
        part: bool,
    ) -> Started:
        planned, results = self._prepared(request, arrays, options, outs)
        if planned.choice is not None and not planned.choice.starts:
            raise ValueError(
                "expected an algorithm that can be started and awaited later, found "
                f"{self._ops.describe()}; use all_reduce, or another cross_device_ops"
            )
        if outs is not None:
            arrays = copied_where_overwritten(arrays, outs)
        tree = unflatten(request[2], results) if out is None else out
        join = None
        if planned.choice is not None and planned.on_gpu:
            planned, arrays, join = marked(planned, arrays, results)
        if isinstance(planned.small, InlineReduction):
            steps = planned.small.steps(arrays, results)
        else:
            steps = self._steps(planned, arrays, results, waits=False)
        return Started(
            self.collectives.channel,
            planned.call,
            steps,
            tree,
            options.timeout_seconds,
            join=join,
            part=part,
        )

    start_reduce = collective(start_inside)

    def _prepared(
        self,
        request: _Request,
        arrays: list[Array],
        options: CommunicationOptions,
        outs: list[Array] | None,
    ) -> tuple[ReductionPlan, list[Array]]:
        """Return the plan of a call, and the arrays for its results."""
        on_gpu = bool(arrays) and is_device(arrays[0])
        # All that a plan depends on and that may differ between two calls.
        key = (
            *(request, options.bytes_per_pack, options.wire_dtype),
            *(options.implementation, on_gpu),
            *[(a.dtype, a.shape) for a in arrays],
        )
        planned = self._plans.get(key)
        if planned is None:
            planned = self._plans[key] = self._plan(request, arrays, options)
            if request[2] is None and options is self._options:
                self._keep_one(planned, request)
        small = planned.small
        if isinstance(small, KernelSum) and small.repeats and options is self._options:
            op, what, structure = request
            listed = what, op, len(arrays)
            known = self._lists.get(listed) is planned
            if not known and structure == list_structure(len(arrays)):
                self._lists[listed] = planned
        # Memory runs out here, if it does, and not between the header and the data.
        if outs is None and not on_gpu:
            outs = self._recycler.arrays(planned.results)
        elif outs is None:
            outs = self._on_gpu(planned, arrays)
        else:
            require_fitting(outs, planned.results, on_gpu)
        return planned, outs

    def _keep_one(self, planned: ReductionPlan, request: _Request) -> None:
        """Let a single small array go the short way, in the calls that follow."""
        channel: Any = self.collectives.channel
        small, (op, what, _) = planned.small, request
        # None in several workers of several replicas.
        if small is None or not small.single or planned.in_areas:
            return
        seconds = self._options.timeout_seconds
        one = OneArray(what, planned, channel, self._recycler, seconds)
        # By what calls are given, too: to look that up takes time.
        for name in (op, op.name, op.name.lower()):
            self.ones[what, name, *planned.signatures[0]] = one

    def _on_gpu(self, planned: ReductionPlan, arrays: list[Array]) -> list[Array]:
        """Return arrays for the results of a call on a GPU."""
        if self.collectives.channel is not None:
            self.collectives.channel.forget_done()
        module = array_module(arrays[0])
        return self._device_recycler.arrays(planned.call, planned.results, module)

    def _reduce_by_memory(
        self,
        request: _Request,
        arrays: list[Array],
        options: CommunicationOptions,
        outs: list[Array] | None,
    ) -> list[Array]:
        """Reduce arrays in host memory, and on GPUs, one kind after the other."""
        groups, (op, what, _) = by_memory(arrays), request
        if len(groups) < 2:
            return list(
                self.collectives.call(
                    what, self._reduce, request, arrays, options, outs
                )
            )
        results: list[Any] = [None] * len(arrays)
        for some in groups:
            asked = op, what, list_structure(len(some))
            own = [arrays[i] for i in some]
            its_outs = None if outs is None else [outs[i] for i in some]
            part = self.collectives.call(
                what, self._reduce, asked, own, options, its_outs
            )
            for index, result in zip(some, part, strict=True):
                results[index] = result
        return results

    def _reduce(
        self,
        request: _Request,
        arrays: list[Array],
        options: CommunicationOptions,
        outs: list[Array] | None,
    ) -> list[Array]:
        planned, results = self._prepared(request, arrays, options, outs)
        return self._carry_out(planned, arrays, results, options, outs)

    def reduce_again(self, again: Repetition, arrays: list[Array]) -> list[Array]:
        """Reduce arrays of the kinds that a repetition knows, looking at none of them.

        Collective over ``topology.replica_comm``; only inside an entry of the library.
        Returns the repetition's own arrays, where it has any.
        """
        options = self._options
        planned = self._plans.get(again.key)
        if planned is None:
            request = again.op, again.what, list_structure(len(arrays))
            planned, _ = self._prepared(request, arrays, options, None)
            self._plans[again.key] = planned
        results, flat = again.results, again.flat
        if results is None:
            results = self._recycler.arrays(planned.results)
        elif self.collectives.channel is None:
            # A single replica: its own values are the sums.
            for result, array in zip(results, arrays, strict=True):
                result[...] = array
            return results
        return self._carry_out(planned, arrays, results, options, None, flat=flat)

    def _carry_out(
        self,
        planned: ReductionPlan,
        arrays: list[Array],
        results: list[Array],
        options: CommunicationOptions,
        outs: list[Array] | None,
        *,
        flat: Array | None = None,
    ) -> list[Array]:
        channel: Any = self.collectives.channel
        if channel is not None and channel.started:
            # Their headers came first, and their data use the same places.
            channel.started.drain()
        call, timeout_seconds = planned.call, options.timeout_seconds
        small = planned.small
        if small is not None and not (planned.in_areas and self.areas is not None):
            if outs is not None and not small.whole:
                arrays = copied_where_overwritten(arrays, outs)
            apart = outs is None or len(arrays) == 1
            small(arrays, results, planned, timeout_seconds, apart, flat=flat)
            if (recorder := active.recorder) is not None:
                recorder.leave_data(call.text, pushed=False)
            return results
        if outs is not None:
            arrays = copied_where_overwritten(arrays, outs)
        steps = self._steps(planned, arrays, results, waits=True)
        if channel is None:
            exhaust(steps)
        else:
            channel.drive(steps, call, timeout_seconds)
        return results

    def _steps(
        self,
        planned: ReductionPlan,
        arrays: list[Array],
        results: list[Array],
        *,
        waits: bool,
    ) -> Awaits:
        """Let the algorithm work on contiguous arrays; see `collectives.work`."""
        choice = planned.choice
        channel = cast("Channel | None", self.collectives.channel)
        sources = [
            (array if is_plain(array) else array.copy("C")).reshape(-1)
            for array in arrays
        ]
        flats = [
            result.reshape(-1)
            if is_plain(result)
            else array_module(result).empty(result.size, result.dtype)
            for result in results
        ]
        if channel is None or choice is None:
            # A single replica, or nothing to move.
            yield HEADER
            for source, flat in zip(sources, flats, strict=True):
                quietly(assign, flat, ..., source)
        else:
            work = Work(
                planned.call,
                pieces=planned.cut(),
                sources=sources,
                results=flats,
                piece_bytes=choice.piece_bytes,
                divisor=planned.divisor,
                waits=waits,
            )
            algorithm = choice.algorithm
            if planned.in_areas and waits and self.areas is not None:
                algorithm = functools.partial(reduce_in_areas, self.areas, algorithm)
            yield from algorithm(work, channel)
        for result, flat in zip(results, flats, strict=True):
            if not is_plain(result):
                result[...] = flat.reshape(result.shape)

    def _plan(
        self, request: _Request, arrays: list[Array], options: CommunicationOptions
    ) -> ReductionPlan:
        on_gpu = bool(arrays) and is_device(arrays[0])
        group = self._group(request[1], options) if on_gpu else None
        if group is None:
            return self._planned(request, arrays, options, None)
        # Its making was a call of all replicas.
        begin = self._planned, request, arrays, options, group
        return cast("ReductionPlan", self.collectives.call(request[1], *begin))

    def _group(self, what: str, options: CommunicationOptions) -> DeviceGroup | None:
        from hpcstrat.gpu.transports.device_group import device_group

        channel: Any = self.collectives.channel
        seconds = options.timeout_seconds
        return None if channel is None else device_group(channel, what, seconds)

    def _planned(
        self,
        request: _Request,
        arrays: list[Array],
        options: CommunicationOptions,
        group: DeviceGroup | None,
    ) -> ReductionPlan:
        op, what, structure = request
        # Refused here, before the header, which then tells the other replicas.
        for array in arrays:
            to_reducible(array)
            if group is not None:
                group.require_own(array)
        # A program of ever new shapes must not fill memory; the next calls plan anew.
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self.ones.clear()
            self._lists.clear()
        return plan_reduction(
            arrays,
            cast("Channel | None", self.collectives.channel),
            self._ops,
            op=op,
            what=what,
            structure=structure,
            options=options,
            group=group,
        )

    @quiet
    def _reduce_rows(self, op: ReduceOp, rows: IndexedSlices, what: str) -> Any:
        label = f"{what}({op.name}) of rows of {rows.dense_shape}"
        values, indices = self._gathers.all_gather(
            [rows.values, rows.indices], 0, label
        )
        if op is ReduceOp.MEAN:
            values = values / self.collectives.size
        return IndexedSlices(values, indices, rows.dense_shape)
