"""Random programs for rank tests: a few, or those that DRAWN_PROGRAMS names.

``DRAWN_PROGRAMS=1:2000 mpirun -n 3 python -m tests.mpi.ranks -k programs FILE``
"""

from __future__ import annotations

import os
from typing import Any

import pytest

__all__ = ["seeds"]


def seeds(few: int) -> list[Any]:
    """Return the seeds from 1 to ``few``, or those in DRAWN_PROGRAMS, as parameters.

    By default, a third of the few seeds run.
    """
    if drawn := os.environ.get("DRAWN_PROGRAMS"):
        first, _, last = drawn.partition(":")
        return [*range(int(first), int(last or first) + 1)]
    always = max(1, few // 3)
    rest = range(always + 1, few + 1)
    more = [pytest.param(seed, marks=pytest.mark.full) for seed in rest]
    return [*range(1, always + 1), *more]
