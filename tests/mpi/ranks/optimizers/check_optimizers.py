"""SGD on any number of replicas equals SGD in one process on the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import (
    assert_only_one_failed,
    assert_same_bits,
    assert_usable,
    outcome,
)
from tests.mpi.ranks.regression import FEATURES, X, Y, gradients

pytestmark = pytest.mark.rule


class Reference:
    """Training in one process, by the formulas of the documentation."""

    def __init__(self, rate: Any, momentum: float, nesterov: bool) -> None:
        self.rate = rate if callable(rate) else lambda step: rate
        self.momentum, self.nesterov, self.steps = momentum, nesterov, 0
        self.values = [np.zeros((FEATURES, 3)), np.zeros(3)]
        self.velocities = [np.zeros_like(value) for value in self.values]

    def step(self, found: Any) -> None:
        rate = self.rate(self.steps)
        self.steps += 1
        for i, gradient in enumerate(found):
            velocity = self.momentum * self.velocities[i] - rate * gradient
            self.velocities[i] = velocity
            if self.nesterov:
                velocity = self.momentum * velocity - rate * gradient
            self.values[i] = self.values[i] + velocity


@pytest.mark.parametrize(
    ("rate", "momentum", "nesterov"),
    [
        (0.05, 0.0, False),
        (0.02, 0.9, False),
        (0.02, 0.9, True),
        (lambda step: 0.1 / (1 + step), 0.5, True),
    ],
    ids=["plain", "momentum", "nesterov", "schedule"],
)
def test_sgd_equals_sgd_of_one_process_on_ragged_batches(
    strategy: Any, job: Any, rate: Any, momentum: float, nesterov: bool
) -> None:
    # The last batch has 7, 5, 2 or 1 of the 37 rows, so some replicas get no row.
    for batch_size in (10, 16, 5, 4):
        reference = Reference(rate, momentum, nesterov)
        with strategy.scope():
            weights = hs.Variable(np.zeros((FEATURES, 3)), name="weights")
            bias = hs.Variable(np.zeros(3), name="bias")
            optimizer = hs.optimizers.SGD(rate, momentum, nesterov)
        dataset = hs.Dataset((X, Y), batch_size, shuffle=True, seed=1)
        alone = hs.Dataset((X, Y), batch_size, shuffle=True, seed=1)
        distributed = strategy.experimental_distribute_dataset(dataset)

        def step(
            batch: Any, size: int, variables: Any = (weights, bias), o: Any = optimizer
        ) -> Any:
            values = [variable.value() for variable in variables]
            losses, *found = gradients(*values, *batch, size)
            o.apply_gradients(zip(found, variables, strict=True))
            return hs.compute_average_loss(losses, global_batch_size=size)

        for _ in range(2):
            for batch, (x, y) in zip(distributed, alone, strict=True):
                losses, *found = gradients(*reference.values, x, y, len(x))
                reference.step(found)
                loss = strategy.run(step, args=(batch, len(x)))
                total = strategy.reduce("sum", loss, axis=None)
                np.testing.assert_allclose(total, losses.mean(), rtol=1e-12)
        for variable, value in zip((weights, bias), reference.values, strict=True):
            np.testing.assert_allclose(variable, value, rtol=0, atol=1e-12)
            assert_same_bits(job, variable.component)
        assert int(optimizer.iterations) == reference.steps


def _train(strategy: Any, optimizer: Any, pairs: Any) -> Any:
    return outcome(strategy.run, optimizer.apply_gradients, (pairs,))


def test_gradients_of_other_variables_are_a_mismatch(strategy: Any, job: Any) -> None:
    with strategy.scope():
        variables = [hs.Variable(np.zeros(2), name=name) for name in ("left", "right")]
        optimizer = hs.optimizers.SGD(1.0)
    order = variables[:: -1 if job.rank == 0 else 1]
    pairs = [(np.full(2, 1.0 + (v.name == "left")), v) for v in order]
    error = _train(strategy, optimizer, pairs)
    if job.size > 1:
        assert type(error) is hs.CollectiveError
        for variable in variables:
            np.testing.assert_array_equal(variable, [0, 0])
    lonely = [(np.ones(2), variables[job.rank > 0])]
    error = _train(strategy, optimizer, lonely)
    assert (type(error) is hs.CollectiveError) == (job.size > 1)
    assert_usable(strategy, job)


def test_wrong_gradients_on_one_rank_fail_on_all(strategy: Any, job: Any) -> None:
    with strategy.scope():
        variable = hs.Variable(np.zeros(2), name="v")
        twin = hs.Variable(np.zeros(2), name="v")
        optimizer = hs.optimizers.SGD(1.0)
    good = [(np.ones(2), variable)]
    wrong: list[Any] = [
        [(np.ones(3), variable)],
        [(None, variable)],
        [],
        [*good, (np.ones(2), twin)],
        [(np.array(["a", "b"]), variable)],
    ]
    for case, bad in enumerate(wrong):
        faulty = case % job.size
        error = _train(strategy, optimizer, bad if job.rank == faulty else good)
        assert_only_one_failed(error, ValueError, faulty, job)
    np.testing.assert_array_equal(variable, [0, 0])
    assert _train(strategy, optimizer, good) is None
    np.testing.assert_array_equal(variable, [-job.size] * 2)
    assert int(optimizer.iterations) == 1


def test_gradients_are_not_modified_and_none_is_left_out(
    strategy: Any, job: Any
) -> None:
    with strategy.scope():
        first = hs.Variable(np.zeros(2, np.float32), name="first")
        second = hs.Variable(np.float64(0), name="second")
        optimizer = hs.optimizers.SGD(0.5, momentum=0.5)
    gradient = np.array([1.0, 2.0])
    for _ in range(2):
        strategy.run(
            optimizer.apply_gradients, args=([(gradient, first), (None, second)],)
        )
    np.testing.assert_array_equal(gradient, [1, 2])
    assert first.dtype == np.float32
    np.testing.assert_allclose(first, -0.5 * job.size * gradient * 2.5, rtol=1e-6)
    assert float(second) == 0
    strategy.run(optimizer.apply_gradients, args=([(2.0, second)],))
    assert float(second) == -job.size


def test_mean_aggregation_divides_by_the_number_of_replicas(
    strategy: Any, job: Any
) -> None:
    with strategy.scope():
        variable = hs.Variable(np.zeros(2), name="v")
        optimizer = hs.optimizers.SGD(1.0, aggregation="mean")
    gradient = np.full(2, 1.0 + job.rank)
    strategy.run(optimizer.apply_gradients, args=([(gradient, variable)],))
    np.testing.assert_allclose(variable, [-(job.size + 1) / 2] * 2, rtol=1e-15)


def test_apply_gradients_is_refused_in_cross_replica_context(
    strategy: Any, job: Any
) -> None:
    with strategy.scope():
        variable = hs.Variable(np.zeros(2), name="v")
        optimizer = hs.optimizers.SGD(1.0)
        error = outcome(optimizer.apply_gradients, [(np.ones(2), variable)])
    assert type(error) is RuntimeError


def test_average_losses_add_up_to_the_global_mean(strategy: Any, job: Any) -> None:
    rng = np.random.default_rng(7)
    for case in range(20):
        lengths = rng.integers(0, 4, job.size)
        lengths[case % job.size] += 1
        losses = [rng.random(length) for length in lengths]
        weights = [rng.random(length) for length in lengths]
        size = int(lengths.sum())

        def step(*args: Any, size: int = size) -> Any:
            return hs.compute_average_loss(*args, global_batch_size=size)

        for given in ([losses], [losses, weights]):
            own = tuple(column[job.rank] for column in given)
            parts = strategy.run(step, args=own)
            total = strategy.reduce("sum", parts, axis=None)
            exact = np.prod([np.concatenate(column) for column in given], axis=0)
            np.testing.assert_allclose(total, exact.sum() / size, rtol=1e-14)
    equal = strategy.run(lambda: hs.compute_average_loss(np.full(3, 2.0)))
    assert strategy.reduce("sum", equal, axis=None) == pytest.approx(2.0)
