"""Every reduction algorithm returns the exact sum, with the same bits on every rank.

Values are small integers in all types, so that every order of additions has the same
sum. The ranks exchange their verdicts before they raise an error, so that Hypothesis
makes and shrinks the same examples on all ranks.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.engine.algorithms import reduction_plans, select, shared_memory
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel import headers
from hpcstrat.engine.topology import segment
from hpcstrat.engine.topology import topology as topology_module
from hpcstrat.engine.topology.segment import Segment
from tests.mpi.ranks.effort import examples, in_step
from tests.mpi.ranks.outcomes import (
    assert_only_one_failed,
    assert_usable,
    exchanged,
    outcome,
)
from tests.mpi.ranks.sums import DTYPES, lock

# Two ranks have special algorithms, and a special rule for a majority.
pytestmark = [pytest.mark.rule, pytest.mark.algorithm]


try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

if ml_dtypes is not None:
    DTYPES.append(np.dtype(ml_dtypes.bfloat16))


def values(seed: int, shape: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array of random integers from 0 to 9."""
    drawn = np.random.default_rng(seed).integers(0, 10, shape)
    return np.asarray(drawn).astype(dtype)


def reduced(dtype: np.dtype[Any], op: str) -> np.dtype[Any]:
    """Return the type of the result of a reduction."""
    return np.dtype(np.float64) if dtype.kind in "iu" and op == "mean" else dtype


def expected(
    parts: list[np.ndarray[Any, Any]], op: str
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the reduced array, computed in one process."""
    dtype = parts[0].dtype
    if op in ("max", "min"):
        return getattr(np, f"{op}imum").reduce(parts)
    wide = np.dtype(np.clongdouble if dtype.kind == "c" else np.longdouble)
    total = np.add.reduce([part.astype(wide) for part in parts], axis=0)
    if op == "mean":
        # All algorithms divide once, in the type in which they add.
        adds = np.float32 if dtype.itemsize == 2 and dtype.kind in "fV" else None
        adds = adds or reduced(dtype, op)
        total = total.astype(adds) / np.asarray(len(parts), adds)
    return np.asarray(total).astype(reduced(dtype, op))


def algorithms(strategy: Any) -> dict[str, Any]:
    """Return all algorithms that support the strategy's layout."""
    size = strategy.num_replicas_in_sync
    ops = {
        "chosen": None,
        "mpi": hs.MpiAllReduce(),
        "hierarchical": hs.HierarchicalCopyAllReduce(),
        "to one": hs.ReductionToOneDevice(size - 1),
    }
    if strategy.topology.num_workers == 1:
        ops["shared memory"] = hs.SharedMemoryAllReduce()
    return ops


def same_bits(job: Any, tree: list[Any]) -> None:
    """Assert that arrays have equal bytes on all ranks."""
    own = [meaningful_bytes(np.asarray(array)) for array in tree]
    assert job.allgather(own) == [own] * job.size


def meaningful_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of an array without the padding of long doubles."""
    if array.dtype.char not in "gG":
        return array.tobytes()
    padded = np.dtype(np.longdouble).itemsize
    used = 10 if np.finfo(np.longdouble).nmant == 63 else padded
    rows = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, padded)
    return rows[:, :used].tobytes()


ARRAYS = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.sampled_from([0, 1, 2, 3, 5, 17]), max_size=3).map(tuple),
        st.sampled_from(["C", "F", "strided"]),
    ),
    max_size=5,
)


def in_memory_order(array: np.ndarray[Any, Any], order: str) -> np.ndarray[Any, Any]:
    """Return a copy of an array in another memory layout."""
    if order == "strided" and array.ndim:
        return np.repeat(array, 2, axis=0)[::2]
    return np.array(array, order="F" if order == "F" else "C")


@given(
    kinds=ARRAYS,
    op=st.sampled_from(["sum", "mean", "max", "min"]),
    piece=st.sampled_from([0, 256, 1000, 4096]),
    how=st.sampled_from(["fresh", "in place", "out", "strided out", "swapped"]),
    small=st.booleans(),
    seed=st.integers(0, 1000),
)
@in_step
def _all_algorithms_agree(
    strategy: Any,
    job: Any,
    *,
    kinds: Any,
    op: str,
    piece: int,
    how: str,
    small: bool,
    seed: int,
) -> None:
    options = hs.CommunicationOptions(bytes_per_pack=piece)
    if op in ("max", "min"):
        kinds = [kind for kind in kinds if kind[0].char not in "gFDG"]
    parts = [
        [
            in_memory_order(values(seed + 7 * rank + 100 * i, shape, dtype), order)
            for i, (dtype, shape, order) in enumerate(kinds)
        ]
        for rank in range(job.size)
    ]
    exact = [expected([p[i] for p in parts], op) for i in range(len(kinds))]
    with pytest.MonkeyPatch.context() as patch:
        if not small:
            patch.setattr(select, "SMALL_BYTES", 0)
            patch.setattr(select, "DIRECT_PIECE_BYTES", 512)
            patch.setattr(select, "GATHERED_BYTES", 0)
        for name, ops in algorithms(strategy).items():
            collectives = Collectives(strategy.collectives.channel, ops, options)
            own = [array.copy() for array in parts[job.rank]]
            out = outs(own, op, how)
            found = collectives.batch_reduce(
                hs.ReduceOp.parse(op), own, f"test of {how}", out=out
            )

            def check(found: Any = found, own: Any = own, out: Any = out) -> None:
                assert out is None or found is out
                for array, wanted in zip(found, exact, strict=True):
                    assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
                    np.testing.assert_array_equal(array, wanted)
                if how in ("fresh", "out", "strided out"):
                    for array, before in zip(own, parts[job.rank], strict=True):
                        np.testing.assert_array_equal(array, before)

            exchanged(job, check)
            same_bits(job, found)
            assert name


def outs(own: list[Any], op: str, how: str) -> Any:
    """Return output arrays for the results, or None for new arrays."""
    if how == "fresh":
        return None
    fresh = [np.empty(a.shape, reduced(a.dtype, op)) for a in own]
    if how == "out":
        return fresh
    if how == "strided out":
        return [np.repeat(a, 2, axis=0)[::2] if a.ndim else a for a in fresh]
    fits = [a if a.dtype == f.dtype else f for a, f in zip(own, fresh, strict=True)]
    if how == "swapped":
        # Results overwrite the memory of another array of the same kind.
        for i, j in ((0, 1), (0, 2)):
            if j < len(own) and (own[i].shape, fits[i].dtype) == (
                own[j].shape,
                fits[j].dtype,
            ):
                fits[i], fits[j] = fits[j], fits[i]
    return fits


def test_all_algorithms_give_the_exact_sum(strategy: Any, job: Any) -> None:
    _all_algorithms_agree(strategy, job)


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    waits=st.permutations(range(4)),
    tests=st.lists(st.integers(0, 3), max_size=4),
    blocking=st.integers(0, 4),
)
@settings(in_step, max_examples=examples(15))
def _started_end_in_order(
    strategy: Any, job: Any, *, sizes: Any, waits: Any, tests: Any, blocking: int
) -> None:
    for name, ops in algorithms(strategy).items():
        if name == "to one":
            continue
        options = hs.CommunicationOptions(bytes_per_pack=1024)
        collectives = Collectives(strategy.collectives.channel, ops, options)
        handles = []
        for number, size in enumerate(sizes):
            if number == blocking:
                total = collectives.batch_reduce(hs.ReduceOp.SUM, np.ones(3), "between")
                np.testing.assert_array_equal(total, np.full(3, job.size))
            own = values(number + 10 * job.rank, size, np.dtype(np.float32))
            out = own if number % 2 else None
            handles.append(
                collectives.start_reduce(hs.ReduceOp.SUM, own, "start", out=out)
            )
        # Ranks may call ``test`` as often as they want.
        for number in tests[: 1 + job.rank]:
            handles[min(number, len(handles) - 1)].test()
        found = {n: handles[n].wait() for n in waits if n < len(handles)}

        def check(found: Any = found, handles: Any = handles) -> None:
            for number, size in enumerate(sizes):
                wanted = expected(
                    [
                        values(number + 10 * rank, size, np.dtype(np.float32))
                        for rank in range(job.size)
                    ],
                    "sum",
                )
                np.testing.assert_array_equal(found[number], wanted)
                assert handles[number].test()

        exchanged(job, check)
        assert name


def test_started_reductions_end_in_any_order_of_waiting(
    strategy: Any, job: Any
) -> None:
    _started_end_in_order(strategy, job)


def test_started_reductions_that_nobody_waits_for_are_finished(
    strategy: Any, job: Any
) -> None:
    own = np.full(70_000, float(job.rank))
    strategy.collectives.start_reduce(hs.ReduceOp.SUM, own, "forgotten", out=own)
    assert_usable(strategy, job)
    np.testing.assert_array_equal(own, np.full(70_000, job.size * (job.size - 1) / 2))


def test_a_mismatch_of_a_started_reduction_is_raised_by_wait(
    strategy: Any, job: Any
) -> None:
    def step() -> Any:
        context = hs.get_replica_context()
        first = context.start_all_reduce("sum", np.ones(2 + (job.rank == 1)))
        error = outcome(first.wait)
        return error, context.start_all_reduce("sum", np.ones(2)).wait()

    error, total = strategy.local_value(strategy.run(step))
    if job.size > 1:
        assert isinstance(error, hs.CollectiveError)
        assert "start_all_reduce" in str(error)
    np.testing.assert_array_equal(total, np.full(2, job.size))
    assert_usable(strategy, job)


def test_a_failure_while_several_reductions_are_under_way_ends_the_strategy(
    make_strategy: Any, job: Any
) -> None:
    if job.size == 1:
        return
    with make_strategy(comm=job) as strategy:
        # The first start with device arrays waits for the other ranks.
        strategy.reduce("sum", np.ones(2), axis=None)

        def step() -> Any:
            context = hs.get_replica_context()
            if job.rank == 0:
                for other in range(1, job.size):
                    job.recv(source=other)
                context.start_all_reduce("sum", np.array(["bad batch"]))
            started = [context.start_all_reduce("sum", np.ones(2)) for _ in range(2)]
            job.send(None, 0)
            raise outcome(started[1].wait)

        error = outcome(strategy.run, step)
        kind = hs.CollectiveError if job.rank else ValueError
        assert isinstance(error, kind), error
        # No later sum can be wrong, because the strategy is closed for sums.
        error = outcome(strategy.reduce, "sum", np.ones(2))
        assert isinstance(error, hs.CollectiveError)
        assert "several started calls" in str(error)
        channel = strategy.collectives.channel
        assert not channel.pending
        channel.failures.broken = ""
        channel.rings.restart()


def test_an_interrupt_before_a_call_is_noticed_in_the_next(
    make_strategy: Any, job: Any
) -> None:
    if job.size == 1:
        return
    with make_strategy(comm=job) as strategy:
        slots = strategy.collectives.channel.rings
        if job.rank == 0 and strategy.topology.num_workers == 1:
            # Take a place, like an interrupt that arrives right after the place was
            # taken.
            slots.take(slots.place_bytes(1))
            error = outcome(strategy.reduce, "sum", np.ones(3), None)
        else:
            error = outcome(strategy.reduce, "sum", np.ones(3), None)
        if strategy.topology.num_workers == 1:
            assert isinstance(error, hs.CollectiveError)
            assert "interrupted" in str(error)
        assert_usable(strategy, job)


def test_an_interrupt_before_a_call_does_not_matter_at_the_end(
    make_strategy: Any, job: Any
) -> None:
    strategy = make_strategy(comm=job)
    channel = strategy.collectives.channel
    if channel is None:
        return
    if job.rank == 0:
        channel.rings.take(channel.rings.place_bytes(1))
    channel.post_leave()
    while (outcome := channel.poll_leave()) is None:
        time.sleep(1e-3)
    assert outcome == ""
    strategy.abandon()


def test_an_interrupted_started_reduction_gives_no_result(
    make_strategy: Any, job: Any
) -> None:
    if job.size == 1:
        return
    with make_strategy(comm=job) as strategy:
        channel = strategy.collectives.channel
        started = strategy.collectives.start_reduce(hs.ReduceOp.SUM, np.ones(9), "x")
        np.testing.assert_array_equal(started.wait(), np.full(9, job.size))
        # Wait, because an interrupt message to a waiting rank would end the job.
        job.Barrier()

        def interrupted() -> Any:
            yield
            raise KeyboardInterrupt

        started._done, started._stages = False, interrupted()
        next(started._stages)
        with pytest.raises(KeyboardInterrupt):
            started.advance(waits=True)
        with pytest.raises(KeyboardInterrupt):
            started.wait()
        assert "interrupted" in channel.failures.broken
        # The ranks have exchanged abort messages, so no collective close is possible.
        strategy.abandon()


@pytest.mark.parametrize("native", [True, False])
def test_a_start_that_one_rank_cannot_make_ready_is_an_error_on_all(
    make_strategy: Any, job: Any, monkeypatch: Any, native: bool
) -> None:
    faulty = job.size - 1

    def no_memory(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room for the pieces")

    settings = hs.Settings(native=native)
    with make_strategy(comm=job, settings=settings) as strategy:
        start = strategy.collectives.start_reduce

        def reduce() -> None:
            start(hs.ReduceOp.SUM, [np.ones(100_000), np.ones(9)], "x").wait()

        with monkeypatch.context() as patch:
            if job.rank == faulty:
                patch.setattr(shared_memory, "_lay_out", no_memory)
                patch.setattr(reduction_plans, "load", no_memory)
            error = outcome(reduce)
        if job.size > 1 and strategy.topology.num_workers == 1:
            assert_only_one_failed(error, MemoryError, faulty, job)
        assert_usable(strategy, job)


def test_an_algorithm_that_blocks_is_not_started(make_strategy: Any, job: Any) -> None:
    with make_strategy(cross_device_ops=hs.ReductionToOneDevice()) as strategy:
        start = strategy.collectives.start_reduce
        error = outcome(start, hs.ReduceOp.SUM, np.ones(3), "start")
        assert isinstance(error, ValueError) == (job.size > 1)
        assert_usable(strategy, job)


def test_slots_smaller_than_a_page_hold_their_data_apart(
    make_strategy: Any, job: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(topology_module, "slot_bytes", lambda *_: 1024)
    with make_strategy(comm=job) as strategy:
        for size in (1, 100, 5000, 3, 700):
            for number in range(4):
                own = np.full(size, number + job.rank, np.int32)
                total = strategy.reduce("sum", own, axis=None)
                wanted = job.size * number + job.size * (job.size - 1) // 2
                np.testing.assert_array_equal(total, np.full(size, wanted))


def test_arrays_that_lie_elsewhere_in_the_same_place_keep_apart(
    make_strategy: Any, job: Any, monkeypatch: Any
) -> None:
    """Arrays of one type and length; later calls reuse the places of earlier calls."""
    monkeypatch.setattr(topology_module, "slot_bytes", lambda *_: 4096)
    total = job.size * (job.size + 1) // 2
    with make_strategy(comm=job) as strategy:
        for number in range(60):
            before = np.full((300, 420, 390)[number % 3], job.rank + 1, np.float32)
            after = np.full(200, number * (job.rank + 1), np.float64)
            first, second = strategy.reduce("sum", [before, after], axis=None)
            np.testing.assert_array_equal(first, np.full(before.size, total))
            np.testing.assert_array_equal(second, np.full(200, number * total))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_large_arrays_together(make_strategy: Any, job: Any, op: str) -> None:
    """Several arrays share a piece, and workers share segments by parts."""
    parts = 40_000
    for algorithm in (None, hs.HierarchicalCopyAllReduce()):
        with make_strategy(comm=job, cross_device_ops=algorithm) as strategy:
            own = [
                values(job.rank + number, size, np.dtype(code))
                for number, (size, code) in enumerate(
                    [(parts, "f8"), (7, "f8"), (parts + 1, "f4"), (parts, "f2")]
                )
            ]
            found = strategy.reduce(op, own, axis=None)
            for number, array in enumerate(own):
                every = [
                    values(rank + number, array.size, array.dtype)
                    for rank in range(job.size)
                ]
                wanted = expected(every, op)
                exact = op == "sum" or job.size in (1, 2, 4)
                bound = 0 if exact else 4 * np.finfo(array.dtype).eps
                np.testing.assert_allclose(found[number], wanted, rtol=bound, atol=0)


def test_closed_strategies_give_their_memory_back(make_strategy: Any, job: Any) -> None:
    def mapped() -> int:
        with open("/proc/self/maps", encoding="ascii") as file:
            return sum("/dev/shm/hpcstrat" in line for line in file)

    gc.collect()
    before = mapped()
    gc.disable()
    for _ in range(3):
        with make_strategy(comm=job) as strategy:
            strategy.reduce("sum", [np.ones(3), np.ones(100_000)], axis=None)
            strategy.reduce("sum", np.ones(3), axis=None)
    after = mapped()
    gc.enable()
    assert after == before


def test_matrices_are_arrays_and_threads_have_contexts_of_their_own(
    strategy: Any, job: Any
) -> None:
    whole = strategy.reduce("sum", np.ones((300, 300)).view(np.matrix), axis=None)
    np.testing.assert_array_equal(whole, np.full((300, 300), job.size))

    def alone() -> Any:
        collectives = Collectives(None)
        ones = np.ones(2_000_000)
        return collectives.batch_reduce(hs.ReduceOp.SUM, ones, "alone").sum()

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(alone) for _ in range(6)]
        assert [future.result() for future in found] == [2e6] * 6


def test_sums_of_one_worker_are_those_in_the_order_of_the_ranks(
    strategy: Any, job: Any
) -> None:
    # The sums are equal bit for bit, for any layout and any sizes of pieces.
    if strategy.topology.num_workers > 1:
        pytest.skip("MPI chooses the order between workers")
    rng = np.random.default_rng(3)
    for dtype in (np.float32, np.float64, np.complex64, np.float16):
        parts = (rng.standard_normal((job.size, 100_003)) * 1e3).astype(dtype)
        total = parts[0].astype(np.float32 if dtype is np.float16 else dtype)
        for part in parts[1:]:
            total = total + part
        for size in (1, 7, 5000, 100_003):
            for piece in (0, 4096, 60_000):
                options = hs.CommunicationOptions(bytes_per_pack=piece)
                own = parts[job.rank, :size].copy()
                for out in (None, own):
                    found = Collectives(
                        strategy.collectives.channel,
                        hs.SharedMemoryAllReduce(),
                        options,
                    ).batch_reduce(hs.ReduceOp.SUM, own, "test", out=out)
                    wanted = total[:size].astype(dtype)
                    exchanged(
                        job,
                        functools.partial(np.testing.assert_array_equal, found, wanted),
                    )


def test_repeated_runs_give_the_same_bits(strategy: Any, job: Any) -> None:
    rng = np.random.default_rng(job.rank)
    own = [rng.standard_normal(n).astype(np.float32) for n in (3, 70_001, 500_000)]
    first = strategy.reduce("sum", own, axis=None)
    same_bits(job, first)
    for _ in range(3):
        again = strategy.reduce("sum", own, axis=None)
        assert [a.tobytes() for a in again] == [a.tobytes() for a in first]
    strategy.reduce("sum", own, axis=None, out=own)
    assert [a.tobytes() for a in own] == [a.tobytes() for a in first]


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_half_precision_between_workers_keeps_its_bound(
    strategy: Any, job: Any, wire: str
) -> None:
    if wire == "bfloat16" and ml_dtypes is None:
        pytest.skip("no ml_dtypes")
    topology = strategy.topology
    options = hs.CommunicationOptions(wire_dtype=wire)
    collectives = Collectives(strategy.collectives.channel, None, options)
    rng = np.random.default_rng(11)
    unit = 2.0**-11 if wire == "float16" else 2.0**-8
    for dtype, exponents in ((np.float32, (-40, 30)), (np.float64, (-300, 290))):
        for size in (1, 2, 1000, 100_001):
            scale = 2.0 ** rng.integers(*exponents)
            spread = 10.0 ** rng.integers(-6, 1, (job.size, size))
            parts = rng.standard_normal((job.size, size)) * spread * scale
            parts = parts.astype(dtype)
            parts[:, size // 2 :: 97] = 0
            found = collectives.batch_reduce(hs.ReduceOp.SUM, parts[job.rank], wire)
            workers = {}
            for rank, worker in enumerate(job.allgather(topology.worker_id)):
                workers.setdefault(worker, []).append(parts[rank].astype(np.longdouble))
            sums = [np.add.reduce(ranks) for ranks in workers.values()]
            exact = np.add.reduce(sums)
            bound = np.zeros(size, np.longdouble)
            if topology.num_workers > 1:
                for term in (*sums, exact):
                    bound += unit * abs(term) + 2.0**-39 * abs(term).max()
            eps = np.finfo(dtype).eps * job.size
            bound = bound * 1.01 + eps * np.add.reduce(abs(parts))

            def check(found: Any = found, exact: Any = exact, b: Any = bound) -> None:
                assert np.all(abs(found - exact) <= b)

            exchanged(job, check)
            same_bits(job, [found])
    odd = np.array([np.inf, -np.inf, np.nan, 1.0, 0.0], np.float32)
    found = collectives.batch_reduce(hs.ReduceOp.SUM, odd, wire)
    np.testing.assert_array_equal(found, odd * np.float32(job.size))
    counts = np.arange(5) + 2**40
    found = collectives.batch_reduce(hs.ReduceOp.SUM, counts, wire)
    np.testing.assert_array_equal(found, counts * job.size)
    found = collectives.batch_reduce(hs.ReduceOp.MEAN, counts, wire)
    np.testing.assert_array_equal(found, counts)


def test_overflow_takes_no_rank_out_of_a_call(strategy: Any, job: Any) -> None:
    # A warning would be an error here, and a user may ask NumPy for errors, too.
    huge = np.full(100_000, np.finfo(np.float32).max)
    with np.errstate(all="raise"):
        for value in (huge, huge[:3], huge[:0]):
            total = strategy.reduce("sum", value, axis=None)
            assert np.all(np.isinf(total)) or job.size == 1
        wide = np.full(5, 60000, np.float16)
        assert np.all(np.isinf(strategy.reduce("sum", wide, axis=None))) or (
            job.size == 1
        )


def test_wrong_outs_are_refused_and_the_others_learn_of_it(
    strategy: Any, job: Any
) -> None:
    locked = np.empty(3)
    wrong = [np.empty(4), np.empty(3, np.float32), [0.0, 0.0, 0.0]]
    if lock(locked):
        wrong.append(locked)
    for out in wrong:
        given_out = out if job.rank == 0 else np.empty(3)
        error = outcome(strategy.reduce, "sum", np.ones(3), None, out=given_out)
        if job.rank == 0:
            assert isinstance(error, ValueError), out
            assert "as out" in str(error) or "structure" in str(error)
        else:
            assert isinstance(error, hs.ReplicaError)
        assert_usable(strategy, job)
    error = outcome(strategy.reduce, "sum", np.ones((2, 2)), 0, out=np.empty(2))
    assert isinstance(error, ValueError)
    assert_usable(strategy, job)


@pytest.mark.once
def test_memory_stays_flat_over_many_reductions(strategy: Any, job: Any) -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    own = [np.ones(n, np.float32) for n in (1, 300, 20_000)]

    def reductions(count: int) -> None:
        for _ in range(count):
            strategy.reduce("sum", own, axis=None)
        handle = strategy.collectives.start_reduce(hs.ReduceOp.SUM, own, "start")
        handle.wait()

    whole = strategy.topology.num_workers == 1 and job.size <= 2
    count = 3000 if whole else 1000
    reductions(count // 10)
    before = resident()
    reductions(count)
    grown = max(job.allgather(resident() - before))
    assert grown < 2 << 20


def test_memory_barriers_of_other_processors_change_no_result(
    make_strategy: Any, job: Any, monkeypatch: Any
) -> None:
    made = []

    def arm(mpi: Any) -> Any:
        made.append(original(mpi, "aarch64"))
        return made[-1]

    original = headers._memory_barrier
    monkeypatch.setattr(headers, "_memory_barrier", arm)
    with make_strategy(comm=job) as strategy:
        assert_usable(strategy, job)
        own = np.full(300_000, job.rank, np.int64)
        total = strategy.reduce("sum", own, axis=None)
        np.testing.assert_array_equal(total, job.size * (job.size - 1) // 2)
    assert len(made) == (job.size > 1)
    assert all(barrier is not None for _, barrier in made)


def test_a_small_memory_file_system_gives_smaller_slots(
    topology: Any, monkeypatch: Any
) -> None:
    comm, real = topology.worker_comm, os.posix_fallocate
    page = os.sysconf("SC_PAGE_SIZE")

    def reserve(handle: int, start: int, length: int) -> None:
        if comm.rank == comm.size - 1 and length > 4 * page:
            raise OSError(28, "No space left on device")
        real(handle, start, length)

    monkeypatch.setattr(segment.os, "posix_fallocate", reserve)
    made = Segment(comm, 64, 12 * page)
    assert made.part_bytes == 3 * page
    assert len(made.buffer) == page + comm.size * 3 * page
    made.close()


@pytest.mark.slow
def test_more_elements_than_an_int_counts(strategy: Any, job: Any) -> None:
    own = np.full(2**31 + 5, job.rank + 1, np.int8)
    total = strategy.reduce("sum", own, axis=None, out=own)
    assert total is own
    assert total[0] == total[-1] == job.size * (job.size + 1) // 2
    assert int(total.min()) == int(total.max())


def test_a_progress_thread_ends_reductions_while_the_program_computes(
    make_strategy: Any, topology_layout: Any, job: Any
) -> None:
    if topology_layout.replicas_per_worker is None:
        pytest.skip("between workers")
    with make_strategy(comm=job, progress_thread=True) as strategy:
        own = np.full(5000, float(job.rank))
        handles = [
            strategy.collectives.start_reduce(hs.ReduceOp.SUM, own, "start")
            for _ in range(3)
        ]
        deadline = time.monotonic() + 30
        while not all(handle._done for handle in handles):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for handle in handles:
            np.testing.assert_array_equal(
                handle.wait(), np.full(5000, job.size * (job.size - 1) / 2)
            )
        assert_usable(strategy, job)


class Foreign:
    """An array of another library in host memory, exported through DLPack."""

    def __init__(self, array: Any, *, copies: bool = False) -> None:
        self.array = array
        self.copies = copies

    def __dlpack__(self, **options: Any) -> Any:
        """Export the array, or a copy of it."""
        array = self.array.copy() if self.copies else self.array
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        """Return the DLPack device of the array."""
        return self.array.__dlpack_device__()


def test_arrays_of_other_libraries_take_results(strategy: Any, job: Any) -> None:
    total = job.size * (job.size + 1) // 2
    own = [Foreign(np.full((3, 4), job.rank + 1.0).T), Foreign(np.ones(0))]
    for out in (own, [Foreign(np.zeros((4, 3))), Foreign(np.zeros(0))]):
        assert strategy.reduce("sum", own, out=out) is out
        np.testing.assert_array_equal(out[0].array, np.full((4, 3), total))
        own[0].array[...] = job.rank + 1
    single = Foreign(np.zeros(3))
    assert strategy.reduce("sum", np.ones(3), out=single) is single
    np.testing.assert_array_equal(single.array, np.full(3, job.size))

    def started() -> None:
        context = hs.get_replica_context()
        context.start_all_reduce("mean", np.ones(3), out=single).wait()

    strategy.run(started)
    np.testing.assert_array_equal(single.array, np.ones(3))


def test_outs_that_would_not_be_written_are_refused(strategy: Any, job: Any) -> None:
    with strategy.scope():
        variable = hs.Variable(np.zeros(3), name="x")
    locked = Foreign(np.zeros(3))
    wrong = [variable, Foreign(np.zeros(3), copies=True), Foreign(np.zeros(4))]
    if lock(locked.array):
        wrong.append(locked)
    for out in wrong:
        with pytest.raises(ValueError, match="as out"):
            strategy.reduce("sum", np.ones(3), out=out)
        assert_usable(strategy, job)
    assert not variable.numpy().any()


def test_tensors_of_torch_take_results(strategy: Any, job: Any) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    model(torch.full((1, 3), job.rank + 1.0)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert strategy.reduce("sum", gradients, out=gradients) is gradients
    total = job.size * (job.size + 1) / 2
    assert model.weight.grad.tolist() == [[total] * 3] * 2
    with pytest.raises(ValueError, match=r"as out.*detach"):
        strategy.reduce("sum", gradients, out=list(model.parameters()))
    assert_usable(strategy, job)
