"""Update rules on any number of replicas equal the published ones on the whole batch.

The reference rules follow the papers' formulas, one expression after the other, and
share no code with the library.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import optimizers
from tests.mpi.ranks.outcomes import assert_same_bits
from tests.mpi.ranks.reference_rules import (
    RULES,
    Array,
    Model,
    Rule,
    batches,
    gradients_of,
    initial,
)
from tests.mpi.ranks.regression import ROWS, X

pytestmark = pytest.mark.rule


class Reference:
    """Training in one process, which keeps all past gradients."""

    def __init__(self, rule: Rule, limit: float | None = None) -> None:
        self.rule, self.limit = rule, limit
        self.values = initial(np.float64)
        self.past: dict[str, list[Array]] = {name: [] for name in self.values}
        self.norms: list[float] = []

    def step(self, found: list[Array]) -> None:
        norm = float(np.sqrt(sum((g**2).sum() for g in found)))
        self.norms.append(norm)
        clipped = self.limit is not None and norm > self.limit
        for (name, value), gradient in zip(self.values.items(), found, strict=True):
            past = self.past[name]
            past.append(gradient * (self.limit / norm) if clipped else gradient)
            self.values[name] = self.rule(name, value, past, len(past))


@pytest.mark.parametrize("name", RULES)
def test_rules_are_those_of_the_papers(strategy: Any, job: Any, name: str) -> None:
    make, rule = RULES[name]
    # The last of 37 rows form batches of 7, 5 and 1 rows, so some replicas get no row.
    for size, dtype in ((10, "f8"), (16, "f8"), (12, "f4")):
        reference, model = Reference(rule), Model(strategy, make, dtype)
        for _, (batch, (x, y)) in zip(
            range(10), batches(strategy, size, dtype), strict=False
        ):
            whole = (x.astype(np.float64), y.astype(np.float64))
            reference.step(gradients_of(reference.values.values(), *whole, len(x)))
            assert model.step(batch, len(x))
        exact = dtype == "f8"
        tolerance = {"rtol": 0, "atol": 1e-12} if exact else {"rtol": 0, "atol": 2e-4}
        model.assert_close(reference.values, **tolerance)
        assert {v.dtype for v in model.variables} == {np.dtype(dtype)}
        assert_same_bits(job, *[v.component for v in model.variables])
        assert int(model.optimizer.iterations) == 10


@pytest.mark.parametrize("name", ["momentum", "adam", "lamb"])
def test_accumulation_is_one_big_batch(strategy: Any, job: Any, name: str) -> None:
    make, rule = RULES[name]
    for steps in (2, 5):
        reference = Reference(rule)
        model = Model(strategy, lambda n=steps: make(accumulate_steps=n), "f8")
        stream = batches(strategy, 4)
        for _ in range(4):
            before = model.bits()
            parts = [next(stream) for _ in range(steps)]
            x, y = (
                np.concatenate(column)
                for column in zip(*[p[1] for p in parts], strict=True)
            )
            for index, (batch, _) in enumerate(parts):
                assert model.bits() == before
                assert model.step(batch, len(x)) == (index == steps - 1)
            reference.step(gradients_of(reference.values.values(), x, y, len(x)))
        model.assert_close(reference.values, rtol=0, atol=1e-12)
        assert_same_bits(job, *[v.component for v in model.variables])
        assert int(model.optimizer.iterations) == 4


def test_accumulation_does_not_communicate(strategy: Any, job: Any) -> None:
    with strategy.scope():
        variable = hs.Variable(np.zeros(2), name="v")
        optimizer = optimizers.SGD(1.0, accumulate_steps=3)
    strategy.run(optimizer.build, args=([variable],))
    # Replica 0 makes two calls before the other replicas begin their first call.
    if job.rank == 0:
        for _ in range(2):
            assert not _alone(strategy, optimizer, variable)
    job.Barrier()
    if job.rank != 0:
        for _ in range(2):
            assert not _alone(strategy, optimizer, variable)
    np.testing.assert_array_equal(variable, [0, 0])
    assert _alone(strategy, optimizer, variable)
    np.testing.assert_array_equal(variable, [-3 * job.size] * 2)


def _alone(strategy: Any, optimizer: Any, variable: Any) -> bool:
    pairs = [(np.ones(2), variable)]
    updated = strategy.run(optimizer.apply_gradients, args=(pairs,))
    return bool(strategy.local_value(updated))


def test_mean_of_accumulated_gradients_is_over_calls_and_replicas(
    strategy: Any, job: Any
) -> None:
    with strategy.scope():
        variable = hs.Variable(np.zeros(2), name="v")
        optimizer = optimizers.SGD(1.0, aggregation="mean", accumulate_steps=3)
    for call in range(3):
        pairs = [(np.full(2, 1.0 + call + job.rank), variable)]
        strategy.run(optimizer.apply_gradients, args=(pairs,))
    mean = 2 + (job.size - 1) / 2
    np.testing.assert_allclose(variable, [-mean] * 2, rtol=1e-15)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_clipping_takes_the_norm_after_the_sum(
    strategy: Any, job: Any, name: str
) -> None:
    make, rule = RULES[name]
    reference = Reference(rule, 7.0)
    model = Model(strategy, lambda: make(clip_global_norm=7.0), "f8")
    stream = batches(strategy, 10)
    for _ in range(10):
        batch, (x, y) = next(stream)
        reference.step(gradients_of(reference.values.values(), x, y, len(x)))
        model.step(batch, len(x))
    assert max(reference.norms) > 7 > min(reference.norms)
    model.assert_close(reference.values, rtol=0, atol=1e-12)
    assert_same_bits(job, *[v.component for v in model.variables])


def test_clipping_of_what_is_not_finite_shows(strategy: Any, job: Any) -> None:
    with strategy.scope():
        first, second = (hs.Variable(np.zeros(2), name=name) for name in "ab")
        optimizer = optimizers.SGD(1.0, clip_global_norm=1.0)
    broken = np.array([np.inf if job.rank == 0 else 1.0, 1.0])
    pairs = [(broken, first), (np.ones(2), second)]
    strategy.run(optimizer.apply_gradients, args=(pairs,))
    assert np.isnan(first.numpy()).all()
    assert np.isnan(second.numpy()).all()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adamw", "lamb"])
def test_sparse_gradients_are_dense_ones(
    strategy: Any, job: Any, name: str, steps: int
) -> None:
    options = {"accumulate_steps": steps, "clip_global_norm": 1.5}
    with strategy.scope():
        start = np.random.default_rng(2).standard_normal((7, 2))
        sparse = hs.Variable(start, name="table")
        dense = hs.Variable(start, name="table")
        one, other = (RULES[name][0](**options) for _ in range(2))
    rng = np.random.default_rng(job.rank)
    for step in range(4):
        # Rows repeat, also on several replicas, and in some steps replica 0 has no
        # rows.
        count = 0 if job.rank == 0 and step % 2 else 5
        indices = rng.integers(0, 6, count).astype("i4" if job.rank else "i8")
        rows = hs.IndexedSlices(rng.standard_normal((count, 2)), indices, (7, 2))
        strategy.run(one.apply_gradients, args=([(rows, sparse)],))
        strategy.run(other.apply_gradients, args=([(rows.to_dense(), dense)],))
    assert not np.array_equal(sparse, start)
    np.testing.assert_allclose(sparse, dense, rtol=0, atol=1e-12)
    assert_same_bits(job, sparse.component)


def test_rows_without_gradients_are_not_touched(strategy: Any, job: Any) -> None:
    with strategy.scope():
        table = hs.Variable(np.ones((4, 2)), name="table")
        optimizer = optimizers.Adagrad(0.5)
    # A row with NaN as state stays unchanged, because the step does not touch it.
    strategy.run(optimizer.build, args=([table],))
    optimizer.checkpoint_variables()["sum_of_squares/table"].component[3] = np.nan
    rows = hs.IndexedSlices(np.ones((1, 2)), [job.rank % 2])
    strategy.run(optimizer.apply_gradients, args=([(rows, table)],))
    np.testing.assert_array_equal(table.numpy()[2:], np.ones((2, 2)))
    assert (table.numpy()[0] < 1).all()


def test_steps_keep_their_arrays(strategy: Any, job: Any) -> None:
    for name, (make, _) in RULES.items():
        model = Model(strategy, make, "f8")
        stream = batches(strategy, 10)
        model.step(next(stream)[0], 10)
        state = model.optimizer.checkpoint_variables()
        arrays = [v.component for v in [*model.variables, *state.values()]]
        model.step(next(stream)[0], 10)
        state = model.optimizer.checkpoint_variables()
        again = [v.component for v in [*model.variables, *state.values()]]
        assert all(a is b for a, b in zip(arrays, again, strict=True)), name
    assert len(X) == ROWS
