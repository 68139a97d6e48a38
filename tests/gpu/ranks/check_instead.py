"""Tests with GPU arrays that replace rank tests of NumPy's arrays."""

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.calls.replica_collectives import Collectives
from tests.gpu.ranks.arrays import DeviceNumpy, has_type
from tests.gpu.ranks.exceptions import NO_MEANING, reason_of
from tests.mpi.ranks.made_variables import START, make
from tests.mpi.ranks.sums import assert_sum, random_parts

START_HOST = np.array([[1.0, -2.0], [4.0, 8.0]])


def test_rank_tests_make_and_reduce_arrays_on_gpus(strategy: Any, job: Any) -> None:
    assert isinstance(START, cupy.ndarray)
    parts = random_parts(1, job.size, (3, 5), np.float32)
    assert all(isinstance(part, cupy.ndarray) for part in parts)
    standin = getattr(cupy, "_standin", None)
    before = standin and copy.copy(standin.counts)
    total = strategy.reduce("sum", parts[job.rank], axis=None)
    assert_sum(total, parts)
    if standin is not None and job.size > 1:
        after = standin.counts
        assert after.launches + after.collectives > before.launches + before.collectives
    with pytest.raises(AssertionError, match="on the host"):
        assert_sum(cupy.asnumpy(total), parts)
    with pytest.raises(AssertionError):
        assert_sum(total + 1, parts)


_REASONS = {"nccl": "nccl", "mpi": "messages of MPI", "host": "algorithms on the host"}


def test_arrays_go_by_the_transport_that_the_job_is_for(
    strategy: Any, job: Any
) -> None:
    transport = os.environ.get("HPCSTRAT_TEST_TRANSPORT")
    if transport is None or job.size == 1:
        pytest.skip("the job is for no transport")
    strategy.reduce("sum", cupy.ones(10), axis=None)
    reason = strategy.collectives.channel.device_group.reason
    assert reason.startswith(_REASONS[transport])


def test_the_module_for_numpy_keeps_arrays_where_they_are() -> None:
    own, host = DeviceNumpy(), np.arange(3.0)
    for made in (own.arange(3.0), own.ones(3), own.array([1, 2]), own.asarray(host)):
        assert isinstance(made, cupy.ndarray)
    assert isinstance(own.sqrt(host), np.ndarray)
    assert isinstance(own.sqrt(own.arange(3.0)), cupy.ndarray)
    assert isinstance(own.random.default_rng(1).random(3), cupy.ndarray)
    assert isinstance(own.concatenate([[0], own.arange(3)]), cupy.ndarray)
    assert isinstance(own.add.reduce([own.arange(3), own.arange(3)]), cupy.ndarray)
    assert isinstance(own.zeros(2, np.longdouble), np.ndarray)
    assert not has_type(">i4")
    own.testing.assert_array_equal(own.arange(3.0), host)
    with pytest.raises(AssertionError):
        own.testing.assert_array_equal(own.arange(3.0) + 1, host)
    assert own.float32 is np.float32


def test_reasons_are_found_by_test_and_case() -> None:
    for key in NO_MEANING:
        name, _, case = key.partition("[")
        assert reason_of(f"tests/{name}[one_worker-{case}" if case else name)
        if case:
            assert not reason_of(f"tests/{name}[one_worker-float32]")


def test_variables_act_as_arrays_of_cupy(strategy: Any) -> None:
    variable = make(strategy, aggregation="sum")
    other = cupy.asarray(START_HOST)

    def check() -> None:
        results = {
            "plus": (variable + 1, START_HOST + 1),
            "quotient": (2.0 / variable, 2 / START_HOST),
            "left": (other - variable, np.zeros((2, 2))),
            "product": (variable @ other, START_HOST @ START_HOST),
            "greater": (variable > 0, START_HOST > 0),
            "exp": (cupy.exp(variable), np.exp(START_HOST)),
            "NumPy's exp": (np.exp(variable), np.exp(START_HOST)),
            "part": (variable[1:, 0], START_HOST[1:, 0]),
        }
        for name, (found, wanted) in results.items():
            assert isinstance(found, cupy.ndarray), name
            np.testing.assert_allclose(cupy.asnumpy(found), wanted, 1e-15, err_msg=name)
        assert len(variable) == 2
        assert float(variable[0, 0]) == 1
        array = other.copy()
        array += variable
        np.testing.assert_array_equal(cupy.asnumpy(array), 2 * START_HOST)

    check()
    strategy.run(check)
    with pytest.raises(TypeError, match="assign"):
        np.add(variable, 1, out=variable)
    with pytest.raises(TypeError, match="host memory"):
        np.asarray(variable)


def test_copies_of_variables_are_copies(strategy: Any) -> None:
    for synchronization in ("on_write", "on_read"):
        variable = make(
            strategy, synchronization=synchronization, aggregation="only_first_replica"
        )
        for function in (variable.read_value, variable.numpy):
            function()[:] = -1
        strategy.run(lambda v: v.read_value().fill(-1), args=(variable,))
        np.testing.assert_array_equal(variable.numpy(), START_HOST)
        exported = cupy.from_dlpack(variable)
        np.testing.assert_array_equal(cupy.asnumpy(exported), START_HOST)
        assert not cupy.shares_memory(exported, variable.component)


def test_aggregates_are_not_lent_through_the_interface(strategy: Any) -> None:
    # The aggregate would be freed before it is read: a reader keeps only the variable.
    variable = make(strategy, synchronization="on_read", aggregation="sum")
    assert not hasattr(variable, "__cuda_array_interface__")
    strategy.run(lambda: cupy.asarray(variable))
    assert hasattr(make(strategy), "__cuda_array_interface__")


def test_results_that_are_held_are_not_overwritten(strategy: Any) -> None:
    size, held = strategy.num_replicas_in_sync, []
    for step in range(6):
        own = cupy.full(20_000, float(step))
        total = strategy.reduce("sum", own, axis=None)
        held.append((step, total if step % 2 else total[100:].reshape(100, -1)))
        for number, array in held:
            assert bool((array == number * size).all())


def test_threads_reduce_apart() -> None:
    def alone() -> float:
        ones = cupy.ones(200_000)
        collectives = Collectives(None)
        return float(collectives.batch_reduce(hs.ReduceOp.SUM, ones, "alone").sum())

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(alone) for _ in range(6)]
        assert [future.result() for future in found] == [2e5] * 6


def test_slices_of_variables_on_gpus_take_every_element_once(strategy: Any) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one copy does not differ")
    sizes = [0, 1, 3, 5000, 1, 1, 70_000, 2, 0, 12, 300_000]
    with strategy.scope():
        variables = [hs.Variable(cupy.zeros(n, cupy.float32)) for n in sizes]
    copies = strategy._connection.copies
    assert copies.num_slices > 1
    for pieces in copies._on_device.slices:
        assert 0 < sum(piece.array.nbytes for piece in pieces) <= 1 << 20
        for piece in pieces:
            part = piece.array
            part += 1
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), np.ones(variable.shape))
        variable.assign(cupy.zeros(variable.shape, cupy.float32))
