"""Aggregation rules: classes that combine replicas' values, and divide a value.

Each `VariableAggregation` except ``NONE`` has a rule; variables, checkpoints and
elastic restores use the rules. To add an aggregation, add a member to the enumeration,
a class to this module, and an entry to ``_RULES``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import (
    call_without_fp_warnings,
    rounded,
    without_fp_warnings,
)
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, is_half
from hpcstrat.engine.logical.tree_order import TreeOrder
from hpcstrat.engine.options import ReduceOp, VariableAggregation
from hpcstrat.engine.typing import Array
from hpcstrat.variables.variable import NOT_SUMMABLE

_WIDEST = np.dtype(np.int64).itemsize


class AggregationRule:
    """The rule of one aggregation; all replicas call its methods in the same order."""

    divides = False
    """Whether each replica has a part of the value, not the whole value."""

    format_version = 1
    """The lowest version of the checkpoint format that has this aggregation."""

    refused_methods: Collection[str] = ()
    """Methods of variables, such as ``scatter_max``, that this aggregation refuses."""

    def type_problem(self, dtype: np.dtype[Any]) -> tuple[str, str] | None:
        """Return an error's expected dtype and advice; None for a valid dtype."""
        del dtype
        return None

    def combine(self, strategy: Any, parts: Sequence[Any], what: str) -> Any:
        """Combine the values of all replicas into one value of the same type.

        Collective over the strategy's replicas. ``parts`` has an item for each replica
        of this process: an array for an assignment, an IndexedSlices for a scatter
        method, or a list of arrays if one call reads several variables.
        """
        raise NotImplementedError

    def combine_saved(self, values: Array) -> Array:
        """Combine replicas' values that are stacked along the first axis.

        Not collective. Checkpoints of logical replicas contain such stacked values."""
        raise NotImplementedError

    def part(self, value: Array, num_replicas: int, replica_id: int) -> Array:
        """Return a replica's part of a value that `combine` restores from all parts."""
        del num_replicas, replica_id
        return value

    # Methods for elastic training: replicas are lost, with their parts, or added.

    def after_loss(
        self, own: Array | None, lost: Array, *, keeps: bool, succeeds_first: bool
    ) -> Array | None:
        """Return this replica's part, or None, after the loss of another replica.

        Called if another rank has a copy of the lost part, ``lost``; if not, `loss` is
        called instead. ``keeps`` is True on the one replica that must preserve the lost
        part; ``own`` is never None there. ``succeeds_first`` is True if replica 0 was
        lost and this replica now has number 0.
        """
        del lost, keeps, succeeds_first
        return own

    def with_newcomers(
        self,
        strategy: Any,
        part: Array | None,
        like: Array,
        *,
        newcomers: Collection[int],
        root: int,
        path: str,
    ) -> Array | None:
        """Return this replica's part after new replicas have joined.

        Collective over the strategy's replicas. The parts of the ``newcomers`` are
        chosen so that the combined value does not change: if a rule does not override
        this method, they are copies of the part of ``root``, a replica that has one.
        ``part`` is None on newcomers. ``like`` has the shape and dtype of a part.
        """
        own, what = like if part is None else part, f"value of {path} for newcomers"
        given: Array = strategy.collectives.broadcast(own, root, what)
        return given if strategy.replica_id in newcomers else part

    def loss(self, gone: Sequence[int], paths: str) -> str:
        """Describe the parts that are lost with the replicas ``gone``; "" if none."""
        del gone, paths
        return ""


class _ReductionRule(AggregationRule):
    """A rule that combines values by a reduction, ``op``."""

    op: ReduceOp
    refused_methods = NOT_SUMMABLE

    def combine(self, strategy: Any, parts: Sequence[Any], what: str) -> Any:
        return strategy.replicas.reduce_parts(self.op, list(parts), what)

    def combine_saved(self, values: Array) -> Array:
        # Add in the order of a reduction over replicas, so that the bits are the same.
        order = TreeOrder(len(values), 1)
        [total] = call_without_fp_warnings(order.sum_roots, 0, list(values))
        return np.asarray(total)


class _SumRule(_ReductionRule):
    """The rule of SUM: the value is the sum of all replicas' parts."""

    op = ReduceOp.SUM
    divides = True

    def part(self, value: Array, num_replicas: int, replica_id: int) -> Array:
        return share_of(value, num_replicas, replica_id)

    def after_loss(
        self, own: Array | None, lost: Array, *, keeps: bool, succeeds_first: bool
    ) -> Array | None:
        del succeeds_first
        if not keeps:
            return own
        # The lost part is added to this replica's, so that the total does not change.
        total: Array = call_without_fp_warnings(np.add, own, lost)
        return total

    def with_newcomers(
        self,
        strategy: Any,
        part: Array | None,
        like: Array,
        *,
        newcomers: Collection[int],
        root: int,
        path: str,
    ) -> Array | None:
        del root, path
        return np.zeros_like(like) if strategy.replica_id in newcomers else part

    def loss(self, gone: Sequence[int], paths: str) -> str:
        return f"the parts of replicas {gone} in the sums {paths}" if gone else ""


class _MeanRule(_ReductionRule):
    """The rule of MEAN: the value is the mean of all replicas' values."""

    op = ReduceOp.MEAN

    def type_problem(self, dtype: np.dtype[Any]) -> tuple[str, str] | None:
        if dtype.kind == "f" or is_half(dtype):
            return None
        return "a floating dtype", "make it a float, or choose SUM for a total"

    def combine_saved(self, values: Array) -> Array:
        return rounded(super().combine_saved(values) / len(values), values.dtype)

    def with_newcomers(
        self,
        strategy: Any,
        part: Array | None,
        like: Array,
        *,
        newcomers: Collection[int],
        root: int,
        path: str,
    ) -> Array | None:
        del root
        # Newcomers get the mean of the other replicas' values, so that the mean over
        # all replicas does not change.
        term = np.zeros_like(like) if part is None else part
        what = f"mean of {path} for newcomers"
        total = strategy.collectives.batch_reduce(ReduceOp.SUM, term, what)
        if strategy.replica_id not in newcomers:
            return part
        count = strategy.num_replicas_in_sync - len(newcomers)
        mean: Array = (total / count).astype(like.dtype)
        return mean


class _OnlyFirstReplica(AggregationRule):
    """The rule of ONLY_FIRST_REPLICA: the value is replica 0's value."""

    def combine(self, strategy: Any, parts: Sequence[Any], what: str) -> Any:
        first = parts[0]
        if not isinstance(first, IndexedSlices):
            return strategy.collectives.broadcast(first, 0, what)
        # The rows are sent as a Python object, because the other replicas cannot
        # allocate arrays for them: the number of rows may differ.
        values, indices = strategy.collectives.broadcast_object(
            (first.values, first.indices), 0, what
        )
        return IndexedSlices(values, indices, first.dense_shape)

    def combine_saved(self, values: Array) -> Array:
        first: Array = values[0]
        return first

    def after_loss(
        self, own: Array | None, lost: Array, *, keeps: bool, succeeds_first: bool
    ) -> Array | None:
        del keeps
        return lost if succeeds_first else own

    def loss(self, gone: Sequence[int], paths: str) -> str:
        return f"the values of replica 0 of {paths}" if 0 in gone else ""


_RULES: dict[VariableAggregation, AggregationRule] = {
    VariableAggregation.SUM: _SumRule(),
    VariableAggregation.MEAN: _MeanRule(),
    VariableAggregation.ONLY_FIRST_REPLICA: _OnlyFirstReplica(),
}


def rule_of(aggregation: VariableAggregation | str) -> AggregationRule | None:
    """Return the rule of an aggregation, given by member or name; None for ``NONE``.

    Raises ValueError for an unknown name."""
    parsed = VariableAggregation.parse(aggregation)
    return None if parsed is VariableAggregation.NONE else _RULES[parsed]


def format_version_of(aggregations: Collection[str]) -> int:
    """Return the lowest version of the checkpoint format that has all these names."""
    versions = [
        rule.format_version
        for aggregation, rule in _RULES.items()
        if aggregation.name.lower() in aggregations
    ]
    return max(versions, default=1)


@without_fp_warnings
def share_of(total: Array, num_replicas: int, replica_id: int) -> Array:
    """Return one replica's share of a total; the sum of all shares is the total.

    Integers are divided exactly: shares of the first replicas are larger by one if
    there is a remainder. Floats are divided; the sum of the shares is exact if the
    number of replicas is a power of two.
    """
    if total.dtype.kind in "iu":
        # Widen integers first: an int8, for example, cannot represent 200 replicas.
        wide = total if total.dtype.itemsize == _WIDEST else total.astype(np.int64)
        remainder = replica_id < wide % num_replicas
        return (wide // num_replicas + remainder).astype(total.dtype)
    # A sum of bools is their logical or: one share is the total, the others are False.
    if total.dtype.kind == "b":
        return total if replica_id == 0 else array_module(total).zeros_like(total)
    return (total / num_replicas).astype(total.dtype, copy=False)
