"""Waits for messages of MPI, with a limit of time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from hpcstrat.engine.topology.kept_requests import keep

__all__ = ["finish"]

_NAP_SECONDS = 0.001


def finish(requests: Iterable[Any], deadline: float, *, naps: bool = False) -> bool:
    """Wait for requests until a time of ``time.monotonic``; return if all were done.

    Those that were not are kept, with their memory: MPI may still write there. With
    ``naps`` the wait leaves the core to others; without, it ends within microseconds.
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
