"""Advice from a report: how many replicas to use, and which parts are too slow.

Series and points are objects of the classes in `hpcstrat.tools.bench.analysis`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpcstrat.tools.bench.shapes import size_text

__all__ = ["GOOD_EFFICIENCY", "slow_parts", "verdicts"]

GOOD_EFFICIENCY = 0.8
"""Least efficiency at which most centers consider additional nodes worth their cost."""

# A part that takes longer than this many times the expected time is slow.
_TOO_SLOW = 2.0
_SHARES = {
    "communication": "spent in sums",
    "late": "spent waiting for late replicas",
    "input": "spent in next() of the data set",
}


def verdicts(series: Sequence[Any]) -> Iterator[str]:
    """Yield, for weak and strong scaling, how many replicas to use and why not more."""
    for one in series:
        points = [p for p in one.points if p.run.cores_per_rank >= 1]
        if one.name == "step" and len(points) > 1:
            yield f"{one.scaling.capitalize()} scaling: {_verdict(points)}"


def _verdict(points: Sequence[Any]) -> str:
    last = points[0]
    for point in points[1:]:
        if point.efficiency < GOOD_EFFICIENCY:
            return (
                f"use {_size(last)}. With {_size(point)} the efficiency is "
                f"{point.efficiency:.0%}, below {GOOD_EFFICIENCY:.0%}{_reason(point)}."
            )
        last = point
    return (
        f"use {_size(last)}, or more: the efficiency of the largest run is still "
        f"{last.efficiency:.0%}."
    )


def _size(point: Any) -> str:
    replicas, nodes = point.run.num_replicas, point.run.num_workers
    words = f"{replicas} replica{'s' * (replicas > 1)}{point.run.of_ranks}"
    return f"{words} on {nodes} node{'s' * (nodes > 1)}"


def _reason(point: Any) -> str:
    """Return which activity, except computation, takes most of the time, as text."""
    shares = {name: getattr(point, name) or 0.0 for name in _SHARES}
    most = max(shares, key=lambda name: shares[name])
    if not shares[most]:
        return ""
    host = f" on {point.slowest_host}" if most == "late" and point.slowest_host else ""
    return f", as {shares[most]:.0%} of a step is {_SHARES[most]}{host}"


def slow_parts(series: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence on each part that took several times the expected time."""
    for one in series:
        slow = [
            p
            for p in one.points
            if p.expected_seconds and p.median > _TOO_SLOW * p.expected_seconds
        ]
        if not slow:
            continue
        worst = max(slow, key=lambda p: p.median / (p.expected_seconds or p.median))
        times = worst.median / (worst.expected_seconds or worst.median)
        nbytes = one.parameters.get("nbytes")
        what = one.name.replace("_", "-")
        if nbytes and one.scaling == "same":
            what += f" of {size_text(nbytes)}"
        elif one.scaling != "same":
            what += f" ({one.scaling})"
        yield (
            f"The {what} with {_size(worst)} took {times:.1f} times as long as "
            f"{worst.expected_by} expects: look at the links in the table of the "
            "runs, at other programs on these nodes, and at what hpcstrat doctor "
            "says there."
        )
