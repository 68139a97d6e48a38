"""`np.seterr` affects the program's arithmetic, but not the library's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import layers, metrics, optimizers

RULES: dict[str, Any] = {
    "sgd": lambda **o: optimizers.SGD(0.5, **o),
    "nesterov": lambda **o: optimizers.SGD(0.5, 0.9, nesterov=True, **o),
    "adagrad": lambda **o: optimizers.Adagrad(0.5, **o),
    "adam": lambda **o: optimizers.Adam(0.5, **o),
    "adamw": lambda **o: optimizers.AdamW(0.5, **o),
    "lamb": lambda **o: optimizers.LAMB(0.5, **o),
}
# Values that overflow or underflow, zero, infinities and NaN.
EXTREME = [1e300, -1e300, 5e-324, 1e-200, 0.0, np.inf, -np.inf, np.nan]


@pytest.fixture(autouse=True)
def raising() -> Any:
    """Let NumPy raise all floating-point errors."""
    with np.errstate(all="raise"):
        yield
        assert set(np.geterr().values()) == {"raise"}
        with pytest.raises(FloatingPointError):
            np.float64(1e300) * np.float64(1e300)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["e", "f", "d"])
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_global_norm": 0.1, "accumulate_steps": 2, "aggregation": "mean"}],
    ids=str,
)
def test_optimizers(rule: str, dtype: str, options: Any) -> None:
    with np.errstate(all="ignore"):
        numbers = np.array(EXTREME).astype(dtype)
    variables = [hs.Variable(numbers, name="a"), hs.Variable(numbers[:, None])]
    optimizer = RULES[rule](**options)
    for number in range(4):
        rows = np.array(EXTREME)[:, None], np.arange(8) % (1 + number)
        sparse = hs.IndexedSlices(*rows, (8, 1))
        # Pass float64 gradients, which are cast to the variable's type.
        pairs = [(np.roll(EXTREME, number), variables[0]), (sparse, variables[1])]
        optimizer.apply_gradients(pairs)
    assert int(optimizer.iterations) == 4 // options.get("accumulate_steps", 1)


def test_a_schedule_has_the_programs_settings() -> None:
    def rate(step: int) -> float:
        return float(np.exp(np.float64(1000.0 * step)))

    variable = hs.Variable(np.zeros(1))
    optimizer = optimizers.SGD(rate)
    optimizer.apply_gradients([(np.ones(1), variable)])
    with pytest.raises(FloatingPointError, match="overflow"):
        optimizer.apply_gradients([(np.ones(1), variable)])


def test_losses() -> None:
    for dtype in "efd":
        with np.errstate(all="ignore"):
            numbers = np.array(EXTREME).astype(dtype)
        hs.compute_average_loss(numbers, numbers, 3)
        hs.scale_regularization_loss(numbers)


@pytest.mark.parametrize("name", metrics.__all__)
def test_metrics(name: str) -> None:
    kind = getattr(metrics, name)
    is_metric = isinstance(kind, type) and issubclass(kind, metrics.Metric)
    if not is_metric or name in ("Metric", "MeanMetricWrapper"):
        pytest.skip("no metric with a rule of its own")
    metric = kind()
    wide = np.array([EXTREME, EXTREME[::-1]])
    with np.errstate(all="ignore"):
        narrow = wide.astype("f")
    weights = np.array([1e300, 5e-324])
    if name in ("Mean", "Sum"):
        for values in (wide, narrow, wide.astype(np.longdouble)):
            metric.update_state(values, weights)
    elif name == "SparseCategoricalAccuracy":
        metric.update_state(np.array([1, 2]), wide, weights)
    else:
        metric.update_state(narrow, wide[::-1], weights)
        metric.update_state(np.zeros((1, 8)), wide[:1])
    metric.result()
    metric.reset_state()


def test_a_metrics_function_has_the_programs_settings() -> None:
    metric = metrics.MeanMetricWrapper(lambda true, predicted: np.log(predicted))
    with pytest.raises(FloatingPointError, match="divide"):
        metric.update_state(np.ones(1), np.zeros(1))


def test_layers() -> None:
    layer = layers.SyncBatchNormalization(2)
    x = np.array(EXTREME).reshape(4, 2)
    strategy = hs.OneDeviceStrategy()

    def step() -> None:
        layer.forward(x, training=True)
        layer.backward(x)
        layer.forward(x[:0], training=True)
        layer.forward(x, training=False)

    strategy.run(step)
