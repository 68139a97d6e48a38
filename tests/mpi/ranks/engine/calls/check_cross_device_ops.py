"""Hooks in a program's CrossDeviceOps, and reduction algorithms called directly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import outcome

pytestmark = pytest.mark.rule


class Counting(hs.ReductionToOneDevice):
    """A subclass in the style of tf.distribute, which counts calls of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def _count(self, what: str) -> None:
        self.calls[what] += 1
        # As in tf.distribute, hooks run in cross-replica context.
        assert hs.get_replica_context() is None
        assert hs.has_strategy()

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        self._count("reduce")
        assert isinstance(options, hs.CommunicationOptions)
        return super().reduce_implementation(
            reduce_op, per_replica_value, destinations, options
        )

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        self._count("batch_reduce")
        return super().batch_reduce_implementation(
            reduce_op, value_destination_pairs, options
        )

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        self._count("broadcast")
        return super().broadcast_implementation(tensor, destinations)


@pytest.fixture
def counted(make_strategy: Any) -> tuple[Any, Counting]:
    ops = Counting()
    return make_strategy(cross_device_ops=ops), ops


def _seen(ops: Counting) -> dict[str, int]:
    seen = dict(ops.calls)
    ops.calls.clear()
    return seen


def test_each_way_to_reduce_calls_a_hook(counted: Any, job: Any) -> None:
    strategy, ops = counted
    total, mine = sum(range(1, job.size + 1)), np.full(2, job.rank + 1.0)
    for _ in range(2):
        np.testing.assert_array_equal(strategy.reduce("sum", mine), total)
        assert _seen(ops) == {"reduce": 1}
    found = strategy.reduce("mean", {"a": mine, "b": np.int32(job.rank)})
    np.testing.assert_allclose(found["a"], total / job.size)
    assert found["b"].dtype == np.float64
    assert _seen(ops) == {"batch_reduce": 1}

    def inside() -> None:
        context = hs.get_replica_context()
        np.testing.assert_array_equal(context.all_reduce("sum", mine), total)
        both = context.all_reduce("sum", [mine, mine[0]])
        assert both[1] == total
        out = mine.copy()
        assert context.all_reduce("sum", out, out=out) is out
        np.testing.assert_array_equal(out, total)

    strategy.run(inside)
    assert _seen(ops) == {"reduce": 2, "batch_reduce": 1}
    extended = strategy.extended
    np.testing.assert_array_equal(extended.reduce_to("sum", mine, "CPU:0"), total)
    extended.batch_reduce_to("sum", [(mine, "CPU:0"), (mine, "CPU:0")])
    assert _seen(ops) == {"reduce": 1, "batch_reduce": 1}
    np.testing.assert_array_equal(extended.broadcast_to(mine), 1.0)
    assert extended.broadcast_to(7) == 7
    assert _seen(ops) == {"broadcast": 1}


def test_variables_and_optimizers_call_the_hooks(counted: Any, job: Any) -> None:
    strategy, ops = counted
    with strategy.scope():
        variable = hs.Variable(np.zeros(2), aggregation="sum", name="v")
        others = [hs.Variable(np.zeros(2), name=name) for name in "ab"]
        optimizer = hs.optimizers.SGD(1.0)
        seen = hs.Variable(0.0, synchronization="on_read", aggregation="sum", name="s")
    _seen(ops)
    mine = np.full(2, job.rank + 1.0)
    total = sum(range(1, job.size + 1))

    def step() -> None:
        variable.assign_add(mine)
        optimizer.apply_gradients([(mine, other) for other in others])
        seen.assign_add(1.0)

    strategy.run(step)
    np.testing.assert_array_equal(variable.numpy(), total)
    np.testing.assert_array_equal(others[1].numpy(), -total)
    # A value of a single replica is assigned without a reduction.
    assigned = {"reduce": 1} if job.size > 1 else {}
    assert _seen(ops) == assigned | {"batch_reduce": 1}
    assert seen.numpy() == job.size
    assert _seen(ops) == {"reduce": 1}
    strategy.check_divergence()


class Clipped(hs.CrossDeviceOps):
    """A subclass with one hook, which all kinds of reductions must call."""

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        found = super().reduce_implementation(
            reduce_op, per_replica_value, destinations, options
        )
        return np.minimum(found, 2.0)


def test_one_hook_serves_all_calls(make_strategy: Any, job: Any) -> None:
    strategy = make_strategy(cross_device_ops=Clipped())
    found = strategy.reduce("sum", [np.ones(3), np.float32(5)])
    np.testing.assert_array_equal(found[0], min(job.size, 2.0))
    assert found[1] == 2
    assert found[1].dtype == np.float32


class Wrong(hs.CrossDeviceOps):
    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        return [np.zeros(5) for _ in value_destination_pairs]


def test_results_of_another_shape_are_refused(make_strategy: Any) -> None:
    strategy = make_strategy(cross_device_ops=Wrong())
    error = outcome(strategy.reduce, "sum", np.ones(3))
    assert isinstance(error, ValueError)
    assert "of the hooks of Wrong, found (5,)" in str(error)


class FailsOnLast(hs.CrossDeviceOps):
    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        assert isinstance(per_replica_value, hs.PerReplica)
        if per_replica_value.values[0] < 0:
            raise ZeroDivisionError("of the program")
        return super().reduce_implementation(
            reduce_op, per_replica_value, destinations, options
        )


def test_a_hook_that_fails_on_one_rank_is_told_to_all(
    make_strategy: Any, job: Any
) -> None:
    strategy = make_strategy(cross_device_ops=FailsOnLast())
    last = job.rank == job.size - 1
    error = outcome(strategy.reduce, "sum", np.float64(-1 if last else 1))
    assert isinstance(error, ZeroDivisionError if last else hs.ReplicaError)
    assert strategy.reduce("sum", np.float64(1)) == job.size


def test_started_reductions_are_refused(counted: Any) -> None:
    strategy, _ = counted

    def inside() -> Any:
        start = hs.get_replica_context().start_all_reduce
        return outcome(start, "sum", np.ones(2))

    error = strategy.local_value(strategy.run(inside))
    assert "hooks of Counting" in str(error)


@pytest.mark.parametrize(
    "ops",
    [hs.CrossDeviceOps(), hs.ReductionToOneDevice(), hs.MpiAllReduce(), Counting()],
)
def test_algorithms_by_themselves(strategy: Any, job: Any, ops: Any) -> None:
    """An algorithm works directly, whatever the strategy's own algorithm is."""
    total, mine = sum(range(1, job.size + 1)), np.full(2, job.rank + 1.0)
    value = strategy.run(lambda: mine)
    with strategy.scope():
        for _ in range(2):
            found = ops.reduce("sum", value, value)
            np.testing.assert_array_equal(strategy.local_value(found), total)
        assert isinstance(found, hs.Mirrored) == (job.size > 1)
        aggregation = hs.VariableAggregation.MEAN
        pairs = [(value, "CPU:0"), (value, value)]
        plain, mirrored = ops.batch_reduce(aggregation, pairs)
        np.testing.assert_allclose(plain, total / job.size)
        np.testing.assert_allclose(strategy.local_value(mirrored), total / job.size)
        cast = ops.broadcast(mine, value)
        np.testing.assert_array_equal(strategy.local_value(cast), 1.0)


def test_algorithms_by_themselves_need_a_scope() -> None:
    with pytest.raises(RuntimeError, match=r"with strategy\.scope"):
        hs.CrossDeviceOps().reduce("sum", np.ones(2), "CPU:0")


def test_aggregations_are_operations(strategy: Any, job: Any) -> None:
    """Programs written for tf.distribute pass aggregations as operations."""
    sums = hs.VariableAggregation.SUM
    assert strategy.extended.reduce_to(sums, np.float64(1), "CPU:0") == job.size
    assert strategy.reduce(hs.VariableAggregation.MEAN, np.float64(1)) == 1
    with pytest.raises(ValueError, match="aggregation SUM or MEAN, found NONE"):
        strategy.reduce(hs.VariableAggregation.NONE, np.float64(1))


def test_other_objects_are_refused_on_all_ranks(make_strategy: Any) -> None:
    error = outcome(make_strategy, cross_device_ops="nccl")
    assert isinstance(error, TypeError)
    assert "a CrossDeviceOps as cross_device_ops, found 'nccl'" in str(error)
