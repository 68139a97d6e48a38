"""Zeros in the place of gradients that some replicas do not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.arrays.indexed_slices import IndexedSlices
from hpcstrat.logs import get_logger
from hpcstrat.optimizers.gradients import Gradient, zero_gradient
from hpcstrat.optimizers.pairs import Pairs
from hpcstrat.options import ReduceOp
from hpcstrat.variables import Variable

__all__ = ["Filling"]


class Filling:
    """Gives all replicas gradients of the same kind for the same variables."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def filled(
        self,
        collectives: Any,
        pairs: Pairs,
        shares: Sequence[Gradient] | None = None,
        unclaimed: Mapping[str, bool] | None = None,
    ) -> list[tuple[Gradient | None, Variable]]:
        """Return the gradients, zeros where only other replicas have one.

        Collective over the strategy's replicas. ``shares`` are what this replica has in
        the place of zeros; ``unclaimed`` are variables that have not been given, with
        whether this replica has a gradient. In the result None is where no replica has
        one, and a gradient is dense where any replica's is. Raises ValueError on every
        replica if any has one for a variable that is not given.
        """
        others = unclaimed or {}
        kinds = np.zeros((2, len(pairs) + len(others)), np.int64)
        kinds[0, len(pairs) :] = list(others.values())
        for index, (gradient, _) in enumerate(pairs):
            if gradient is not None:
                kinds[int(isinstance(gradient, IndexedSlices)), index] = 1
        names = ", ".join([*(variable.name for _, variable in pairs), *others])
        dense, sparse = collectives.batch_reduce(
            ReduceOp.SUM, kinds, f"apply_gradients: which of {names} have one"
        )
        _require_claimed(others, dense[len(pairs) :])
        filled: list[tuple[Gradient | None, Variable]] = []
        for index, (gradient, variable) in enumerate(pairs):
            agreed = gradient
            if isinstance(gradient, IndexedSlices) and dense[index]:
                agreed = gradient.to_dense()
            elif gradient is None and dense[index] + sparse[index]:
                if shares is not None:
                    agreed = shares[index]
                else:
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


def _require_claimed(names: Iterable[str], has: Any) -> None:
    lost = [name for name, count in zip(names, has, strict=True) if count]
    if lost:
        raise ValueError(
            f"expected all variables whose gradients were being accumulated when the "
            f"state was saved, found none of the name {', '.join(map(repr, lost))}; "
            "give every variable in each call, with None where it has no gradient"
        )
