"""Aggregation rules: how the replicas' values are combined, and a value is divided.

Each `VariableAggregation` but ``NONE`` has a rule, which variables, checkpoints and
elastic restores use. For a new aggregation add a member to the enumeration, a class
here, and its line in ``_RULES``.
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
    """The rule of one aggregation; all replicas call the same methods in the same
    order.
    """

    divides = False
    """Whether replicas have parts of the value, not the whole value."""

    refused_methods: Collection[str] = ()
    """Methods of variables, such as ``scatter_max``, that have no meaning with it."""

    def type_problem(self, dtype: np.dtype[Any]) -> tuple[str, str] | None:
        """Return the types that a variable must have, and advice; None for a good
        type.
        """
        del dtype
        return None

    def combine(self, strategy: Any, parts: Sequence[Any], what: str) -> Any:
        """Combine the values of all replicas, and return one of the same kind.

        Collective over the strategy's replicas. ``parts`` has an item for each replica
        of this process: an array in an assignment, an IndexedSlices in a scatter
        method, a list of arrays if many variables are read at once.
        """
        raise NotImplementedError

    def combine_saved(self, values: Array) -> Array:
        """Combine the values of all replicas, along the first axis; not collective.

        Checkpoints of logical replicas have such values.
        """
        raise NotImplementedError

    def part(self, value: Array, num_replicas: int, replica_id: int) -> Array:
        """Return a replica's part of a value, so that all parts combine to the
        value.
        """
        del num_replicas, replica_id
        return value

    # For elastic training, which loses replicas with their parts, and adds new ones.

    def after_loss(
        self, own: Array | None, lost: Array, *, keeps: bool, succeeds_first: bool
    ) -> Array | None:
        """Return this replica's part after the loss of another replica; None for none.

        ``lost`` is a copy of the lost part. One replica ``keeps`` it, beside its own
        part. ``succeeds_first`` says whether replica 0 was lost, and this replica has
        its number now.
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
        """Return this replica's part, once newcomers have parts that do not change the
        value.

        Collective over the strategy's replicas. ``part`` is None on newcomers; ``like``
        is an array of its shape and type, with any values; ``root`` is a replica with a
        part.
        """
        raise NotImplementedError

    def loss(self, gone: Sequence[int], paths: str) -> str:
        """Describe the loss of replicas' parts of variables; empty for no loss."""
        del gone, paths
        return ""


class _ReductionRule(AggregationRule):
    """A rule that is a reduction."""

    op: ReduceOp
    refused_methods = NOT_SUMMABLE

    def combine(self, strategy: Any, parts: Sequence[Any], what: str) -> Any:
        return strategy.replicas.reduce_parts(self.op, list(parts), what)

    def combine_saved(self, values: Array) -> Array:
        # In the order in which the replicas themselves would add them.
        order = TreeOrder(len(values), 1)
        [total] = call_without_fp_warnings(order.sum_roots, 0, list(values))
        return np.asarray(total)


class _SumRule(_ReductionRule):
    """The parts of all replicas add up to the value."""

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
        # The total stays.
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
    """The value is the mean of all replicas'."""

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
        # Newcomers get the mean of the others, so that they do not change it.
        term = np.zeros_like(like) if part is None else part
        what = f"mean of {path} for newcomers"
        total = strategy.collectives.batch_reduce(ReduceOp.SUM, term, what)
        if strategy.replica_id not in newcomers:
            return part
        count = strategy.num_replicas_in_sync - len(newcomers)
        mean: Array = (total / count).astype(like.dtype)
        return mean


class _OnlyFirstReplica(AggregationRule):
    """The value is replica 0's: of all replicas, not of each worker."""

    def combine(self, strategy: Any, parts: Sequence[Any], what: str) -> Any:
        first = parts[0]
        if not isinstance(first, IndexedSlices):
            return strategy.collectives.broadcast(first, 0, what)
        # As an object, as only replica 0 knows the number of rows.
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
        own, what = like if part is None else part, f"value of {path} for newcomers"
        given: Array = strategy.collectives.broadcast(own, root, what)
        return given if strategy.replica_id in newcomers else part

    def loss(self, gone: Sequence[int], paths: str) -> str:
        return f"the values of replica 0 of {paths}" if 0 in gone else ""


_RULES: dict[VariableAggregation, AggregationRule] = {
    VariableAggregation.SUM: _SumRule(),
    VariableAggregation.MEAN: _MeanRule(),
    VariableAggregation.ONLY_FIRST_REPLICA: _OnlyFirstReplica(),
}


def rule_of(aggregation: VariableAggregation | str) -> AggregationRule | None:
    """Return the rule of an aggregation, or of its name; None for ``NONE``.

    ValueError for an unknown name.
    """
    parsed = VariableAggregation.parse(aggregation)
    return None if parsed is VariableAggregation.NONE else _RULES[parsed]


@without_fp_warnings
def share_of(total: Array, num_replicas: int, replica_id: int) -> Array:
    """Return one replica's share of a total, so that the shares add up to it.

    Shares of integers are exact: the first replicas get the remainder. Floats are
    divided; their sum is exact if the number of replicas is a power of two.
    """
    if total.dtype.kind in "iu":
        # A narrow type may not hold the number of replicas.
        wide = total if total.dtype.itemsize == _WIDEST else total.astype(np.int64)
        remainder = replica_id < wide % num_replicas
        return (wide // num_replicas + remainder).astype(total.dtype)
    # The sum of bools is whether any is true: one true part is enough.
    if total.dtype.kind == "b":
        return total if replica_id == 0 else array_module(total).zeros_like(total)
    return (total / num_replicas).astype(total.dtype, copy=False)
