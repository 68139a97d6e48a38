"""Sums by NCCL, also of one rank alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.collectives.device_reduction import reduce_on_device
from hpcstrat.collectives.header import EveryRankError
from hpcstrat.collectives.nccl import NcclTransport, NcclWorker
from hpcstrat.collectives.nccl_group import NcclGroup
from hpcstrat.device.streams import Lane
from tests.gpu.driving import (
    KINDS,
    Reduction,
    Team,
    drive,
    in_step,
    reduce_many,
    reduce_now,
    shared_team,
)


@pytest.fixture(scope="module")
def crew() -> Iterator[Team]:
    """Yield all ranks as one worker."""
    yield from shared_team()


@pytest.fixture(scope="module")
def transport(crew: Team) -> Iterator[Any]:
    """Yield the transport, whose communicator is made once."""
    made = NcclTransport(crew.topology, crew.lane)
    yield made
    made.close()


@given(
    kinds=KINDS,
    mean=st.booleans(),
    in_place=st.booleans(),
    piece_bytes=st.sampled_from([64, 1000, 1 << 20]),
    seed=st.integers(0, 1000),
)
@in_step
def _sums(crew: Team, transport: Any, **given: Any) -> None:
    reduction = Reduction(**given)
    results = reduce_now(crew, transport, reduction)
    reduction.check(crew.topology.replica_comm, results)


def test_sums_are_exact(crew: Team, transport: Any) -> None:
    """For all types and sizes, in place or not, in one piece or several."""
    _sums(crew, transport)


@given(kinds=st.lists(KINDS, min_size=1, max_size=3), polls=st.integers(0, 20))
@settings(in_step, max_examples=12)
def _started(crew: Team, transport: Any, *, kinds: Any, polls: int) -> None:
    reductions = [
        Reduction(one, number, mean=number % 2 == 1) for number, one in enumerate(kinds)
    ]
    reduce_many(crew, transport, reductions, polls)


def test_started_sums_end_beside_computation(crew: Team, transport: Any) -> None:
    """While the program's stream and thread do other things, ranks at other times."""
    _started(crew, transport)


def test_the_host_waits_for_nothing(crew: Team, transport: Any) -> None:
    """And one array in the type of its sum goes without being packed."""
    import cupy

    reduction = Reduction([("float32", 5000)], 1)
    warm = reduce_now(crew, transport, reduction)
    reduction.check(crew.topology.replica_comm, warm)
    sources, results = reduction.arrays(crew.rank)
    work = reduction.work(crew.size, sources, results, waits=True)
    cupy._standin.reset()
    drive(crew, work, reduce_on_device(work, crew.channel, transport))
    counts = cupy._standin.counts
    assert counts.synchronizations == 0
    assert (counts.collectives, counts.launches) == (1, 0)
    assert counts.device_to_device == 0
    reduction.check(crew.topology.replica_comm, results)


def _awaited(crew: Team, steps: Iterator[Any], call: Any) -> None:
    for awaited in steps:
        crew.channel.wait(awaited, call)


@pytest.mark.parametrize("make", [NcclTransport, NcclWorker])
@pytest.mark.parametrize("where", ["library", "communicator"])
def test_what_one_rank_cannot_do_is_an_error_on_all(
    crew: Team, monkeypatch: Any, make: Any, where: str
) -> None:
    """Also where it finds out only when the communicator is made."""
    from cupy.cuda import nccl

    from hpcstrat.device import library

    last = crew.rank == crew.size - 1
    if where == "library":
        monkeypatch.setattr(library, "nccl", lambda: None if last else nccl)
    else:
        # One that fails takes the others with it in NCCL, in one way or another.
        def _fails(size: int, identity: Any, rank: int) -> Any:
            del size, identity, rank
            raise RuntimeError("no route" if last else "another rank has failed")

        monkeypatch.setattr(nccl, "NcclCommunicator", _fails)
    transport = make(crew.topology, crew.lane)
    reduction = Reduction([("float32", 10)], 1)
    work = reduction.work(crew.size, *reduction.arrays(crew.rank), waits=True)
    steps = transport.connect(work, crew.channel)
    found = "no NCCL library" if where == "library" else "no route"
    with pytest.raises(EveryRankError, match=rf"{found}.*NCCL_DEBUG=INFO"):
        _awaited(crew, steps, work.call)
    monkeypatch.undo()
    # All are at the same point: the next calls serve.
    good = make(crew.topology, crew.lane)
    _awaited(crew, good.connect(work, crew.channel), work.call)
    good.close()


def test_where_nccl_fails_all_ranks_do_without(
    crew: Team, job: Any, monkeypatch: Any
) -> None:
    """Also in broadcasts and gathers, which nobody can choose."""
    import cupy
    from cupy.cuda import nccl

    def _fails(size: int, identity: Any, rank: int) -> Any:
        del size, identity, rank
        raise RuntimeError("no space in /dev/shm")

    monkeypatch.setattr(nccl, "NcclCommunicator", _fails)
    with hs.MultiWorkerMirroredStrategy(comm=job.Dup()) as other:
        ones = cupy.ones(10, cupy.float32)
        total = other.reduce("sum", ones, axis=None)
        assert (cupy.asnumpy(total) == crew.size).all()
        assert other.gather(ones, 0).shape == (10 * crew.size,)
        channel: Any = other.collectives.channel
        group = channel.device_group
        assert not group.capabilities.nccl
        assert "no space in /dev/shm" in group.reason


@pytest.fixture
def lane() -> Any:
    """Return a lane on this rank's GPU, also where it is alone."""
    cupy = pytest.importorskip("cupy")
    from mpi4py import MPI

    cupy.cuda.Device(MPI.COMM_WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    return Lane()


def test_an_error_of_nccl_says_what_to_do(lane: Lane) -> None:
    """Found at the next call, on the rank that has it."""
    group = NcclGroup(None, None, lane)
    for _ in group.connect():
        raise AssertionError("one rank waits for nobody")

    class _Failed:
        def check_async_error(self) -> None:
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled")

        def abort(self) -> None:
            pass

    group.abandon()
    group._comm = _Failed()
    with pytest.raises(hs.CollectiveError, match=r"SYSTEM_ERROR.*NCCL_DEBUG=INFO"):
        group.all_reduce([])
    group.abandon()
    assert not group.connected


@pytest.mark.parametrize("mean", [False, True])
def test_one_rank_alone_goes_the_same_way(lane: Lane, mean: bool) -> None:
    """Which is what a machine with one GPU can test."""
    transport = NcclTransport(None, lane)
    kinds = [("float32", 1000), ("float16", 7), ("complex64", 65), ("int8", 9)]
    reduction = Reduction(kinds, 2, mean=mean)
    sources, results = reduction.arrays(0)
    work = reduction.work(1, sources, results, waits=True)
    channel: Any = None
    for awaited in reduce_on_device(work, channel, transport):
        assert awaited is None
    from mpi4py import MPI

    reduction.check(MPI.COMM_SELF, results)
    transport.close()
