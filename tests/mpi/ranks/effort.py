"""The number of examples: fewer by default, on shared cores, or with slow kernels."""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, settings
from mpi4py import MPI

__all__ = ["SHORT", "examples", "in_step", "seeds"]

SHORT = "--short" in sys.argv
"""Whether these are the tests that pytest runs by default; see conftest.py."""

_SLOW = MPI.COMM_WORLD.size > 2 or "HPCSTRAT_TEST_ARRAYS" in os.environ
# Of the examples of the whole matrix, one in so many.
_ONE_IN = {(False, False): 1, (True, False): 3, (False, True): 3, (True, True): 6}


def examples(number: int) -> int:
    """Return how many examples to try, of so many."""
    return max(1, number // _ONE_IN[SHORT, _SLOW])


def seeds(number: int) -> range:
    """Return the seeds to try: all of them in the whole matrix."""
    return range(examples(number) if SHORT else number)


# Hypothesis: every rank draws the same examples, in the same order.
in_step = settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
