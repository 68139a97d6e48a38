"""Gradients that are NaN or infinite: their origin is named, and steps are skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.optimizers.non_finite import all_finite
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = pytest.mark.rule


@pytest.fixture
def guarded(make_strategy: Any, job: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes strategies with a policy; close them at the end."""
    made: list[Any] = []

    def make(policy: str, on_error: str = "abort") -> Any:
        options = {"comm": job, "settings": hs.Settings(non_finite=policy)}
        made.append(make_strategy(on_error=on_error, **options))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Yield a list that gets this rank's log lines."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hpcstrat")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


class _Model:
    """A model of two variables, one of them large, with an optimizer."""

    def __init__(self, strategy: Any, optimizer: str = "Adam", **options: Any) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.kernel = hs.Variable(np.ones((60, 50), np.float32), name="kernel")
            self.bias = hs.Variable(np.ones(5, np.float32), name="bias")
            self.optimizer = getattr(hs.optimizers, optimizer)(1e-2, **options)

    @property
    def gradients(self) -> list[Any]:
        return [np.full((60, 50), 0.5, np.float32), np.ones(5, np.float32)]

    def step(self, gradients: list[Any]) -> Any:
        pairs = list(zip(gradients, [self.kernel, self.bias], strict=True))
        updated = self.strategy.run(lambda: bool(self.optimizer.apply_gradients(pairs)))
        return self.strategy.local_value(updated)

    def state(self) -> dict[str, bytes]:
        """Return the bytes of all variables and slots."""
        slots = self.optimizer.checkpoint_variables()
        named = {**slots, "kernel": self.kernel, "bias": self.bias}
        return {name: v.component.tobytes() for name, v in named.items()}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_origin_is_named_on_every_replica(guarded: Any, job: Any, value: float) -> None:
    model = _Model(guarded("raise"))
    model.step(model.gradients)
    before = model.state()
    faulty = job.size - 1
    gradients = model.gradients
    if job.rank == faulty:
        gradients[0][3, 4] = value
        gradients[0][7, 1] = value
        gradients[1][2] = value
    error = outcome(model.step, gradients)
    assert isinstance(error, hs.NonFiniteError)
    assert isinstance(error, FloatingPointError)
    assert (
        f"the gradient of variable 'kernel' is {value} in element (3, 4), from "
        f"replicas [{faulty}], and 1 more gradients are not finite" in str(error)
    )
    assert model.state() == before
    assert model.step(model.gradients) is True
    assert_usable(model.strategy, job)


def test_overflow_of_the_sum_is_told_from_a_bad_replica(guarded: Any, job: Any) -> None:
    if job.size == 1:
        pytest.skip("one value has no sum that overflows")
    model = _Model(guarded("raise"))
    gradients = model.gradients
    gradients[1][4] = 3e38
    error = outcome(model.step, gradients)
    assert isinstance(error, hs.NonFiniteError)
    assert "'bias' is inf in element (4,), though finite on every" in str(error)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "Adagrad", "LAMB"])
def test_skipped_steps_change_nothing(
    guarded: Any, job: Any, optimizer: str, first: bool
) -> None:
    with_norm = {"clip_global_norm": 1.0} if optimizer == "Adam" else {}
    model = _Model(guarded("skip"), optimizer, **with_norm)
    if not first:
        assert model.step(model.gradients) is True
    before = model.state()
    gradients = model.gradients
    if job.rank == 0:
        gradients[1][0] = np.nan
    for number in range(1, 4):
        assert model.step(gradients) is False
        assert model.optimizer.skipped_steps == number
        assert model.state() == before
    assert model.step(model.gradients) is True
    assert model.state() != before
    assert int(model.optimizer.iterations) == 1 + (not first)
    model.strategy.check_divergence()
    assert set(job.allgather(str(model.state()))) == {str(model.state())}


def test_skipped_accumulations_begin_anew(guarded: Any, job: Any) -> None:
    model = _Model(guarded("skip"), "SGD", accumulate_steps=2)
    bad = model.gradients
    if job.rank == 0:
        bad[0][1, 1] = np.inf
    before = (model.kernel.numpy(), model.bias.numpy())
    assert model.step(bad) is False
    assert model.step(model.gradients) is False
    assert model.optimizer.skipped_steps == 1
    np.testing.assert_array_equal(model.kernel, before[0])
    np.testing.assert_array_equal(model.bias, before[1])
    assert model.step(model.gradients) is False
    assert model.step(model.gradients) is True
    np.testing.assert_allclose(model.bias, before[1] - 1e-2 * 2 * job.size, rtol=1e-6)


def test_warnings_become_rare_and_steps_are_applied(
    guarded: Any, job: Any, lines: list[str]
) -> None:
    model = _Model(guarded("warn"), "SGD")
    gradients = model.gradients
    gradients[1][1] = np.nan
    for _ in range(9):
        assert model.step(gradients) is True
    assert np.isnan(model.bias.numpy()).tolist() == [False, True, False, False, False]
    assert int(model.optimizer.iterations) == 9
    assert model.optimizer.skipped_steps == 0
    told = [line for line in lines if "'bias' is nan in element (1,)" in line]
    assert len(told) == (4 if job.rank == 0 else 0)
    if told:
        assert f"from replicas {list(range(job.size))}" in told[0]
        assert "step 8 of this kind, applied" in told[-1]


def test_nothing_is_checked_by_default(
    strategy: Any, job: Any, lines: list[str]
) -> None:
    model = _Model(strategy, "SGD")
    gradients = model.gradients
    gradients[1][1] = np.nan
    assert model.step(gradients) is True
    assert not lines


def test_rows_are_named_as_in_the_variable(guarded: Any, job: Any) -> None:
    strategy = guarded("raise")
    with strategy.scope():
        table = hs.Variable(np.zeros((9, 4)), name="table")
        optimizer = hs.optimizers.Adagrad(0.1)
    values = np.ones((2, 4))
    if job.rank == 0:
        values[1, 3] = np.nan
    # Replica 0 has a gradient for rows 1 and 6; only replica 0 has row 6.
    rows = hs.IndexedSlices(values, [1, 6 if job.rank == 0 else 2])
    before = table.numpy()
    error = outcome(strategy.run, lambda: optimizer.apply_gradients([(rows, table)]))
    assert "'table' is nan in element (6, 3), from replicas [0]" in str(error)
    np.testing.assert_array_equal(table, before)


def test_rows_whose_sum_overflows(guarded: Any, job: Any) -> None:
    strategy = guarded("skip")
    with strategy.scope():
        table = hs.Variable(np.zeros((3, 2), np.float32), name="table")
        optimizer = hs.optimizers.SGD(0.1)
    rows = hs.IndexedSlices(np.full((2, 2), 3e38, np.float32), [1, 1])
    strategy.run(lambda: bool(optimizer.apply_gradients([(rows, table)])))
    assert optimizer.skipped_steps == 1
    assert not table.numpy().any()


def test_all_replicas_leave_run_with_the_same_error(guarded: Any, job: Any) -> None:
    model = _Model(guarded("raise", "raise"))
    gradients = model.gradients
    if job.rank == 0:
        gradients[0][0, 0] = np.nan
    for _ in range(2):
        assert isinstance(outcome(model.step, gradients), hs.NonFiniteError)
    assert model.step(model.gradients) is True


@pytest.mark.parametrize("dtype", ["e", "f", "d", "g", "F", "D", "bfloat16"])
@pytest.mark.parametrize("size", [1, 3000])
def test_every_type_is_checked(dtype: str, size: int) -> None:
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        kind = np.dtype(ml_dtypes.bfloat16)
    else:
        kind = np.dtype(dtype)
    array = np.ones((size, 1), kind)
    others = [np.ones(3, np.float32), np.ones(3), np.empty(0)]
    assert all_finite([*others, array])
    # The square of this value overflows in many types, but the value itself is finite.
    array[-1] = np.finfo(np.float16).max
    assert all_finite([*others, array])
    for bad in (np.nan, np.inf, -np.inf):
        array[-1] = bad
        assert not all_finite([*others, array])
    if kind.kind == "c":
        array[-1] = complex(0, np.nan)
        assert not all_finite([*others, array])


def test_squares_that_overflow_are_finite() -> None:
    for array in (np.full(5000, 1e38, np.float32), np.full(5, -1e300)):
        assert all_finite([array])


def test_plain_programs_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCSTRAT_NON_FINITE", "skip")
    strategy = hs.OneDeviceStrategy()
    with strategy.scope():
        x = hs.Variable(np.ones(3), name="x")
        optimizer = hs.optimizers.SGD(0.1)
    gradient = np.array([1, np.nan, 1])
    strategy.run(lambda: optimizer.apply_gradients([(gradient, x)]))
    np.testing.assert_array_equal(x, np.ones(3))
    assert optimizer.skipped_steps == 1
