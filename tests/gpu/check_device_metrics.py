"""Metrics and normalization of values on GPUs equal the host's, without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest

import hpcstrat as hs
from tests.gpu.held import counted_waits, on_host

pytestmark = pytest.mark.gpu

_PAIRS = (
    "Accuracy",
    "BinaryAccuracy",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "RootMeanSquaredError",
)


@pytest.fixture(params=["auto", "gpu"])
def each(request: pytest.FixtureRequest, make_strategy: Any) -> Iterator[Any]:
    """Yield a strategy that makes variables on the host, or on the GPU."""
    settings = hs.Settings(device=request.param, share_gpus=True)
    with make_strategy(settings=settings) as made:
        yield made


def _metrics(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        found = {name: getattr(hs.metrics, name)(name) for name in _PAIRS}
        found["Mean"] = hs.metrics.Mean("Mean")
        found["Sum"] = hs.metrics.Sum("Sum")
        found["Categorical"] = hs.metrics.CategoricalAccuracy("Categorical")
        found["Sparse"] = hs.metrics.SparseCategoricalAccuracy("Sparse")
        found["Own"] = hs.metrics.MeanMetricWrapper(lambda y, p: (y - p) ** 4, "Own")
    return found


def _update(metrics: dict[str, Any], rank: int, step: int, put: Any) -> None:
    rng = np.random.default_rng([rank, step])
    true = rng.integers(0, 2, (4 + rank, 3)).astype(np.float32)
    predicted = rng.random((4 + rank, 3), np.float32).round(1)
    weights = rng.random(4 + rank)
    y, p, w = put(true), put(predicted), put(weights)
    for name in (*_PAIRS, "Own"):
        metrics[name].update_state(y, p, sample_weight=w if step % 2 else None)
    for name in ("Mean", "Sum"):
        metrics[name].update_state(p, sample_weight=w if step % 2 else None)
    metrics["Categorical"].update_state(y, p, w)
    # Labels and predictions are arrays of different libraries.
    labels = true.argmax(axis=1)
    metrics["Sparse"].update_state(put(labels), p)


def test_results_are_those_of_host_values(each: Any) -> None:
    there, here = _metrics(each), _metrics(each)

    def run(metrics: dict[str, Any], put: Any) -> None:
        for step in range(3):
            _update(metrics, each.replica_id, step, put)

    each.run(run, args=(there, cupy.asarray))
    each.run(run, args=(here, np.asarray))
    found, wanted = hs.metrics.results(there), hs.metrics.results(here)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name
    for metric in there.values():
        metric.reset_state()
        assert metric.result() == 0


def test_updates_do_not_wait(each: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = _metrics(each)

    def step(values: Any) -> None:
        with counted_waits(monkeypatch) as waits:
            for number in range(3):
                for name in (*_PAIRS, "Own"):
                    metrics[name].update_state(values[0], values[1])
                metrics["Mean"].update_state(values[number])
                metrics["Categorical"].update_state(values[0], values[1])
        found.append(waits.here)

    found: list[Any] = []
    rng = np.random.default_rng(2)
    each.run(step, args=([cupy.asarray(rng.random((4, 3))) for _ in range(3)],))
    assert [name for name in found[0] if name != "pageable"] == []


def test_what_is_on_the_gpu_is_saved_with_the_rest(
    each: Any, folder: Path, job: Any
) -> None:
    metrics = _metrics(each)
    nested = {"metrics": {"mean": metrics["Mean"]}}
    keeper = hs.CheckpointManager(folder, nested=nested, sum=metrics["Sum"])
    each.run(_update, args=(metrics, each.replica_id, 0, cupy.asarray))
    before = metrics["Mean"], metrics["Sum"]
    keeper.save(1, asynchronous=True)
    each.run(_update, args=(metrics, each.replica_id, 1, cupy.asarray))
    wanted = _metrics(each)
    each.run(_update, args=(wanted, each.replica_id, 0, np.asarray))
    assert keeper.restore() == 1
    for metric in before:
        value = wanted[metric.name].result()
        assert metric.result() == pytest.approx(value, rel=1e-6)
    keeper.close()


@pytest.mark.parametrize("axis", [-1, 1])
def test_normalization_is_that_of_host_values(each: Any, axis: int) -> None:
    with each.scope():
        there, here = (
            hs.layers.SyncBatchNormalization(5, axis, name=name)
            for name in ("there", "here")
        )
    rng = np.random.default_rng(each.replica_id)
    shape = (3 + each.replica_id, 5, 5)
    x, dy = rng.standard_normal((2, *shape)).astype(np.float32)

    def step(layer: Any, put: Any) -> list[Any]:
        y = layer.forward(put(x), training=True)
        gradients = layer.backward(put(dy))
        return [on_host(each_) for each_ in (y, *gradients, layer.forward(put(x)))]

    found, wanted = [], []
    each.run(lambda: found.extend(step(there, cupy.asarray)))
    each.run(lambda: wanted.extend(step(here, np.asarray)))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for name, variable in there.checkpoint_variables().items():
        other = here.checkpoint_variables()[name].component
        np.testing.assert_allclose(
            on_host(variable.component), on_host(other), rtol=1e-6
        )


def test_moments_of_no_values(each: Any) -> None:
    def step() -> None:
        x = cupy.zeros((0, 4), np.float32)
        mean, variance, count = hs.layers.sync_batch_moments(x)
        assert isinstance(mean, cupy.ndarray)
        assert float(count) == 0
        assert not on_host(mean).any()
        assert not on_host(variance).any()
        gradient = hs.layers.sync_batch_moments_backward(
            x, (mean, variance, count), np.ones(4), np.ones(4)
        )
        assert gradient.shape == (0, 4)

    each.run(step)
