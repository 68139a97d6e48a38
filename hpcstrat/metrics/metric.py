"""The base class of metrics, whose results are computed from all replicas' totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import without_fp_warnings
from hpcstrat.engine.arrays.kinds import is_device, to_host
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.context import AnnouncesInitErrors, current, own_index
from hpcstrat.engine.options import VariableAggregation, VariableSynchronization
from hpcstrat.engine.typing import Array
from hpcstrat.variables import SyncOnReadVariable, Variable, class_for_state, read_all


class Metric(AnnouncesInitErrors):
    """A quantity that is computed from totals; each replica has its own totals.

    In the scope of a strategy that distributes variables, the constructor is collective
    over the strategy's replicas, and the metric covers the examples of all replicas;
    ``update_state`` then raises RuntimeError in cross-replica context. Outside of such
    a scope the metric covers the examples of this process.

    Parameters
    ----------
    name : str
        Name in messages and checkpoints.
    dtype : dtype
        Dtype of the result; totals are float64.
    totals : sequence of str
        Names of the totals.
    """

    def __init__(self, name: str, dtype: Any, totals: Sequence[str]) -> None:
        self.name = name
        self.dtype = np.dtype(dtype)
        # Sums of values on a GPU, by index of the replica in this process and name of
        # the total. The sums stay on the GPU, so that updates do not wait for it;
        # `_settle` adds them to the totals in host memory.
        self._on_device: dict[tuple[int, str], Array] = {}
        # All totals are float64, so that one message can contain all of them. A count
        # may be a sum of weights, which are not integers.
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

        Waits for the GPU if updates had values on a GPU."""
        self._settle()
        return list(self._totals.values())

    @property
    def collectives(self) -> Any:
        """The object for `result`'s collective calls; for the library's own modules."""
        # The decorator `channel.entries.collective` reads this property.
        first: Any = next(iter(self._totals.values()), None)
        distributed = isinstance(first, SyncOnReadVariable)
        return first.collectives if distributed else Collectives(None)

    @collective
    def result(self) -> Any:
        """Return the metric's value, computed from all updates since the last reset.

        Collective over the strategy's replicas in cross-replica context, else not
        collective.

        Returns
        -------
        scalar of the metric's dtype
            In cross-replica context, the metric over all replicas' examples, equal bit
            for bit on every rank; inside ``run``, the metric over this replica's
            examples.
        """
        return self.result_of(read_totals(self.variables))

    def result_of(self, totals: Sequence[Array]) -> Any:
        """Compute the metric from given totals.

        Not collective.

        Parameters
        ----------
        totals : sequence of ndarray of shape ()
            Totals in the order of `variables`.

        Returns
        -------
        scalar of the metric's dtype
            The value of the metric.
        """
        raise NotImplementedError(type(self).__name__)

    def reset_state(self) -> None:
        """Set the totals of all replicas to 0, or inside ``run`` this replica's totals.

        Not collective, but in cross-replica context all ranks must make the call."""
        own = own_index()
        for key in [k for k in self._on_device if own in (None, k[0])]:
            del self._on_device[key]
        for variable in self._totals.values():
            variable.assign(0.0, read_value=False)

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the totals that a checkpoint saves.

        Not collective.

        Returns
        -------
        dict of str to Variable
            The totals by name.
        """
        self._settle()
        return dict(self._totals)

    @without_fp_warnings
    def _settle(self) -> None:
        """Add the sums on the GPU to the totals in host memory."""
        kept, self._on_device = self._on_device, {}
        for (index, name), amount in kept.items():
            self._totals[name].components[index][...] += to_host(amount)

    def _require_own(self) -> None:
        """Raise RuntimeError if an update is called in cross-replica context."""
        first = next(iter(self._totals.values()))
        distributed = isinstance(first, SyncOnReadVariable)
        # In cross-replica context, N replicas would add the same value N times.
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
                # Do not return the new value, which would be a copy.
                total.assign_add(value, read_value=False)

    def __repr__(self) -> str:
        self._settle()
        totals = ", ".join(
            f"{name}={float(to_host(variable.component))}"
            for name, variable in self._totals.items()
        )
        return f"<{type(self).__name__} {self.name!r} {totals}>"


def read_totals(variables: Sequence[Variable]) -> list[Array]:
    """Return the sums of the totals of all replicas, in host memory.

    Inside ``run``, this replica's own totals are returned. Collective over the
    strategy's replicas in cross-replica context, in one reduction; else not collective.
    Raises ValueError for variables of several strategies.
    """
    # Inside ``run``, make no collective call: other replicas may not read their totals.
    if _reads_own():
        return [to_host(variable.value()) for variable in variables]
    strategies = {id(v.distribute_strategy): v.distribute_strategy for v in variables}
    # Metrics of this process alone may be read together with any strategy's metrics.
    strategies.pop(id(None), None)
    if len(strategies) > 1:
        raise ValueError(
            "expected metrics of one strategy, found those of "
            f"{list(strategies.values())}; read the metrics of each strategy separately"
        )
    return [to_host(total) for total in read_all(variables)]


def _reads_own() -> bool:
    """Return whether reading a variable now returns this replica's component."""
    entry = current()
    if entry is None or entry.strategy.is_default:
        return False
    return entry.replica_context is not None or entry.updating
