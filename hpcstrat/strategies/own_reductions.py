"""Reductions that call the hooks of a program's own subclass of CrossDeviceOps."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.plan import repeat_nothing
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import is_device, to_reducible
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.context import push
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Tree
from hpcstrat.engine.values import PerReplica, localize


def call_in_cross_replica(
    strategy: Any, function: Callable[..., Any], *args: Any
) -> Any:
    """Call the program's function in a strategy's cross-replica context."""

    def call() -> Any:
        push(strategy.cross_context)
        return function(*args)

    # The copy of the context, with the pushed entry, is discarded after the call.
    return copy_context().run(call)


class HookedCollectives(Collectives):
    """Collective calls whose reductions are made by the hooks of a CrossDeviceOps.

    All reductions of the strategy, its optimizers and its metrics use this object."""

    def __init__(
        self,
        channel: Channel | None,
        ops: CrossDeviceOps,
        options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__(channel, ops, options)
        self._options = options or CommunicationOptions()
        # The strategy that makes the calls; set by the strategy's constructor.
        self.strategy: Any = None
        self.reduce_in_call = self._by_hooks
        self.batch_reduce = self._entered
        self.repeat = repeat_nothing
        self.start_in_call = self.start_reduce = self._start_nothing

    def _start_nothing(
        self, op: ReduceOp, trees: Tree, what: str, *args: Any, **options: Any
    ) -> Any:
        raise ValueError(
            "expected an algorithm that can be started and awaited later, found the "
            f"hooks of {type(self.ops).__name__}; use all_reduce"
        )

    @property
    def overlaps(self) -> bool:
        """Whether started reductions continue while ranks compute: always False."""
        return False

    def _by_hooks(
        self,
        op: ReduceOp,
        trees: Tree,
        what: str,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
    ) -> Tree:
        """Reduce a tree by calling the hooks; see `Reductions.reduce_in_call`."""
        leaves, structure = flatten(trees)
        values = [
            PerReplica(v if isinstance(v, IndexedSlices) else to_reducible(v, op))
            for v in leaves
        ]
        options = options or self._options
        call, ops = partial(call_in_cross_replica, self.strategy), self.ops
        if len(values) == 1:
            found = [call(ops.reduce, op, values[0], values[0], options)]
        else:
            pairs = [(value, value) for value in values]
            found = list(call(ops.batch_reduce, op, pairs, options)) if pairs else []
        if len(found) != len(values):
            raise ValueError(
                f"expected {len(values)} results of batch_reduce_implementation of "
                f"{type(self.ops).__name__} in {what}, found {len(found)}; return one "
                "for each pair, in order"
            )
        results = [
            self._result(op, value.values[0], localize(one))
            for value, one in zip(values, found, strict=True)
        ]
        if out is None:
            return unflatten(structure, results)
        for target, result in zip(flatten(out)[0], results, strict=True):
            np.copyto(np.asarray(target), result)
        return out

    _entered = collective(_by_hooks)

    def _result(self, op: ReduceOp, given: Any, found: Any) -> Any:
        """Check a hook's result; copy a host array that shares ``given``'s memory."""
        if isinstance(found, IndexedSlices) or is_device(found):
            return found
        is_mean = op is ReduceOp.MEAN and given.dtype.kind in "iu"
        array = np.asarray(found)
        if array.shape != given.shape:
            raise ValueError(
                f"expected an array of shape {given.shape} of the hooks of "
                f"{type(self.ops).__name__}, found {array.shape}; return what all "
                "replicas get"
            )
        dtype = np.dtype(np.float64) if is_mean else given.dtype
        # The caller may write to the result: it must not share the input's memory.
        return array.astype(
            dtype, casting="same_kind", copy=np.may_share_memory(array, given)
        )
