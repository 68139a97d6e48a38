"""Metrics on any number of replicas count each example of the whole batch once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.metrics.metric import read_totals
from tests.mpi.ranks.outcomes import assert_same_bits, assert_usable, outcome

pytestmark = pytest.mark.rule


RNG = np.random.default_rng(23)
CLASSES = 3


def cuts(size: int, case: int) -> Any:
    """Return the bounds of each replica's part of 20 rows; some parts are empty."""
    ends = np.sort(np.random.default_rng(case).integers(0, 21, size - 1))
    return np.concatenate([[0], ends, [20]])


def make_pairs() -> dict[str, Any]:
    """Return labels, predictions and the value of each example, for each metric."""
    labels = RNG.integers(0, CLASSES, 20)
    scores = RNG.random((20, CLASSES))
    hits = labels == scores.argmax(axis=1)
    one_hot = np.eye(CLASSES)[labels]
    guesses = RNG.integers(0, CLASSES, 20)
    binary, soft = RNG.integers(0, 2, 20), RNG.random(20)
    target = RNG.standard_normal((20, CLASSES))
    error = scores - target
    squares = (error**2).mean(axis=1)
    return {
        "Accuracy": (labels, guesses, labels == guesses),
        "CategoricalAccuracy": (one_hot, scores, hits),
        "SparseCategoricalAccuracy": (labels, scores, hits),
        "BinaryAccuracy": (binary, soft, binary == (soft > 0.5)),
        "MeanSquaredError": (target, scores, squares),
        "MeanAbsoluteError": (target, scores, np.abs(error).mean(axis=1)),
        "RootMeanSquaredError": (target, scores, squares),
    }


PAIRS = make_pairs()
WEIGHTS = RNG.random(20)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_those_of_one_process(
    strategy: Any, job: Any, kind: str, weighted: bool
) -> None:
    true, predicted, values = PAIRS[kind]
    weights = WEIGHTS if weighted else np.ones(20)
    with strategy.scope():
        metric = getattr(hs.metrics, kind)()
    for case in range(3):
        ends = cuts(job.size, case)
        own = slice(ends[job.rank], ends[job.rank + 1])
        columns = (true, predicted, weights) if weighted else (true, predicted)
        strategy.run(metric.update_state, args=[column[own] for column in columns])
    expected = np.average(values, weights=weights)
    if kind == "RootMeanSquaredError":
        expected = np.sqrt(expected)
    found = metric.result()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert_same_bits(job, found)
    metric.reset_state()
    assert metric.result() == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_replica_is_in_the_result_of_all(
    strategy: Any, job: Any, bad: float
) -> None:
    with strategy.scope():
        mean, total = hs.metrics.Mean(), hs.metrics.Sum()
        error = hs.metrics.RootMeanSquaredError()
        hits = hs.metrics.BinaryAccuracy()

    def step(value: Any) -> None:
        mean.update_state(value)
        total.update_state(value)
        error.update_state([0.0], [value])
        # A NaN is not above the threshold, so it counts as the other class, as in
        # TensorFlow.
        hits.update_state([1.0], [value])

    last = job.size - 1
    strategy.run(step, args=(bad if job.rank == last else 1.0,))
    np.testing.assert_equal(float(mean.result()), bad)
    np.testing.assert_equal(float(total.result()), bad)
    np.testing.assert_equal(float(error.result()), abs(bad))
    assert hits.result() == (last + (bad > 0)) / job.size
    for metric in (mean, total, error, hits):
        assert_same_bits(job, metric.result())
        metric.reset_state()
    strategy.run(step, args=(1.0,))
    assert mean.result() == hits.result() == error.result() == 1


def test_values_of_uneven_replicas(strategy: Any, job: Any) -> None:
    # Rank r has r values, so the mean of the replicas' means would be wrong, and
    # replica 0 has no values.
    own = np.arange(job.rank) + 10.0 * job.rank
    every = np.concatenate([np.arange(r) + 10.0 * r for r in range(job.size)])
    with strategy.scope():
        mean, total = hs.metrics.Mean(), hs.metrics.Sum()

    def step(values: Any) -> Any:
        for metric in (mean, total):
            metric.update_state(values)
        return mean.result(), total.result()

    alone = strategy.local_value(strategy.run(step, args=(own,)))
    assert alone == (own.mean() if own.size else 0, own.sum())
    with strategy.scope():
        found = mean.result(), total.result()
    assert found == (every.mean() if every.size else 0, every.sum())


def test_updates_do_not_communicate(strategy: Any, job: Any) -> None:
    # If updates communicated, their different numbers would be a mismatch.
    with strategy.scope():
        mean = hs.metrics.Mean()

    def step() -> None:
        for _ in range(job.rank):
            mean.update_state(2.0)
            assert mean.result() == 2

    strategy.run(step)
    assert mean.result() == (2 if job.size > 1 else 0)
    strategy.run(mean.reset_state)
    assert mean.result() == 0


def test_several_are_read_in_one_reduction(
    strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        group = hs.metrics.MetricGroup(
            [hs.metrics.Mean("loss"), hs.metrics.Sum("rows"), hs.metrics.Accuracy()]
        )

    def step() -> Any:
        group["loss"].update_state(np.full(job.rank + 1, float(job.rank)))
        group["rows"].update_state(job.rank + 1)
        group["accuracy"].update_state([job.rank], [0])
        return group.results()

    own = strategy.local_value(strategy.run(step))
    accuracy = float(job.rank == 0)
    assert own == {"loss": job.rank, "rows": job.rank + 1, "accuracy": accuracy}
    collectives, calls = strategy.collectives, []
    reduce = collectives.reduce_in_call

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return reduce(*args, **options)

    monkeypatch.setattr(collectives, "reduce_in_call", counted)
    found = group.results()
    assert len(calls) == 1
    ranks = np.arange(job.size)
    rows = job.size * (job.size + 1) // 2
    assert found["loss"] == pytest.approx((ranks * (ranks + 1)).sum() / rows, rel=1e-15)
    assert found["rows"] == rows
    assert found["accuracy"] == pytest.approx(1 / job.size, rel=1e-15)
    every = [group[name] for name in group]
    assert hs.metrics.results(every) == list(found.values())
    assert len(calls) == 2


def test_other_metrics_on_one_rank_are_a_mismatch(strategy: Any, job: Any) -> None:
    with strategy.scope():
        first, second = hs.metrics.Mean("first"), hs.metrics.Mean("second")
    error = outcome((second if job.rank == 0 else first).result)
    assert (type(error) is hs.CollectiveError) == (job.size > 1)
    assert_usable(strategy, job)


def test_updates_outside_of_run_are_refused(strategy: Any, job: Any) -> None:
    with strategy.scope():
        metric = hs.metrics.Mean()
        inside = outcome(metric.update_state, 1.0)
    outside = outcome(metric.update_state, 1.0)
    assert type(inside) is type(outside) is RuntimeError
    assert "strategy.run" in str(outside)
    assert metric.result() == 0


def test_metrics_of_two_strategies_are_read_apart(
    strategy: Any, make_strategy: Any
) -> None:
    other = make_strategy()
    metrics = []
    for owner in (strategy, other):
        with owner.scope():
            metrics.append(hs.metrics.Mean())
    error = outcome(hs.metrics.results, metrics)
    assert type(error) is ValueError
    alone = hs.metrics.Mean()
    alone.update_state(3.0)
    assert hs.metrics.results([alone, metrics[1]]) == [3, 0]
    assert read_totals([]) == []
    other.close()


def test_updates_in_the_run_of_another_strategy_are_refused(
    strategy: Any, make_strategy: Any
) -> None:
    with make_strategy() as other:
        with other.scope():
            metric = hs.metrics.Mean()
        with pytest.raises(RuntimeError, match="a second strategy object"):
            strategy.run(metric.update_state, args=(1.0,))


@pytest.fixture
def folder(job: Any) -> Iterator[Path]:
    """Yield a folder that all ranks can see, and remove it at the end."""
    name = tempfile.mkdtemp(prefix="hpcstrat-") if job.rank == 0 else None
    path = Path(job.bcast(name))
    yield path
    job.Barrier()
    if job.rank == 0:
        shutil.rmtree(path, ignore_errors=True)


def test_metrics_survive_a_restart(strategy: Any, job: Any, folder: Path) -> None:
    with strategy.scope():
        group = hs.metrics.MetricGroup({"a": hs.metrics.Mean(), "b": hs.metrics.Sum()})

    def step(value: float) -> None:
        group["a"].update_state(np.full(job.rank + 1, value))
        group["b"].update_state(value)

    strategy.run(step, args=(0.1 + job.rank,))
    before = group.results()
    manager = hs.CheckpointManager(folder, metrics=group, lonely=group["a"])
    manager.save(1)
    group.reset_state()
    manager.restore()
    found = group.results()
    for name, value in before.items():
        assert found[name] == pytest.approx(value, rel=1e-14)
    # Restored values and later updates count equally.
    strategy.run(step, args=(0.1 + job.rank,))
    assert group["a"].result() == pytest.approx(before["a"], rel=1e-14)
    assert group["b"].result() == pytest.approx(2 * before["b"], rel=1e-14)
