"""Sums by NCCL, on several ranks and on a single rank."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.engine.algorithms.work import Work
from hpcstrat.engine.arrays.packing import cut
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.waitable import HEADER, EveryRankError, WaitSteps
from hpcstrat.engine.gpu.streams import Lane
from hpcstrat.engine.gpu.transports import nccl_trial
from hpcstrat.engine.gpu.transports.device_reduction import reduce_on_device
from hpcstrat.engine.gpu.transports.nccl_group import NcclGroup, nccl_failure
from hpcstrat.engine.gpu.transports.nccl_transport import NcclTransport
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

# The library's default sizes of trial sums; tests use fewer, see conftest.py.
ALL_BYTES = (4, 1 << 20, 64 << 20)


@pytest.fixture(scope="module")
def crew() -> Iterator[Team]:
    """Yield a team of all ranks as one worker."""
    yield from shared_team("nccl")


def _connected(crew: Team) -> NcclGroup:
    group = NcclGroup(crew.topology.mpi, crew.topology.replica_comm, crew.lane)
    _awaited(crew, group.connect())
    return group


@pytest.fixture(scope="module")
def transport(crew: Team) -> Iterator[Any]:
    """Yield the transport, whose communicator is made only once."""
    made = NcclTransport(_connected(crew), crew.lane)
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
    """Test all types and sizes, in place or not, in one piece or several."""
    _sums(crew, transport)


@given(kinds=st.lists(KINDS, min_size=1, max_size=3), polls=st.integers(0, 20))
@settings(in_step, max_examples=len(seeds(12)))
def _started(crew: Team, transport: Any, *, kinds: Any, polls: int) -> None:
    reductions = [
        Reduction(one, number, mean=number % 2 == 1) for number, one in enumerate(kinds)
    ]
    reduce_many(crew, transport, reductions, polls)


def test_started_sums_end_beside_computation(crew: Team, transport: Any) -> None:
    """The program's stream and thread do other work; ranks arrive at various times."""
    _started(crew, transport)


def test_the_host_waits_for_nothing(crew: Team, transport: Any) -> None:
    """The host does not wait, and an array in the type of its sum is not packed."""
    standin = pytest.importorskip("cupy._standin", reason="needs the stand-in's counts")
    reduction = Reduction([("float32", 5000)], 1)
    warm = reduce_now(crew, transport, reduction)
    reduction.check(crew.topology.replica_comm, warm)
    sources, results = reduction.arrays(crew.rank)
    work = reduction.work(crew.size, sources, results)
    standin.reset()
    steps = reduce_on_device(work, crew.channel, transport)
    crew.channel.drive(steps, work.call)
    counts = standin.counts
    assert counts.synchronizations == 0
    assert (counts.collectives, counts.launches) == (1, 0)
    assert counts.device_to_device == 0
    reduction.check(crew.topology.replica_comm, results)


# A large array among small ones, and a large array of a half type.
_LIST = [("float32", 500), ("float32", 1 << 18), ("float32", 7), ("float16", 1 << 19)]


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_large_arrays_of_a_list_are_summed_where_they_lie(
    crew: Team, transport: Any, mean: bool, in_place: bool
) -> None:
    """One kernel packs the small arrays; means are divided in place."""
    standin = pytest.importorskip("cupy._standin", reason="needs the stand-in's counts")
    reduction = Reduction(_LIST, 3, mean=mean, in_place=in_place, piece_bytes=8 << 20)
    reduction.check(crew.topology.replica_comm, reduce_now(crew, transport, reduction))
    sources, results = reduction.arrays(crew.rank)
    work = reduction.work(crew.size, sources, results)
    standin.reset()
    crew.channel.drive(reduce_on_device(work, crew.channel, transport), work.call)
    # One sum for the large array, one for the small ones, one in float32 for the half
    # type.
    assert standin.counts.collectives == 3
    assert standin.counts.launches == 4 + mean
    reduction.check(crew.topology.replica_comm, results)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nccl_adds_half_types_itself_where_it_is_told_to(
    crew: Team, transport: Any, monkeypatch: Any, dtype: str, mean: bool
) -> None:
    """NCCL adds half types directly, in half the bytes, without our kernels."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    import cupy

    calls: list[tuple[int, int]] = []
    comm = transport.group._comm
    all_reduce = comm.allReduce

    def _noted(send: int, recv: int, count: int, kind: int, *more: Any) -> None:
        calls.append((count, kind))
        all_reduce(send, recv, count, kind, *more)

    monkeypatch.setattr(comm, "allReduce", _noted)
    name = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    numbers = np.arange(3000) % 7 * 4
    sources = [cupy.asarray((numbers + 4 * crew.rank).astype(name)) for _ in range(3)]
    results = [cupy.empty_like(source) for source in sources]
    signatures = [(name, (3000,))] * 3
    call = describe_call("test", f"{dtype} {mean}")
    work = Work(
        *(call, tuple(cut(signatures, mean, 1 << 20)), sources, results, 1 << 20),
        divisor=crew.size if mean else 0,
    )
    steps = reduce_on_device(work, crew.channel, transport, in_half=True)
    crew.channel.drive(steps, call)
    total = numbers * crew.size + 4 * sum(range(crew.size))
    wanted = (total / (crew.size if mean else 1)).astype(name)
    for result in results:
        # NCCL divides before it adds to compute averages.
        near = abs(result.get().astype("f8") - wanted.astype("f8"))
        assert (near <= abs(wanted.astype("f8")) * 2.0**-7 * crew.size).all()
    assert calls == [(9000, 9 if dtype == "bfloat16" else 6)]


def test_pieces_that_follow_one_another_are_of_two_lanes(
    crew: Team, transport: Any, monkeypatch: Any
) -> None:
    """Pieces alternate between lanes: one is packed while another is summed."""
    streams: list[int] = []
    comm = transport.group._comm
    all_reduce = comm.allReduce

    def _noted(*arguments: Any) -> None:
        streams.append(arguments[-1])
        all_reduce(*arguments)

    monkeypatch.setattr(comm, "allReduce", _noted)
    kinds = [("int16", 700), ("float32", 300), ("float64", 90)]
    reduction = Reduction(kinds, 5, mean=True, piece_bytes=1000)
    results = reduce_now(crew, transport, reduction)
    reduction.check(crew.topology.replica_comm, results)
    # Both lanes have a high priority, because other ranks wait for them.
    runtime = pytest.importorskip("cupy.cuda.runtime")
    lanes = transport._lanes[1:]
    assert all(runtime.streamGetPriority(one.stream.ptr) < 0 for one in lanes)
    in_turn = [stream for stream, _ in itertools.groupby(streams)]
    assert len(set(in_turn)) == 2
    assert len(in_turn) > 4


class _NoThread(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def _awaited(crew: Team, steps: WaitSteps) -> None:
    for awaited in steps:
        crew.channel.wait(awaited, describe_call("test of NCCL"))


@pytest.mark.parametrize("where", ["library", "communicator", "thread"])
def test_what_one_rank_cannot_do_is_an_error_on_all(
    crew: Team, monkeypatch: Any, where: str
) -> None:
    """The rank may notice the problem only when the communicator is made."""
    from cupy.cuda import nccl

    from hpcstrat.engine.gpu import library

    last = crew.rank == crew.size - 1
    found = "no route"
    if where == "library":
        found = "no NCCL library"
        monkeypatch.setattr(library, "nccl", lambda: None if last else nccl)
    else:
        if where == "thread" and last:
            found = "can't start new thread"
            monkeypatch.setattr(nccl_trial.threading, "Thread", _NoThread)

        # In NCCL, a failure of one rank makes the other ranks fail, too.
        def _fails(size: int, identity: Any, rank: int) -> Any:
            del size, identity, rank
            raise RuntimeError("no route" if last else "another rank has failed")

        monkeypatch.setattr(nccl, "NcclCommunicator", _fails)
    group = NcclGroup(crew.topology.mpi, crew.topology.replica_comm, crew.lane)
    found = crew.topology.replica_comm.bcast(found, root=crew.size - 1)
    with pytest.raises(EveryRankError, match=rf"{found}.*NCCL_DEBUG=INFO"):
        _awaited(crew, group.connect())
    monkeypatch.undo()
    # All ranks are at the same point, so their next calls work.
    _connected(crew).close()


def _goes_without_nccl(crew: Team, comm: Any, why: str, **options: Any) -> None:
    import cupy

    with hs.MultiWorkerMirroredStrategy(comm=comm, **options) as other:
        ones = cupy.ones(10, cupy.float32)
        total = other.reduce("sum", ones, axis=None)
        assert (cupy.asnumpy(total) == crew.size).all()
        assert other.gather(ones, 0).shape == (10 * crew.size,)
        channel: Any = other.collectives.channel
        group = channel.device_group
        assert not group.capabilities.nccl
        assert re.search(why, group.reason), group.reason


def test_where_nccl_fails_all_ranks_do_without(
    crew: Team, job: Any, monkeypatch: Any
) -> None:
    """Broadcasts and gathers, whose mover cannot be chosen, work without NCCL, too."""
    from cupy.cuda import nccl

    def _fails(size: int, identity: Any, rank: int) -> Any:
        del size, identity, rank
        raise RuntimeError("no space in /dev/shm")

    monkeypatch.setattr(nccl, "NcclCommunicator", _fails)
    _goes_without_nccl(crew, job.Dup(), "no space in /dev/shm")


def test_where_nccl_does_not_return_all_ranks_do_without(
    crew: Team, job: Any, monkeypatch: Any
) -> None:
    """One rank or all ranks hang in NCCL; late communicators are aborted."""
    from cupy.cuda import nccl

    goes_on, aborted = threading.Event(), threading.Event()

    class _Late:
        def __init__(self, size: int, identity: Any, rank: int) -> None:
            del size, identity, rank
            goes_on.wait(30)

        def abort(self) -> None:
            aborted.set()

    monkeypatch.setattr(nccl_trial, "_JOIN_SECONDS", 0.2)
    monkeypatch.setattr(nccl, "NcclCommunicator", _Late)
    why = f"not joined {crew.size} ranks within 0.2 s \\(see NCCL_SOCKET_IFNAME"
    _goes_without_nccl(crew, job.Dup(), why)
    goes_on.set()
    assert aborted.wait(30)


@pytest.fixture
def communicators(monkeypatch: Any) -> list[Any]:
    """Return a list that gets the NCCL communicators that are made from now on."""
    from cupy.cuda import nccl

    made: list[Any] = []

    class _Noted(nccl.NcclCommunicator):  # type: ignore[name-defined, misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(nccl, "NcclCommunicator", _Noted)
    return made


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("tree error", "SYSTEM_ERROR"),
        ("ring error", "SYSTEM_ERROR"),
        ("ring stuck", "not summed 1048576 bytes within 2 s .*/dev/shm"),
        ("tree endless", "not summed 4 bytes within 2 s .*NCCL_P2P_DISABLE"),
        ("ring wrong", "ArithmeticError: a sum of 1048576 bytes is wrong"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_nccl_that_does_not_sum_is_left_out_on_all_ranks(
    crew: Team,
    job: Any,
    monkeypatch: Any,
    communicators: list[Any],
    fault: str,
    why: str,
    last: bool,
) -> None:
    """NCCL has joined the ranks, but fails in its trial; the ranks abort it."""
    pytest.importorskip("cupy._standin", reason="needs the stand-in's faults")
    rank = crew.size - 1 if last else 0
    monkeypatch.setenv("HPCSTRAT_STANDIN_NCCL_FAULT", f"{fault} {rank}")
    monkeypatch.setattr(nccl_trial, "_TRIAL_SECONDS", 2.0)
    _goes_without_nccl(crew, job.Dup(), why)
    (made,) = communicators
    deadline = time.monotonic() + 20
    stuck = fault.endswith("stuck")
    while made.comm and not stuck and time.monotonic() < deadline:
        time.sleep(0.01)
    # A rank that is stuck in a call does not free the communicator it still uses.
    assert bool(made.comm) == stuck


def test_the_trial_ends_before_the_wait_for_other_ranks(
    crew: Team, job: Any, monkeypatch: Any
) -> None:
    """The trial ends before the rank's wait limit, which would end the job."""
    pytest.importorskip("cupy._standin", reason="needs the stand-in's faults")
    monkeypatch.setenv("HPCSTRAT_STANDIN_NCCL_FAULT", "tree endless 0")
    settings = hs.Settings(limit_seconds=4.0)
    why = "not summed 4 bytes within 1 s"
    _goes_without_nccl(crew, job.Dup(), why, settings=settings)


def test_sums_of_three_sizes_come_first(
    crew: Team, job: Any, monkeypatch: Any, communicators: list[Any]
) -> None:
    """Trial sums run before NCCL is chosen, and they connect the ranks."""
    pytest.importorskip("cupy._standin", reason="needs the stand-in")
    monkeypatch.setattr(nccl_trial, "_TRIAL_BYTES", ALL_BYTES)
    import cupy

    cupy._standin.reset()
    with hs.MultiWorkerMirroredStrategy(comm=job.Dup()) as other:
        total = other.reduce("sum", cupy.ones(10, cupy.float32), axis=None)
        assert (cupy.asnumpy(total) == crew.size).all()
        channel: Any = other.collectives.channel
        assert channel.device_group.reason.startswith("nccl")
        assert cupy._standin.counts.collectives == len(ALL_BYTES) + 1
        assert communicators[0]._connected == {"tree", "ring"}


def test_nccl_can_be_left_out(crew: Team, job: Any) -> None:
    """A setting turns off NCCL, although NCCL works."""
    without = hs.Settings(nccl=False)
    why = "the setting nccl is off"
    _goes_without_nccl(crew, job.Dup(), why, settings=without)


@pytest.fixture
def lane() -> Any:
    """Return a lane on this rank's GPU, also if the rank is alone."""
    cupy = pytest.importorskip("cupy")
    from mpi4py import MPI

    cupy.cuda.Device(MPI.COMM_WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    return Lane()


def _alone(steps: WaitSteps) -> None:
    for awaited in steps:
        while awaited is not HEADER and not awaited.agreed():
            time.sleep(1e-4)


def test_an_error_of_nccl_says_what_to_do(lane: Lane) -> None:
    """The rank with the error raises it at its next call."""
    group = NcclGroup(None, None, lane)
    _alone(group.connect())

    group.abandon()
    group._comm = _Failed()
    with pytest.raises(hs.CollectiveError, match=r"SYSTEM_ERROR.*NCCL_DEBUG=INFO"):
        group.all_reduce([], lane)
    group.abandon()
    assert group._comm is None


class _Failed:
    """A communicator whose calls have failed."""

    def check_async_error(self) -> None:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled")

    def abort(self) -> None:
        pass


@pytest.mark.parametrize("survives", [False, True])
def test_an_error_of_nccl_is_found_while_calls_do_not_end(
    lane: Lane, survives: bool
) -> None:
    """The rank finds the error itself if it awaits the calls, or tells the watchdog."""
    group = NcclGroup(None, None, lane, survives=survives)
    _alone(group.connect())
    assert nccl_failure() == ""
    group.abandon()
    group._comm = _Failed()
    never_ends = threading.Event()
    lane.stream.launch_host_func(lambda _: never_ends.wait(30), None)
    awaited = list(group.ended())
    assert len(awaited) == int(survives)
    for one in awaited:
        with pytest.raises(hs.CollectiveError, match=r"SYSTEM_ERROR.*NCCL_DEBUG=INFO"):
            one.missing()
    assert ("SYSTEM_ERROR" in nccl_failure()) == (not survives)
    with pytest.raises(hs.CollectiveError, match="SYSTEM_ERROR"):
        group.all_reduce([], lane)
    # Now the program knows the error, so the watchdog must not report it.
    assert nccl_failure() == ""
    never_ends.set()
    group.abandon()


@pytest.mark.parametrize("mean", [False, True])
def test_one_rank_alone_goes_the_same_way(lane: Lane, mean: bool) -> None:
    """A machine with one GPU can test only this case."""
    group = NcclGroup(None, None, lane)
    _alone(group.connect())
    transport = NcclTransport(group, lane)
    kinds = [("float32", 1000), ("float16", 7), ("complex64", 65), ("int8", 9)]
    reduction = Reduction(kinds, 2, mean=mean)
    sources, results = reduction.arrays(0)
    work = reduction.work(1, sources, results)
    channel: Any = None
    _alone(reduce_on_device(work, channel, transport))
    from mpi4py import MPI

    reduction.check(MPI.COMM_SELF, results)
    transport.close()


def test_communicators_are_aborted_side_by_side(lane: Lane) -> None:
    """An abort that waits for another communicator does not delay that one's abort."""

    class _Waiting:
        def __init__(self, other: _Waiting | None = None) -> None:
            self.aborted, self.other = threading.Event(), other

        def abort(self) -> None:
            if self.other is None or self.other.aborted.wait(30):
                self.aborted.set()

    second = _Waiting()
    first = _Waiting(second)
    for comm in first, second:
        group = NcclGroup(None, None, lane)
        group._comm = comm
        group.abandon()
    assert first.aborted.wait(30)
    assert second.aborted.is_set()
