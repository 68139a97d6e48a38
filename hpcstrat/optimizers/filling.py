"""Zeros in the place of gradients that some replicas do not have."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.indexed_slices import IndexedSlices
from hpcstrat.optimizers.gradients import Gradient, zero_gradient
from hpcstrat.optimizers.pairs import Pairs
from hpcstrat.options import ReduceOp
from hpcstrat.tracing import get_logger
from hpcstrat.variables import Variable

__all__ = ["Filling"]


class Filling:
    """Gives all replicas gradients of the same kind for the same variables."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def filled(
        self, collectives: Any, pairs: Pairs
    ) -> list[tuple[Gradient | None, Variable]]:
        """Return the gradients, zeros where only other replicas have one.

        Collective over the strategy's replicas.

        Parameters
        ----------
        collectives : Collectives
            Of the strategy.
        pairs : sequence of (ndarray, IndexedSlices or None, Variable)
            This replica's.

        Returns
        -------
        list of (ndarray, IndexedSlices or None, Variable)
            None where no replica has one; dense where any replica's is.
        """
        kinds = np.zeros((2, len(pairs)), np.int64)
        for index, (gradient, _) in enumerate(pairs):
            if gradient is not None:
                kinds[int(isinstance(gradient, IndexedSlices)), index] = 1
        names = ", ".join(variable.name for _, variable in pairs)
        dense, sparse = collectives.batch_reduce(
            ReduceOp.SUM, kinds, f"apply_gradients: which of {names} have one"
        )
        filled: list[tuple[Gradient | None, Variable]] = []
        for index, (gradient, variable) in enumerate(pairs):
            agreed = gradient
            if isinstance(gradient, IndexedSlices) and dense[index]:
                agreed = gradient.to_dense()
            elif gradient is None and dense[index] + sparse[index]:
                agreed = zero_gradient(variable, not dense[index])
                self._note(variable.name)
            filled.append((agreed, variable))
        return filled

    def _note(self, name: str) -> None:
        if name not in self._noted:
            self._noted.add(name)
            get_logger("optimizers").warning(
                "no gradient for variable %r on this replica; it counts as zeros", name
            )
