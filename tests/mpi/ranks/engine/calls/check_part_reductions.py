"""Reductions of parts combine the replicas' values in replica order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.mpi.ranks.promised import (
    FLOATS,
    assert_promised,
    in_order,
    random_terms,
)

pytestmark = pytest.mark.algorithm

LENGTHS = (0, 1, 5, 1_000, 200_001)


def _wanted(terms: list[Any], function: np.ufunc) -> Any:
    dtype = terms[0].dtype
    # Halves are combined in float32.
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    with np.errstate(all="ignore"):
        wide_terms = [term.astype(wide) for term in terms]
        return in_order(wide_terms, function).astype(dtype)


@pytest.mark.parametrize("function", [np.add, np.multiply], ids=["add", "multiply"])
def test_values_are_combined_in_replica_order(
    strategy: Any, job: Any, function: np.ufunc
) -> None:
    moves = strategy.collectives.moves
    for length in LENGTHS:
        for dtype in FLOATS if length < 100_000 else FLOATS[:1]:
            if function is np.multiply and np.dtype(dtype).kind == "c":
                # NumPy's products have other bits at the end of an array.
                continue
            terms = random_terms(length, job.size, length * job.size, dtype)
            total = _wanted(terms, function)
            parts = np.split(terms[job.rank], job.size)
            part = np.empty(length, dtype)
            moves.collectives.parts.reduce_scatter(function, parts, part, "scatter")
            own = np.split(total, job.size)[job.rank]
            pairs = [(part, own)]
            whole = terms[job.rank].copy()
            moves.collectives.parts.combine(function, whole, "combine")
            pairs.append((whole, total))
            root, on_root = length % job.size, terms[job.rank].copy()
            moves.collectives.parts.reduce_to(function, on_root, root, "reduce")
            if job.rank == root:
                pairs.append((on_root, total))
            name = f"{function.__name__} by reduce_scatter of parts"
            assert_promised(job, pairs, name)
