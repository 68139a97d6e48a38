"""Reductions of parts combine the replicas' values in replica order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.calls import part_reductions
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


def test_some_ranks_may_lack_the_kernel(make_strategy: Any, job: Any) -> None:
    size = job.size
    # Between workers the kernel's messages are those of the all-to-all of NumPy.
    settings = hs.Settings(native=job.rank % 2 == 0)
    with make_strategy(comm=job, settings=settings) as strategy:
        parts = strategy.collectives.parts
        for length in (0, 1, 3, 1_000, 20_000, 60_000):
            for dtype in FLOATS if length < 1_001 else FLOATS[:1]:
                terms = random_terms(length, size, length * size, dtype)
                own = np.split(_wanted(terms, np.add), size)[job.rank]
                for _ in range(2):
                    given = np.split(terms[job.rank].copy(), size)
                    part = np.empty(length, dtype)
                    parts.reduce_scatter(np.add, given, part, "scatter")
                    assert_promised(job, [(part, own)], "reduce_scatter, few kernels")


def test_long_parts_are_combined_piece_by_piece(
    strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, lengths = job.size, [7 * rank % 5 * 13 for rank in range(job.size)]
    monkeypatch.setattr(part_reductions, "_MOST_RECEIVED_BYTES", 100 * size)
    ends = np.cumsum(lengths)[:-1]
    terms = random_terms(3, size, sum(lengths), np.dtype("f8"))
    own = np.split(_wanted(terms, np.multiply), ends)[job.rank]
    given, part = np.split(terms[job.rank], ends), np.empty(lengths[job.rank])
    strategy.collectives.parts.reduce_scatter(np.multiply, given, part, "scatter")
    assert_promised(job, [(part, own)], "reduce_scatter in pieces")
