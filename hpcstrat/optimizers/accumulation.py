"""Sums of gradients over several calls, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hpcstrat.arrays import array_module, is_device
from hpcstrat.device.update_sums import sum_rows
from hpcstrat.indexed_slices import IndexedSlices
from hpcstrat.optimizers.gradients import Gradient
from hpcstrat.optimizers.on_device import add
from hpcstrat.optimizers.slots import Slots
from hpcstrat.typing import Array
from hpcstrat.variables import Variable

__all__ = ["Accumulation"]

_SUM, _COUNT, _STEPS = "gradient_sum", "gradient_count", "accumulated_steps"


class Accumulation:
    """This replica's sums, kept as variables for the sake of checkpoints.

    A checkpoint holds their total over replicas; restored, each replica continues with
    an equal share of it, which gives the same step but for rounding.

    Parameters
    ----------
    slots : Slots
        Holds them.
    steps : int
        How many calls make one step; at least 2 for sums to be kept.
    """

    def __init__(self, slots: Slots, steps: int) -> None:
        self.steps = steps
        self._slots = slots
        self._pending: dict[str, Variable] = {}

    def add(
        self, pairs: Sequence[tuple[Gradient | None, Variable]]
    ) -> Sequence[tuple[Gradient | None, Variable]] | None:
        """Add gradients to the sums.

        Collective over the strategy's replicas, the first time; then not collective.

        Parameters
        ----------
        pairs : sequence of (ndarray, IndexedSlices or None, Variable)
            As checked.

        Returns
        -------
        sequence of (ndarray or None, Variable), or None
            The sums once they are complete, or None; of a single step the gradients
            themselves.
        """
        if self.steps == 1:
            return pairs
        # Sums are made for all variables, because to make them is collective.
        self.build([variable for _, variable in pairs])
        on_device: list[tuple[Array, Array]] = []
        for gradient, variable in pairs:
            self._pending[variable.name] = variable
            if gradient is None:
                continue
            total, count = self._sum_and_count(variable)
            if isinstance(gradient, IndexedSlices):
                _add_rows(total, gradient)
            elif is_device(total):
                on_device.append((total, gradient))
            else:
                total += gradient
            count += 1
        add(self._slots.tables, on_device)
        done = self._slots.made[_STEPS].component
        done += 1
        if done < self.steps:
            return None
        sums = [(*self._sum_and_count(v), v) for v in self._pending.values()]
        return [(total if count else None, v) for total, count, v in sums]

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the sums of variables.

        Collective over the strategy's replicas, if there are new variables.

        Parameters
        ----------
        variables : iterable of Variable
            Those to be updated.
        """
        if self.steps == 1:
            return
        zero = np.zeros((), np.int64)
        for variable in variables:
            if _STEPS not in self._slots.made:
                self._slots.make(_STEPS, variable, zero)
            name = f"{_SUM}/{variable.name}"
            if name not in self._slots.made:
                module = array_module(variable.component)
                array = module.zeros(variable.shape, variable.dtype)
                self._slots.make(name, variable, array, is_sum=True)
                count = f"{_COUNT}/{variable.name}"
                self._slots.make(count, variable, zero, is_sum=True)

    def _sum_and_count(self, variable: Variable) -> tuple[Array, Array]:
        made, name = self._slots.made, variable.name
        return made[f"{_SUM}/{name}"].component, made[f"{_COUNT}/{name}"].component

    def restart(self) -> None:
        """Set everything to zero.

        Not collective.
        """
        if self.steps == 1:
            return
        self._pending.clear()
        self._slots.clear(_SUM, _COUNT, _STEPS)

    def is_lost(self, name: str, value: Array) -> bool:
        """Return whether a restored value tells of sums that nothing will continue.

        Not collective.

        Parameters
        ----------
        name : str
            Of the value.
        value : ndarray
            As saved.

        Returns
        -------
        bool
            True for a checkpoint from the middle of an accumulation, without one here.
        """
        return self.steps == 1 and name == _STEPS and bool(value.any())


def _add_rows(total: Array, rows: IndexedSlices) -> None:
    if is_device(total):
        # CuPy's own way adds in any order, with other bits each time.
        values, indices = sum_rows(rows.values, rows.indices)
        total[indices] += values
    else:
        np.add.at(total, rows.indices, rows.values)
