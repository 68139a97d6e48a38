"""Slices that each rank of a worker sums are in the promised order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcstrat.engine.algorithms.slices import reduce_slices
from hpcstrat.engine.algorithms.work import slice_of
from hpcstrat.engine.arrays.packing import Run
from hpcstrat.engine.channel.call import describe_call
from tests.mpi.ranks.promised import (
    FLOATS,
    assert_promised,
    promised,
    random_terms,
    workers_of,
)

pytestmark = pytest.mark.algorithm


def _runs(length: int, size: int, dtype: np.dtype[Any]) -> list[Run]:
    """Return a run of an array for each rank of a worker."""
    runs, start, line = [], 0, 64 // dtype.itemsize
    for rank in range(size):
        own = slice_of(length, rank, size)
        count = own.stop - own.start
        runs.append(Run(dtype, start, count, ((0, own.start, own.stop, start),)))
        start += -(-count // line) * line
    return runs


def test_sums_are_in_the_order_of_ranks_and_then_of_workers(
    strategy: Any, job: Any
) -> None:
    channel, topology = strategy.collectives.channel, strategy.topology
    if channel is None:
        pytest.skip("a single replica moves nothing")
    workers, comm = workers_of(strategy, job), topology.worker_comm
    # All workers cut the array alike, which requires workers of one size.
    if len({workers.count(worker) for worker in workers}) > 1:
        pytest.skip("workers of unequal size")
    for length in (comm.size, 700, 5_003):
        for dtype in FLOATS[:2]:
            terms = random_terms(length, job.size, length, dtype)
            runs = _runs(length, comm.size, dtype)
            total = np.empty(runs[comm.rank].size, dtype)
            call = describe_call(f"slices of {dtype}[{length}]")
            steps = reduce_slices(
                *([(tuple(runs), total)], [terms[job.rank]], call, channel),
                place_bytes=channel.rings.place_bytes(64 << 10),
            )
            channel.drive(steps, call, None)
            own = slice_of(length, comm.rank, comm.size)
            wanted = promised(terms, "sum", workers)[own]
            assert_promised(job, [(total, wanted)], "reduce_slices")
