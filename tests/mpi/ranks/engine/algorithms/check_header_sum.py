"""Small sums between workers, sent in headers, are in the promised order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcstrat.engine.algorithms.header_sum import HeaderSum
from hpcstrat.engine.algorithms.plan import repeat_nothing
from tests.mpi.ranks.promised import (
    FLOATS,
    assert_promised,
    promised,
    random_terms,
    reduced_by,
    workers_of,
)

pytestmark = pytest.mark.algorithm


def test_sums_are_in_the_order_of_ranks_and_then_of_workers(
    strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strategy.topology.num_workers == 1:
        pytest.skip("inside one worker headers carry no values")
    wire, calls = strategy.collectives.channel.wire, list[Any]()
    # In a worker of one replica the kernel adds the values.
    monkeypatch.setattr(wire, "kernel", None)
    reductions = strategy.collectives.reductions_by(strategy.collectives.ops)
    monkeypatch.setattr(reductions, "_plans", {})
    for caller in (reductions, strategy.collectives):
        monkeypatch.setattr(caller, "repeat", repeat_nothing)
    real = HeaderSum.__call__

    def noting(self: Any, *args: Any, **named: Any) -> Any:
        calls.append(self)
        return real(self, *args, **named)

    monkeypatch.setattr(HeaderSum, "__call__", noting)
    workers = workers_of(strategy, job)
    for length in (1, 7, 100):
        # One array of each type, and all of them in one call.
        trees = [random_terms(length, job.size, length, dtype) for dtype in FLOATS]
        for op in ("sum", "mean"):
            own = [terms[job.rank] for terms in trees]
            wanted = [promised(terms, op, workers) for terms in trees]
            found = [reduced_by(strategy, None, op, array) for array in own]
            found += reduced_by(strategy, None, op, own)
            pairs = list(zip(found, wanted * 2, strict=True))
            assert_promised(job, pairs, f"{op} in the header")
    assert len(calls) == 3 * 2 * (len(FLOATS) + 1)
    assert np.unique([call.nbytes for call in calls]).size > 1
