"""A picture of predicted steps: their efficiency, and the parts of their time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcstrat.tools.bench.prediction.forecast import ForecastPoint

__all__ = ["PARTS", "draw"]

PARTS = {
    "compute_seconds": "computing",
    "inside_seconds": "inside of nodes",
    "header_seconds": "header",
    "latency_seconds": "latency of messages",
    "bandwidth_seconds": "bytes of messages",
}
"""The parts of a step's time, in words."""


def draw(curves: Mapping[str, Sequence[ForecastPoint]], title: str) -> Any:
    """Return a matplotlib figure of the curves' efficiencies and parts of times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * (1 + len(curves)), 4), layout="constrained")
    axes = figure.subplots(1, 1 + len(curves))
    first = axes[0]
    for name, points in curves.items():
        nodes = [point.num_nodes for point in points]
        first.plot(
            nodes, [100 * p.efficiency for p in points], marker="o", ms=3, label=name
        )
    first.set(xscale="log", ylim=(0, 105), xlabel="nodes", ylabel="efficiency in %")
    first.legend()
    first.grid(alpha=0.3)
    for axis, (name, points) in zip(axes[1:], curves.items(), strict=True):
        nodes = [point.num_nodes for point in points]
        parts = [[1e3 * getattr(p, part) for p in points] for part in PARTS]
        axis.stackplot(nodes, parts, labels=PARTS.values())
        axis.set(xscale="log", xlabel="nodes", ylabel="ms of a step", title=name)
        axis.set_xlim(nodes[0], nodes[-1])
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS))
    figure.suptitle(title)
    return figure
