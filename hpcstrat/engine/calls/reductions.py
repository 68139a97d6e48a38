"""The path of every reduction: flatten the tree, plan, header, algorithm, unflatten."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hpcstrat.engine.algorithms.mapped_memory import MappedMemory
from hpcstrat.engine.algorithms.plan import (
    CopyPlan,
    KernelPlan,
    Plan,
    is_plain,
    repeater,
)
from hpcstrat.engine.algorithms.reduction_plans import plan_reduction
from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, is_device, to_reducible
from hpcstrat.engine.arrays.overlaps import copied_where_overwritten
from hpcstrat.engine.arrays.recycling import DeviceRecycler, Recycler
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.calls.reduction_arrays import (
    all_plain,
    checked_outs,
    in_each_memory,
    list_structure,
    require_fitting,
    require_sum_of_rows,
)
from hpcstrat.engine.calls.repeated_moves import kept
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.pending_calls import PendingCall
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.transports.device_group import DeviceGroup

__all__ = ["Reductions"]

_MOST_PLANS = 1024
# The size in bytes of a call whose values are too large for a header.
_LARGE_BYTES = 1 << 20

# Operation, name of the call, and tree structure; structure None for a single array.
_Request = tuple[ReduceOp, str, Any]


class Reductions:
    """Calls that reduce the arrays of all replicas by a `ReduceOp`.

    A plan is made once for each kind of call and then reused. ``ops`` chooses the
    algorithm, by the options of the call; calls without options use ``options``.
    """

    def __init__(
        self, collectives: Any, ops: CrossDeviceOps, options: CommunicationOptions
    ) -> None:
        # The `Collectives` of the replicas.
        self.collectives = collectives
        self._ops = ops
        self._options = options
        # Repeats an earlier call in the compiled kernel, or returns None.
        self.repeat = repeater(collectives.channel)
        self._plans: dict[Any, Plan] = {}
        # The areas of the worker's ranks, None if they have none.
        self._areas: MappedMemory | None = None
        self._recycler = Recycler()
        self._device_recycler = DeviceRecycler()

    def close(self) -> None:
        """Forget the plans, which hold shared memory."""
        self._plans.clear()
        self._device_recycler.clear()

    def use_mapped_memory(self, areas: MappedMemory) -> None:
        """Use ``areas`` in later sums; all ranks must call this at the same point."""
        self._areas = areas
        self._plans.clear()

    def reduce_in_call(
        self,
        op: ReduceOp,
        trees: Tree,
        what: str,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
    ) -> Tree:
        """Reduce all arrays of a tree over the replicas, in few messages.

        Collective over ``topology.replica_comm``. Call this only from a method that is
        an entry itself, see `hpcstrat.engine.channel.entries`, and that makes no other
        collective call. ``MEAN`` divides once, after the sum; the mean of integers is
        float64. Rows of IndexedSlices are concatenated in replica order. ``trees`` must
        have the same structure, shapes and dtypes on every replica, and are modified
        only if they are passed as ``out``, too, see `Strategy.reduce`. The results
        belong to the caller, and are equal bit for bit on every replica. Raises
        CollectiveError on every replica if the replicas disagree on structure, shape or
        dtype. Raises ValueError on a replica if one of its arrays cannot be summed, or
        ``out`` does not fit; the other replicas raise ReplicaError.
        """
        if options is None:
            result = self.repeat(what, op, trees, out, True)
            if result is not None:
                return result
            options = self._options
        # One array, or a list of arrays, need not be flattened.
        if type(trees) is np.ndarray and trees.dtype.isnative:
            if out is None or type(out) is np.ndarray:
                outs = None if out is None else [out]
                return self._reduce((op, what, None), [trees], options, outs)[0]
        elif type(trees) is list and out is None and all_plain(trees):
            request = op, what, list_structure(len(trees))
            return self._reduce(request, trees, options, None)
        leaves, structure = flatten(trees)
        sparse = [i for i, v in enumerate(leaves) if isinstance(v, IndexedSlices)]
        arrays = [
            to_reducible(leaf.values if isinstance(leaf, IndexedSlices) else leaf, op)
            for leaf in leaves
        ]
        if sparse:
            require_sum_of_rows(op)
        outs = None if out is None else checked_outs(out, arrays, structure, sparse)
        # All replicas first make one call for each sparse leaf, in the same order.
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

    batch_reduce = collective(reduce_in_call)

    @property
    def overlaps(self) -> bool:
        """True if MPI sends data of a started reduction while the ranks compute.

        Not collective; the same on every rank. False for a single worker, because its
        ranks copy the data themselves.
        """
        channel = self.collectives.channel
        if channel is None or channel.topology.num_workers == 1:
            return False
        return self._ops.choose(_LARGE_BYTES, channel.topology, self._options).starts

    def start_in_call(
        self,
        op: ReduceOp,
        trees: Tree,
        what: str,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
        in_pass: bool = False,
    ) -> PendingCall:
        """Start the reduction of `reduce_in_call`, and return without waiting for it.

        Collective over ``topology.replica_comm``. Until the reduction has ended,
        ``trees`` and ``out`` must not be written, and ``out`` must not be read. Raises
        ValueError for IndexedSlices. `PendingCall.wait` returns the result. For
        ``in_pass``, see `PendingCall`.
        """
        options = options or self._options
        leaves, structure = flatten(trees)
        if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
            raise ValueError(
                "expected arrays in a reduction that is started, found IndexedSlices; "
                "reduce them with all_reduce"
            )
        arrays = [to_reducible(leaf, op) for leaf in leaves]
        if len({is_device(array) for array in arrays}) > 1:
            raise ValueError(
                "expected arrays in one kind of memory in a reduction that is started, "
                "found host memory and a GPU's; start two reductions"
            )
        outs = None if out is None else checked_outs(out, arrays, structure, [])
        request = op, what, structure
        if arrays and is_device(arrays[0]):
            # Make the group now: it needs collective calls, which `start` cannot make.
            self._group(what, options)

        def start() -> PendingCall:
            plan: Any = self._plan_for(request, arrays, options)
            results, join = self._results(plan, arrays, outs), None
            if not plan.starts:
                raise ValueError(
                    "expected an algorithm that can be started and awaited later, "
                    f"found {self._ops.describe()}; use all_reduce, or another "
                    "cross_device_ops"
                )
            own = arrays
            if outs is not None:
                own = copied_where_overwritten(arrays, outs)
            tree = unflatten(structure, results) if out is None else out
            if not isinstance(plan, CopyPlan) and is_device(own[0]):
                plan, own, join = _marked(plan, own, results)
            return PendingCall(
                self.collectives.channel,
                plan.call,
                plan.steps(own, results),
                tree,
                options.timeout_seconds,
                join=join,
                in_pass=in_pass,
            )

        return cast("PendingCall", self.collectives.call(what, start))

    start_reduce = collective(start_in_call)

    def _plan_for(
        self, request: _Request, arrays: list[Array], options: CommunicationOptions
    ) -> Plan:
        """Return the plan of a call; make it at the first call of its kind."""
        on_gpu = bool(arrays) and is_device(arrays[0])
        kinds = [(array.dtype, array.shape) for array in arrays]
        # The key has everything that a plan depends on and that differs between calls.
        key = request, None if options is self._options else options, on_gpu, *kinds
        op, what, structure = request

        def make() -> Plan:
            group = self._group(what, options) if on_gpu else None

            def plan() -> Plan:
                # Refuse wrong arrays before the header, which then reports the error.
                for array in arrays:
                    to_reducible(array, op)
                    if group is not None:
                        group.require_own(array)
                return plan_reduction(
                    request,
                    arrays,
                    options,
                    self.collectives.channel,
                    self._ops,
                    allocate=self._recycler.arrays,
                    group=group,
                    areas=self._areas,
                )

            # `_group` may have made calls: report later errors in a new entry.
            made = plan() if group is None else self.collectives.call(what, plan)
            plain = structure is None or structure == list_structure(len(arrays))
            if isinstance(made, KernelPlan) and plain and options is self._options:
                # All forms in which callers pass the operation.
                names = sys.intern(op.name.lower()), op, op.name
                how = structure is not None, options.timeout_seconds
                made.keep(self.repeat, what, names, *how)
            return made

        return kept(self._plans, key, make, _MOST_PLANS)

    def _results(
        self, plan: Plan, arrays: list[Array], outs: list[Array] | None
    ) -> list[Array]:
        """Return arrays for the results of a call, new arrays if there are no ``outs``.

        Arrays are allocated before the header, because after the header a rank can no
        longer report that its memory is exhausted.
        """
        on_gpu = bool(arrays) and is_device(arrays[0])
        if outs is not None:
            require_fitting(outs, plan.results, on_gpu)
            return outs
        if not on_gpu:
            return self._recycler.arrays(plan.results)
        if self.collectives.channel is not None:
            self.collectives.channel.forget_done()
        module = array_module(arrays[0])
        return self._device_recycler.arrays(plan.call, plan.results, module)

    def _reduce_by_memory(
        self,
        request: _Request,
        arrays: list[Array],
        options: CommunicationOptions,
        outs: list[Array] | None,
    ) -> list[Array]:
        """Reduce the arrays in host memory, and then the arrays on GPUs."""
        op, what, structure = request

        def reduce(some: list[int]) -> list[Array]:
            kind = structure if len(some) == len(arrays) else list_structure(len(some))
            own = [arrays[i] for i in some]
            its_outs = None if outs is None else [outs[i] for i in some]
            call = what, self._reduce, (op, what, kind), own, options, its_outs
            return cast("list[Array]", self.collectives.call(*call))

        return in_each_memory(reduce, arrays)

    def _reduce(
        self,
        request: _Request,
        arrays: list[Array],
        options: CommunicationOptions,
        outs: list[Array] | None,
    ) -> list[Array]:
        seconds = options.timeout_seconds
        plan = self._plan_for(request, arrays, options)
        found: list[Array] | None = plan.repeat(arrays, outs, seconds)
        if found is None:
            found = self._results(plan, arrays, outs)
            if outs is not None:
                arrays = copied_where_overwritten(arrays, outs)
            plan.run(arrays, found, seconds)
        return found

    def _group(self, what: str, options: CommunicationOptions) -> DeviceGroup | None:
        from hpcstrat.engine.gpu.transports.device_group import device_group

        channel = self.collectives.channel
        seconds = options.timeout_seconds
        return None if channel is None else device_group(channel, what, seconds)

    @without_fp_warnings
    def _reduce_rows(self, op: ReduceOp, rows: IndexedSlices, what: str) -> Any:
        label = f"{what}({op.name}) of rows of {rows.dense_shape}"
        gather = self.collectives.all_gather
        values, indices = gather([rows.values, rows.indices], 0, label)
        if op is ReduceOp.MEAN:
            values = values / self.collectives.size
        return IndexedSlices(values, indices, rows.dense_shape)


def _marked(
    plan: Any, arrays: list[Array], results: list[Array]
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
    return plan.with_options(begin=begin, end=end), arrays, end.join
