"""The default strategy and OneDeviceStrategy: one replica, without MPI."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs


@pytest.fixture(params=["default", "one device"])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "default":
        yield hs.get_strategy()
    else:
        with hs.OneDeviceStrategy("CPU:0") as strategy:
            yield strategy


def test_everything_is_one_replica(strategy: Any) -> None:
    assert strategy.num_replicas_in_sync == 1
    assert strategy.replica_id == 0
    with pytest.raises(RuntimeError, match="MPI"):
        _ = strategy.topology


def test_values_pass_through(strategy: Any) -> None:
    value = {"x": np.arange(3), "y": [1, "text", None]}
    assert strategy.reduce("sum", value, axis=None) is value
    assert strategy.run(lambda: value) is value
    assert strategy.run(lambda v: v["x"], args=(value,)) is value["x"]
    assert strategy.experimental_local_results(value) == (value,)
    assert strategy.local_value(value)["x"] is value["x"]
    assert strategy.broadcast_object(value) is value
    np.testing.assert_array_equal(strategy.gather(np.arange(3), axis=0), range(3))
    strategy.barrier()
    made = strategy.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    assert made == 1


def test_synchronization_is_for_variables_that_are_distributed() -> None:
    plain = hs.Variable(1.0, synchronization="none", aggregation="mean")
    plain.assign_add(2.0)
    assert plain.numpy() == 3


def test_axes_are_reduced(strategy: Any) -> None:
    array = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(strategy.reduce("sum", array, axis=0), [3, 5, 7])
    np.testing.assert_array_equal(strategy.reduce("mean", array, axis=1), [1, 4])
    assert strategy.reduce("mean", array, axis=(0, 1)) == 2.5
    assert np.isnan(strategy.reduce("mean", np.zeros(0), axis=0))


@pytest.mark.parametrize("axis", [2, -3, (0, 0), (0, -2)])
def test_wrong_axes_are_refused(strategy: Any, axis: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        strategy.reduce("sum", np.ones((2, 3)), axis=axis)


def test_mistakes_are_those_of_several_replicas(strategy: Any) -> None:
    with pytest.raises(ValueError, match="ReduceOp"):
        strategy.reduce("median", 1, axis=None)
    with pytest.raises(ValueError, match="axis"):
        strategy.gather(np.float64(1), axis=0)
    with pytest.raises(ValueError, match="root"):
        strategy.broadcast_object(1, root=1)
    with pytest.raises(ValueError, match="list or tuple"):
        strategy.run(print, args=np.ones(2))


def test_replica_context_is_there_inside_run(strategy: Any) -> None:
    def step() -> Any:
        context = hs.get_replica_context()
        assert context.strategy is strategy
        assert context.replica_id_in_sync_group == 0
        return context.all_reduce("mean", np.array([1, 2]))

    np.testing.assert_array_equal(strategy.run(step), [1, 2])


def test_variables_are_plain(strategy: Any) -> None:
    for options in ({}, {"synchronization": "on_read"}, {"aggregation": "sum"}):
        made = strategy.run(lambda options=options: hs.Variable(np.ones(2), **options))
        assert type(made) is hs.Variable
        strategy.run(made.assign_add, args=(np.ones(2),))
        np.testing.assert_array_equal(made, [2, 2])
        np.testing.assert_array_equal(made.assign_sub(np.ones(2)), [1, 1])
        assert made.assign(np.zeros(2), read_value=False) is None
        assert made.device == "CPU:0"


def test_update_calls_the_function_on_the_variable() -> None:
    strategy = hs.OneDeviceStrategy()
    with strategy.scope():
        variable = hs.Variable(1.0)
    found = strategy.extended.update(
        variable, lambda v, x: v.assign_add(x), args=(2.0,)
    )
    assert found == variable.numpy() == 3
    assert strategy.extended.variable_created_in_scope(variable)


def test_scope_of_one_device_is_cross_replica_context() -> None:
    strategy = hs.OneDeviceStrategy("/device:cpu:3")
    assert strategy.device == "CPU:3"
    assert hs.has_strategy() is False
    with strategy.scope():
        assert hs.get_strategy() is strategy
        assert hs.has_strategy()
        assert hs.in_cross_replica_context()
        assert hs.get_replica_context() is None
        with pytest.raises(RuntimeError, match="a second strategy object"):
            hs.OneDeviceStrategy().scope().__enter__()
    assert hs.get_replica_context() is not None


def test_default_strategy_has_no_scope_inside_another() -> None:
    default = hs.get_strategy()
    with hs.OneDeviceStrategy().scope(), pytest.raises(RuntimeError):
        default.scope().__enter__()


@pytest.mark.parametrize("name", ["TPU:0", "CPU", "CPU:x", "", None, "CPU:-1"])
def test_names_of_no_device_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="expected a device"):
        hs.OneDeviceStrategy(name)


def test_unknown_on_error_is_refused() -> None:
    from hpcstrat.strategies.base import Strategy

    with pytest.raises(ValueError, match="on_error"):
        Strategy(on_error="ignore")


def test_optimizer_and_losses_work_without_a_strategy() -> None:
    variable = hs.Variable(np.ones(2), name="v")
    optimizer = hs.optimizers.SGD(0.5, momentum=0.5)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(2), variable)])
    np.testing.assert_allclose(variable, [1 - 0.5 - 0.75] * 2)


def test_mpi_is_not_started() -> None:
    program = (
        "import sys, numpy, hpcstrat as hs\n"
        "with hs.OneDeviceStrategy() as strategy:\n"
        "    strategy.run(lambda: hs.Variable(1.0).assign(2.0))\n"
        "    list(strategy.experimental_distribute_dataset("
        "hs.Dataset(numpy.ones(4), 2)))\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
