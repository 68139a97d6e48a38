"""Sums by MPI messages with device memory, at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.engine.gpu.transports.device_reduction import reduce_on_device
from hpcstrat.engine.gpu.transports.mpi_transport import Limits, MpiTransport
from tests.gpu.driving import (
    KINDS,
    Reduction,
    Team,
    in_step,
    reduce_many,
    reduce_now,
    same_bits,
    shared_team,
)
from tests.mpi.ranks.effort import seeds

_ALWAYS = 1 << 40
LIMITS = {
    "default": Limits(),
    "doubling": Limits(segment_bytes=_ALWAYS),
    "ring": Limits(segment_bytes=0),
    "ring_of_chunks": Limits(segment_bytes=0, chunk_bytes=256, in_flight=3),
    "ring_one_by_one": Limits(segment_bytes=0, chunk_bytes=640, in_flight=1),
}


@pytest.fixture(scope="module")
def crew() -> Iterator[Team]:
    """Yield a team of all ranks as one worker."""
    yield from shared_team("mpi")


@pytest.fixture(scope="module")
def transports(crew: Team) -> Iterator[dict[str, Any]]:
    """Yield a transport for each set of limits."""
    made = {
        name: MpiTransport(crew.topology, crew.lane, limits)
        for name, limits in LIMITS.items()
    }
    yield made
    crew.lane.synchronize()
    for transport in made.values():
        transport.close()


@pytest.mark.parametrize("limits", LIMITS)
def test_sums_are_exact(crew: Team, transports: Any, limits: str) -> None:
    """Test all types and sizes, in place or not, in one piece or several."""

    @given(
        kinds=KINDS,
        mean=st.booleans(),
        in_place=st.booleans(),
        piece_bytes=st.sampled_from([64, 1000, 1 << 20]),
        seed=st.integers(0, 1000),
    )
    @settings(in_step, max_examples=len(seeds(12)))
    def _sums(**given: Any) -> None:
        reduction = Reduction(**given)
        results = reduce_now(crew, transports[limits], reduction)
        reduction.check(crew.topology.replica_comm, results)

    _sums()


@pytest.mark.parametrize("limits", LIMITS)
def test_bits_are_those_of_all_ranks(crew: Team, transports: Any, limits: str) -> None:
    """All ranks have equal bits, also for NaN, and if the order changes the sum."""
    import cupy

    generator = np.random.default_rng(crew.rank)
    host = generator.standard_normal(5001).astype(np.float32)
    host *= 10.0 ** generator.integers(-6, 6, host.size)
    host[:: 7 + crew.rank] = [np.nan, np.inf, -np.inf, -0.0, 1e38][crew.rank % 5]
    reduction = Reduction([("float32", host.size)], 0)
    source, result = cupy.asarray(host), cupy.empty(host.size, np.float32)
    work = reduction.work(crew.size, [source], [result])
    steps = reduce_on_device(work, crew.channel, transports[limits])
    crew.channel.drive(steps, work.call)
    comm = crew.topology.replica_comm
    sums = result.get()
    same_bits(comm, [sums])
    with np.errstate(all="ignore"):
        wanted = np.sum(comm.allgather(host), axis=0, dtype=np.float64)
        largest = np.max(np.abs(comm.allgather(host)), axis=0)
    fine = np.isfinite(wanted) & (largest < 1e37)
    np.testing.assert_allclose(
        sums[fine], wanted[fine], atol=largest[fine].max() * 1e-6
    )
    nans = np.isnan(np.array(comm.allgather(host))).any(axis=0)
    assert np.isnan(sums[nans]).all()


@given(
    kinds=st.lists(KINDS, min_size=1, max_size=3),
    limits=st.sampled_from(sorted(LIMITS)),
    polls=st.integers(0, 20),
    piece_bytes=st.sampled_from([512, 1 << 20]),
)
@settings(in_step, max_examples=len(seeds(15)))
def _started(
    crew: Team,
    transports: Any,
    *,
    kinds: Any,
    limits: str,
    polls: int,
    piece_bytes: int,
) -> None:
    reductions = [
        Reduction(one, number, mean=number % 2 == 1, piece_bytes=piece_bytes)
        for number, one in enumerate(kinds)
    ]
    reduce_many(crew, transports[limits], reductions, polls)


def test_started_sums_end_beside_computation(crew: Team, transports: Any) -> None:
    """The program's stream and thread do other work; ranks arrive at various times."""
    _started(crew, transports)


def test_megabytes_go_in_flights(crew: Team, transports: Any) -> None:
    """Test a ring with its default sizes, whose segments have several chunks."""
    reduction = Reduction([("float32", (1 << 20) + 13)], 5, piece_bytes=64 << 20)
    results = reduce_now(crew, transports["default"], reduction)
    reduction.check(crew.topology.replica_comm, results)
