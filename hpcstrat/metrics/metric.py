"""The base of all metrics: totals of each replica, added up when they are read."""

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

    Made in the scope of a strategy that distributes variables, it covers all replicas,
    and making it is collective over them; elsewhere it covers this process.

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
        # Sums of values on a GPU that are not yet in the totals in host memory: an
        # update must not wait for the GPU. Keyed by replica of this process and name.
        self._on_device: dict[tuple[int, str], Array] = {}
        # All of one type, so that they travel in one buffer. Counts are float64, too,
        # because weights need not be integers; they are exact up to 2**53.
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

        If values were on a GPU and the variables are not, this waits for the GPU.
        """
        self._settle()
        return list(self._totals.values())

    @property
    def collectives(self) -> Any:
        """The calls between replicas that reading the totals makes here.

        For the library's own modules.
        """
        # By this name `channel.entries` finds what an entry of any object calls.
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
            In cross-replica context that of all replicas' examples, equal bit for bit
            on every rank; inside ``run`` that of this replica's own.
        """
        return self.result_of(read_totals(self.variables))

    def result_of(self, totals: Sequence[Array]) -> Any:
        """Return the metric that belongs to totals.

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
        """Set the totals to 0: all of them, or inside ``run`` this replica's own.

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
        # In cross-replica context each replica would add the same: N times in the sum.
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
                # Without the new value, which would be a copy.
                total.assign_add(value, read_value=False)

    def __repr__(self) -> str:
        self._settle()
        totals = ", ".join(
            f"{name}={float(to_host(variable.component))}"
            for name, variable in self._totals.items()
        )
        return f"<{type(self).__name__} {self.name!r} {totals}>"


def read_totals(variables: Sequence[Variable]) -> list[Array]:
    """Return totals of all replicas, or inside ``run`` this replica's own, on the host.

    Collective over the strategy's replicas in cross-replica context, where it makes one
    reduction; else not collective. ValueError for variables of several strategies.
    """
    # No call: other replicas need not read theirs.
    if _reads_own():
        return [to_host(variable.value()) for variable in variables]
    strategies = {id(v.distribute_strategy): v.distribute_strategy for v in variables}
    # Plain metrics are of this process, and may be read beside any others.
    strategies.pop(id(None), None)
    if len(strategies) > 1:
        raise ValueError(
            f"expected metrics of one strategy, found those of "
            f"{list(strategies.values())}; read those of each by themselves"
        )
    return [to_host(total) for total in read_all(variables)]


def _reads_own() -> bool:
    """Whether variables act on this replica's component, as they see it themselves."""
    entry = current()
    if entry is None or entry.strategy.is_default:
        return False
    return entry.replica_context is not None or entry.updating
