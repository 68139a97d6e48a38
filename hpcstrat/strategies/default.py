"""Strategies with a single replica, which need no MPI."""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.arrays.kinds import as_array
from hpcstrat.engine.options import ReduceOp, VariableOptions
from hpcstrat.engine.typing import Tree
from hpcstrat.strategies.base import Strategy
from hpcstrat.variables import Variable


class SingleReplicaStrategy(Strategy):
    """Base class of strategies with one replica, whose values are not distributed."""

    distributes = False
    ranks_are_independent = True

    def variable_class(self, options: VariableOptions) -> Any:
        return Variable

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        axis: Any = None,
        *,
        out: Tree = None,
    ) -> Tree:
        # A wrong operation raises an error here, too, as it does with several ranks.
        ReduceOp.parse(reduce_op)
        if axis is None and out is None:
            self._require_cross("reduce")
            return value
        return super().reduce(reduce_op, value, axis, out=out)

    def gather(self, value: Tree, axis: int) -> Tree:
        return as_array(super().gather(value, axis))


class DefaultStrategy(SingleReplicaStrategy):
    """The strategy that is current outside of all scopes."""

    is_default = True
