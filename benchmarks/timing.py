"""Timing of the benchmarks: OSU's method, with all alternatives in turn.

The time of a call is the longest of the ranks', as in the OSU micro-benchmarks
(https://mvapich.cse.ohio-state.edu/benchmarks/). Each round times every alternative
once, after a barrier, so that a machine that slows down slows all of them; with a
`CoreWatch` that is a barrier without MPI calls. The order is drawn anew for each round:
no alternative always finds what the same other one has left in the caches. Inputs can
be written anew before each call, as training does: what another rank has read, and
nobody has written since, is faster than any real step.
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
        is collective, or does the same work on each rank.
    rounds : int
        Timed rounds.
    warm_up : int
        Rounds before them that are not timed.
    hot : bool
        Whether each call is made once more right before it is timed, so that it finds
        its own code and data in the caches, as in OSU's loop over one call. Without,
        it finds what another one has left, which is nearer to a training step.
    seed : int
        For the order; the same on all ranks, without which they would hang.
    rewrite : callable, optional
        Writes the inputs of all calls; called before each of them.
    watch : CoreWatch, optional
        Lets the ranks begin each call together, instead of a barrier of MPI, and
        measures the latency between them there, and after the last call of a round.

    Returns
    -------
    dict of str to ndarray of shape (rounds,)
        Seconds in each round, the longest of any rank; the same on all ranks. Values
        at the same index are of the same round.
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
    """Do what `measure` does, in as many rounds as fit in a time.

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
        How long the calls may take, all together.
    least : int
        Timed rounds, also where they take longer.
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
    # The times are the longest of all ranks, so all of them decide alike. The rounds
    # at most double, because the first ones may have been held up by something.
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
