"""Optimizers with missing gradients, errors, and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import optimizers
from tests.mpi.ranks.outcomes import (
    assert_only_one_failed,
    assert_same_bits,
    assert_usable,
    outcome,
)
from tests.mpi.ranks.reference_rules import RULES, Model, batches

pytestmark = pytest.mark.rule


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """Yield a list that gets the log messages of optimizers."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = hs.get_logger("optimizers"), Handler()
    logger.addHandler(handler)
    logger.propagate = False
    yield found
    logger.propagate = True
    logger.removeHandler(handler)


def make(strategy: Any, *names: str, **options: Any) -> Any:
    """Return variables of two zeros, and an optimizer that subtracts gradients."""
    with strategy.scope():
        variables = [hs.Variable(np.zeros((2, 1)), name=name) for name in names]
        return variables, optimizers.SGD(1.0, **options)


def apply(strategy: Any, optimizer: Any, *pairs: Any) -> Any:
    updated = strategy.run(optimizer.apply_gradients, args=(list(pairs),))
    return strategy.local_value(updated)


ONES = np.ones((2, 1))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_gradient_that_some_replicas_lack_is_an_error_that_names_it(
    strategy: Any, job: Any, steps: int
) -> None:
    (first, second), optimizer = make(
        strategy, "first", "second", accumulate_steps=steps
    )
    lacks = job.rank == job.size - 1
    error = None
    for _ in range(steps):
        pairs = [(ONES, first), (None if lacks else ONES, second)]
        error = outcome(apply, strategy, optimizer, *pairs)
    if job.size > 1:
        assert type(error) is hs.CollectiveError
        assert "without gradients for second" in str(error)
        np.testing.assert_array_equal(first, [[0], [0]])
    else:
        assert error is None
    assert_usable(strategy, job)
    # After an error, the accumulation starts again from zero.
    before = first.numpy()
    for _ in range(steps):
        assert outcome(apply, strategy, optimizer, (ONES, first)) is None
    np.testing.assert_array_equal(first, before - steps * job.size)


@pytest.mark.parametrize("steps", [1, 3])
def test_missing_gradients_count_as_zeros_with_one_note(
    strategy: Any, job: Any, notes: list[str], steps: int
) -> None:
    names = ("dense", "sparse", "mixed", "nowhere")
    variables, optimizer = make(
        strategy, *names, missing_gradients="zeros", accumulate_steps=steps
    )
    rows = hs.IndexedSlices(np.ones((2, 1)), [1, 1], (2, 1))
    lacks = job.rank == 0 and job.size > 1
    mixed = [ONES, rows, None][job.rank % 3]
    given = [None if lacks else ONES, None if lacks else rows, mixed, None]
    for _ in range(2 * steps):
        apply(strategy, optimizer, *zip(given, variables, strict=True))
    count = 2 * steps * (job.size - (job.size > 1))
    dense, sparse, both, nowhere = (variable.numpy()[:, 0] for variable in variables)
    np.testing.assert_array_equal(dense, [-count] * 2)
    np.testing.assert_array_equal(sparse, [0, -2 * count])
    parts = job.allgather(None if mixed is None else np.asarray(_dense(mixed)))
    total = sum(part for part in parts if part is not None)
    np.testing.assert_array_equal(both, -2 * steps * total[:, 0])
    np.testing.assert_array_equal(nowhere, [0, 0])
    named = {name for name in names for note in notes if repr(name) in note}
    assert len(notes) == len(named)
    missing = {n for n, g in zip(names[:3], given, strict=False) if g is None}
    assert named == missing
    assert_same_bits(job, *[variable.component for variable in variables])
    nothing = [(None, variable) for variable in variables]
    for _ in range(steps):
        error = outcome(apply, strategy, optimizer, *nothing)
    assert type(error) is ValueError


def _dense(gradient: Any) -> Any:
    sparse = isinstance(gradient, hs.IndexedSlices)
    return gradient.to_dense() if sparse else gradient


def test_variables_without_any_gradient_keep_their_state(
    strategy: Any, job: Any
) -> None:
    with strategy.scope():
        first, second = (hs.Variable(np.ones(2), name=name) for name in "ab")
        optimizer = optimizers.AdamW(0.1, accumulate_steps=2)
    for call in range(2):
        pairs = [(np.ones(2), first), (None, second)]
        assert apply(strategy, optimizer, *pairs) == (call == 1)
    np.testing.assert_array_equal(second, [1, 1])
    assert (first.numpy() < 1).all()
    assert "first_moment/b" not in optimizer.checkpoint_variables()


@pytest.mark.parametrize("steps", [1, 2])
def test_wrong_gradients_on_one_rank_fail_on_all(
    strategy: Any, job: Any, steps: int
) -> None:
    (table,), optimizer = make(strategy, "table", accumulate_steps=steps)
    strategy.run(optimizer.build, args=([table],))
    with strategy.scope():
        counter = hs.Variable(np.zeros(2, np.int32), name="counter")
    wrong: list[Any] = [
        [(np.ones((2, 2)), table)],
        [(hs.IndexedSlices(np.ones((1, 1)), [2]), table)],
        [(hs.IndexedSlices(np.ones((1, 1)), [-1]), table)],
        [(hs.IndexedSlices(np.ones((1, 2)), [0]), table)],
        [(hs.IndexedSlices(np.ones((1, 1)), [0], (3, 1)), table)],
        [(ONES * 1j, table)],
        [(np.ma.masked_less(ONES, 2), table)],
        [(np.ones(2), counter)],
    ]
    for case, bad in enumerate(wrong):
        faulty = case % job.size
        if job.rank == faulty:
            failure = outcome(apply, strategy, optimizer, *bad)
            # The faulty rank makes as many steps as the other ranks.
            for _ in range(steps - 1):
                strategy.run(lambda: None)
        else:
            # The other ranks continue to add gradients until they communicate.
            for call in range(steps):
                failure = outcome(apply, strategy, optimizer, (ONES, table))
                assert (failure is None) == (call < steps - 1)
        assert_only_one_failed(failure, ValueError, faulty, job)
    np.testing.assert_array_equal(table, [[0], [0]])
    for _ in range(steps):
        apply(strategy, optimizer, (ONES, table))
    np.testing.assert_array_equal(table, -steps * job.size * ONES)


def test_a_schedule_that_fails_on_one_rank_fails_on_all(
    strategy: Any, job: Any
) -> None:
    def rate(step: int) -> float:
        if job.rank == 0:
            raise ArithmeticError("no rate")
        return 1.0

    with strategy.scope():
        variable = hs.Variable(np.zeros(2), name="v")
        optimizer = optimizers.Adam(rate)
    error = outcome(apply, strategy, optimizer, (np.ones(2), variable))
    assert_only_one_failed(error, ArithmeticError, 0, job)
    assert_usable(strategy, job)


def test_regularization_adds_up_to_itself(strategy: Any, job: Any) -> None:
    part = strategy.run(lambda: hs.scale_regularization_loss([1.0, 2.0]))
    np.testing.assert_allclose(strategy.reduce("sum", part, axis=None), 3, rtol=1e-6)
    with strategy.scope(), pytest.raises(RuntimeError, match="cross-replica"):
        hs.scale_regularization_loss(1.0)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        *(("sgd", False), ("momentum", False), ("adagrad", False), ("adam", False)),
        *(("adamw", True), ("lamb", True), ("adam-schedule", True)),
    ],
)
def test_training_goes_on_bit_for_bit(
    strategy: Any, folder: Path, name: str, build: bool
) -> None:
    rule = RULES[name][0]
    options = {"clip_global_norm": 5.0}
    stream = [next(b) for b in [batches(strategy, 10)] for _ in range(6)]

    def fresh() -> tuple[Model, Any]:
        model = Model(strategy, lambda: rule(**options), "f8")
        objects = {"model": model.variables, "optimizer": model.optimizer}
        return model, hs.CheckpointManager(folder, **objects)

    model, manager = fresh()
    for batch, (x, _) in stream[:3]:
        model.step(batch, len(x))
    manager.save()
    other, manager = fresh()
    if build:
        strategy.run(other.optimizer.build, args=(other.variables,))
    assert manager.restore() == 3
    for batch, (x, _) in stream[3:]:
        model.step(batch, len(x))
        other.step(batch, len(x))
    assert model.bits() == other.bits()
    saved = model.optimizer.checkpoint_variables()
    again = other.optimizer.checkpoint_variables()
    assert saved.keys() == again.keys()
    for path, variable in saved.items():
        assert variable.component.tobytes() == again[path].component.tobytes(), path


def _accumulating(strategy: Any, folder: Path) -> tuple[Any, Any, Any]:
    with strategy.scope():
        variable = hs.Variable(np.zeros(3), name="v")
        other = hs.Variable(np.zeros(3), name="other")
        optimizer = optimizers.Adam(0.1, accumulate_steps=3)
    objects = {"model": [variable, other], "optimizer": optimizer}
    return (variable, other), optimizer, hs.CheckpointManager(folder, **objects)


@pytest.mark.parametrize("build", [False, True], ids=["deferred", "built"])
@pytest.mark.parametrize("split", [1, 3, 5])
def test_accumulation_goes_on_on_any_number_of_replicas(
    strategies: dict[int, Any], folder: Path, job: Any, split: int, build: bool
) -> None:
    # The gradients of each call are divided among the current number of replicas.
    total = np.random.default_rng(4).standard_normal((6, 12, 3))

    def train(strategy: Any, calls: range, variables: Any, optimizer: Any) -> None:
        count, own = strategy.num_replicas_in_sync, strategy.replica_id
        for call in calls:
            gradient = total[call, own::count].sum(axis=0)
            pairs = [(gradient, variables[0]), (None, variables[1])]
            apply(strategy, optimizer, *pairs)

    def go_on(strategy: Any, restores: bool) -> Any:
        variables, optimizer, manager = _accumulating(strategy, folder)
        if build:
            strategy.run(optimizer.build, args=(variables,))
        if restores:
            assert manager.restore() == split
        else:
            train(strategy, range(split), variables, optimizer)
            manager.save(split, overwrite=True)
        train(strategy, range(split, 6), variables, optimizer)
        assert int(optimizer.iterations) == 2
        np.testing.assert_array_equal(variables[1], [0, 0, 0])
        return variables[0].numpy()

    for saving, restoring in ((job.size, 1), (1, job.size), (job.size, job.size)):
        results = []
        for count, restores in ((saving, False), (restoring, True)):
            own = go_on(strategies[count], restores) if count in strategies else None
            results.append(job.bcast(own))
        np.testing.assert_allclose(*results, rtol=0, atol=1e-12)


def test_sums_that_nothing_continues_are_told(
    strategy: Any, folder: Path, notes: list[str]
) -> None:
    variables, optimizer, manager = _accumulating(strategy, folder)
    gradient = np.ones(3)
    apply(strategy, optimizer, *[(gradient, variable) for variable in variables])
    manager.save(0)
    with strategy.scope():
        other = optimizers.Adam(0.1)
    hs.CheckpointManager(folder, model=variables, optimizer=other).restore()
    assert len(notes) == 1
    assert "accumulate_steps is 1" in notes[0]
