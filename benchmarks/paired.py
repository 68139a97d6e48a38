"""Timing of steps in turn, on a machine that other programs may use, too.

As in `timing`, each round times every rival once, in a new order, and the time of a
step is the longest time of any rank. The CPU load by processes outside of this job is
recorded, too, so that disturbed steps can be excluded. This load is known to a fraction
of a millisecond if the kernel counts the CPU time of control groups (``cpuacct``, or
``cpu.stat`` of version 2). If not, it is known in ticks of 10 ms, which is coarse for
single steps.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CLEAN", "Samples", "cost", "measure_paired"]

# A step counts only if other programs used at most this share of the machine.
CLEAN = 0.12
# With fewer pairs of steps than this, no result is computed.
LEAST_PAIRS = 8

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Samples:
    """The measurements of one rival, one step per round; the same on all ranks."""

    seconds: Array
    foreign: Array

    @property
    def clean(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return a mask of the steps that other programs have hardly disturbed."""
        return self.foreign < CLEAN

    @property
    def median(self) -> float:
        """Return the median seconds of the clean steps, or NaN if there are none."""
        seconds = self.seconds[self.clean]
        return float(np.median(seconds)) if len(seconds) else np.nan


def _clock() -> Callable[[], float]:
    """Return a function that returns the CPU seconds of all processes."""
    nanoseconds = Path("/sys/fs/cgroup/cpuacct/cpuacct.usage")
    if nanoseconds.exists():
        return lambda: int(nanoseconds.read_bytes()) / 1e9
    group = Path("/sys/fs/cgroup/cpu.stat")
    if group.exists():
        return lambda: int(group.read_bytes().split()[1]) / 1e6
    tick = 1 / os.sysconf("SC_CLK_TCK")

    def of_ticks() -> float:
        with open("/proc/stat", "rb") as file:
            times = [int(word) for word in file.readline().split()[1:9]]
        # Exclude the time of idling, and of waiting for disks.
        return (sum(times) - times[3] - times[4]) * tick

    return of_ticks


def measure_paired(
    comm: Any,
    mpi: Any,
    steps: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    rest: float = 0.0,
) -> dict[str, Samples]:
    """Time each step once per round, for a number of seconds.

    Collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks, all on one machine.
    mpi : module
        ``mpi4py.MPI``.
    steps : mapping of str to callable
        The rivals by name: the same names in the same order on all ranks.
    seconds : float
        Seconds of all measurements together.
    rest : float
        Seconds to sleep after each round, so that other programs can run.

    Returns
    -------
    dict of str to Samples
        Values at the same index are of the same round.
    """
    clock = _clock()
    cores = os.cpu_count() or 1
    generator = np.random.default_rng(0)
    names, taken = list(steps), []
    gc.collect()
    gc.disable()
    warm_up, end = 3, time.monotonic() + seconds
    # Rank 0's clock decides for all ranks, so that they do the same number of rounds.
    while warm_up or comm.bcast(time.monotonic() < end):
        time.sleep(rest)
        row = np.empty((3, len(names)))
        for place in generator.permutation(len(names)):
            step = steps[names[place]]
            comm.Barrier()
            own, every = time.process_time(), clock()
            start = time.perf_counter()
            step()
            row[0, place] = time.perf_counter() - start
            comm.Barrier()
            row[1, place] = (clock() - every) / (time.perf_counter() - start)
            row[2, place] = (time.process_time() - own) / (time.perf_counter() - start)
        warm_up = max(warm_up - 1, 0)
        if not warm_up:
            taken.append(row)
    gc.enable()
    times, every, own = np.moveaxis(np.array(taken), 1, 0).copy()
    comm.Allreduce(mpi.IN_PLACE, times, op=mpi.MAX)
    comm.Allreduce(mpi.IN_PLACE, own)
    foreign = np.maximum(comm.bcast(every) - own, 0) / cores
    return {
        name: Samples(times[:, place], foreign[:, place])
        for place, name in enumerate(names)
    }


def cost(samples: Mapping[str, Samples], name: str, base: str) -> dict[str, float]:
    """Return the time of a step minus the time of another step in the same round.

    Not collective.

    Parameters
    ----------
    samples : mapping of str to Samples
        From `measure_paired`.
    name : str
        The rival.
    base : str
        The rival whose time is subtracted.

    Returns
    -------
    dict of str to float
        ``lower``, ``median`` and ``upper`` quartile in seconds, and ``pairs``, the
        number of clean pairs; NaN if there are too few pairs.
    """
    one, other = samples[name], samples[base]
    clean = one.clean & other.clean
    found = (one.seconds - other.seconds)[clean]
    quartiles = np.full(3, np.nan)
    if len(found) >= LEAST_PAIRS:
        quartiles = np.percentile(found, [25, 50, 75])
    named = dict(zip(("lower", "median", "upper"), quartiles.tolist(), strict=True))
    return {**named, "pairs": len(found)}
