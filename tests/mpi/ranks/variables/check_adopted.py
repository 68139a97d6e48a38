"""Variables over memory that another library owns."""

from __future__ import annotations

import contextvars
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = pytest.mark.rule


def _adopted(strategy: Any, memory: Any, **options: Any) -> Any:
    with strategy.scope():
        return hs.Variable.adopt(memory, **options)


def test_memory_gets_the_value_of_replica_0_and_stays_the_component(
    strategy: Any,
) -> None:
    memory = np.full((2, 3), strategy.replica_id, np.float32)
    variable = _adopted(strategy, memory, name="weights")
    np.testing.assert_array_equal(memory, np.zeros((2, 3)))
    assert variable.component is memory
    assert variable.name == "weights"
    assert variable.trainable
    memory += 5
    np.testing.assert_array_equal(variable.numpy(), np.full((2, 3), 5))
    assert not variable.value().flags.writeable


def test_updates_of_the_variable_are_those_of_the_memory(strategy: Any) -> None:
    memory = np.zeros(3)
    variable = _adopted(strategy, memory, aggregation="sum")
    with strategy.scope():
        variable.assign(np.arange(3.0))
        strategy.run(lambda: variable.assign_add(np.ones(3)))
    added = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(memory, np.arange(3.0) + added)


def test_gradients_move_the_memory(strategy: Any) -> None:
    memory = np.ones(4)
    variable = _adopted(strategy, memory)
    with strategy.scope():
        optimizer = hs.optimizers.SGD(0.5)
    own = np.full(4, float(strategy.replica_id + 1))
    strategy.run(lambda: optimizer.apply_gradients([(own, variable)]))
    count = strategy.num_replicas_in_sync
    np.testing.assert_allclose(memory, 1 - 0.5 * (count * (count + 1) / 2))


def test_restore_writes_into_the_memory(strategy: Any, folder: Path) -> None:
    memory = np.arange(6.0).reshape(2, 3)
    manager = hs.CheckpointManager(folder, weights=_adopted(strategy, memory))
    manager.save(1)
    memory[...] = -1
    assert manager.restore_or_initialize() == 1
    np.testing.assert_array_equal(memory, np.arange(6.0).reshape(2, 3))


def test_copies_that_their_owner_lets_differ_are_found(make_strategy: Any) -> None:
    with make_strategy() as strategy:
        memory = np.zeros(5)
        variable = _adopted(strategy, memory, name="biased")
        memory[2] = strategy.replica_id
        error = outcome(strategy.check_divergence)
        differs = strategy.num_replicas_in_sync > 1
        assert isinstance(error, hs.DivergenceError) == differs
        assert not differs or variable.name in str(error)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: np.zeros((4, 4)).T[1:], "strides"),
        (lambda: np.broadcast_to(np.zeros(1), (1,)), "read-only"),
        (lambda: np.zeros(2, ">f8"), "dtype >f8"),
        (lambda: [1.0, 2.0], "found list"),
    ],
)
def test_memory_that_one_replica_cannot_lend_is_an_error_on_all(
    strategy: Any, job: Any, wrong: Any, words: str
) -> None:
    last = strategy.num_replicas_in_sync - 1
    memory = wrong() if strategy.replica_id == last else np.zeros(2)
    error = outcome(_adopted, strategy, memory)
    assert isinstance(error, (ValueError, hs.ReplicaError))
    assert words in str(error)
    assert_usable(strategy, job)


def test_adopted_outside_of_scopes_is_a_plain_variable() -> None:
    memory = np.zeros(2)
    variable = hs.Variable.adopt(memory, name="alone")
    assert type(variable) is hs.Variable
    variable.assign_add(np.ones(2))
    np.testing.assert_array_equal(memory, np.ones(2))


def test_a_thread_without_a_context_reduces_by_the_strategy(strategy: Any) -> None:
    """A thread without a context reduces, like the hooks of frameworks."""
    totals: list[Any] = []
    thread = threading.Thread(
        target=contextvars.Context().run,
        args=(lambda: totals.append(strategy.reduce("sum", np.ones(2), axis=None)),),
    )
    thread.start()
    thread.join()
    np.testing.assert_array_equal(totals[0], np.full(2, strategy.num_replicas_in_sync))
