"""The base of all metrics: each replica has totals, and reading adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.kinds import is_device, to_host
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.context import AnnouncesInitErrors, current, own_index
from hpcstrat.engine.options import VariableAggregation, VariableSynchronization
from hpcstrat.engine.reduction.object_collectives import ObjectCollectives
from hpcstrat.engine.typing import Array
from hpcstrat.variables import SyncOnReadVariable, Variable, class_for_state, read_all


class Metric(AnnouncesInitErrors):
    """A quantity computed from totals that each replica keeps for itself.

    In the scope of a strategy that distributes variables, making it is collective over
    the strategy's replicas, and it covers all of them; its updates raise RuntimeError
    in cross-replica context. Elsewhere it covers this process.

    Parameters
    ----------
    name : str
        For messages and checkpoints.
    dtype : dtype
        Type of the result; totals are float64.
    totals : sequence of str
        Names of the totals.
    """

    def __init__(self, name: str, dtype: Any, totals: Sequence[str]) -> None:
        self.name = name
        self.dtype = np.dtype(dtype)
        # By replica of this process and name: sums on a GPU, for which updates must not
        # wait. `_settle` adds them to the totals in host memory.
        self._on_device: dict[tuple[int, str], Array] = {}
        # One type, for one buffer in messages. Counts of weights need not be integers.
        self._totals = {
            total: class_for_state()(
                np.float64(0),
                name=f"{name}/{total}",
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            for total in totals
        }

    @property
    def variables(self) -> list[Variable]:
        """The totals, as SyncOnRead variables with aggregation ``SUM``.

        Waits for the GPU if values were there and the variables are not.
        """
        self._settle()
        return list(self._totals.values())

    @property
    def collectives(self) -> Any:
        """The calls that reading the totals makes here; for the library's own
        modules.
        """
        # `channel.entries` looks for this name.
        first: Any = next(iter(self._totals.values()), None)
        distributed = isinstance(first, SyncOnReadVariable)
        return first.collectives if distributed else ObjectCollectives(None)

    @collective
    def result(self) -> Any:
        """Return the metric since the last reset.

        Collective over the strategy's replicas in cross-replica context, else not
        collective.

        Returns
        -------
        scalar of the metric's dtype
            In cross-replica context the metric of all replicas' examples, equal bit for
            bit on every rank; inside ``run`` that of this replica.
        """
        return self.result_of(read_totals(self.variables))

    def result_of(self, totals: Sequence[Array]) -> Any:
        """Return the metric for some totals.

        Not collective.

        Parameters
        ----------
        totals : sequence of ndarray of shape ()
            In the order of `variables`.

        Returns
        -------
        scalar of the metric's dtype
            The metric.
        """
        raise NotImplementedError(type(self).__name__)

    def reset_state(self) -> None:
        """Set the totals to 0: all of them, or inside ``run`` this replica's.

        Not collective, but in cross-replica context all ranks must do it.
        """
        own = own_index()
        for key in [k for k in self._on_device if own in (None, k[0])]:
            del self._on_device[key]
        for variable in self._totals.values():
            variable.assign(0.0, read_value=False)

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the state to save.

        Not collective.

        Returns
        -------
        dict of str to Variable
            By name.
        """
        self._settle()
        return dict(self._totals)

    @without_fp_warnings
    def _settle(self) -> None:
        """Add the sums on the GPU to the totals."""
        kept, self._on_device = self._on_device, {}
        for (index, name), amount in kept.items():
            self._totals[name].components[index][...] += to_host(amount)

    def _require_own(self) -> None:
        """Refuse to update the totals of all replicas at once."""
        first = next(iter(self._totals.values()))
        distributed = isinstance(first, SyncOnReadVariable)
        # In cross-replica context N replicas would each add the same value.
        if distributed and not _reads_own():
            raise RuntimeError(
                f"expected update_state of metric {self.name!r} in replica context, "
                "found another context; call it inside the function that strategy.run "
                "runs"
            )

    def _add(self, **amounts: Any) -> None:
        for name, amount in amounts.items():
            total = self._totals[name]
            if is_device(amount) and not is_device(total.component):
                key = own_index() or 0, name
                kept = self._on_device.get(key)
                self._on_device[key] = amount if kept is None else kept + amount
            else:
                value = amount if is_device(amount) else np.float64(amount)
                # Returning the new value would make a copy.
                total.assign_add(value, read_value=False)

    def __repr__(self) -> str:
        self._settle()
        totals = ", ".join(
            f"{name}={float(to_host(variable.component))}"
            for name, variable in self._totals.items()
        )
        return f"<{type(self).__name__} {self.name!r} {totals}>"


def read_totals(variables: Sequence[Variable]) -> list[Array]:
    """Return totals of all replicas, or inside ``run`` this replica's, on the host.

    Collective over the strategy's replicas in cross-replica context, in one reduction;
    else not collective. ValueError for variables of several strategies.
    """
    # Without a call, as other replicas need not read theirs.
    if _reads_own():
        return [to_host(variable.value()) for variable in variables]
    strategies = {id(v.distribute_strategy): v.distribute_strategy for v in variables}
    # Plain metrics belong to this process, and go with those of any strategy.
    strategies.pop(id(None), None)
    if len(strategies) > 1:
        raise ValueError(
            f"expected metrics of one strategy, found those of "
            f"{list(strategies.values())}; read those of each by themselves"
        )
    return [to_host(total) for total in read_all(variables)]


def _reads_own() -> bool:
    """Whether variables act on this replica's component in this context."""
    entry = current()
    if entry is None or entry.strategy.is_default:
        return False
    return entry.replica_context is not None or entry.updating
