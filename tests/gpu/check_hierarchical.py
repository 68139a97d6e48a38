"""The sum inside each worker, across, and inside again; workers may differ in size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.gpu.transports.hierarchical_transport import (
    HierarchicalTransport,
    HostAcross,
    MpiAcross,
)
from hpcstrat.gpu.transports.mpi_sums import Limits
from hpcstrat.gpu.transports.nccl_transport import NcclWorker
from hpcstrat.gpu.transports.peer_transport import PeerTransport
from tests.gpu.driving import (
    KINDS,
    Reduction,
    Team,
    in_step,
    reduce_many,
    reduce_now,
    shared_team,
)
from tests.mpi.ranks.effort import seeds

_SMALL = Limits(doubling_bytes=64, segment_bytes=0, chunk_bytes=256, in_flight=2)
INSIDE = {"peer": PeerTransport, "nccl": NcclWorker}
ACROSS = {
    "pairs": lambda crew: MpiAcross(crew.topology, crew.lane),
    "small_pairs": lambda crew: MpiAcross(crew.topology, crew.lane, _SMALL),
    "host": lambda crew: HostAcross(crew.lane),
    "host_parts": lambda crew: HostAcross(crew.lane, part_bytes=512),
}


@pytest.fixture(scope="module")
def crew() -> Iterator[Team]:
    """Yield workers of two ranks; of three ranks the last is alone."""
    yield from shared_team(2)


@pytest.fixture(scope="module", params=INSIDE)
def transports(request: Any, crew: Team) -> Iterator[dict[str, Any]]:
    """Yield a transport for each way to go across."""
    made = {
        name: HierarchicalTransport(
            crew.topology, INSIDE[request.param](crew.topology, crew.lane), across(crew)
        )
        for name, across in ACROSS.items()
    }
    yield made
    crew.lane.synchronize()
    for transport in made.values():
        transport.close()


@pytest.mark.parametrize("across", ACROSS)
def test_sums_are_exact(crew: Team, transports: Any, across: str) -> None:
    """For all types and sizes, in place or not, in one piece or several."""

    @given(
        kinds=KINDS,
        mean=st.booleans(),
        in_place=st.booleans(),
        piece_bytes=st.sampled_from([1000, 1 << 20]),
        seed=st.integers(0, 1000),
    )
    @settings(in_step, max_examples=len(seeds(12)))
    def _sums(**given: Any) -> None:
        reduction = Reduction(**given)
        results = reduce_now(crew, transports[across], reduction)
        reduction.check(crew.topology.replica_comm, results)

    _sums()


def test_started_sums_end_beside_computation(crew: Team, transports: Any) -> None:
    """While the program's stream and thread do other things, ranks at other times."""

    @given(
        kinds=st.lists(KINDS, min_size=1, max_size=3),
        across=st.sampled_from(sorted(ACROSS)),
        polls=st.integers(0, 20),
    )
    @settings(in_step, max_examples=len(seeds(8)))
    def _started(*, kinds: Any, across: str, polls: int) -> None:
        reductions = [
            Reduction(one, number, mean=number % 2 == 1)
            for number, one in enumerate(kinds)
        ]
        reduce_many(crew, transports[across], reductions, polls)

    _started()


@pytest.mark.parametrize("wire", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_numbers_go_across(crew: Team, wire: Any) -> None:
    """Sums of what both types hold are exact, and means of integers stay so."""
    across = HostAcross(crew.lane, np.dtype(wire), part_bytes=1024)
    inside = PeerTransport(crew.topology, crew.lane)
    transport = HierarchicalTransport(crew.topology, inside, across)
    reduction = Reduction([("float32", 1000), ("int32", 777)], 3, mean=False)
    results = reduce_now(crew, transport, reduction)
    reduction.check(crew.topology.replica_comm, results)
    reduction = Reduction([("int64", 777)], 3, mean=True)
    results = reduce_now(crew, transport, reduction)
    reduction.check(crew.topology.replica_comm, results)
    crew.lane.synchronize()
    transport.close()
