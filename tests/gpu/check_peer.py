"""The sum over memory that ranks of one node open to each other."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.gpu.transports import peer_transport
from hpcstrat.gpu.transports.device_reduction import reduce_on_device
from hpcstrat.gpu.transports.peer_transport import PeerTransport
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

MODES = ("events", "no_events")
PIECES = st.sampled_from([1000, 4096, 1 << 20])


@pytest.fixture(scope="module")
def crew() -> Iterator[Team]:
    """Yield all ranks as one worker."""
    yield from shared_team()


@pytest.fixture(scope="module")
def transports(crew: Team) -> Iterator[dict[str, Any]]:
    """Yield a transport that shares events, and one that does not."""
    made = {
        mode: PeerTransport(crew.topology, crew.lane, events=mode == "events")
        for mode in MODES
    }
    yield made
    for transport in made.values():
        transport.close()


@pytest.fixture(params=["direct", "scattered"])
def form(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take pieces of all sizes for small ones, or for large ones."""
    small = 1 << 40 if request.param == "direct" else 0
    monkeypatch.setattr(peer_transport, "_DIRECT_BYTES", small)
    return str(request.param)


@pytest.mark.parametrize("mode", MODES)
def test_sums_are_exact(crew: Team, transports: Any, mode: str, form: str) -> None:
    """For all types and sizes, in place or not, in one piece or several."""

    @given(
        kinds=KINDS,
        mean=st.booleans(),
        in_place=st.booleans(),
        piece_bytes=PIECES,
        seed=st.integers(0, 1000),
    )
    @in_step
    def _sums(**given: Any) -> None:
        reduction = Reduction(**given)
        results = reduce_now(crew, transports[mode], reduction)
        reduction.check(crew.topology.replica_comm, results)

    _sums()


def test_bits_are_those_of_the_order_of_ranks(
    crew: Team, transports: Any, form: str
) -> None:
    """Whatever the form and the pieces: as NumPy adds, one rank after the other."""
    import cupy

    hosts = []
    for rank in range(crew.size):
        generator = np.random.default_rng(rank)
        host = generator.standard_normal(50_021).astype(np.float32)
        host *= 10.0 ** generator.integers(-6, 6, host.size)
        host[:: 7 + rank] = [np.inf, -np.inf, -0.0, 1e38][rank % 4]
        hosts.append(host)
    with np.errstate(all="ignore"):
        wanted = functools.reduce(np.add, hosts)
        mean = wanted / np.float32(crew.size)
    for divides, piece_bytes in [(False, 1 << 20), (True, 4096), (True, 1 << 20)]:
        reduction = Reduction(
            [("float32", wanted.size)], 0, mean=divides, piece_bytes=piece_bytes
        )
        source = cupy.asarray(hosts[crew.rank])
        result = cupy.empty(wanted.size, np.float32)
        work = reduction.work(crew.size, [source], [result], waits=True)
        steps = reduce_on_device(work, crew.channel, transports["events"])
        crew.channel.drive(steps, work.call)
        found, right = result.get(), mean if divides else wanted
        numbers = ~np.isnan(right)
        assert (np.isnan(found) == ~numbers).all()
        assert found[numbers].tobytes() == right[numbers].tobytes()
        same_bits(crew.topology.replica_comm, [found])


def test_halves_are_never_written_too_early(crew: Team, transports: Any) -> None:
    """Many calls in sequence, of random sizes, from hosts at random times."""
    import cupy

    transport, own = transports["events"], np.random.default_rng(crew.rank)
    common = np.random.default_rng(11)
    checks = []
    for number in range(120):
        size = int(common.choice([1, 100, 5000, 40_000]))
        piece = int(common.choice([1 << 10, 1 << 14, 1 << 20]))
        piece = max(piece, size // 2)
        reduction = Reduction(
            [("float32", size)], number, piece_bytes=piece, in_place=number % 3 == 0
        )
        results = reduce_now(crew, transport, reduction)
        # Kept as the stream goes on: nothing is compared before many have been made.
        checks.append((reduction, [result * 1 for result in results]))
        time.sleep(own.random() * 0.002)
        if number % 40 == 39:
            for one, kept in checks:
                one.check(crew.topology.replica_comm, kept)
            checks.clear()
    cupy.cuda.get_current_stream().synchronize()


@given(
    kinds=st.lists(KINDS, min_size=1, max_size=4),
    polls=st.integers(0, 20),
    piece_bytes=st.sampled_from([512, 1 << 20]),
)
@settings(in_step, max_examples=len(seeds(25)))
def _started(
    crew: Team, transport: Any, *, kinds: Any, polls: int, **given: Any
) -> None:
    reductions = [
        Reduction(one, number, mean=number % 2 == 1, **given)
        for number, one in enumerate(kinds)
    ]
    reduce_many(crew, transport, reductions, polls)


@pytest.mark.parametrize("mode", MODES)
def test_started_sums_end_beside_computation(
    crew: Team, transports: Any, mode: str, form: str
) -> None:
    """While the program's stream and thread do other things, ranks at other times."""
    _started(crew, transports[mode])


def test_sources_may_still_be_in_the_making(crew: Team, transports: Any) -> None:
    """On a stream of the program, and results are used there without waiting."""
    import cupy

    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream()):
        with stream:
            for size in (1000, 70_001):
                source = cupy.zeros(size, np.float32)
                for _ in range(30):
                    source += crew.rank + 1
                reduction = Reduction([("float32", size)], size)
                work = reduction.work(crew.size, [source], [source], waits=True)
                steps = reduce_on_device(work, crew.channel, transports["events"])
                crew.channel.drive(steps, work.call)
                used = source * 2
                source[...] = -1.0
                total = 30 * crew.size * (crew.size + 1)
                assert (used.get() == total).all()


def test_no_call_waits_for_the_device(crew: Team, transports: Any) -> None:
    """And none takes more memory than the calls before it."""
    import cupy

    standin = getattr(cupy, "_standin", None)
    if standin is None:
        pytest.skip("CuPy itself counts nothing")
    transport = transports["events"]
    sizes = (10, 5000, 100_000)
    arrays = [cupy.ones(size, np.float32) for size in sizes]
    works = [
        Reduction([("float32", size)], 0, piece_bytes=1 << 18).work(
            crew.size, [array], [array], waits=True
        )
        for size, array in zip(sizes, arrays, strict=True)
    ]
    names = (
        *("device_synchronizations", "stream_synchronizations"),
        *("event_synchronizations", "device_to_host", "host_to_device"),
        *("allocations", "pinned_allocations"),
    )
    before: list[int] = []
    for repetition in range(30):
        if repetition == 10:
            before = [getattr(standin.counts, name) for name in names]
        for work in works:
            steps = reduce_on_device(work, crew.channel, transport)
            crew.channel.drive(steps, work.call)
    after = [getattr(standin.counts, name) for name in names]
    assert after == before, names
    crew.lane.synchronize()


def test_small_calls_take_no_step_but_the_header(crew: Team, transports: Any) -> None:
    import cupy

    transport = transports["events"]
    array = cupy.ones(1000, np.float32)
    reduction = Reduction([("float32", 1000)], 0)
    for repetition in range(3):
        work = reduction.work(crew.size, [array], [array], waits=True)
        steps = reduce_on_device(work, crew.channel, transport)
        next(steps)
        crew.channel.agree(work.call)
        awaited = 0
        with crew.channel.moving(work.call):
            for step in steps:
                crew.channel.wait(step, work.call)
                awaited += 1
        if repetition:
            assert awaited == 0
    assert (array.get() == crew.size**3).all()


def test_windows_grow_and_go(crew: Team) -> None:
    """Larger pieces in calls that follow each other at once; then all is freed."""
    transport = PeerTransport(crew.topology, crew.lane)
    for size in (100, 30_000, 500_000, 50, 1_000_000):
        reduction = Reduction([("float32", size)], size, piece_bytes=1 << 23)
        results = reduce_now(crew, transport, reduction)
        reduction.check(crew.topology.replica_comm, results)
        # A window is in blocks of CUDA's that nothing else of this rank is in.
        assert transport._windows.memory.data.mem.size % (2 << 20) == 0
    transport.close()
    transport.close()
    assert transport._windows.memory is None


def test_windows_are_opened_when_all_work_is_done(
    crew: Team, transports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA waits for it there, and CuPy lets no host function of a stream run."""
    import cupy

    reduction = Reduction([("float32", 1000)], 1)
    # The kernels are compiled.
    reduce_now(crew, transports["events"], reduction)
    ran: list[bool] = []
    had_run: list[bool] = []
    open_memory = cupy.cuda.runtime.ipcOpenMemHandle

    def opened(handle: bytes) -> int:
        had_run.append(bool(ran))
        return int(open_memory(handle))

    monkeypatch.setattr(cupy.cuda.runtime, "ipcOpenMemHandle", opened)
    transport = PeerTransport(crew.topology, crew.lane)
    stream = cupy.cuda.get_current_stream()
    stream.launch_host_func(lambda _: (time.sleep(0.2), ran.append(True)), None)
    results = reduce_now(crew, transport, reduction)
    reduction.check(crew.topology.replica_comm, results)
    assert had_run == [True] * (crew.size - 1)
    transport.close()


def test_calls_that_fail_in_the_header_leave_the_halves_in_step(
    crew: Team, transports: Any
) -> None:
    """One rank announces another call than the rest, after all have packed."""
    from hpcstrat.errors import CollectiveError

    for number in range(4):
        good = Reduction([("float32", 3000)], number)
        # Another call on the last rank only.
        seed = 100 + (crew.rank == crew.size - 1)
        bad = Reduction([("float32", 3000)], seed)
        sources, results = bad.arrays(crew.rank)
        work = bad.work(crew.size, sources, results, waits=True)
        steps = reduce_on_device(work, crew.channel, transports["events"])
        next(steps)
        with pytest.raises(CollectiveError):
            crew.channel.agree(work.call)
        steps.close()
        made = reduce_now(crew, transports["events"], good)
        good.check(crew.topology.replica_comm, made)


def test_all_ranks_raise_where_one_cannot_open(
    crew: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    transport = PeerTransport(crew.topology, crew.lane)
    runtime = cupy.cuda.runtime

    def refuse(*args: Any) -> int:
        raise RuntimeError("no access")

    reduction = Reduction([("float32", 1000)], 1)
    with monkeypatch.context() as patch:
        if crew.rank == crew.size - 1:
            patch.setattr(runtime, "ipcOpenMemHandle", refuse)
        with pytest.raises(ValueError, match=r"no access \(rank 0"):
            reduce_now(crew, transport, reduction)
    # The next call tries again.
    results = reduce_now(crew, transport, reduction)
    reduction.check(crew.topology.replica_comm, results)
    transport.close()
