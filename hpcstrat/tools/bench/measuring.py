"""Timing of calls and steps: a repeat takes as long as its slowest rank.

Calls are measured as in the OSU micro-benchmarks
(https://mvapich.cse.ohio-state.edu/benchmarks/): there is a barrier before each repeat,
and a repeat has so many calls that the resolution of the clock does not matter. Steps
follow each other without a barrier, as in training, so that a replica that is late in
one step can catch up in the next. Each measurement also records how much of the hosts'
cores other programs used.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.engine.observe.timeline.totals import Totals, totals
from hpcstrat.strategies.base import Strategy
from hpcstrat.tools.bench.run_file import BenchError, Part

__all__ = ["Repeats", "compute", "fill_calls", "fill_steps", "worker_shares"]

# A repeat makes several short calls, so that it takes at least about this time.
_REPEAT_SECONDS = 2e-3
_MOST_CALLS = 2000
_TRIAL_CALLS = 3
_OBSERVED = ("late", "communication", "input")
# `compute` uses this array, which stays in a core's own cache.
_WORK = np.ones(8192, np.float32)

_Times = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Repeats:
    """The number of measured repeats, and of warm-up repeats before them."""

    num: int = 30
    warm_up: int = 3

    @property
    def in_all(self) -> int:
        """The number of all repeats, with the warm-up."""
        return self.num + self.warm_up


@contextlib.contextmanager
def _watched(part: Part, strategy: Strategy) -> Iterator[None]:
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
    own = np.array([strategy.all_ranks.topology.worker_id, cores, *spent])
    part.others_share = worker_shares(_of_all_ranks(strategy, own))


def _times() -> _Times:
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


def worker_shares(rows: _Times) -> list[float]:
    """Return the share that other programs used, by worker; empty if unknown.

    A row of ``rows`` has one rank's worker, number of cores, and seconds of
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


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    # If one replica collected garbage, all other replicas would wait for it.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def fill_calls(
    part: Part, strategy: Strategy, call: Callable[[], object], repeats: Repeats
) -> None:
    """Measure a collective call in replica context, and store its times in ``part``.

    Collective over the strategy's replicas.
    """

    def timed(count: int) -> int:
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        return time.perf_counter_ns() - start

    def measured(count: int) -> int:
        strategy.barrier()
        return int(strategy.local_value(strategy.run(timed, args=(count,))))

    # Discard the time of the first calls, which make plans and touch new memory.
    measured(_TRIAL_CALLS)
    # The slowest rank's time determines the number of calls of all ranks.
    trial = _seconds(strategy, np.array([measured(_TRIAL_CALLS)])).max()
    wanted = math.ceil(_REPEAT_SECONDS * _TRIAL_CALLS / trial)
    count = part.calls_per_repeat = min(max(wanted, 1), _MOST_CALLS)
    with _watched(part, strategy), _without_collector():
        for _ in range(repeats.warm_up):
            measured(count)
        own = [measured(count) / count for _ in range(repeats.num)]
    every = _seconds(strategy, np.array(own))
    part.seconds = every.max(axis=0).tolist()


def fill_steps(
    part: Part, strategy: Strategy, step: Callable[[], object], repeats: Repeats
) -> None:
    """Measure steps in cross-replica context, and their times in calls and in next().

    Collective over the strategy's replicas. The warm-up steps are not measured.
    """
    own = np.zeros((1 + len(_OBSERVED), repeats.num))
    with _watched(part, strategy), totals() as found, _without_collector():
        for index in range(repeats.warm_up):
            _do(step, index, repeats)
        strategy.barrier()
        # Discard what was observed in the warm-up steps.
        found.take()
        last = time.perf_counter_ns()
        for index in range(repeats.num):
            _do(step, repeats.warm_up + index, repeats)
            # One reading of the clock ends this step and begins the next step.
            now = time.perf_counter_ns()
            own[:, index] = now - last, *_taken(found, part)
            last = now
    every = _seconds(strategy, own)
    # A step is complete only when the slowest rank has done it.
    part.seconds = every[:, 0].max(axis=0).tolist()
    for row, name in enumerate(("own", *_OBSERVED)):
        setattr(part, f"{name}_seconds", every[:, row].mean(axis=0).tolist())
        # Store only the sum of each replica's repeats, because the single repeats of
        # thousands of replicas would need a large file.
        sums = every[:, row].sum(axis=1).reshape(strategy.num_replicas_in_sync, -1)
        part.replicas[f"{name}_seconds"] = sums.mean(axis=1).tolist()


def _do(step: Callable[[], object], number: int, repeats: Repeats) -> None:
    try:
        step()
    except StopIteration as error:
        raise BenchError(
            f"expected data for {repeats.in_all} steps, found that they ended after "
            f"{number}; repeat them, or give fewer --repeats"
        ) from error


def _taken(found: Totals, part: Part) -> tuple[int, ...]:
    *observed, part.num_calls, part.reduced_bytes = found.take()
    return tuple(observed)


def _of_all_ranks(strategy: Strategy, own: Any) -> Any:
    """Gather an array of each rank; the first axis of the result is the rank."""
    calls = strategy.all_ranks.collectives
    return np.asarray(calls.all_gather(own[None], 0, "bench"))


def _seconds(strategy: Strategy, own: Any) -> Any:
    """Gather all ranks' nanoseconds, as seconds; the first axis is the rank."""
    return _of_all_ranks(strategy, own) / 1e9


def compute(seconds: float) -> None:
    """Keep this thread's core busy for some seconds of processor time.

    The call takes longer if replicas share a core.
    """
    # Do not sleep: otherwise helper threads and other replicas would use the core.
    end = time.thread_time() + seconds
    result = np.empty_like(_WORK)
    while time.thread_time() < end:
        np.add(_WORK, _WORK, out=result)
