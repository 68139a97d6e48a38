"""Broadcast and all-gather of device memory, by NCCL and through the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.waitable import WaitSteps
from hpcstrat.engine.gpu.transports import byte_movers
from hpcstrat.engine.gpu.transports.byte_movers import NcclMover, StagedMover
from hpcstrat.engine.gpu.transports.nccl_group import NcclGroup
from tests.gpu.driving import (
    Team,
    in_step,
    require_here,
    shared_team,
    why_not_here,
)
from tests.mpi.ranks.effort import seeds

# The transport that each mover needs, see tests/gpu/jobs.py.
NAMES = {
    "nccl": "nccl",
    "staged": "host",
    "small_staged": "host",
}
SIZES = st.sampled_from([0, 1, 2, 7, 300, 1001, 5000])
TYPES = st.sampled_from(["float32", "complex128", "int8", "bool", "uint16"])


@pytest.fixture(scope="module")
def crew() -> Iterator[Team]:
    """Yield a team of all ranks as one worker."""
    yield from shared_team("host")


@pytest.fixture(scope="module")
def movers(crew: Team) -> Iterator[dict[str, Any]]:
    """Yield the movers by their names."""
    topology, lane = crew.topology, crew.lane
    group = NcclGroup(topology.mpi, topology.replica_comm, lane)
    if not why_not_here("nccl", crew.size):
        for awaited in group.connect():
            crew.channel.wait(awaited, describe_call("test of moves"))
    made: dict[str, Any] = {
        "nccl": NcclMover(group, lane),
        "staged": StagedMover(topology, lane),
        "small_staged": StagedMover(topology, lane, 900),
    }
    yield made
    lane.synchronize()
    made["staged"].close()
    made["small_staged"].close()
    group.close()


@pytest.fixture(params=NAMES)
def mover(crew: Team, movers: dict[str, Any], request: Any) -> Any:
    """Return one mover; skip the test if it cannot serve these ranks."""
    require_here(NAMES[request.param], crew.size)
    return movers[request.param]


def _values(size: int, dtype: str, replica: int) -> Any:
    generator = np.random.default_rng([size, replica])
    return generator.integers(0, 100, size).astype(dtype)


def _drive(crew: Team, steps: WaitSteps) -> None:
    crew.channel.drive(steps, describe_call("test of moves"))


def test_all_have_what_the_root_has(crew: Team, mover: Any) -> None:
    """Test any root, and any number and sizes of arrays."""
    import cupy

    @given(
        kinds=st.lists(st.tuples(TYPES, SIZES), min_size=1, max_size=5),
        root=st.integers(0, crew.size - 1),
        in_place=st.booleans(),
    )
    @settings(in_step, max_examples=len(seeds(15)))
    def _broadcasts(*, kinds: Any, root: int, in_place: bool) -> None:
        sources = [
            cupy.asarray(_values(size, dtype, crew.rank)) for dtype, size in kinds
        ]
        results = sources
        if not in_place:
            results = [cupy.empty(size, dtype) for dtype, size in kinds]
        steps = byte_movers.broadcast(mover, sources, results, root)
        _drive(crew, steps)
        # Copy at once, because the program may use its arrays right after the call.
        copies = [result.copy() for result in results]
        for (dtype, size), result in zip(kinds, copies, strict=True):
            np.testing.assert_array_equal(result.get(), _values(size, dtype, root))

    _broadcasts()


def test_all_have_what_each_has(crew: Team, mover: Any) -> None:
    """Arrays are gathered in replica order, also if some replicas have no elements."""
    import cupy

    @given(dtype=TYPES, sizes=st.lists(SIZES, min_size=crew.size, max_size=crew.size))
    @settings(in_step, max_examples=len(seeds(15)))
    def _gathers(*, dtype: str, sizes: list[int]) -> None:
        own = cupy.asarray(_values(sizes[crew.rank], dtype, crew.rank))
        out = cupy.empty(sum(sizes), dtype)
        steps = byte_movers.all_gather(mover, own, out, sizes)
        _drive(crew, steps)
        copy = out.copy()
        wanted = [_values(size, dtype, rank) for rank, size in enumerate(sizes)]
        np.testing.assert_array_equal(copy.get(), np.concatenate(wanted))

    _gathers()
