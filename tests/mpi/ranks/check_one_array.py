"""One small array, reduced again and again: after the first time by the short way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.reduction.one_array import OneArray
from tests.mpi.ranks.outcomes import assert_usable, outcome

DTYPES = ["f4", "f8", "f2", "i4", "i8", "i2", "c16"]
SHAPES = [(), (1,), (3, 5), (0,), (700,)]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return for each call whether it went the short way."""
    found: list[bool] = []
    real = OneArray.__call__

    def noting(self: OneArray, array: Any, out: Any = None) -> Any:
        result = real(self, array, out)
        found.append(result is not None)
        return result

    monkeypatch.setattr(OneArray, "__call__", noting)
    return found


def reduced(strategy: Any, how: str, op: Any, own: Any, out: Any = None) -> Any:
    """Reduce an array in cross-replica context, or in that of a replica."""
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


@pytest.mark.parametrize("how", ["reduce", "all_reduce"])
@pytest.mark.parametrize("op", ["sum", hs.ReduceOp.MEAN, "Mean"])
def test_results_are_right_each_time(
    strategy: Any, job: Any, op: Any, how: str
) -> None:
    mean = hs.ReduceOp.parse(op) is hs.ReduceOp.MEAN
    for dtype in DTYPES:
        for shape in SHAPES:
            for seed in range(3):
                parts = drawn(job, shape, dtype, seed)
                whole = np.sum(parts, axis=0, dtype=np.result_type(dtype, "i8"))
                expected = whole / job.size if mean else whole
                own, before = parts[job.rank], parts[job.rank].copy()
                # Twice what has a place of its own, and in any memory order.
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


def test_it_is_taken_where_it_can_be(
    strategy: Any, job: Any, taken: list[bool]
) -> None:
    if job.size == 1:
        pytest.skip("a single replica moves nothing")
    topology, own = strategy.topology, np.ones(5)
    if topology.num_workers > 1 and topology.num_workers < topology.num_replicas:
        pytest.skip("workers of several replicas gather first")
    for _ in range(3):
        strategy.reduce("sum", own, axis=None, out=np.empty(5))
        strategy.reduce("SUM", own, axis=None)
    assert len(taken) >= 5
    assert all(taken)
    del taken[:]
    # Not into every other place, nor other values, nor while another is under way.
    strategy.reduce("sum", own, axis=None, out=np.empty(10)[::2])
    strategy.reduce("sum", [own], axis=None)
    assert not any(taken)
    started = strategy.collectives.start_reduce(hs.ReduceOp.SUM, own, "reduce")
    assert (strategy.reduce("sum", own, axis=None) == job.size).all()
    assert (started.wait() == job.size).all()


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
