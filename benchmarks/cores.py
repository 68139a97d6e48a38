"""The latency between the cores of two ranks, measured between the timed calls.

On a virtual machine, or if ranks are not bound, the ranks' cores change while a program
runs. Two cores that shared a cache may share none a second later, and a sum through
shared memory then takes several times as long. Therefore the latency between the ranks
is measured before each call and after the last call of a round, and rounds are sorted
by this latency.

The ranks measure the latency, and synchronize, by flags in shared memory instead of MPI
calls. MPI calls right before a timed call would load MPI's code into the caches, and so
favor the alternatives that use MPI.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["LATENCY", "CoreWatch", "by_state", "describe_cores"]

TOGETHER, APART, MOVED = "together", "apart", "moved"
"""The cores of a round: near each other, far from each other, or not the same ones."""

LATENCY = "latency between the cores"
"""Stands beside the times of alternatives."""

# Cores lie apart if their latency is above this multiple of the least latency. On AMD's
# EPYC 9004 a flag takes 0.10 to 0.20 us between cores that share a cache, depending on
# the clock rate, and 0.26 to 0.40 us between others. Latencies of MPI messages would
# overlap.
_APART = 2.2
_TRIPS = 40
_LEAST_ROUNDS = 20
# Distance of the flags in numbers of 8 bytes. Each flag has its own cache line, even if
# the processor fetches two lines at once.
_APART_NUMBERS = 16
_LOOKS_BEFORE_YIELD = 10_000


class CoreWatch:
    """Measures the latency between the first two ranks of a communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks, all on one machine; nothing is measured for a single rank.
    mpi : module
        ``mpi4py.MPI``.
    """

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm = comm
        nbytes = (comm.size + 1) * _APART_NUMBERS * 8 if comm.rank == 0 else 0
        self._window = mpi.Win.Allocate_shared(nbytes, 1, comm=comm)
        memory = memoryview(self._window.Shared_query(0)[0]).cast("B").cast("q")
        # The first flag releases all ranks; each rank has another flag.
        self._flags = memory[::_APART_NUMBERS]
        comm.Barrier()
        self._number = 0
        self._round: list[float] = []
        self._rounds: list[list[float]] = []
        self._least = np.inf

    def look(self) -> None:
        """Measure the latency once, and return on all ranks at the same time.

        Collective over the communicator.
        """
        rank, size, flags = self._comm.rank, self._comm.size, self._flags
        trips = range(self._number + 1, self._number + _TRIPS + 1)
        self._number += _TRIPS + 1
        if size < 2:
            return
        best = np.inf
        if rank == 0:
            for number in trips:
                start = time.perf_counter()
                flags[1] = number
                self._await(2, number)
                best = min(best, (time.perf_counter() - start) / 2)
            for other in range(2, size):
                self._await(1 + other, self._number)
            flags[0] = self._number
        else:
            for number in trips if rank == 1 else ():
                self._await(1, number)
                flags[2] = number
            flags[1 + rank] = self._number
            self._await(0, self._number)
        if rank == 0:
            self._round.append(best)

    def _await(self, flag: int, number: int) -> None:
        """Wait until a flag has at least this value."""
        flags, looks = self._flags, 0
        while flags[flag] < number:
            looks += 1
            if looks % _LOOKS_BEFORE_YIELD == 0:
                os.sched_yield()

    def close(self) -> None:
        """Free the flags; collective over the communicator."""
        self._window.Free()

    def end_round(self, *, counted: bool) -> None:
        """Record the end of a round, and whether the round counts; not collective."""
        if counted:
            self._rounds.append(self._round)
        self._round = []

    def take(self) -> tuple[list[str], Any]:
        """Return the state of the cores in each round since the last call.

        Collective over the communicator.

        Returns
        -------
        states : list of str
            State of the cores in each round.
        latencies : ndarray of shape (rounds,)
            Median latency of each round in seconds.
        """
        rounds, self._rounds = self._comm.bcast(self._rounds), []
        if self._comm.size < 2:
            return [TOGETHER] * len(rounds), np.zeros(len(rounds))
        self._least = min(self._least, *(min(one) for one in rounds))
        bound, states = _APART * self._least, []
        for one in rounds:
            far = [latency > bound for latency in one]
            states.append(APART if all(far) else MOVED if any(far) else TOGETHER)
        return states, np.array([np.median(one) for one in rounds])


def by_state(times: Mapping[str, Any], watch: CoreWatch) -> dict[str, dict[str, Any]]:
    """Group the times of rounds by the state of the cores.

    Collective over the watch's communicator.

    Parameters
    ----------
    times : mapping of str to ndarray of shape (rounds,)
        Seconds, from `timing.measure` with the watch.
    watch : CoreWatch
        The watch that measured the latencies.

    Returns
    -------
    dict of str to dict of str to ndarray of shape (rounds of the state,)
        Times of each state that has rounds, except rounds in which the cores moved; for
        each alternative, and for the latency, in seconds.
    """
    states, latencies = watch.take()
    found: dict[str, dict[str, Any]] = {}
    counts = {state: states.count(state) for state in (TOGETHER, APART)}
    for state, count in counts.items():
        rounds = np.array([one == state for one in states])
        # Drop a state with only a few rounds, because its median would be noise.
        if count and count >= min(_LEAST_ROUNDS, max(counts.values())):
            found[state] = {name: values[rounds] for name, values in times.items()}
            found[state][LATENCY] = latencies[rounds]
    return found


def describe_cores(state: str, times: Mapping[str, Any]) -> str:
    """Return a description of a state of the cores, with its latency and rounds.

    Not collective.

    Parameters
    ----------
    state : str
        A key of the result of `by_state`.
    times : mapping of str to ndarray of shape (rounds,)
        The times of this state.

    Returns
    -------
    str
        Such as ``"cores together (0.56 us), 2000 rounds"``.
    """
    latency = times[LATENCY]
    return f"cores {state} ({np.median(latency) * 1e6:.2f} us), {len(latency)} rounds"
