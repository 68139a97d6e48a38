"""`numpy.seterr` on one rank changes no result, and makes no rank leave a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_same_bits, assert_usable

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

TYPES: list[Any] = [*"blefdF"]
if ml_dtypes is not None:
    TYPES.append(ml_dtypes.bfloat16)
TYPES += [pytest.param(code, marks=pytest.mark.slow) for code in "BhHiQgDG"]

pytestmark = [
    pytest.mark.rule,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def extremes(dtype: Any, rank: int) -> dict[str, Any]:
    """Return arrays whose sums, means or conversions set floating-point flags."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return {"largest": np.full(3, np.iinfo(dtype).max, dtype)}
    info = ml_dtypes.finfo(dtype) if dtype.name == "bfloat16" else np.finfo(dtype)
    return {
        "overflow": np.full(3, info.max, dtype),
        "underflow": np.full(3, info.smallest_subnormal, dtype),
        "invalid between ranks": np.full(3, np.inf if rank else -np.inf, dtype),
        "invalid within": np.array([np.inf, -np.inf, 1], dtype),
        "nan": np.full(3, np.nan, dtype),
    }


def reductions(strategy: Any, op: str) -> dict[str, Callable[[Any], Any]]:
    """Return functions that reduce a value, or move a reduced value, in all ways."""
    half = hs.CommunicationOptions(wire_dtype="float16")

    def all_reduce(value: Any, *options: Any) -> Any:
        return hs.get_replica_context().all_reduce(op, value, *options)

    def start(value: Any) -> Any:
        return hs.get_replica_context().start_all_reduce(op, value).wait()

    def run(step: Callable[..., Any], *args: Any) -> Any:
        return strategy.local_value(strategy.run(step, args))

    return {
        "small": lambda v: strategy.reduce(op, v),
        "several": lambda v: strategy.reduce(op, [v, np.tile(v, 7), np.float32(1)]),
        "large": lambda v: strategy.reduce(op, np.tile(v, 30_000))[:5],
        "started": lambda v: run(start, v),
        "half between workers": lambda v: run(all_reduce, np.tile(v, 9), half),
        "rows": lambda v: (
            strategy.reduce(op, hs.IndexedSlices(v, np.arange(len(v)), v.shape)).values
        ),
    }


def reductions_over_axes(strategy: Any, op: str) -> dict[str, Callable[[Any], Any]]:
    """Return functions that first sum a value over axes, then between the ranks."""
    return {
        "axis": lambda v: strategy.reduce(op, v, axis=0),
        "axes": lambda v: strategy.reduce(op, np.stack([v, v]), axis=(0, 1)),
        "empty axis": lambda v: strategy.reduce(op, v[:0], axis=0),
    }


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_reductions_do_not_heed_it(strategy: Any, job: Any, dtype: Any) -> None:
    apart = extremes(dtype, job.rank)
    cases = {"all": np.concatenate(list(apart.values()))} | apart
    for name, own in cases.items():
        for op in ("sum", "mean"):
            ways = reductions if name == "all" else reductions_over_axes
            for how, reduce in ways(strategy, op).items():
                with np.errstate(all="ignore"):
                    wanted = reduce(own)
                with np.errstate(all="raise" if job.rank == 0 else "warn"):
                    found = reduce(own)
                note = f"{op} of {name} {how}"
                parts = zip(_list(found), _list(wanted), strict=True)
                for part, expected in parts:
                    # Compare values, not padding bytes of long doubles.
                    np.testing.assert_array_equal(part, expected, note)
                if np.dtype(dtype).char not in "gG":
                    assert_same_bits(job, *_list(found))
    assert_usable(strategy, job)


def _list(value: Any) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    # NumPy's comparison does not recognize a NaN of ml_dtypes, so convert to float32.
    return [v.astype(np.float32) if v.dtype.kind == "V" else v for v in values]


def test_an_axis_does_not_heed_it(strategy: Any, job: Any) -> None:
    # Each of these cases once left the other ranks waiting in the call.
    cases = {
        "overflow of the own sum": np.full(3, np.finfo(np.float64).max),
        "sum that float16 does not hold": np.full(3, 60_000, np.float16),
        "mean that becomes 0": np.array([6e-8, 0, 0], np.float16),
        "infinities": np.array([np.inf, -np.inf]),
    }
    for own in cases.values():
        for op in ("sum", "mean"):
            with np.errstate(all="raise" if job.rank == 0 else "ignore"):
                found = strategy.reduce(op, own, axis=0)
            wide = np.float32 if own.dtype == np.float16 else own.dtype
            with np.errstate(all="ignore"):
                sums = [own.sum(dtype=wide).astype(own.dtype)] * job.size
                total = np.add.reduce(sums, dtype=wide)
                if op == "mean":
                    total = own.sum(dtype=wide) / own.size
                np.testing.assert_array_equal(found, total.astype(own.dtype))
    assert_usable(strategy, job)


def test_training_does_not_heed_it(strategy: Any, job: Any) -> None:
    for number in (np.finfo(np.float32).max, np.float32(1e-45), np.float32(np.inf)):
        value = np.full((4, 2), number)
        with strategy.scope():
            weights = hs.Variable(np.ones(2, np.float32), name="w", aggregation="mean")
            total = hs.Variable(
                np.zeros(2, np.float32), synchronization="on_read", aggregation="sum"
            )
            metrics = [hs.metrics.Mean(), hs.metrics.MeanSquaredError()]
            layer = hs.layers.SyncBatchNormalization(2)
            optimizers = [hs.optimizers.Adam(0.1), hs.optimizers.SGD(1.0, 0.9)]

        def step(
            value: Any = value,
            weights: Any = weights,
            total: Any = total,
            metrics: Any = metrics,
            layer: Any = layer,
            optimizers: Any = optimizers,
        ) -> None:
            weights.assign_add(value[0])
            weights.scatter_mul(hs.IndexedSlices(value[0], [0, 1]))
            total.assign_add(value[0])
            total.assign_add(value[0])
            metrics[0].update_state(value)
            metrics[1].update_state(value, np.zeros_like(value))
            layer.forward(value, training=True)
            layer.backward(value)
            for optimizer in optimizers:
                optimizer.apply_gradients([(value[0], weights)])
            hs.compute_average_loss(value[:, 0], sample_weight=value[:, 1])

        with np.errstate(all="raise" if job.rank == 0 else "ignore"):
            strategy.run(step)
            results = [total.read_value(), *(metric.result() for metric in metrics)]
            strategy.reduce("sum", 1e-50)
            strategy.check_divergence()
        assert_same_bits(job, weights.numpy(), layer.gamma.numpy(), *results)
    assert_usable(strategy, job)
