"""The state that optimizers keep for each variable, and how checkpoints see it."""

from __future__ import annotations

import numpy as np

from hpcstrat.arrays import array_module, is_device, to_device
from hpcstrat.context import pop, push
from hpcstrat.device.updates import Tables
from hpcstrat.optimizers.on_device import set_zero
from hpcstrat.options import VariableAggregation, VariableSynchronization
from hpcstrat.typing import Array
from hpcstrat.variables import HostValue, SyncOnReadVariable, Variable, share_of

__all__ = ["Slots"]


class Slots:
    """Variables that are made when they are first needed.

    Attributes
    ----------
    made : dict of str to Variable
        By name, ``<kind>/<variable>``.
    deferred : dict of str to ndarray
        Restored values whose variables have not been made yet.
    tables : Tables
        What the kernels of a GPU know of the arrays.
    """

    def __init__(self) -> None:
        self.made: dict[str, Variable] = {}
        self.deferred: dict[str, Array] = {}
        self.tables = Tables()

    def get(self, kind: str, variable: Variable, initial: float) -> Variable:
        """Return state of a variable that is the same on every replica.

        Collective over the strategy's replicas, the first time.

        Parameters
        ----------
        kind : str
            Which state.
        variable : Variable
            Whose.
        initial : float
            Its first value.

        Returns
        -------
        Variable
            Of the variable's strategy, shape and dtype, in the same memory.
        """
        name = f"{kind}/{variable.name}"
        slot = self.made.get(name)
        if slot is None:
            module = array_module(variable.component)
            array = module.full(variable.shape, initial, variable.dtype)
            slot = self.make(name, variable, array)
        return slot

    def make(
        self, name: str, variable: Variable, array: Array, *, is_sum: bool = False
    ) -> Variable:
        """Make state, with its restored value if there is one.

        Collective over the strategy's replicas.

        Parameters
        ----------
        name : str
            Its name.
        variable : Variable
            Of the same strategy.
        array : ndarray
            The first value otherwise; the state is in the same memory.
        is_sum : bool
            Whether each replica has a part of it: synchronized on read, with
            aggregation ``SUM``, so that checkpoints hold the total and any number of
            replicas can share it.

        Returns
        -------
        Variable
            The new state.

        Raises
        ------
        ValueError
            If the restored value has another shape.
        """
        strategy = variable.distribute_strategy
        on, how = VariableSynchronization, VariableAggregation
        token = push(None if strategy is None else strategy.cross_entry)
        try:
            slot = Variable(
                array if is_device(array) else HostValue(array),
                trainable=False,
                name=name,
                synchronization=on.ON_READ if is_sum else on.AUTO,
                aggregation=how.SUM if is_sum else how.NONE,
            )
        finally:
            pop(token)
        if name in self.deferred:
            self._restore(slot, self.deferred.pop(name))
        self.made[name] = slot
        return slot

    def _restore(self, slot: Variable, saved: Array) -> None:
        if saved.shape != slot.shape:
            raise ValueError(
                f"expected a saved value of shape {slot.shape} for {slot.name!r}, found"
                f" {saved.shape}; restore a checkpoint of the same model"
            )
        saved = saved.astype(slot.dtype, copy=False)
        if isinstance(slot, SyncOnReadVariable):
            strategy = slot.distribute_strategy
            saved = share_of(saved, strategy.num_replicas_in_sync, strategy.replica_id)
        if is_device(slot.component):
            slot.component[...] = to_device(saved)
        else:
            np.copyto(slot.component, saved)

    def clear(self, *kinds: str) -> None:
        """Set this replica's part of some state to zero.

        Not collective.

        Parameters
        ----------
        *kinds : str
            Which state, of all variables.
        """
        arrays = []
        for name, slot in self.made.items():
            if name.partition("/")[0] in kinds:
                if is_device(slot.component):
                    arrays.append(slot.component)
                else:
                    slot.component[...] = 0
        set_zero(self.tables, arrays)
        for name in list(self.deferred):
            if name.partition("/")[0] in kinds:
                del self.deferred[name]
