"""The NumPy twin of the kernel adds in the promised order, in and between workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.promised import (
    FLOATS,
    assert_promised,
    assert_random_calls,
    promised,
    random_terms,
    reduced_by,
    workers_of,
)

pytestmark = pytest.mark.algorithm


@pytest.mark.parametrize("seed", seeds(6))
def test_random_calls_have_the_promised_bits(
    make_strategy: Any, job: Any, seed: int
) -> None:
    with make_strategy(comm=job, settings=hs.Settings(native=False)) as strategy:
        if strategy.collectives.channel is not None:
            assert strategy.collectives.channel.kernel is None
        shared = np.random.default_rng(seed)
        assert_random_calls(job, strategy, shared, by="the library's choice")


def test_sums_are_in_the_order_of_ranks_and_then_of_workers(
    make_strategy: Any, job: Any
) -> None:
    with make_strategy(comm=job, settings=hs.Settings(native=False)) as strategy:
        workers, ops = workers_of(strategy, job), hs.HierarchicalCopyAllReduce()
        for length, piece in ((1, 0), (700, 256), (5_003, 4096), (70_003, 0)):
            for dtype in FLOATS if length < 70_000 else FLOATS[:1]:
                terms = random_terms(length, job.size, length, dtype)
                for op in ("sum", "mean"):
                    wanted = promised(terms, op, workers)
                    found = [
                        reduced_by(
                            *(strategy, ops, op, terms[job.rank]),
                            piece=piece,
                            started=started,
                        )
                        for started in (False, True)
                    ]
                    pairs = [(one, wanted) for one in found]
                    assert_promised(job, pairs, f"{op} by reduce_in_memory", piece)
