"""Accumulation of gradients over several calls of an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.arrays.row_updates import summed_rows
from hpcstrat.engine.options import VariableAggregation
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.errors import NonFiniteError
from hpcstrat.optimizers.gradients import Gradient
from hpcstrat.optimizers.slots import Slots, spellings
from hpcstrat.strategies import Strategy
from hpcstrat.variables import Variable, share_of

_SUM, _COUNT, _CALLS = "gradient_sum", "gradient_count", "accumulated_steps"
_TOTAL = VariableAggregation.SUM


@dataclasses.dataclass(slots=True)
class _Start:
    """The state of an accumulation at the beginning of the current ``run``.

    ``before`` has copies of this replica's sum and count for each variable whose sum
    has changed since then.
    """

    calls: int
    restored: frozenset[str] | None
    pending: dict[int, Variable]
    before: dict[int, tuple[Variable, Array, Array]]


class Accumulation:
    """This replica's sums of gradients, stored as variables that checkpoints save.

    A checkpoint contains the total of the sums over replicas. After a restore, each
    replica has an equal share of the total, on any number of replicas. The checkpoint
    does not say which replica had a gradient of a variable, so the replicas exchange at
    the end of the accumulation which variables have a gradient.

    ``restored`` has the names of the counts that were above 0 on this replica at the
    restore. It is None if this accumulation was not restored.
    """

    def __init__(self, slots: Slots, steps: int, is_mean: bool) -> None:
        self.steps = steps
        self.restored: frozenset[str] | None = None
        self._is_mean = is_mean
        self._slots = slots
        self._calls: Variable | None = None
        self._pending: dict[int, Variable] = {}
        self._start: _Start | None = None

    def __getstate__(self) -> dict[str, Any]:
        copied = {**self.__dict__, "_pending": {}, "_start": None}
        if self.calls:
            copied["restored"] = self._counted()
        return copied

    @property
    def calls(self) -> int:
        """The number of calls whose gradients have been added to the sums."""
        return 0 if self._calls is None else int(self._calls.component)

    @property
    def own(self) -> dict[str, Variable]:
        """The counter of calls, by its name in files; empty before the first call."""
        return {} if self._calls is None else {_CALLS: self._calls}

    def add(
        self, pairs: Sequence[tuple[Gradient | None, Variable]], strategy: Strategy
    ) -> Sequence[tuple[Gradient | None, Variable]] | None:
        """Add gradients to the sums; return the sums if they are complete, else None.

        Collective over the strategy's replicas only in the first call. If a step is a
        single call, the gradients themselves are returned.
        """
        if self.steps == 1:
            return pairs
        # Variables without a gradient get a sum, too, because making it is collective.
        self.build([variable for _, variable in pairs])
        assert self._calls is not None
        if self._start is None and strategy.raises_together:
            strategy.run_ends.append(self._end_run)
            self._start = _Start(self.calls, self.restored, dict(self._pending), {})
        with np.errstate(all="ignore"):
            for gradient, variable in pairs:
                self._pending[id(variable)] = variable
                if gradient is not None:
                    self._add(gradient, variable)
        self._calls.component[...] += 1
        if self.calls < self.steps:
            return None
        sums = [(*self._sum_and_count(v), v) for v in self._pending.values()]
        return [(total if count else None, v) for total, count, v in sums]

    def _add(self, gradient: Gradient, variable: Variable) -> None:
        total, count = self._sum_and_count(variable)
        start = self._start
        # The sums are copied once in each run, unless the run began with empty sums.
        if start is not None and start.calls and id(variable) not in start.before:
            start.before[id(variable)] = variable, total.copy(), count.copy()
        if isinstance(gradient, IndexedSlices):
            _add_rows(total, gradient)
        else:
            total += gradient
        count += 1

    def shares(self) -> list[tuple[Array, bool]]:
        """Return this replica's sum for each variable, in the order of `add`.

        The flag with each sum is True if it contained a gradient at the restore."""
        names = self.restored or ()
        return [
            (
                self._sum_and_count(variable)[0],
                any(name in names for name in spellings(f"{_COUNT}/{variable.name}")),
            )
            for variable in self._pending.values()
        ]

    def unclaimed(self) -> dict[str, bool]:
        """Map the name of each restored sum that waits for its variable to a flag.

        The flag is True if this replica's part of the sum contains a gradient."""
        found = self._slots.waiting(_COUNT)
        return {name: bool(count.component) for name, count in found.items()}

    def _counted(self) -> frozenset[str]:
        """Return the names of the counts that are above 0 on this replica."""
        owned = [(v.name, count) for v, count in self._slots.of_kind(_COUNT)]
        counts = [*owned, *self._slots.waiting(_COUNT).items()]
        return frozenset(f"{_COUNT}/{name}" for name, n in counts if n.component)

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the sums for variables.

        Collective over the strategy's replicas if there are new variables."""
        if self.steps == 1:
            return
        slots, zero = self._slots, np.zeros((), np.int64)
        for variable in variables:
            if self._calls is None:
                self._calls = slots.count(_CALLS, variable.distribute_strategy)
            if slots.find(_SUM, variable) is None:
                module = array_module(variable.component)
                array = module.zeros(variable.shape, variable.dtype)
                slots.make(_SUM, variable, array, aggregation=_TOTAL)
                # Gradients are counted separately, because a sum of zeros does not show
                # whether there was a gradient.
                slots.make(_COUNT, variable, zero, aggregation=_TOTAL)

    def _sum_and_count(self, variable: Variable) -> tuple[Array, Array]:
        total = self._slots.find(_SUM, variable)
        count = self._slots.find(_COUNT, variable)
        assert total is not None
        assert count is not None
        return total.component, count.component

    def restart(self) -> None:
        """Set the sums and the number of calls to zero."""
        if self.steps == 1:
            return
        self._pending.clear()
        self.restored = None
        self._slots.clear(_SUM, _COUNT, _CALLS)
        if self._calls is not None:
            self._calls.component[...] = 0
        if self._start is not None:
            # The step is complete: an error later in this run does not undo it.
            self._start = _Start(0, None, {}, {})

    def undo(self, error: Exception, strategy: Strategy) -> None:
        """Restore or clear the sums after a failed call of ``apply_gradients``.

        With ``on_error="raise"`` all replicas restore their sums from before the
        ``run``, and can repeat the step. With ``"abort"``, or after a NonFiniteError,
        this replica's sums are cleared.
        """
        if isinstance(error, NonFiniteError) or not strategy.raises_together:
            self.restart()
        else:
            self._go_back()

    def _go_back(self) -> None:
        start = self._start
        if start is None:
            return
        if not start.calls:
            self.restart()
            return
        assert self._calls is not None
        self._calls.component[...] = start.calls
        self._pending, self.restored = dict(start.pending), start.restored
        for variable, total, count in start.before.values():
            own_total, own_count = self._sum_and_count(variable)
            own_total[...], own_count[...] = total, count

    def _end_run(self, failed: bool) -> None:
        if failed:
            self._go_back()
        self._start = None

    def defer(
        self, name: str, value: Array, strategy: Replicas | None, *, is_part: bool
    ) -> bool:
        """Store a restored sum or count and return True; return False for other state.

        ``value`` is the total over replicas, or with ``is_part`` this replica's part.
        """
        if name.partition("/")[0] not in (_SUM, _COUNT):
            return False
        if strategy is not None and not is_part:
            count = strategy.num_replicas_in_sync
            # The sum of the shares equals the total, except for the last bits.
            value = share_of(value, count, strategy.replica_id)
        self._slots.wait(name, value, strategy, _TOTAL)
        return True

    def continues(self, num_replicas: int, now: int) -> bool:
        """Continue sums that ``num_replicas`` replicas saved, on ``now`` replicas.

        Returns whether it drops restored sums, because ``accumulate_steps`` is now 1.
        """
        slots, self._start, self._pending = self._slots, None, {}
        counted = slots.waiting(_CALLS).get("", self._calls)
        is_begun = counted is not None and bool(counted.component)
        self.restored = self._counted() if is_begun and self.steps > 1 else None
        if self.steps == 1:
            slots.drop(_SUM, _COUNT, _CALLS)
            return is_begun
        if is_begun:
            self._pending = {id(v): v for v, _ in slots.of_kind(_SUM)}
        # For a mean, the step will divide the sums by the present number of replicas
        # instead of the number that saved them, so the sums are scaled here.
        if self._is_mean and now != num_replicas:
            sums = [slot for _, slot in slots.of_kind(_SUM)]
            sums += slots.waiting(_SUM).values()
            with np.errstate(all="ignore"):
                for slot in sums:
                    slot.component[...] *= now / num_replicas
        return False


def _add_rows(total: Array, rows: IndexedSlices) -> None:
    if is_device(total):
        indices, values = summed_rows(rows.indices, rows.values)
        total[indices] += values
    else:
        np.add.at(total, rows.indices, rows.values)
