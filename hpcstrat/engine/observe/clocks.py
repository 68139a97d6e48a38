"""Measures the offset of this host's clock to the clock of replica 0's host.

``time.perf_counter_ns`` is Linux's CLOCK_MONOTONIC, which all processes of a host
share. Clocks of different hosts have different origins, because the clock counts from
the boot of the host, and the clocks drift.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.engine.observe.timeline.alignment import Sample, best_sample
from hpcstrat.engine.topology.bounded import finish
from hpcstrat.engine.topology.kept_requests import keep
from hpcstrat.engine.topology.topology import Topology

__all__ = ["measure_clock"]

_ROUNDS = 50
_TAG = 7
_LIMIT_SECONDS = 60.0


def measure_clock(
    topology: Topology,
    comm: Any,
    limit_seconds: float | None = None,
    *,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Sample | None:
    """Measure the offset of this worker's clock to replica 0's clock.

    Collective over ``topology.replica_comm``; only the first replica of each worker
    communicates, one worker after the other. ``comm`` has all replicas in the same
    order, and must have no other messages in flight. ``clock`` returns nanoseconds.
    Returns None on the other replicas of a worker, and after a timeout.
    """
    if topology.worker_comm.rank:
        return None
    limit = _LIMIT_SECONDS if limit_seconds is None else limit_seconds
    deadline = time.monotonic() + limit
    if topology.replica_id:
        return _ask(comm, clock, deadline)
    # Translate the ranks of the workers' first replicas to ranks in ``comm``.
    own, every = topology.cross_worker_comm.Get_group(), comm.Get_group()
    leaders = own.Translate_ranks(None, every)
    own.Free()
    every.Free()
    # Serve one worker at a time: a worker that waited would measure long round trips.
    for leader in leaders[1:]:
        if not _answer(comm, clock, leader, deadline):
            break
    return Sample(clock(), 0, 0)


def _ask(comm: Any, clock: Callable[[], int], deadline: float) -> Sample | None:
    """Request replica 0's time repeatedly; return the sample with the least error."""
    sent, received = np.zeros(1, np.int64), np.zeros(1, np.int64)
    trips = []
    for _ in range(_ROUNDS):
        before = clock()
        requests = [comm.Irecv(received, 0, _TAG), comm.Isend(sent, 0, _TAG)]
        if not finish(requests, deadline):
            return None
        trips.append((before, int(received[0]), clock()))
    return best_sample(trips)


def _answer(comm: Any, clock: Callable[[], int], leader: int, deadline: float) -> bool:
    """Reply to another worker's time requests; return whether that ended in time."""
    received = np.zeros(1, np.int64)
    # Use one buffer per reply, because MPI may still be sending the previous reply.
    sent = np.zeros((_ROUNDS, 1), np.int64)
    requests = list[Any]()
    for number in range(_ROUNDS):
        if not finish([comm.Irecv(received, leader, _TAG)], deadline):
            keep(requests)
            return False
        sent[number] = clock()
        requests.append(comm.Isend(sent[number], leader, _TAG))
    return finish(requests, deadline)
