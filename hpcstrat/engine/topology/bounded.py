"""Waits for MPI requests, with a timeout."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from hpcstrat.engine.topology.kept_requests import keep

__all__ = ["finish"]

_NAP_SECONDS = 0.001


def finish(requests: Iterable[Any], deadline: float, *, naps: bool = False) -> bool:
    """Wait for requests until ``deadline``; return whether all have completed.

    ``deadline`` is a time of ``time.monotonic``. Requests that did not complete are
    kept alive with their buffers, because MPI may still write into the buffers. If
    ``naps`` is true, the wait sleeps between tests, so that other processes can use the
    core; if not, it ends within microseconds after the last request completes.
    """
    left = [request for request in requests if not request.Test()]
    while left:
        if time.monotonic() > deadline:
            keep(left)
            return False
        if naps:
            time.sleep(_NAP_SECONDS)
        else:
            os.sched_yield()
        left = [request for request in left if not request.Test()]
    return True
