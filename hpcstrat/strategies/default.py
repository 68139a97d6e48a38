"""Strategies of one replica, which need no MPI."""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.arrays.kinds import as_array
from hpcstrat.engine.options import ReduceOp, VariableOptions
from hpcstrat.engine.typing import Tree
from hpcstrat.strategies.base import Strategy
from hpcstrat.variables import Variable


class SingleReplicaStrategy(Strategy):
    """One replica: variables and values are plain, and everything passes through."""

    distributes = False
    ranks_are_independent = True

    def variable_class(self, options: VariableOptions) -> Any:
        """Return the class of variables made in this strategy's scope.

        For the library's own modules.
        """
        return Variable

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        axis: Any = None,
        *,
        out: Tree = None,
    ) -> Tree:
        """Return the value, reduced over the axis if there is one.

        Not collective.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM`` or ``MEAN``.
        value : tree of array_like
            The value.
        axis : int or tuple of int, optional
            Dimensions to reduce over.
        out : tree of ndarray, optional
            Where to copy the value; only without an axis.

        Returns
        -------
        tree
            ``out`` where there is one, or else the value itself without an axis.

        Raises
        ------
        ValueError
            For an unknown operation, an axis out of range, or an ``out`` that does not
            fit.
        """
        # Wrong operations are errors here, too: the program may move to more ranks.
        ReduceOp.parse(reduce_op)
        if axis is None and out is None:
            self._require_cross("reduce")
            return value
        return super().reduce(reduce_op, value, axis, out=out)

    def gather(self, value: Tree, axis: int) -> Tree:
        """Return the value.

        Not collective.

        Parameters
        ----------
        value : array_like of shape (...)
            The value.
        axis : int
            Checked as for several replicas.

        Returns
        -------
        ndarray
            The value.

        Raises
        ------
        ValueError
            For scalars, or an axis out of range.
        """
        return as_array(super().gather(value, axis))


class DefaultStrategy(SingleReplicaStrategy):
    """The current strategy where none was entered."""

    is_default = True
