"""Sums on the host with copies from and to the GPU, by every algorithm of the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.engine.algorithms import select
from hpcstrat.engine.algorithms.work import Algorithm
from hpcstrat.engine.gpu.transports.staging_transport import StagingTransport
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
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

_CHOOSERS = {
    "library": select.select,
    "mpi": select.by_mpi,
    "hierarchical": select.hierarchical,
}
PART_BYTES = {"one_part": 8 << 20, "small_parts": 1024}


@pytest.fixture(scope="module", params=[None, 1, 2], ids=["worker", "lonely", "two"])
def crew(request: Any) -> Iterator[Team]:
    """Yield a team: all ranks as one worker, as single ranks, or in workers of two."""
    yield from shared_team("host", request.param)


@pytest.fixture(scope="module")
def transports(crew: Team) -> Iterator[dict[tuple[str, str], Any]]:
    """Yield a transport for each algorithm of the host, and each size of parts."""
    made = {
        (name, parts): _transport(crew, name, PART_BYTES[parts])
        for name in _CHOOSERS
        for parts in PART_BYTES
    }
    yield made
    crew.lane.synchronize()
    for transport in made.values():
        transport.close()


def _transport(crew: Team, name: str, part_bytes: int) -> StagingTransport:
    # Small pieces: a part has several of them, and places in memory are reused soon.
    options = CommunicationOptions(bytes_per_pack=256)

    def _choose(nbytes: int, exact: bool) -> tuple[Algorithm, int]:
        del exact
        choice = _CHOOSERS[name](nbytes, crew.topology, options)
        return choice.algorithm, choice.piece_bytes

    return StagingTransport(crew.lane, _choose, part_bytes)


@pytest.mark.parametrize("parts", PART_BYTES)
@pytest.mark.parametrize("name", _CHOOSERS)
def test_sums_are_exact(crew: Team, transports: Any, name: str, parts: str) -> None:
    """Test all types and sizes, in place or not, in one piece or several."""

    @given(
        kinds=KINDS,
        mean=st.booleans(),
        in_place=st.booleans(),
        piece_bytes=st.sampled_from([1000, 1 << 20]),
        seed=st.integers(0, 1000),
    )
    @settings(in_step, max_examples=len(seeds(8)))
    def _sums(**given: Any) -> None:
        reduction = Reduction(**given)
        results = reduce_now(crew, transports[name, parts], reduction)
        reduction.check(crew.topology.replica_comm, results)

    _sums()


@pytest.mark.parametrize("name", _CHOOSERS)
def test_started_sums_end_beside_computation(
    crew: Team, transports: Any, name: str
) -> None:
    """The program's stream and thread do other work; ranks arrive at various times."""

    @given(
        kinds=st.lists(KINDS, min_size=1, max_size=3),
        parts=st.sampled_from(sorted(PART_BYTES)),
        polls=st.integers(0, 20),
    )
    @settings(in_step, max_examples=len(seeds(5)))
    def _started(*, kinds: Any, parts: str, polls: int) -> None:
        reductions = [
            Reduction(one, number, mean=number % 2 == 1)
            for number, one in enumerate(kinds)
        ]
        reduce_many(crew, transports[name, parts], reductions, polls)

    _started()


def test_calls_of_the_host_go_on_in_between(crew: Team, transports: Any) -> None:
    """Staged parts and small calls on the host use the same shared memory in turn."""
    import numpy as np

    from hpcstrat.engine.calls.replica_collectives import Collectives

    host = Collectives(crew.channel)
    for turn in range(20):
        sizes = ([1, 40, 3000][turn % 3], [700, 5][turn % 2])
        reduction = Reduction([("float32", size) for size in sizes], turn)
        results = reduce_now(crew, transports["library", "small_parts"], reduction)
        ones = np.full(sizes[0], crew.rank + 1, np.int64)
        total = host.batch_reduce(ReduceOp.SUM, ones, "all_reduce")
        assert (total == crew.size * (crew.size + 1) // 2).all()
        reduction.check(crew.topology.replica_comm, results)


def test_page_locked_memory_is_bounded(crew: Team) -> None:
    """A transport page-locks two parts, however large the piece is."""
    standin = pytest.importorskip("cupy._standin", reason="needs the stand-in's counts")
    transport = _transport(crew, "library", 64 << 10)
    reduction = Reduction([("float64", 100_003)], 1)
    standin.reset()
    results = reduce_now(crew, transport, reduction)
    assert standin.counts.device_synchronizations == 0
    assert standin.counts.pageable <= 2
    pinned = sum(place.nbytes for place in transport._in_turn)
    assert pinned == 2 * (64 << 10)
    reduction.check(crew.topology.replica_comm, results)
    crew.lane.synchronize()
    transport.close()
