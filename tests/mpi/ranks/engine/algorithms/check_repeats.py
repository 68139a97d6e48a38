"""Repeated reductions of the same array, which reuse the plan of the first call."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.observe.timeline.totals import totals
from tests.mpi.ranks.effort import SHORT
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = [pytest.mark.rule, pytest.mark.algorithm]

DTYPES = ["f4", "f8", "f2", "i4", "i8", "i2", "c16"]
SHAPES = [(), (1,), (3, 5), (0,), (700,)]


def watched(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that says for each later call whether the kernel made it alone."""
    found: list[bool] = []
    real = strategy.collectives.repeat

    def noting(*args: Any) -> Any:
        result = real(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(strategy.collectives, "repeat", noting)
    return found


def has_kernel(strategy: Any) -> bool:
    """Return whether the kernel adds the values of a strategy's small sums."""
    kernel, topology = (
        getattr(strategy.collectives.channel, "kernel", None),
        strategy.topology,
    )
    added_by_kernel = topology.num_workers == 1 or topology.worker_comm.size == 1
    return kernel is not None and added_by_kernel


def reduced(strategy: Any, how: str, op: Any, own: Any, out: Any = None) -> Any:
    """Reduce an array, in cross-replica or in replica context."""
    if how == "reduce":
        return strategy.reduce(op, own, axis=None, out=out)
    outcome = strategy.run(
        lambda: hs.get_replica_context().all_reduce(op, own, out=out)
    )
    return strategy.local_value(outcome)


def drawn(job: Any, shape: Any, dtype: str, seed: int) -> list[Any]:
    """Return small integers for each rank, whose sums are exact in any type."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-9, 9, (job.size, *shape))
    return [np.asarray(part).astype(dtype) for part in numbers]


@pytest.mark.parametrize(
    ("op", "how"),
    [
        ("sum", "reduce"),
        ("Mean", "all_reduce"),
        *[
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                *[(op, "reduce") for op in ("Mean", hs.ReduceOp.MEAN)],
                *[(op, "all_reduce") for op in ("sum", hs.ReduceOp.MEAN)],
            )
        ],
    ],
)
def test_results_are_right_each_time(
    strategy: Any, job: Any, op: Any, how: str
) -> None:
    mean = hs.ReduceOp.parse(op) is hs.ReduceOp.MEAN
    for dtype in DTYPES:
        for shape in SHAPES:
            # Reduce the values of each seed several times.
            for seed in range(2 if SHORT else 3):
                parts = drawn(job, shape, dtype, seed)
                whole = np.sum(parts, axis=0, dtype=np.result_type(dtype, "i8"))
                expected = whole / job.size if mean else whole
                own, before = parts[job.rank], parts[job.rank].copy()
                # Write results into a new array, into a given one, and into a strided
                # one.
                kind = reduced(strategy, how, op, own).dtype
                wide = np.zeros((*shape, 2), kind)
                for out in (None, np.empty(shape, kind), wide[..., 0]):
                    total = reduced(strategy, how, op, own, out)
                    assert out is None or total is out
                    assert total.dtype == kind
                    rtol = 2e-3 if dtype == "f2" else 1e-6
                    np.testing.assert_allclose(total, expected, rtol)
                np.testing.assert_array_equal(own, before)
                turned = reduced(strategy, how, op, own.T)
                np.testing.assert_array_equal(turned, total.T)
                if kind == own.dtype:
                    assert reduced(strategy, how, op, own, own) is own
                    np.testing.assert_array_equal(own, total)


def test_the_kernel_makes_repeated_calls_alone(
    strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated, own = watched(strategy, monkeypatch), np.ones(5)
    alone = has_kernel(strategy)

    def make_calls() -> list[bool]:
        del repeated[:]
        strategy.reduce("sum", own, axis=None, out=np.empty(5))
        strategy.reduce("".join(["s", "um"]), own, axis=None)
        strategy.reduce("SUM", own, axis=None)
        strategy.reduce(hs.ReduceOp.SUM, [own, own[:3]], axis=None)
        return list(repeated)

    # The first calls make the plans.
    make_calls()
    assert make_calls() == [alone] * 4
    # The kernel alone makes no call whose result is strided.
    strategy.reduce("sum", own, axis=None, out=np.empty(10)[::2])
    assert not repeated[-1]
    started = strategy.collectives.start_reduce(hs.ReduceOp.SUM, own, "reduce")
    assert (strategy.reduce("sum", own, axis=None) == job.size).all()
    # The usual code path ended the started reduction before it made this call.
    assert not repeated[-1]
    assert (started.wait() == job.size).all()
    assert make_calls() == [alone] * 4
    # A list with one array is another call than the array alone.
    [total] = strategy.reduce("sum", [own], axis=None)
    assert not repeated[-1]
    np.testing.assert_array_equal(total, job.size)


@pytest.mark.parametrize("change", ["notice", "elsewhere", "timeline"])
def test_what_is_out_of_the_ordinary_is_looked_at(
    strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    channel, own = strategy.collectives.channel, np.ones(3)
    if not all(job.allgather(has_kernel(strategy))):
        pytest.skip("no kernel makes these calls on all ranks")
    repeated = watched(strategy, monkeypatch)
    for _ in range(2):
        strategy.reduce("sum", own, axis=None)
    assert repeated[-1]
    # Change the state between the check and the call, like a signal handler.
    assert channel.may_repeat()
    if change == "notice":
        channel.notice = "planted"
    elif change == "elsewhere":
        channel.elsewhere = lambda: None
    with totals() if change == "timeline" else contextlib.nullcontext() as found:
        strategy.reduce("sum", own, axis=None)
    assert not repeated[-1]
    if change == "notice":
        assert channel.noticed == dict.fromkeys(range(job.size), "planted")
        # Clear the notices, because other tests use the same channel.
        channel.noticed = {}
    elif change == "timeline":
        assert found.num_calls == 1
    channel.elsewhere = None
    for _ in range(2):
        strategy.reduce("sum", own, axis=None)
    assert repeated[-1]


def test_a_notice_before_a_late_rank_has_read_the_values_loses_none(
    strategy: Any, job: Any
) -> None:
    """All ranks agree after a notice; the next sum must not reuse the memory."""
    channel, last = strategy.collectives.channel, job.size - 1
    if channel is None:
        pytest.skip("one replica makes no calls")
    for step in range(30):
        # In each step, one rank sends a notice, and another rank is late.
        if strategy.replica_id == step % job.size:
            channel.notice = "planted"
        if strategy.replica_id == (step + 1) % job.size:
            time.sleep(1e-4)
        mine = strategy.replica_id + 10 * step
        first = strategy.reduce("sum", np.float64(mine), axis=None)
        second = strategy.reduce("sum", np.ones(3), axis=None)
        assert first == last * job.size / 2 + 10 * step * job.size
        assert (second == job.size).all()
    # Clear the notices, because other tests use the same channel.
    channel.noticed = {}


def test_results_that_lie_over_other_values_are_right(strategy: Any, job: Any) -> None:
    for _ in range(3):
        memory = np.arange(600.0) * (job.rank + 1)
        wanted = np.arange(599.0) * job.size * (job.size + 1) / 2
        found = strategy.reduce("sum", memory[:-1], axis=None, out=memory[1:])
        np.testing.assert_array_equal(found, wanted)


def test_an_operation_that_is_none_is_an_error_on_all(strategy: Any, job: Any) -> None:
    own = np.ones(3)
    for _ in range(2):
        strategy.reduce("sum", own, axis=None)
    for op in ("product", ["sum"], None):
        faulty = job.size - 1
        error = outcome(
            strategy.reduce, op if job.rank == faulty else "sum", own, axis=None
        )
        if job.rank == faulty:
            assert isinstance(error, (TypeError, ValueError))
        else:
            assert isinstance(error, hs.ReplicaError)
        assert_usable(strategy, job)


@pytest.mark.parametrize("odd", [0, -1])
def test_another_call_is_an_error_on_all(strategy: Any, job: Any, odd: int) -> None:
    if job.size == 1:
        pytest.skip("alone")
    for size in (2, 3, 2, 3):
        strategy.reduce("sum", np.ones(size), axis=None)
    own = np.full(2 if job.rank == odd % job.size else 3, 1.0)
    error = outcome(strategy.reduce, "sum", own, axis=None, out=own)
    assert isinstance(error, hs.CollectiveError)
    assert (own == 1).all()
    assert "float64[2]" in str(error)
    assert "float64[3]" in str(error)
    assert_usable(strategy, job)
