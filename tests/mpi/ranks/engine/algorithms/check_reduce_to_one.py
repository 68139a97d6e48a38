"""A reduction on one replica adds in replica order, for any root."""

from __future__ import annotations

from typing import Any

import pytest

import hpcstrat as hs
from tests.mpi.ranks.promised import (
    FLOATS,
    assert_promised,
    promised,
    random_terms,
    reduced_by,
)

pytestmark = pytest.mark.algorithm


def test_sums_are_in_replica_order_for_any_root(strategy: Any, job: Any) -> None:
    for length in (1, 5_003):
        for number, dtype in enumerate(FLOATS):
            terms = random_terms(length, job.size, length, dtype)
            root = number % job.size
            for op in ("sum", "mean"):
                ops = hs.ReductionToOneDevice(root)
                found = reduced_by(strategy, ops, op, terms[job.rank])
                pairs = [(found, promised(terms, op))]
                assert_promised(job, pairs, f"{op} by reduce_to_one on replica {root}")
