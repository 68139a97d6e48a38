"""The share of each host's cores that other programs used during a measurement."""

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
    """Record in ``part`` how much of each host other programs use during the block.

    The end of the block is collective over the strategy's replicas, unless the block
    raises an exception.
    """
    # Do not gather in a `finally`: if only this rank's block raises, the other ranks
    # may not gather, and this rank would wait forever.
    start = _times()
    yield
    spent = _times() - start
    # Count all cores of the host, because /proc/stat does, and not only the job's.
    cores = float(os.cpu_count() or 1)
    own = np.array([[strategy.topology.worker_id, cores, *spent]])
    part.others_share = worker_shares(np.asarray(strategy.gather(own, axis=0)))


def _times() -> Times:
    """Return seconds: the host's busy time, this process's time, wall-clock time."""
    return np.array([_busy_seconds(), time.process_time(), time.perf_counter()])


def _busy_seconds() -> float:
    """Return the busy seconds of all cores of the host together; NaN if unknown."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            # Read the fields up to `steal` (proc(5)); `user` includes guest time.
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        # Return a number, because all ranks must gather equally many numbers.
        return float("nan")
    # Subtract the times in which cores were idle or waited for disks. The remaining
    # sum includes the time that a hypervisor used.
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def worker_shares(rows: Times) -> list[float]:
    """Return the share that other programs used, by worker; empty if unknown.

    A row of ``rows`` has one replica's worker, number of cores, and seconds of
    `_times`.
    """
    if np.isnan(rows).any():
        return []
    found = []
    for worker in np.unique(rows[:, 0]):
        _, cores, busy, own, wall = rows[rows[:, 0] == worker].T
        # The replicas of a worker read the same counter of the host, at slightly
        # different times, so take the largest.
        others = max(float(busy.max() - own.sum()), 0.0)
        # Ticks are coarse: in a short block the share may seem to exceed 1.
        found.append(min(others / float(cores.max() * wall.max()), 1.0))
    return found
