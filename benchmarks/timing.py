"""Timing of the benchmarks by OSU's method, with all alternatives in turn.

The time of a call is the longest time of any rank, as in the OSU micro-benchmarks
(https://mvapich.cse.ohio-state.edu/benchmarks/). Each round times every alternative
once, after a barrier, so that a machine that slows down slows all of them; with a
`CoreWatch`, the barrier makes no MPI calls. Each round has a new random order, so that
no alternative always follows the same other one and finds that one's data in the
caches. Inputs can be rewritten before each call, as in training. Without rewriting,
inputs that another rank has read before would be summed faster than in any real step.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from cores import CoreWatch

__all__ = ["measure", "measure_for"]

Calls = Mapping[str, Callable[[], object]]
Times = dict[str, np.ndarray[Any, np.dtype[np.float64]]]

MOST_ROUNDS = 2000


def measure(
    comm: Any,
    mpi: Any,
    calls: Calls,
    rounds: int,
    warm_up: int,
    *,
    hot: bool = False,
    seed: int = 0,
    rewrite: Callable[[], object] | None = None,
    watch: CoreWatch | None = None,
) -> Times:
    """Time each call once a round, in a new order in each round.

    Collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    mpi : module
        ``mpi4py.MPI``.
    calls : mapping of str to callable
        The alternatives by name: the same names in the same order on all ranks. Each
        call is collective, or does the same work on each rank.
    rounds : int
        Number of timed rounds.
    warm_up : int
        Number of untimed rounds before the timed ones.
    hot : bool
        Whether each call is made once more right before it is timed, so that it finds
        its own code and data in the caches, as in OSU's loop over one call. If False,
        the caches hold data of another alternative, which is closer to a training step.
    seed : int
        Seed of the order; the same on all ranks, because different orders would
        deadlock.
    rewrite : callable, optional
        Writes the inputs of all calls; called before each call.
    watch : CoreWatch, optional
        Synchronizes the ranks before each call, instead of an MPI barrier. It measures
        the latency between the ranks there, and after the last call of a round.

    Returns
    -------
    dict of str to ndarray of shape (rounds,)
        Seconds in each round, the longest time of any rank; the same on all ranks.
        Values at the same index are of the same round.
    """
    functions = list(calls.values())
    times = np.empty((len(functions), rounds))
    order = np.tile(np.arange(len(functions)), (warm_up + rounds, 1))
    order = np.random.default_rng(seed).permuted(order, axis=1)
    gc.collect()
    gc.disable()
    for index, places in enumerate(order.tolist(), -warm_up):
        for place in places:
            call = functions[place]
            if rewrite is not None:
                rewrite()
            if hot:
                call()
            if watch is None:
                comm.Barrier()
            else:
                watch.look()
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            if index >= 0:
                times[place, index] = seconds
        if watch is not None:
            watch.look()
            watch.end_round(counted=index >= 0)
    gc.enable()
    comm.Allreduce(mpi.IN_PLACE, times, op=mpi.MAX)
    return dict(zip(calls, times, strict=True))


def measure_for(
    comm: Any,
    mpi: Any,
    calls: Calls,
    seconds: float,
    *,
    least: int = 7,
    hot: bool = False,
    rewrite: Callable[[], object] | None = None,
    watch: CoreWatch | None = None,
) -> Times:
    """Time calls as `measure` does, in as many rounds as fit into some seconds.

    Collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    mpi : module
        ``mpi4py.MPI``.
    calls : mapping of str to callable
        See `measure`.
    seconds : float
        Seconds of all calls together.
    least : int
        Minimum number of timed rounds, even if they take longer.
    hot : bool
        See `measure`.
    rewrite : callable, optional
        See `measure`.
    watch : CoreWatch, optional
        See `measure`.

    Returns
    -------
    dict of str to ndarray of shape (rounds,)
        See `measure`.
    """
    options: dict[str, Any] = {"hot": hot, "rewrite": rewrite, "watch": watch}
    chunks = [measure(comm, mpi, calls, least, 2, **options)]
    rounds = least
    # The times are the longest of all ranks, so that all ranks decide alike. The number
    # of rounds at most doubles, because the first rounds may have been unusually slow.
    while rounds < MOST_ROUNDS:
        spent = sum(
            float(values.sum()) for chunk in chunks for values in chunk.values()
        )
        spent *= 1 + hot
        more = int(min((seconds / spent - 1) * rounds, rounds, MOST_ROUNDS - rounds))
        if more < 1:
            break
        chunks.append(measure(comm, mpi, calls, more, 0, seed=rounds, **options))
        rounds += more
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in calls}
