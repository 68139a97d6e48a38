"""Metrics of one process: the arithmetic of updates, weights and results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat import metrics

NUMBERS = st.lists(st.floats(-1e6, 1e6), max_size=12)


def value_of(metric: Any, *batches: Any) -> float:
    for batch in batches:
        metric.update_state(*batch)
    return float(metric.result())


@given(st.lists(st.tuples(NUMBERS, st.floats(0, 10)), max_size=4))
def test_mean_and_sum_are_those_of_all_weighted_values(batches: Any) -> None:
    values = np.concatenate([np.zeros(0), *[batch for batch, _ in batches]])
    weights = np.concatenate(
        [np.zeros(0), *[np.full(len(batch), weight) for batch, weight in batches]]
    )
    total, count = (values * weights).sum(), weights.sum()
    limit = 1e-12 * np.abs(values * weights).sum()
    assert value_of(metrics.Sum(), *batches) == pytest.approx(total, abs=limit)
    mean = value_of(metrics.Mean(), *batches)
    bound = limit / count if count else 0
    assert mean == pytest.approx(total / count if count else 0, rel=1e-12, abs=bound)


def test_nothing_has_the_mean_zero() -> None:
    assert metrics.Mean().result() == 0
    assert value_of(metrics.Mean(), ([],), (np.zeros((0, 3)),)) == 0
    assert value_of(metrics.Mean(), ([1.0, 2.0], [0, 0])) == 0
    assert metrics.RootMeanSquaredError().result() == 0


# The expected values follow the formulas in tf.keras's documentation.
@pytest.mark.parametrize(
    ("values", "weights", "mean", "total"),
    [
        ([1, 3, 5, 7], None, 4, 16),
        ([1, 3, 5, 7], [1, 1, 0, 0], 2, 4),
        ([1, 3, 5, 7], 0.5, 4, 8),
        ([1, 3, 5, 7], [2.0], 4, 32),
        ([1, 3], [[1], [3]], 2.5, 10),
        ([[1, 3], [5, 7]], [1, 0], 2, 4),
        ([[1, 3], [5, 7]], [[1], [0]], 2, 4),
        ([[1, 3], [5, 7]], [[1, 0]], 3, 6),
        ([[1, 3], [5, 7]], [[1, 0], [0, 1]], 4, 8),
        ([[[1, 3]], [[5, 7]]], [1, 0], 2, 4),
        ([[[1], [3]], [[5], [7]]], [[1, 0], [0, 1]], 4, 8),
        (5, None, 5, 5),
        (5, [2], 5, 10),
        (np.zeros((0, 3)), np.zeros(0), 0, 0),
        (np.zeros((2, 2, 0)), np.ones(2), 0, 0),
        ([True, False], None, 0.5, 1),
    ],
)
def test_weights_are_fitted_to_values(
    values: Any, weights: Any, mean: float, total: float
) -> None:
    assert value_of(metrics.Mean(), (values, weights)) == mean
    assert value_of(metrics.Sum(), (values, weights)) == total


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ([1, 2, 3], [1, 2]),
        ([1], [1, 2]),
        (np.ones((2, 3)), np.ones(3)),
        (np.ones((2, 3)), np.ones((3, 2))),
        (np.ones((2, 2, 2)), np.ones(3)),
        (np.ones(2), np.ones((2, 1, 1))),
        ([1j], None),
        (["a"], None),
        ([1, 2], [1j, 1j]),
    ],
)
@pytest.mark.parametrize("kind", [metrics.Mean, metrics.Sum])
def test_what_does_not_fit_changes_nothing(
    kind: Any, values: Any, weights: Any
) -> None:
    metric = kind()
    with pytest.raises(ValueError, match="expected"):
        metric.update_state(values, weights)
    assert metric.result() == 0


def test_sums_are_float64_whatever_comes_in() -> None:
    many = np.full(100_000, 0.1, np.float32)
    exact = float(np.float32(0.1))
    assert value_of(metrics.Mean(), (many,)) == pytest.approx(exact, rel=1e-12)
    # Python numbers are not rounded to float32, the library's default type for them.
    assert value_of(metrics.Mean(), ([0.1],)) == 0.1
    assert value_of(metrics.Sum(), (np.full(70_000, 1, np.float16),)) == 70_000
    assert value_of(metrics.Sum(), (np.full(300, 200, np.uint8),)) == 60_000


def test_accuracy() -> None:
    pair = ([1, 2, 3, 4], [0, 2, 3, 4])
    assert value_of(metrics.Accuracy(), pair) == 0.75
    assert value_of(metrics.Accuracy(), (*pair, [1, 1, 0, 0])) == 0.5
    assert value_of(metrics.Accuracy(), ([[1], [2]], [1, 3])) == 0.5
    assert value_of(metrics.Accuracy(), (["a", "b"], ["a", "c"])) == 0.5
    assert value_of(metrics.Accuracy(), ([1], [1.7])) == 0
    tenth = np.float64(0.1)
    assert value_of(metrics.Accuracy(), (np.float32([tenth]), np.array([tenth]))) == 1
    large = np.array([2**62])
    assert value_of(metrics.Accuracy(), (large, large + 1)) == 0


def test_binary_accuracy() -> None:
    pair = ([[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]])
    assert value_of(metrics.BinaryAccuracy(), pair) == 0.75
    assert value_of(metrics.BinaryAccuracy(), (*pair, [1, 0, 0, 1])) == 0.5
    assert value_of(metrics.BinaryAccuracy(threshold=0.7), pair) == 1
    assert value_of(metrics.BinaryAccuracy(), ([0, 1], [0.5, 0.5])) == 0.5
    # Each element of a vector counts as an example, so that batches of any size add up.
    uneven = ([1, 1, 1], [1, 1, 1]), ([0], [1])
    assert value_of(metrics.BinaryAccuracy(), *uneven) == 0.75


def test_categorical_accuracy() -> None:
    scores = [[0.1, 0.9, 0.8], [0.05, 0.95, 0]]
    one_hot = [[0, 0, 1], [0, 1, 0]]
    assert value_of(metrics.CategoricalAccuracy(), (one_hot, scores)) == 0.5
    weighted = (one_hot, scores, [0.7, 0.3])
    assert value_of(metrics.CategoricalAccuracy(), weighted) == pytest.approx(0.3)
    for labels in ([2, 1], [[2], [1]]):
        found = value_of(metrics.SparseCategoricalAccuracy(), (labels, scores))
        assert found == 0.5
    nothing = np.zeros((0, 3))
    assert value_of(metrics.CategoricalAccuracy(), (nothing, nothing)) == 0
    labels = np.zeros(0, np.int64)
    assert value_of(metrics.SparseCategoricalAccuracy(), (labels, nothing)) == 0


def test_errors_of_regression() -> None:
    pair = ([[0, 1], [0, 0]], [[1, 1], [0, 0]])
    weighted = (*pair, [1, 0])
    assert value_of(metrics.MeanSquaredError(), pair) == 0.25
    assert value_of(metrics.MeanSquaredError(), weighted) == 0.5
    assert value_of(metrics.MeanAbsoluteError(), pair) == 0.25
    assert value_of(metrics.MeanAbsoluteError(), weighted) == 0.5
    assert value_of(metrics.RootMeanSquaredError(), pair) == 0.5
    root = value_of(metrics.RootMeanSquaredError(), weighted)
    assert root == pytest.approx(np.sqrt(0.5), rel=1e-15)
    column = (np.array([[1.0], [2.0]]), np.array([1.0, 4.0]))
    assert value_of(metrics.MeanSquaredError(), column) == 2


@pytest.mark.parametrize(
    ("metric", "true", "predicted"),
    [
        (metrics.Accuracy(), [1, 2], [1, 2, 3]),
        (metrics.MeanSquaredError(), np.ones((2, 3)), np.ones(3)),
        (metrics.BinaryAccuracy(), np.ones(2), np.ones((2, 2))),
        (metrics.CategoricalAccuracy(), [0, 1], np.ones((2, 3))),
        (metrics.CategoricalAccuracy(), 1, 1),
        (metrics.SparseCategoricalAccuracy(), [0, 1, 2], np.ones((2, 3))),
        (metrics.SparseCategoricalAccuracy(), 0, 1.0),
    ],
    ids=str,
)
def test_labels_and_predictions_must_match(
    metric: Any, true: Any, predicted: Any
) -> None:
    with pytest.raises(ValueError, match="expected"):
        metric.update_state(true, predicted)
    assert metric.result() == 0


def test_a_function_of_ones_own() -> None:
    metric = metrics.MeanMetricWrapper(lambda y, p: np.maximum(0, 1 - y * p), "hinge")
    assert value_of(metric, (np.array([1, -1]), np.array([0.5, -2]))) == 0.25
    assert metric.name == "hinge"


def test_results_have_the_dtype_asked_for() -> None:
    assert metrics.Mean().result().dtype == np.float64
    metric = metrics.Mean("loss", np.float32)
    assert value_of(metric, ([0.1],)) == np.float32(0.1)
    assert metric.result().dtype == metric.dtype == np.float32


def test_reset_forgets_everything() -> None:
    metric = metrics.Mean()
    metric.update_state([1, 2])
    metric.reset_state()
    assert value_of(metric, ([5],)) == 5
    assert "Mean 'mean' total=5.0, count=1.0" in repr(metric)


def test_results_keep_the_structure() -> None:
    first, second = metrics.Mean("first"), metrics.Sum("second")
    first.update_state([1, 2])
    second.update_state([1, 2])
    assert metrics.results([first, second]) == [1.5, 3]
    assert metrics.results({"a": second, "b": first}) == {"a": 3, "b": 1.5}
    assert metrics.results([]) == []


def test_a_group_reads_resets_and_saves_its_metrics(tmp_path: Any) -> None:
    group = metrics.MetricGroup([metrics.Mean("loss"), metrics.Accuracy()])
    assert list(group) == ["loss", "accuracy"]
    assert len(group) == 2
    group["loss"].update_state([1, 2])
    group["accuracy"].update_state([1, 2], [1, 3])
    manager = hs.CheckpointManager(tmp_path, metrics=group)
    manager.save(1)
    group.reset_state()
    assert group.results() == {"loss": 0, "accuracy": 0}
    assert manager.restore() == 1
    assert group.results() == {"loss": 1.5, "accuracy": 0.5}
    with pytest.raises(ValueError, match="names of their own"):
        metrics.MetricGroup([metrics.Mean(), metrics.Mean()])


def test_one_device_needs_no_replica_context() -> None:
    strategy = hs.OneDeviceStrategy()
    with strategy.scope():
        metric = metrics.Mean()
        metric.update_state([1.0])
    strategy.run(metric.update_state, args=(np.array([3.0]),))
    assert metric.result() == 2
    with strategy.scope():
        assert metric.result() == 2


def test_a_metric_without_totals_has_a_result() -> None:
    class Constant(hs.metrics.Metric):
        def __init__(self) -> None:
            super().__init__("constant", np.float64, ())

        def result_of(self, totals: Any) -> Any:
            return 5.0 + len(totals)

    assert Constant().result() == 5.0
