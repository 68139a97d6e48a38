"""How much is tried: less where ranks share cores, or kernels run as loops on them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from mpi4py import MPI

__all__ = ["examples", "in_step"]

_SLOW = MPI.COMM_WORLD.size > 2 or "HPCSTRAT_TEST_ARRAYS" in os.environ


def examples(number: int) -> int:
    """Return how many examples to try, of so many."""
    return max(1, number // 3) if _SLOW else number


# Hypothesis: every rank draws the same examples, in the same order.
in_step = settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
