"""Batch normalization on any number of replicas equals that of the whole batch."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.layers import (
    SyncBatchNormalization,
    sync_batch_moments,
    sync_batch_moments_backward,
)
from tests.mpi.ranks.outcomes import (
    assert_only_one_failed,
    assert_same_bits,
    assert_usable,
    outcome,
)

pytestmark = pytest.mark.rule


RNG = np.random.default_rng(31)
ROWS, CHANNELS = 13, 3
# Each channel has a different mean and scale.
X = RNG.standard_normal((2, ROWS, 4, CHANNELS)) * np.array([1, 5, 0.1])
X += np.array([3, -20, 0])
DY = RNG.standard_normal((2, ROWS, 4, CHANNELS))
GAMMA, BETA = RNG.uniform(0.5, 2, (2, CHANNELS))
EPSILON = 1e-3


def part(size: int, rank: int, case: int, rows: int = ROWS) -> slice:
    """Return a replica's rows of a ragged division; in case 0 the last one has all."""
    ends = np.sort(np.random.default_rng(case).integers(0, rows + 1, size - 1)) * case
    bounds = np.concatenate([[0], np.minimum(ends, rows), [rows]])
    return slice(bounds[rank], bounds[rank + 1])


def expected(x: Any, dy: Any) -> Any:
    """Return the result and gradients for the whole batch, by the paper's formulas."""
    axes = (0, 1)
    n = x[..., 0].size
    mean, variance = x.mean(axis=axes), x.var(axis=axes)
    scale = np.sqrt(variance + EPSILON)
    normal = (x - mean) / scale
    dnormal = dy * GAMMA
    dvariance = (dnormal * (x - mean)).sum(axis=axes) * -0.5 / scale**3
    dmean = -dnormal.sum(axis=axes) / scale
    dx = dnormal / scale + dvariance * 2 * (x - mean) / n + dmean / n
    dgamma, dbeta = (dy * normal).sum(axis=axes), dy.sum(axis=axes)
    return normal * GAMMA + BETA, dx, dgamma, dbeta


def make_layer(strategy: Any, axis: int = -1, **options: Any) -> Any:
    with strategy.scope():
        layer = SyncBatchNormalization(CHANNELS, axis, dtype=np.float64, **options)
        layer.gamma.assign(GAMMA)
        layer.beta.assign(BETA)
    return layer


@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_is_that_of_one_process(strategy: Any, job: Any, axis: int) -> None:
    layer = make_layer(strategy, axis, momentum=0.8)
    moving_mean, moving_variance = np.zeros(CHANNELS), np.ones(CHANNELS)

    def step(x: Any, dy: Any) -> Any:
        y = layer.forward(x, training=True)
        dx, *found = layer.backward(dy)
        summed = hs.get_replica_context().all_reduce("sum", found)
        return y, dx, summed

    def turned(array: Any) -> Any:
        return np.moveaxis(array, -1, axis)

    for case in range(4):
        x, dy = X[case % 2], DY[case % 2]
        own = part(job.size, job.rank, case)
        result = strategy.run(step, args=(turned(x[own]), turned(dy[own])))
        y, dx, summed = strategy.local_value(result)
        whole = expected(x, dy)
        for found, wanted in zip((y, dx), whole[:2], strict=True):
            np.testing.assert_allclose(found, turned(wanted[own]), rtol=0, atol=1e-12)
        np.testing.assert_allclose(summed, whole[2:], rtol=0, atol=1e-12)
        moving_mean = 0.8 * moving_mean + 0.2 * x.mean(axis=(0, 1))
        moving_variance = 0.8 * moving_variance + 0.2 * x.var(axis=(0, 1))
        for variable, wanted in (
            (layer.moving_mean, moving_mean),
            (layer.moving_variance, moving_variance),
        ):
            assert_same_bits(job, variable.component)
            np.testing.assert_allclose(variable.component, wanted, rtol=0, atol=1e-12)
            np.testing.assert_allclose(variable.numpy(), wanted, rtol=0, atol=1e-12)
    y = strategy.local_value(strategy.run(layer.forward, args=(turned(X[0]),)))
    wanted = (X[0] - moving_mean) / np.sqrt(moving_variance + EPSILON) * GAMMA + BETA
    np.testing.assert_allclose(y, turned(wanted), rtol=0, atol=1e-12)


def test_moments_are_those_of_all_values(strategy: Any, job: Any) -> None:
    # Rounding the values changes the variance by a relative error of eps * mean /
    # spread. Sums of squares would have an error with the square of this quotient.
    means = np.array([1e6, -1e9, 0])
    far = RNG.standard_normal((ROWS, CHANNELS)) + means
    limit = 1e-12 + 8 * np.finfo(np.float64).eps * np.abs(means) / far.std(axis=0)
    for case in range(4):
        own = far[part(job.size, job.rank, case)]
        result = strategy.run(sync_batch_moments, args=(own,))
        mean, variance, count = strategy.local_value(result)
        assert count == ROWS
        assert_same_bits(job, mean, variance)
        np.testing.assert_allclose(mean, far.mean(axis=0), rtol=1e-14, atol=1e-14)
        assert np.all(np.abs(variance / far.var(axis=0) - 1) <= limit)


def test_moments_of_no_values_are_zero(strategy: Any, job: Any) -> None:
    nothing = np.zeros((0, CHANNELS), np.float32)
    result = strategy.run(sync_batch_moments, args=(nothing,))
    mean, variance, count = strategy.local_value(result)
    assert count == 0
    np.testing.assert_array_equal([mean, variance], np.zeros((2, CHANNELS)))
    layer = make_layer(strategy)

    def step() -> Any:
        y = layer.forward(nothing, training=True)
        return layer.backward(y)

    dx, dgamma, dbeta = strategy.local_value(strategy.run(step))
    assert dx.shape == (0, CHANNELS)
    np.testing.assert_array_equal([dgamma, dbeta], np.zeros((2, CHANNELS)))
    np.testing.assert_array_equal(layer.moving_mean.component, np.zeros(CHANNELS))


def test_gradients_through_the_moments(strategy: Any, job: Any) -> None:
    x = X[0, :, 0]
    partial = RNG.standard_normal((job.size, 2, CHANNELS))
    own = part(job.size, job.rank, 2)

    def step(rows: Any) -> Any:
        moments = sync_batch_moments(rows)
        return sync_batch_moments_backward(rows, moments, *partial[job.rank])

    found = strategy.local_value(strategy.run(step, args=(x[own],)))
    dmean, dvariance = partial.sum(axis=0)
    wanted = dmean / ROWS + dvariance * 2 * (x - x.mean(axis=0)) / ROWS
    np.testing.assert_allclose(found, wanted[own], rtol=0, atol=1e-12)


def test_one_reduction_in_each_direction(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(strategy)
    collectives, calls = strategy.collectives, []
    reduce = collectives.batch_reduce

    def counted(*args: Any) -> Any:
        calls.append(args)
        return reduce(*args)

    monkeypatch.setattr(collectives, "batch_reduce", counted)
    strategy.run(layer.forward, args=(X[0], True))
    assert len(calls) == 1
    strategy.run(layer.backward, args=(DY[0],))
    assert len(calls) == 2
    assert calls[1][1].shape == (2, CHANNELS)
    strategy.run(layer.forward, args=(X[0],))
    strategy.run(layer.backward, args=(DY[0],))
    layer.forward(X[0])
    assert len(calls) == 2


def test_two_layers_train_as_in_one_process(strategy: Any, job: Any) -> None:
    """Train two layers in sequence, and compare the result with a single replica."""

    def train(owner: Any, own: Any) -> Any:
        with owner.scope():
            layers = [
                SyncBatchNormalization(CHANNELS, name=name, dtype=np.float64)
                for name in ("first", "second")
            ]
            optimizer = hs.optimizers.SGD(0.1, momentum=0.9)

        def step(x: Any, target: Any) -> None:
            hidden = np.tanh(layers[0].forward(x, training=True))
            y = layers[1].forward(hidden, training=True)
            dy, *second = layers[1].backward((y - target) / ROWS)
            _, *first = layers[0].backward(dy * (1 - hidden**2))
            variables = [v for layer in layers for v in layer.trainable_variables]
            optimizer.apply_gradients(zip([*first, *second], variables, strict=True))

        for epoch in range(5):
            rows = own(epoch)
            owner.run(step, args=(X[epoch % 2, rows], DY[0, rows]))
        return [
            variable.component
            for layer in layers
            for variable in layer.checkpoint_variables().values()
        ]

    found = train(strategy, lambda epoch: part(job.size, job.rank, epoch))
    alone = train(hs.OneDeviceStrategy(), lambda epoch: slice(None))
    assert_same_bits(job, *found)
    for variable, wanted in zip(found, alone, strict=True):
        np.testing.assert_allclose(variable, wanted, rtol=0, atol=1e-12)


def test_a_wrong_batch_on_one_rank_fails_on_all(strategy: Any, job: Any) -> None:
    layer = make_layer(strategy)
    good = X[0]
    for case, bad in enumerate([np.ones((2, 4)), np.ones(3), np.ones((2, 3)) * 1j]):
        faulty = case % job.size
        own = bad if job.rank == faulty else good
        error = outcome(strategy.run, layer.forward, (own, True))
        assert_only_one_failed(error, ValueError, faulty, job)
    strategy.run(layer.forward, args=(good, True))
    own = good[:2] if job.rank == 0 else good
    error = outcome(strategy.run, layer.backward, (own,))
    assert_only_one_failed(error, ValueError, 0, job)
    columns = np.ones((2, 4 if job.rank == 0 else 3))
    error = outcome(strategy.run, sync_batch_moments, (columns,))
    assert (type(error) is hs.CollectiveError) == (job.size > 1)
    assert_usable(strategy, job)


def test_training_outside_of_run_is_refused(strategy: Any, make_strategy: Any) -> None:
    layer = make_layer(strategy)
    with strategy.scope():
        assert type(outcome(layer.forward, X[0], True)) is RuntimeError
        assert type(outcome(sync_batch_moments, X[0])) is RuntimeError
    # The default strategy would average over this replica only.
    assert type(outcome(layer.forward, X[0], True)) is RuntimeError
    with make_strategy() as other:
        error = outcome(other.run, layer.forward, (X[0], True))
        assert type(error) is RuntimeError
    strategy.run(layer.forward, args=(X[0], True))
    assert type(outcome(layer.backward, DY[0])) is RuntimeError
    strategy.run(layer.backward, args=(DY[0],))


def test_layer_survives_a_restart(strategy: Any, job: Any) -> None:
    folder = job.bcast(tempfile.mkdtemp(prefix="hpcstrat-") if job.rank == 0 else None)
    layer = make_layer(strategy)
    strategy.run(layer.forward, args=(X[0] + job.rank, True))
    variables = layer.checkpoint_variables()
    kept = {name: variable.numpy() for name, variable in variables.items()}
    manager = hs.CheckpointManager(folder, layer=layer)
    manager.save(1)
    for variable in variables.values():
        variable.component[...] = -1
    manager.restore()
    for name, value in kept.items():
        np.testing.assert_array_equal(variables[name].component, value)
    job.Barrier()
    if job.rank == 0:
        shutil.rmtree(folder)
