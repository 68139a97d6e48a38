"""Several metrics, read in one reduction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpcstrat.metrics.metric import Metric, read_totals
from hpcstrat.variables import Variable


def results(metrics: Mapping[str, Metric] | Iterable[Metric]) -> Any:
    """Return the results of several metrics, with one reduction for all of them.

    Collective over the strategy's replicas in cross-replica context, else not
    collective.

    Parameters
    ----------
    metrics : dict of str to Metric, or sequence of Metric
        Of one strategy; the same on every replica.

    Returns
    -------
    dict or list of scalar
        By the keys, or in the order, of the argument.

    Raises
    ------
    ValueError
        For metrics of several strategies.
    CollectiveError
        If replicas read different metrics. On every replica.
    """
    named = isinstance(metrics, Mapping)
    every: list[Metric] = list(
        metrics.values() if isinstance(metrics, Mapping) else metrics
    )
    totals = iter(read_totals([v for metric in every for v in metric.variables]))
    values = [
        metric.result_of([next(totals) for _ in metric.variables]) for metric in every
    ]
    return dict(zip(metrics, values, strict=True)) if named else values


class MetricGroup:
    """Metrics by name, to be read, reset and saved together.

    Parameters
    ----------
    metrics : dict of str to Metric, or sequence of Metric
        A sequence is taken by the names of its metrics.

    Raises
    ------
    ValueError
        If two metrics have the same name.
    """

    def __init__(self, metrics: Mapping[str, Metric] | Iterable[Metric]) -> None:
        if not isinstance(metrics, Mapping):
            every = list(metrics)
            metrics = {metric.name: metric for metric in every}
            if len(metrics) < len(every):
                raise ValueError(
                    "expected metrics with names of their own, found "
                    f"{[metric.name for metric in every]}; name them with name=, or "
                    "pass a dict"
                )
        self._metrics: dict[str, Metric] = dict(metrics)

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def results(self) -> dict[str, Any]:
        """Return all results, with one reduction.

        Collective over the strategy's replicas in cross-replica context, else not
        collective.

        Returns
        -------
        dict of str to scalar
            By name.
        """
        found: dict[str, Any] = results(self._metrics)
        return found

    def reset_state(self) -> None:
        """Reset all metrics.

        Not collective, but in cross-replica context all ranks must do it.
        """
        for metric in self._metrics.values():
            metric.reset_state()

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the state to save.

        Not collective.

        Returns
        -------
        dict of str to Variable
            By ``<metric>/<total>``.
        """
        return {
            f"{name}/{total}": variable
            for name, metric in self._metrics.items()
            for total, variable in metric.checkpoint_variables().items()
        }

    def __repr__(self) -> str:
        return f"MetricGroup({self._metrics!r})"
