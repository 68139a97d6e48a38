"""Random programs for rank tests: a few, or those that DRAWN_PROGRAMS names.

``DRAWN_PROGRAMS=1:2000 mpirun -n 3 python -m tests.mpi.ranks -k programs FILE``
"""

from __future__ import annotations

import os

__all__ = ["seeds"]


def seeds(few: int) -> range:
    """Return the seeds from 1 to ``few``, or the range in DRAWN_PROGRAMS."""
    first, _, last = os.environ.get("DRAWN_PROGRAMS", f"1:{few}").partition(":")
    return range(int(first), int(last or first) + 1)
