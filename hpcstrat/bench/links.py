"""Latency and bandwidth between two replicas, inside a worker and between two."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hpcstrat.strategies.base import Strategy

__all__ = ["LARGE_BYTES", "SMALL_BYTES", "measure_links"]

SMALL_BYTES = 8
LARGE_BYTES = 4 << 20
_TAG = 31
_WARM_UP = 5
_SMALL_TRIPS = 20


def measure_links(strategy: Strategy, repeats: int) -> dict[str, Any]:
    """Send messages there and back, as the OSU latency benchmark does.

    Collective over the strategy's replicas; on replica 0 it returns what the file of a
    run has as ``links``. The first two replicas of the first worker send, and then the
    first ones of the first two workers, while all others wait.
    """
    topology = strategy.topology
    found: dict[str, Any] = {"inside": None, "between": None}
    for name, comm in (
        ("inside", topology.worker_comm),
        ("between", topology.cross_worker_comm),
    ):
        # Replicas 0 and 1 of the one, or of the other.
        first = topology.worker_id if name == "inside" else topology.worker_comm.rank
        if comm.size > 1 and comm.rank < 2 and first == 0:
            found[name] = _link(comm, repeats)
        strategy.barrier()
    return found


def _link(comm: Any, repeats: int) -> dict[str, Any]:
    """Measure between ranks 0 and 1 of a communicator; they alone call it."""
    small = _trips(comm, SMALL_BYTES, repeats, _SMALL_TRIPS)
    large = _trips(comm, LARGE_BYTES, repeats, 1)
    latency = float(np.median(small))
    # What the first byte takes is no part of what each byte takes.
    moving = max(float(np.median(large)) - latency, 1e-12)
    return {
        "latency_seconds": latency,
        "bytes_per_second": LARGE_BYTES / moving,
        "small_bytes": SMALL_BYTES,
        "small_seconds": small,
        "large_bytes": LARGE_BYTES,
        "large_seconds": large,
    }


def _trips(comm: Any, nbytes: int, repeats: int, trips: int) -> list[float]:
    """Return half of the time of a round trip, of each repeat."""
    sent, received = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    taken = []
    for repeat in range(-_WARM_UP, repeats):
        start = time.perf_counter()
        for _ in range(trips):
            if comm.rank == 0:
                comm.Send(sent, 1, _TAG)
                comm.Recv(received, 1, _TAG)
            else:
                comm.Recv(received, 0, _TAG)
                comm.Send(sent, 0, _TAG)
        if repeat >= 0:
            taken.append((time.perf_counter() - start) / (2 * trips))
    return taken
