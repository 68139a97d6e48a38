"""Sums inside of a worker have the bits of adding the values in replica order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.algorithms import select
from tests.mpi.ranks.promised import FLOATS, assert_promised, promised
from tests.mpi.ranks.sums import all_reduce, random_parts

pytestmark = pytest.mark.algorithm


def switches(strategy: Any) -> list[int]:
    """Return sizes in bytes at which the algorithm changes, and some in between."""
    topology = strategy.topology
    ranks = topology.worker_comm.size
    edges = {
        *(64, ranks * select.FROM_BYTES_PER_RANK, select.SMALL_BYTES // ranks),
        *(select.SCATTERED_PIECE_BYTES // 2, select.SCATTERED_PIECE_BYTES),
        *(select.DIRECT_PIECE_BYTES // 2, select.DIRECT_PIECE_BYTES),
        *(topology.slot_bytes // 2, topology.slot_bytes, 3 * topology.slot_bytes),
    }
    return sorted(edges)


def test_sums_inside_a_worker_are_in_the_order_of_the_replicas(
    strategy: Any, job: Any
) -> None:
    if strategy.topology.num_workers > 1:
        pytest.skip("between workers the MPI library chooses the order")
    for nbytes in switches(strategy):
        for number, dtype in enumerate(FLOATS):
            wire = max(dtype.itemsize, 4)
            # Test the size, and one element less and more.
            for length in (nbytes // wire - 1, nbytes // wire, nbytes // wire + 1):
                if length > 100_000 and number > 1:
                    continue
                parts = random_parts(nbytes, job.size, (length,), dtype)
                own = parts[job.rank]
                for op in ("sum", "mean"):
                    found = strategy.reduce(op, own)
                    pairs = [(found, promised(parts, op))]
                    assert_promised(job, pairs, f"{op} by the library's choice")


def test_all_ways_to_call_add_in_the_same_order(strategy: Any, job: Any) -> None:
    if strategy.topology.num_workers > 1:
        pytest.skip("between workers the MPI library chooses the order")
    for length in (3, 700, 7_000, 70_000):
        parts = random_parts(length, job.size, (length,), np.float32)
        own, wanted = parts[job.rank], promised(parts, "sum")

        def start(own: Any = own) -> Any:
            return hs.get_replica_context().start_all_reduce("sum", own).wait()

        nest = [own[:5], own.astype(np.float64), own]
        out = own.copy()
        strategy.reduce("sum", out, out=out)
        small = hs.CommunicationOptions(bytes_per_pack=1000)
        ways = (
            out,
            strategy.local_value(strategy.run(start)),
            strategy.reduce("sum", nest)[2],
            all_reduce(strategy, "sum", own, small),
            strategy.reduce("sum", own[None], axis=0),
        )
        pairs = [(found, wanted) for found in ways]
        assert_promised(job, pairs, "one of the ways to call")
