"""Contexts: the current strategy, and the calls that each context allows."""

from __future__ import annotations

import contextvars
import copy
import threading
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_only_one_failed, assert_usable, outcome

pytestmark = pytest.mark.rule


def place() -> tuple[bool, bool, bool]:
    """Return whether there is a strategy, replica context and cross-replica context."""
    context = hs.get_replica_context()
    return hs.has_strategy(), context is not None, hs.in_cross_replica_context()


OUTSIDE = (False, True, False)
CROSS = (True, False, True)
REPLICA = (True, True, False)


def test_context_follows_scope_run_merge_call_and_update(
    strategy: Any, job: Any
) -> None:
    def merge(found: Any, own: Any) -> Any:
        assert found is strategy
        assert place() == CROSS
        assert strategy.local_value(own) == job.rank
        return found.reduce("sum", own, axis=None)

    def step() -> Any:
        assert place() == REPLICA
        assert hs.get_strategy() is strategy
        context = hs.get_replica_context()
        assert context.strategy is strategy
        assert context.replica_id_in_sync_group == job.rank
        assert context.num_replicas_in_sync == job.size
        assert len(context.devices) == 1
        total = context.merge_call(merge, args=(np.int64(job.rank),))
        assert place() == REPLICA
        return total

    assert place() == OUTSIDE
    with strategy.scope() as same:
        assert same is strategy
        assert place() == CROSS
        assert hs.get_strategy() is strategy
        with strategy.scope():
            assert place() == CROSS
        inside = strategy.run(step)
        variable = hs.Variable(1.0)
        strategy.extended.update(variable, lambda v: place() == CROSS or 1 / 0)
        assert place() == CROSS
    outside = strategy.run(step)
    assert place() == OUTSIDE
    for total in (inside, outside):
        assert strategy.local_value(total) == sum(range(job.size))


def test_contexts_are_left_when_an_exception_leaves_them(
    strategy: Any, job: Any
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("planted")

    def step() -> None:
        hs.get_replica_context().merge_call(fail)

    for function in (fail, step):
        with pytest.raises(KeyError):
            strategy.run(function)
        assert place() == OUTSIDE
    with pytest.raises(KeyError), strategy.scope():
        fail()
    assert place() == OUTSIDE
    assert_usable(strategy, job)


def test_cross_replica_methods_are_refused_in_replica_context(
    strategy: Any, job: Any
) -> None:
    def step() -> None:
        for call in (
            lambda: strategy.reduce("sum", 1.0, axis=None),
            lambda: strategy.gather(np.ones(1), axis=0),
            lambda: strategy.run(lambda: None),
            lambda: strategy.scope().__enter__(),
            lambda: strategy.extended.reduce_to("sum", 1.0, "CPU:0"),
        ):
            assert type(outcome(call)) is RuntimeError

    strategy.run(step)
    assert_usable(strategy, job)


def test_replica_methods_are_refused_outside_their_function(
    strategy: Any, job: Any
) -> None:
    context = strategy.run(lambda: (hs.get_replica_context(),))[0]
    context = strategy.local_value(context)
    with strategy.scope():
        for call in (
            lambda: context.all_reduce("sum", 1.0),
            lambda: context.all_gather(np.ones(1), 0),
            lambda: context.merge_call(lambda s: None),
        ):
            assert type(outcome(call)) is RuntimeError
    assert_usable(strategy, job)


def test_strategies_do_not_nest_and_variables_keep_to_theirs(
    make_strategy: Any, job: Any
) -> None:
    with make_strategy() as first, make_strategy() as second:
        with first.scope():
            variable = hs.Variable(np.ones(2), aggregation="sum")
            assert type(outcome(second.scope().__enter__)) is RuntimeError
            assert type(outcome(second.run, lambda: None)) is RuntimeError
            assert type(outcome(second.reduce, "sum", 1.0, None)) is RuntimeError
        with second.scope():
            assert type(outcome(variable.assign, np.ones(2))) is RuntimeError
            assert type(outcome(first.run, lambda: None)) is RuntimeError
        error = outcome(second.run, lambda: variable.assign(np.ones(2)))
        assert type(error) is RuntimeError
        assert_usable(first, job)
        assert_usable(second, job)


def test_strategy_that_is_set_is_current_until_it_is_unset(
    strategy: Any, job: Any
) -> None:
    def program() -> None:
        hs.experimental_set_strategy(strategy)
        assert place() == CROSS
        assert isinstance(hs.Variable(1.0), hs.MirroredVariable)
        hs.experimental_set_strategy(None)
        assert place() == OUTSIDE
        assert type(hs.Variable(1.0)) is hs.Variable
        with strategy.scope():
            error = outcome(hs.experimental_set_strategy, strategy)
            assert type(error) is RuntimeError

    # Run in a copied context, so that a failure does not leave the strategy set.
    contextvars.copy_context().run(program)
    assert place() == OUTSIDE


def test_threads_need_the_context_of_their_program(strategy: Any, job: Any) -> None:
    results: list[Any] = []

    def look() -> None:
        results.append(outcome(hs.get_strategy) or hs.get_strategy())

    with strategy.scope():
        inherited = contextvars.copy_context()
        threads = [
            threading.Thread(target=look),
            threading.Thread(target=lambda: inherited.run(look)),
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert (type(results[0]) is RuntimeError) == (job.size > 1)
    assert results[1] is strategy


def test_per_replica_values_have_operators_in_replica_context_only(
    strategy: Any, job: Any
) -> None:
    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(2, context.replica_id_in_sync_group + 1.0)
    )
    own = np.full(2, job.rank + 1.0)
    for function in (lambda: value + 1, lambda: np.exp(value), lambda: -value):
        assert isinstance(outcome(function), (TypeError, ValueError))
    for function in (lambda: np.asarray(value), lambda: bool(value), lambda: value[0]):
        assert type(outcome(function)) is ValueError
    np.testing.assert_array_equal(strategy.local_value(value), own)

    def captured() -> None:
        np.testing.assert_array_equal(value + 1, own + 1)
        np.testing.assert_array_equal(np.asarray(value), own)

    strategy.run(captured)
    assert len({value, value}) == 1


def test_mirrored_values_act_as_their_copy(strategy: Any, job: Any) -> None:
    value = strategy.extended.broadcast_to(np.arange(3.0) + 5 * job.rank)
    np.testing.assert_array_equal(value * 2, np.arange(3.0) * 2)
    np.testing.assert_array_equal(np.asarray(value), np.arange(3.0))
    assert value.shape == (3,)
    assert value.sum() == 3
    assert len(value) == 3
    strategy.run(lambda v: np.testing.assert_array_equal(v, np.arange(3.0)), (value,))


def test_strategies_are_not_copied_and_values_are(strategy: Any, job: Any) -> None:
    for function in (copy.copy, copy.deepcopy):
        assert type(outcome(function, strategy)) is RuntimeError
    value = strategy.extended.broadcast_to(np.ones(2))
    copied = copy.deepcopy(value)
    assert type(copied) is hs.Mirrored
    assert not np.shares_memory(np.asarray(copied), np.asarray(value))


def test_arguments_that_are_no_sequence_are_refused(strategy: Any, job: Any) -> None:
    for args in (np.ones(2), 3, {"x": 1}):
        assert type(outcome(strategy.run, print, args)) is ValueError
    assert_usable(strategy, job)


def test_default_strategy_needs_no_communication(job: Any) -> None:
    if job.rank == 0:
        strategy = hs.get_strategy()
        assert strategy.num_replicas_in_sync == 1
        assert strategy.reduce("mean", 3, axis=None) == 3
        context = hs.get_replica_context()
        assert context.all_reduce("sum", np.ones(2)).sum() == 2
        assert context.merge_call(lambda s, x: x + 1, args=(1,)) == 2


def test_merge_functions_are_called_with_distributed_values(
    strategy: Any, job: Any
) -> None:
    def merge(found: Any, array: Any, *, table: Any) -> Any:
        kind = hs.PerReplica if job.size > 1 else np.ndarray
        assert type(array) is kind
        gathered = found.gather(array, axis=0)
        total = found.reduce("sum", table["t"], axis=None)
        return {"g": gathered, "t": (total, table["t"])}

    def step() -> Any:
        context = hs.get_replica_context()
        rank = context.replica_id_in_sync_group
        result = context.merge_call(
            merge,
            args=(np.full(rank + 1, rank),),
            kwargs={"table": {"t": np.int64(rank)}},
        )
        assert result["t"] == (sum(range(job.size)), rank)
        return result["g"]

    expected = np.repeat(np.arange(job.size), np.arange(job.size) + 1)
    result = strategy.local_value(strategy.run(step))
    np.testing.assert_array_equal(result, expected)


def test_mirrored_is_its_own_mean_and_has_no_sum(strategy: Any, job: Any) -> None:
    value = strategy.extended.broadcast_to(np.arange(3.0) + job.rank, None)
    np.testing.assert_array_equal(strategy.reduce("mean", value, axis=None), range(3))
    if job.size > 1:
        error = outcome(strategy.reduce, "sum", value, axis=None)
        assert type(error) is ValueError
        assert "same on all" in str(error)
        own = value if job.rank == 0 else np.arange(3.0)
        error = outcome(strategy.reduce, "sum", own, axis=None)
        assert_only_one_failed(error, ValueError, 0, job)
    assert_usable(strategy, job)
