"""Reading several metrics in one reduction: `results` and `MetricGroup`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpcstrat.metrics.metric import Metric, read_totals
from hpcstrat.variables import Variable


def results(metrics: Mapping[str, Metric] | Iterable[Metric]) -> Any:
    """Return the results of several metrics, with one reduction for all metrics.

    Collective over the strategy's replicas in cross-replica context, else not
    collective.

    Parameters
    ----------
    metrics : dict of str to Metric, or sequence of Metric
        Metrics of one strategy; the same metrics on every replica.

    Returns
    -------
    dict or list of scalar
        The results: a dict with the argument's keys, or a list in the argument's order.

    Raises
    ------
    ValueError
        If the metrics belong to several strategies.
    CollectiveError
        If replicas read different metrics; raised on every replica.
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
    """Several named metrics that are read, reset and saved together.

    Parameters
    ----------
    metrics : dict of str to Metric, or sequence of Metric
        In a sequence, each metric's key is its ``name``.

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
        """Return the results of all metrics, with one reduction.

        Collective over the strategy's replicas in cross-replica context, else not
        collective.

        Returns
        -------
        dict of str to scalar
            The results by name.
        """
        found: dict[str, Any] = results(self._metrics)
        return found

    def reset_state(self) -> None:
        """Reset all metrics of the group.

        Not collective, but in cross-replica context all ranks must make the call."""
        for metric in self._metrics.values():
            metric.reset_state()

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the metrics' state that a checkpoint saves.

        Not collective.

        Returns
        -------
        dict of str to Variable
            The totals, by ``<metric>/<total>``.
        """
        return {
            f"{name}/{total}": variable
            for name, metric in self._metrics.items()
            for total, variable in metric.checkpoint_variables().items()
        }

    def __repr__(self) -> str:
        return f"MetricGroup({self._metrics!r})"
