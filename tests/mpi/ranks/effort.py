"""The number of examples per test, reduced on shared cores or for slow kernels."""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, settings
from mpi4py import MPI

__all__ = ["SHORT", "examples", "in_step", "seeds"]

SHORT = "--short" in sys.argv
"""Whether these are the tests that pytest runs by default; see conftest.py."""

_SLOW = MPI.COMM_WORLD.size > 2 or "HPCSTRAT_TEST_ARRAYS" in os.environ
# The part of the whole matrix's examples that runs: one in this number.
_ONE_IN = {(False, False): 1, (True, False): 3, (False, True): 3, (True, True): 6}


def examples(number: int) -> int:
    """Return how many of ``number`` examples to try; HPCSTRAT_TEST_EXAMPLES sets it."""
    wanted = int(os.environ.get("HPCSTRAT_TEST_EXAMPLES", "0"))
    return wanted or max(1, number // _ONE_IN[SHORT, _SLOW])


def seeds(number: int) -> range:
    """Return the seeds to try; the whole matrix tries all ``number`` seeds."""
    return range(examples(number) if SHORT else number)


# Settings for Hypothesis: every rank draws the same examples, in the same order.
in_step = settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
