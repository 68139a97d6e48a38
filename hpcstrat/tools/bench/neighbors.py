"""The share of each host that other programs used during a measurement."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcstrat.strategies.base import Strategy
from hpcstrat.tools.bench.run_file import Part

__all__ = ["watched", "worker_shares"]

Times = np.ndarray[Any, np.dtype[np.float64]]


@contextlib.contextmanager
def watched(part: Part, strategy: Strategy) -> Iterator[None]:
    """Record in a part the share of each worker's host that others used in this block.

    Collective over the strategy's replicas, at its end, unless it raises.
    """
    # No `finally`: if the block raises, other ranks may not reach the gather.
    start = _times()
    yield
    spent = _times() - start
    # All cores of the host, as in /proc/stat, not only those that the job may use.
    cores = float(os.cpu_count() or 1)
    own = np.array([[strategy.topology.worker_id, cores, *spent]])
    part.others_share = worker_shares(np.asarray(strategy.gather(own, axis=0)))


def _times() -> Times:
    """Return busy seconds of the host's cores; of this process; wall-clock seconds."""
    return np.array([_busy_seconds(), time.process_time(), time.perf_counter()])


def _busy_seconds() -> float:
    """Return the busy seconds of all cores together; NaN if they are unknown."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            # Fields up to `steal`, proc(5): guest time is already counted in `user`.
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        # Not None: all must send the same number of values, or the gather would fail.
        return float("nan")
    # Without idle time, and without waiting for disks; time that a hypervisor took is
    # included.
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def worker_shares(rows: Times) -> list[float]:
    """Return the share of others by worker; empty if it is unknown.

    For each replica: worker, cores, and the seconds of `_times`.
    """
    if np.isnan(rows).any():
        return []
    found = []
    for worker in np.unique(rows[:, 0]):
        _, cores, busy, own, wall = rows[rows[:, 0] == worker].T
        # Each replica has read the same clock of the host, at slightly different times.
        others = max(float(busy.max() - own.sum()), 0.0)
        # Ticks are coarse: a short block may seem to have more time than there is.
        found.append(min(others / float(cores.max() * wall.max()), 1.0))
    return found
