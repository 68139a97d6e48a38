"""Advice in error texts of optimizers, which leads to the right result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import outcome

pytestmark = pytest.mark.rule


# The sum of all replicas' parts.
TOTAL = np.array([1.0, -2.0, 0.5])


def part_of(job: Any) -> Any:
    """Return this replica's part of the total."""
    weights = np.arange(1, job.size + 1)
    return TOTAL * weights[job.rank] / weights.sum()


def refusal(job: Any, function: Callable[[], Any], *texts: str) -> None:
    """Assert that several replicas get an error with some words of advice."""
    error = outcome(function)
    if job.size == 1:
        return
    assert isinstance(error, (ValueError, TypeError, NotImplementedError)), error
    for text in texts:
        assert text in str(error)


def variable(strategy: Any, **options: Any) -> Any:
    with strategy.scope():
        return hs.Variable(np.zeros(3), name="w", **options)


def reduced(part: Any) -> Any:
    return hs.get_replica_context().all_reduce("sum", part)


METHODS = {"assign": 1, "assign_add": 1, "assign_sub": -1}


@pytest.mark.parametrize("method", METHODS)
def test_updates_in_replica_context(strategy: Any, job: Any, method: str) -> None:
    part = part_of(job)

    def update(w: Any, value: Callable[[Any], Any]) -> None:
        strategy.run(lambda: getattr(w, method)(value(part)))

    texts = "'only_first_replica' for values that are equal", "'sum'"
    refusal(job, lambda: update(variable(strategy), reduced), *texts)
    equal = variable(strategy, aggregation="only_first_replica")
    update(equal, reduced)
    np.testing.assert_allclose(equal, METHODS[method] * TOTAL)
    for kind, factor in (("sum", 1), ("mean", job.size)):
        combined = variable(strategy, aggregation=kind)
        update(combined, lambda own, factor=factor: own * factor)
        np.testing.assert_allclose(combined, METHODS[method] * TOTAL)


def test_scattered_updates_in_replica_context(strategy: Any, job: Any) -> None:
    rows = hs.IndexedSlices(part_of(job), [0, 1, 2], (3,))
    whole = hs.IndexedSlices(TOTAL, [0, 1, 2], (3,))

    def update(w: Any, method: str, given: Any) -> None:
        strategy.run(lambda: getattr(w, method)(given))

    texts = "'only_first_replica' for values that are equal", "'sum'"
    refusal(job, lambda: update(variable(strategy), "scatter_add", whole), *texts)
    for kind, given in (("only_first_replica", whole), ("sum", rows)):
        w = variable(strategy, aggregation=kind)
        update(w, "scatter_sub", given)
        np.testing.assert_allclose(w, -TOTAL)
    # The result is the largest value of all replicas' rows.
    w = variable(strategy, aggregation="sum")
    text = "give all rows on replica 0"
    error = outcome(update, w, "scatter_max", rows)
    assert isinstance(error, NotImplementedError)
    assert text in str(error)
    w = variable(strategy, aggregation="only_first_replica")

    def largest() -> None:
        parts = hs.get_replica_context().all_gather(rows.values[None], 0)
        indices = np.tile(rows.indices, job.size)
        w.scatter_max(hs.IndexedSlices(parts.reshape(-1), indices, (3,)))

    strategy.run(largest)
    parts = np.array(job.allgather(part_of(job)))
    np.testing.assert_allclose(w, np.maximum(parts.max(axis=0), 0))


def test_what_run_returned_is_one_value(strategy: Any, job: Any) -> None:
    w = variable(strategy)
    parts = strategy.run(part_of, args=(job,))
    sums = strategy.run(reduced, args=(parts,))
    texts = "combine its parts with strategy.reduce", "strategy.local_value"
    refusal(job, lambda: w.assign_sub(sums), *texts)
    refusal(job, lambda: strategy.extended.update(w, _subtract, (sums,)), *texts)
    w.assign(np.zeros(3))
    w.assign_sub(strategy.reduce("sum", parts))
    np.testing.assert_allclose(w, -TOTAL)
    w.assign_sub(strategy.local_value(sums))
    np.testing.assert_allclose(w, -2 * TOTAL)
    strategy.extended.update(w, _subtract, (strategy.local_value(sums),))
    np.testing.assert_allclose(w, -3 * TOTAL)
    refusal(job, lambda: sums + 1.0, "strategy.local_value")
    refusal(job, lambda: np.asarray(sums), "strategy.local_value")
    np.testing.assert_allclose(strategy.local_value(sums) + 1, TOTAL + 1)


def _subtract(w: Any, value: Any) -> None:
    w.assign_sub(value)


def test_totals_in_cross_replica_context(strategy: Any, job: Any) -> None:
    def made(kind: str) -> Any:
        w = variable(strategy, synchronization="on_read", aggregation=kind)
        if kind == "none":
            strategy.run(lambda: w.assign(np.zeros(3)))
        else:
            w.assign(np.zeros(3))
        return w

    w = made("sum")
    error = outcome(w.assign_add, TOTAL)
    assert isinstance(error, ValueError)
    assert "assign the new sum, or update each replica's part inside" in str(error)
    w.assign(w.value() + TOTAL)
    np.testing.assert_allclose(w.value(), TOTAL)
    strategy.run(lambda: w.assign_add(part_of(job)))
    np.testing.assert_allclose(w.value(), 2 * TOTAL)
    w = made("none")
    for error in (outcome(w.assign, TOTAL), outcome(w.value)):
        assert isinstance(error, ValueError)
        assert "part inside strategy.run" in str(error)
    strategy.run(lambda: w.assign(part_of(job)))
    own = strategy.local_value(strategy.run(lambda: w.value().copy()))
    np.testing.assert_array_equal(own, part_of(job))


def test_types_that_would_change_the_value(strategy: Any) -> None:
    with strategy.scope():
        count = hs.Variable(np.zeros(3, np.int64), name="count")
        real = hs.Variable(np.zeros(3), name="real")
    advice = {
        "create the variable with a floating dtype, or round": (count, TOTAL),
        "real part": (real, TOTAL * 1j),
        "cast the value with astype": (real, TOTAL.astype(np.float32)),
    }
    for text, (w, value) in advice.items():
        error = outcome(w.assign, value)
        assert isinstance(error, ValueError)
        assert text in str(error)


def test_gradients(strategy: Any, job: Any) -> None:
    part = part_of(job)

    def step(optimizer: Any, w: Any) -> None:
        strategy.run(lambda: optimizer.apply_gradients([(part, w)]))

    plain = hs.Variable(np.zeros(3), name="plain")
    made = outcome(step, hs.optimizers.SGD(1.0), plain)
    if job.size > 1:
        assert isinstance(made, ValueError)
        assert "create it in the strategy's scope" in str(made)
    w = variable(strategy)
    with strategy.scope():
        step(hs.optimizers.SGD(1.0), w)
    np.testing.assert_allclose(w, -TOTAL)
    # A mean over the batch is not a loss for each example.
    losses = np.array(job.allgather(part)).sum(axis=1)
    size = len(losses)
    mean = strategy.run(
        lambda: hs.compute_average_loss(losses[job.rank :: job.size], None, size)
    )
    error = outcome(strategy.run, lambda: hs.compute_average_loss(losses.mean()))
    assert "leave out the mean over the batch" in str(error)
    np.testing.assert_allclose(strategy.reduce("sum", mean), losses.mean())


def test_two_strategies_are_told_apart(strategy: Any, make_strategy: Any) -> None:
    """The error must say that there are two strategies, although reprs are equal."""
    with make_strategy() as second:
        w = variable(strategy)
        with strategy.scope():
            optimizer = hs.optimizers.SGD(1.0)
        gradient = np.zeros(3)

        def step() -> None:
            optimizer.apply_gradients([(gradient, w)])

        def mixed_scopes() -> None:
            with second.scope():
                strategy.reduce("sum", 1.0)

        for mixed in (
            lambda: second.run(step),
            lambda: second.run(w.read_value),
            mixed_scopes,
        ):
            with pytest.raises(RuntimeError, match="a second strategy object"):
                mixed()
