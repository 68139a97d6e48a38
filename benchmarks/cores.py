"""The distance between the cores of two ranks while they are measured.

On a virtual machine, and where ranks are not bound, cores move while a program runs:
two that shared a cache may share none a second later, and a sum through shared memory
then takes several times as long. So the latency between the ranks is measured before
each call and after the last one of a round, and rounds are told apart by it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["LATENCY", "CoreWatch", "by_state", "describe_cores"]

TOGETHER, APART, MOVED = "together", "apart", "moved"
"""The cores of a round: near each other, far from each other, or not the same ones."""

LATENCY = "latency between the cores"
"""Stands beside the times of alternatives."""

# A latency above so many times the least one is that of cores that lie apart. On AMD's
# EPYC 9004 a message takes 0.56 us between cores of one cache, and 0.8 between others.
_APART = 1.25
_TRIPS = 40
_LEAST_ROUNDS = 20


class CoreWatch:
    """Measures the latency between the first two ranks of a communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks, of one machine; alone, nothing is measured.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._buffer = np.zeros(1, np.uint8)
        self._round: list[float] = []
        self._rounds: list[list[float]] = []
        self._least = np.inf

    def look(self) -> None:
        """Measure once; collective over the communicator."""
        comm, buffer = self._comm, self._buffer
        if comm.size < 2 or comm.rank > 1:
            return
        best, other = np.inf, 1 - comm.rank
        for _ in range(_TRIPS):
            start = time.perf_counter()
            if comm.rank == 0:
                comm.Send(buffer, other)
                comm.Recv(buffer, other)
            else:
                comm.Recv(buffer, other)
                comm.Send(buffer, other)
            best = min(best, (time.perf_counter() - start) / 2)
        self._round.append(best)

    def end_round(self, *, counted: bool) -> None:
        """Take note of the end of a round, and of whether it counts; not collective."""
        if counted:
            self._rounds.append(self._round)
        self._round = []

    def take(self) -> tuple[list[str], Any]:
        """Return where the cores lay in each round since the last time.

        Collective over the communicator.

        Returns
        -------
        states : list of str
            For each round.
        latencies : ndarray of shape (rounds,)
            The median of each round in seconds.
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
    """Divide times by where the cores lay.

    Collective over the watch's communicator.

    Parameters
    ----------
    times : mapping of str to ndarray of shape (rounds,)
        From `timing.measure`, with the watch.
    watch : CoreWatch
        What watched.

    Returns
    -------
    dict of str to dict of str to ndarray of shape (rounds of the state,)
        For each state in which there were rounds, without those in which the cores
        moved; beside the alternatives, the latency in seconds.
    """
    states, latencies = watch.take()
    found: dict[str, dict[str, Any]] = {}
    counts = {state: states.count(state) for state in (TOGETHER, APART)}
    for state, count in counts.items():
        rounds = np.array([one == state for one in states])
        # A few rounds beside many others say nothing.
        if count and count >= min(_LEAST_ROUNDS, max(counts.values())):
            found[state] = {name: values[rounds] for name, values in times.items()}
            found[state][LATENCY] = latencies[rounds]
    return found


def describe_cores(state: str, times: Mapping[str, Any]) -> str:
    """Say where the cores lay, and in how many rounds.

    Not collective.

    Parameters
    ----------
    state : str
        Of `by_state`.
    times : mapping of str to ndarray of shape (rounds,)
        Its times.

    Returns
    -------
    str
        Such as ``"cores together (0.56 us), 2000 rounds"``.
    """
    latency = times[LATENCY]
    return f"cores {state} ({np.median(latency) * 1e6:.2f} us), {len(latency)} rounds"
