"""Finds the rank for which other ranks waited, from the events of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpcstrat.engine.observe.timeline.rank_files import RankFile
from hpcstrat.engine.observe.timeline.recorder import WAIT

__all__ = ["RankWaits", "last_arrivals"]


@dataclass(slots=True)
class RankWaits:
    """The waits of one replica in the calls that all replicas have recorded."""

    replica: int
    where: str
    calls: int = 0
    # Time that this replica waited for other replicas.
    waited_seconds: float = 0.0
    # Number of calls in which this replica arrived last, and the sum over these calls
    # of the average wait of the other replicas.
    last: int = 0
    cost_seconds: float = 0.0


def last_arrivals(
    events: Iterable[tuple[RankFile, dict[str, Any]]],
) -> dict[int, RankWaits]:
    """Return the waits of each replica, by number, in calls that all have recorded.

    The times of ``events`` must be of one clock.
    """
    found: dict[int, RankWaits] = {}
    came: dict[tuple[Any, ...], dict[int, tuple[float, float]]] = {}
    for file, event in events:
        found.setdefault(file.tid, RankWaits(file.tid, file.process))
        if event["ph"] == "X" and event["name"] == WAIT:
            args = event["args"]
            if "sequence" not in args:
                continue  # Skip pending calls, whose waits begin after the arrival.
            key = args["channel"], args["sequence"]
            came.setdefault(key, {})[file.tid] = event["ts"], event["dur"]
    for times in came.values():
        if len(times) < max(2, len(found)):
            continue
        latest = max(times, key=lambda replica: times[replica][0])
        last = times[latest][0]
        lost = sum(last - start for start, _ in times.values()) / (len(times) - 1)
        found[latest].last += 1
        found[latest].cost_seconds += lost / 1e6
        for replica, (_, duration) in times.items():
            found[replica].calls += 1
            found[replica].waited_seconds += duration / 1e6
    return dict(sorted(found.items()))
