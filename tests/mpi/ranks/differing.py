"""Copies of variables that differ between replicas, and steps that compare them."""

from __future__ import annotations

from typing import Any

import numpy as np

import hpcstrat as hs
from tests.mpi.ranks.outcomes import outcome


def step() -> Any:
    """Make one collective call in replica context."""
    return hs.get_replica_context().all_reduce("sum", np.float32(1))


def round_length(strategy: Any) -> int:
    """Return the number of ``run`` calls in which all bytes of copies are compared."""
    own = max(1, strategy._connection.copies.num_slices)
    # The ranks may differ, because one may have freed more variables than another.
    return max(strategy.topology.replica_comm.allgather(own))


def error_within(strategy: Any, runs: int) -> Any:
    """Return the first error of ``runs`` steps, or None."""
    for _ in range(runs):
        error = outcome(strategy.run, step)
        if error is not None:
            return error
    return None


def named_ranks(faulty: int, size: int) -> tuple[int, ...]:
    """Return the ranks that an error names; of two ranks, it is never replica 0."""
    return (1,) if size == 2 else (faulty,)
