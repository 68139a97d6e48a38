"""An exchange of parts adds the ranks' values in rank order."""

from __future__ import annotations

from typing import Any

import pytest

import hpcstrat as hs
from hpcstrat.engine.algorithms import select
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from tests.mpi.ranks.promised import (
    FLOATS,
    assert_promised,
    promised,
    random_terms,
    reduced_by,
)

pytestmark = pytest.mark.algorithm


class Exchange(CrossDeviceOps):
    """The exchange of parts between all ranks, in any layout."""

    def choose(
        self, nbytes: int, topology: Any, options: hs.CommunicationOptions
    ) -> Any:
        return select.by_exchange(nbytes, topology, options)


def test_sums_are_in_the_order_of_the_ranks(strategy: Any, job: Any) -> None:
    for length, piece in ((1, 0), (5, 64), (700, 256), (5_003, 4096), (90_001, 0)):
        for dtype in FLOATS if length < 70_000 else FLOATS[:1]:
            terms = random_terms(length, job.size, length, dtype)
            for op in ("sum", "mean", "max"):
                if op == "max" and dtype.kind == "c":
                    continue
                found = reduced_by(
                    strategy, Exchange(), op, terms[job.rank], piece=piece
                )
                pairs = [(found, promised(terms, op))]
                assert_promised(job, pairs, f"{op} by reduce_by_exchange", piece)
