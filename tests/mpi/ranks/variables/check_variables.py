"""Variables of every kind, updated and read in every context."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.variables import read_all, share_of
from tests.mpi.ranks.aggregations import AGGREGATIONS, DIVIDED, REFUSED, combined, signs
from tests.mpi.ranks.made_variables import START, make
from tests.mpi.ranks.outcomes import (
    assert_only_one_failed,
    assert_same_bits,
    assert_usable,
    outcome,
)
from tests.mpi.ranks.sums import NATIVE, is_writable, random_parts

pytestmark = pytest.mark.rule


TYPES = (*NATIVE, np.dtype(bool), np.dtype("U3"))
METHODS = ("assign", "assign_add", "assign_sub")


def in_replica(strategy: Any, function: Any, *args: Any) -> Any:
    """Call a function in replica context; return this replica's part of the result."""
    return strategy.local_value(strategy.run(function, args=args))


def apply(method: str, old: Any, value: Any) -> Any:
    return {"assign": value, "assign_add": old + value, "assign_sub": old - value}[
        method
    ]


def parts_of(job: Any) -> list[Any]:
    return [8.0 * (rank + 1) * signs(2, 2) for rank in range(job.size)]


def test_all_components_start_with_the_first_replicas_value(
    strategy: Any, job: Any
) -> None:
    for case, dtype in enumerate(TYPES):
        kind = dtype if dtype.kind not in "Ub" else "i1"
        parts = [p.astype(dtype) for p in random_parts(case, job.size, (2, 3), kind)]
        for synchronization in ("auto", "on_write", "on_read"):
            variable = make(
                strategy,
                lambda parts=parts: np.asfortranarray(parts[job.rank]),
                synchronization=synchronization,
            )
            assert variable.dtype == dtype
            np.testing.assert_array_equal(variable.component, parts[0])
            assert variable.component.flags.c_contiguous
            assert is_writable(variable.component)


def test_class_and_attributes_follow_the_arguments(strategy: Any, job: Any) -> None:
    mirrored = make(strategy, 3, name="m", trainable=False)
    assert type(mirrored) is hs.MirroredVariable
    assert (mirrored.name, mirrored.dtype, mirrored.shape) == ("m", np.int32, ())
    assert mirrored.trainable is False
    assert mirrored.synchronization is hs.VariableSynchronization.ON_WRITE
    on_read = make(strategy, 3.0, synchronization="ON_READ", aggregation="Sum")
    assert type(on_read) is hs.SyncOnReadVariable
    assert on_read.trainable is False
    assert on_read.aggregation is hs.VariableAggregation.SUM
    assert len(on_read.values) == 1
    assert make(strategy, 1.0).trainable is True


def test_variables_that_cannot_be_made_fail_on_every_rank(
    strategy: Any, job: Any
) -> None:
    for options in (
        {"value": 1, "aggregation": "mean"},
        {"value": 1.0, "synchronization": "none"},
        {"value": [[1], [2, 3]]},
        {"value": 1.5, "dtype": "int32"},
    ):
        assert type(outcome(make, strategy, **options)) is ValueError
    for faulty in range(job.size):
        value = object() if job.rank == faulty else 1.0
        assert_only_one_failed(outcome(make, strategy, value), ValueError, faulty, job)
    value = np.ones(2 + job.rank)
    error = outcome(make, strategy, value)
    assert (type(error) is hs.CollectiveError) == (job.size > 1)
    assert_usable(strategy, job)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_assignments_to_mirrored_variables_are_combined(
    strategy: Any, job: Any, aggregation: str
) -> None:
    parts = parts_of(job)
    for method in METHODS:
        variable = make(strategy, aggregation=aggregation)
        result = getattr(variable, method)(parts[0])
        expected = apply(method, START, parts[0])
        assert (type(result) is hs.Mirrored) == (job.size > 1)
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(variable, expected)

        def step(variable: Any = variable, method: str = method) -> Any:
            return getattr(variable, method)(parts[job.rank])

        if aggregation == "none" and job.size > 1:
            assert type(outcome(strategy.run, step)) is ValueError
            np.testing.assert_array_equal(variable, expected)
            continue
        result = in_replica(strategy, step)
        if aggregation != "none":
            expected = apply(method, expected, combined(aggregation, parts))
        else:
            expected = apply(method, expected, parts[0])
        np.testing.assert_allclose(result, expected, rtol=1e-15)
        assert_same_bits(job, result, variable.numpy())
    assert_usable(strategy, job)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_read_components_are_updated_apart_and_combined_when_read(
    strategy: Any, job: Any, aggregation: str
) -> None:
    parts = parts_of(job)
    for method in METHODS:
        variable = make(strategy, synchronization="on_read", aggregation=aggregation)

        def step(variable: Any = variable, method: str = method) -> Any:
            result = getattr(variable, method)(parts[job.rank])
            np.testing.assert_array_equal(variable.value(), result)
            return result

        components = [apply(method, START, part) for part in parts]
        np.testing.assert_array_equal(in_replica(strategy, step), components[job.rank])
        np.testing.assert_array_equal(variable.values[0], components[job.rank])
        (everything,) = read_all([variable])
        if aggregation == "none":
            for read in (variable.value, variable.read_value, variable.numpy):
                assert type(outcome(read)) is ValueError
            np.testing.assert_array_equal(everything, components)
            continue
        expected = combined(aggregation, components)
        for value in (variable.value(), np.asarray(variable), everything):
            np.testing.assert_allclose(value, expected, rtol=1e-15)
        assert_same_bits(job, variable.numpy())
    assert_usable(strategy, job)


def test_on_read_assignment_in_cross_replica_context(strategy: Any, job: Any) -> None:
    for aggregation, method in itertools.product(AGGREGATIONS, METHODS):
        variable = make(strategy, synchronization="on_read", aggregation=aggregation)
        if aggregation == "none" or (aggregation in DIVIDED and method != "assign"):
            error = outcome(getattr(variable, method), START)
            assert type(error) is ValueError
            continue
        before = variable.numpy()
        result = getattr(variable, method)(3 * START)
        expected = apply(method, before, 3 * START)
        for value in (result, variable.numpy()):
            np.testing.assert_allclose(value, expected, rtol=1e-14)
        assert getattr(variable, method)(START, read_value=False) is None


def test_integer_shares_add_up_exactly(strategy: Any, job: Any) -> None:
    for dtype in "bBhHiIlL":
        info = np.iinfo(dtype)
        totals = np.array([info.min, info.min + 1, 0, 1, 7, info.max], dtype)
        variable = make(strategy, totals, synchronization="on_read", aggregation="sum")
        variable.assign(totals, read_value=False)
        np.testing.assert_array_equal(variable.numpy(), totals)
        own = [int(t) // job.size + (job.rank < int(t) % job.size) for t in totals]
        np.testing.assert_array_equal(variable.values[0], own)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7, 128, 300, 70000])
def test_shares_of_narrow_integers_exist_for_many_replicas(num_replicas: int) -> None:
    for dtype in (np.int8, np.uint8, np.int16, np.int64):
        for total in (0, 1, 100, 127):
            shares = [
                int(share_of(np.array(total, dtype), num_replicas, replica))
                for replica in range(min(num_replicas, 200))
            ]
            assert sum(shares) == total


def test_wrong_values_are_refused_and_the_others_learn_of_it(
    strategy: Any, job: Any
) -> None:
    variable = make(strategy, aggregation="sum")
    wrong = (np.ones(2), START.astype(np.float32), "text", None, 1.0)
    for case, value in enumerate(wrong):
        assert type(outcome(variable.assign, value)) is ValueError
        faulty = case % job.size
        own = value if job.rank == faulty else START
        error = outcome(in_replica, strategy, variable.assign, own)
        assert_only_one_failed(error, ValueError, faulty, job)
    np.testing.assert_array_equal(variable, START)
    assert_usable(strategy, job)


def test_updates_of_different_variables_are_a_mismatch(strategy: Any, job: Any) -> None:
    pair = [make(strategy, name=n, aggregation="sum") for n in ("left", "right")]
    error = outcome(in_replica, strategy, pair[job.rank > 0].assign, START)
    if job.size > 1:
        assert type(error) is hs.CollectiveError
        assert "left" in str(error)
        assert "right" in str(error)
    assert_usable(strategy, job)


def test_distributed_values_are_assigned_by_their_rules(
    strategy: Any, job: Any
) -> None:
    mirrored = make(strategy, aggregation="sum")
    on_read = make(strategy, synchronization="on_read", aggregation="mean")
    own = strategy.run(lambda: START * (job.rank + 1))
    if job.size > 1:
        assert type(outcome(mirrored.assign, own)) is ValueError
        assert isinstance(outcome(on_read.assign, own), (TypeError, ValueError))
    strategy.run(on_read.assign, args=(own,))
    mirrored.assign(on_read)
    np.testing.assert_allclose(mirrored, START * (job.size + 1) / 2)
    strategy.run(mirrored.assign, args=(own,))
    np.testing.assert_allclose(mirrored, START * sum(range(job.size + 1)))
    mirrored.assign(strategy.extended.broadcast_to(2 * START))
    np.testing.assert_array_equal(mirrored, 2 * START)


SCATTER = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_div": np.divide.at,
    "scatter_min": np.minimum.at,
    "scatter_max": np.maximum.at,
    "scatter_update": lambda array, indices, rows: array.__setitem__(indices, rows),
}


def test_scattered_rows_are_combined_like_numpy(strategy: Any, job: Any) -> None:
    indices = [np.array([rank % 2, 1]) for rank in range(job.size)]
    rows = [np.array([[2.0, 4.0], [8.0, rank + 1.0]]) for rank in range(job.size)]
    for aggregation, method in itertools.product(AGGREGATIONS[1:], SCATTER):
        variable = make(strategy, aggregation=aggregation)
        expected = START.copy()
        scatter = getattr(variable, method)
        own = hs.IndexedSlices(rows[job.rank], indices[job.rank])
        if method in REFUSED[aggregation]:
            # The error is raised in each context, and for any number of replicas.
            error = outcome(scatter, hs.IndexedSlices(rows[0], indices[0]))
            assert isinstance(error, NotImplementedError)
            error = outcome(strategy.run, scatter, (own,))
            assert isinstance(error, NotImplementedError)
            np.testing.assert_array_equal(variable, START)
            continue
        SCATTER[method](expected, indices[0], rows[0])
        scatter(hs.IndexedSlices(rows[0], indices[0]))
        np.testing.assert_array_equal(variable, expected)
        strategy.run(scatter, args=(own,))
        factor = job.size if aggregation == "mean" else 1
        first = aggregation == "only_first_replica"
        for rank in range(1 if first else job.size):
            SCATTER[method](expected, indices[rank], rows[rank] / factor)
        np.testing.assert_allclose(variable, expected, rtol=1e-14)
        assert_same_bits(job, variable.numpy())


def test_wrong_rows_on_one_rank_fail_on_all(strategy: Any, job: Any) -> None:
    variable = make(strategy, aggregation="sum")
    good = hs.IndexedSlices(np.ones((1, 2)), [0])
    for bad in (
        hs.IndexedSlices(np.ones((1, 2)), [2]),
        hs.IndexedSlices(np.ones((1, 2)), [-1]),
        hs.IndexedSlices(np.ones((1, 3)), [0]),
    ):
        own = bad if job.rank == 0 else good
        error = outcome(strategy.run, variable.scatter_add, (own,))
        assert_only_one_failed(error, ValueError, 0, job)
    np.testing.assert_array_equal(variable, START)
    assert_usable(strategy, job)


def test_variables_act_as_arrays_in_arithmetic_and_functions(
    strategy: Any, job: Any
) -> None:
    variable = make(strategy, aggregation="sum")

    def check() -> None:
        np.testing.assert_array_equal(variable + 1, START + 1)
        np.testing.assert_array_equal(2.0 / variable, 2 / START)
        np.testing.assert_array_equal(-variable @ variable, -START @ START)
        np.testing.assert_array_equal(START - variable, np.zeros((2, 2)))
        np.testing.assert_array_equal(variable > 0, START > 0)
        np.testing.assert_array_equal(np.exp(variable), np.exp(START))
        np.testing.assert_array_equal(np.add.reduce(variable), START.sum(0))
        assert np.sum(variable) == START.sum()
        assert np.mean(variable) == START.mean()
        np.testing.assert_array_equal(np.concatenate([variable, START]).shape, (4, 2))
        np.testing.assert_array_equal(variable[1:, 0], START[1:, 0])
        assert len(variable) == 2
        assert abs(variable).min() == 1
        assert float(variable[0, 0]) == 1
        array = START.copy()
        array += variable
        np.testing.assert_array_equal(array, 2 * START)

    check()
    strategy.run(check)
    with pytest.raises(TypeError, match="assign"):
        np.add(variable, 1, out=variable)
    assert len({variable, make(strategy)}) == 2


def test_views_are_read_only_and_copies_are_copies(strategy: Any, job: Any) -> None:
    for synchronization in ("on_write", "on_read"):
        variable = make(
            strategy, synchronization=synchronization, aggregation="only_first_replica"
        )
        for part in (variable.values[0], strategy.local_value(variable)):
            with pytest.raises(ValueError, match="read-only"):
                part[0] = 1
        for function in (variable.read_value, variable.numpy):
            function()[:] = -1
        strategy.run(lambda v: v.read_value().fill(-1), args=(variable,))
        np.testing.assert_array_equal(variable.numpy(), START)
        exported = np.from_dlpack(variable)
        np.testing.assert_array_equal(exported, START)
        assert not np.shares_memory(exported, variable.component)


def test_deep_copies_are_apart_and_pickling_is_refused(strategy: Any, job: Any) -> None:
    for synchronization in ("on_write", "on_read"):
        variable = make(strategy, synchronization=synchronization, aggregation="mean")
        other = copy.deepcopy({"v": [variable, variable]})["v"]
        assert other[0] is other[1]
        assert type(other[0]) is type(variable)
        other[0].assign(2 * START)
        np.testing.assert_array_equal(variable, START)
        np.testing.assert_array_equal(other[0], 2 * START)
        strategy.run(other[0].assign_add, args=(START,))
        np.testing.assert_array_equal(other[0].numpy(), 3 * START)
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(variable)


def test_update_acts_on_each_component(strategy: Any, job: Any) -> None:
    variable = make(strategy)
    gradient = strategy.extended.reduce_to("sum", START, variable)
    result = strategy.extended.update(
        variable, lambda v, g: v.assign_sub(g), args=(gradient,)
    )
    np.testing.assert_array_equal(result, START * (1 - job.size))
    np.testing.assert_array_equal(variable, START * (1 - job.size))
    if job.size > 1:
        own = strategy.run(lambda: START * job.rank)
        error = outcome(
            strategy.extended.update, variable, lambda v, g: v.assign(g), (own,)
        )
        assert type(error) is ValueError
    on_read = make(strategy, synchronization="on_read", aggregation="sum")
    own = strategy.run(lambda: START * job.rank)
    strategy.extended.update(on_read, lambda v, g: v.assign(g), args=(own,))
    np.testing.assert_array_equal(on_read, START * sum(range(job.size)))


def test_many_variables_are_read_in_order(strategy: Any, job: Any) -> None:
    variables = [
        make(strategy, i * START, synchronization=kind, aggregation=aggregation)
        for i, (kind, aggregation) in enumerate(
            itertools.product(("on_write", "on_read"), AGGREGATIONS)
        )
    ]
    for i, (variable, value) in enumerate(
        zip(variables, read_all(variables), strict=True)
    ):
        expected = i * START
        if variable.synchronization is hs.VariableSynchronization.ON_READ:
            name = variable.aggregation.name.lower()
            expected = combined(name, [expected] * job.size)
        np.testing.assert_allclose(value, expected)
