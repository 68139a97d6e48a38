"""The claims of the pages for users who come from other libraries."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import outcome

pytestmark = pytest.mark.rule


def test_what_takes_the_place_of_a_communicator(strategy: Any, job: Any) -> None:
    topology = strategy.topology
    assert strategy.num_replicas_in_sync == job.size
    assert topology.replica_id == job.rank == topology.replica_comm.rank
    assert 0 <= topology.worker_comm.rank < topology.worker_comm.size
    assert 0 <= topology.worker_id < topology.num_workers
    duplicate = topology.replica_comm.Dup()
    assert duplicate.allreduce(1) == job.size
    duplicate.Free()


def test_calls_between_replicas(strategy: Any, job: Any) -> None:
    ranks = np.arange(float(job.size))
    mine = np.float64(job.rank)
    rows = np.full((job.rank + 1, 2), mine)
    all_rows = np.concatenate(
        [np.full((rank + 1, 2), rank) for rank in range(job.size)]
    )
    assert strategy.reduce("sum", mine) == ranks.sum()
    assert strategy.reduce("mean", mine) == ranks.mean()
    # The replicas may gather arrays of different lengths.
    gathered = strategy.gather(strategy.run(lambda: rows), axis=0)
    np.testing.assert_array_equal(gathered, all_rows)
    np.testing.assert_array_equal(strategy.extended.broadcast_to(mine), 0)
    sent = {"arrays": [rows], "text": str(job.rank)}
    assert strategy.broadcast_object(sent)["text"] == "0"
    strategy.barrier()

    def inside() -> None:
        context = hs.get_replica_context()
        assert context.all_reduce("mean", mine) == ranks.mean()
        # Reduce several values at once.
        both = context.all_reduce("sum", [mine, rows[0]])
        assert both[0] == ranks.sum()
        np.testing.assert_array_equal(both[1], [ranks.sum()] * 2)
        assert context.start_all_reduce("sum", mine).wait() == ranks.sum()
        np.testing.assert_array_equal(context.all_gather(rows, axis=0), all_rows)
        # The argument is unchanged, unless the result is written into it.
        part = rows[0].copy()
        context.all_reduce("sum", part)
        np.testing.assert_array_equal(part, rows[0])
        context.all_reduce("sum", part, out=part)
        np.testing.assert_array_equal(part, both[1])

    strategy.run(inside)


def test_variables_are_kept_equal_and_arrays_are_not(strategy: Any, job: Any) -> None:
    mine = np.full(3, float(job.rank))
    with strategy.scope():
        variable = hs.Variable(mine, name="v")
    # Variables start with replica 0's value; ``value()`` returns a read-only view.
    np.testing.assert_array_equal(variable.numpy(), 0)
    assert not variable.value().flags.writeable
    error = outcome(strategy.check_equal, {"mine": mine})
    assert (error is None) == (job.size == 1)
    refused = outcome(strategy.run, lambda: variable.assign(mine))
    # With aggregation NONE, assigning would make the copies differ.
    assert (refused is None) == (job.size == 1)


def test_optimizers_sum_unless_they_are_told(strategy: Any, job: Any) -> None:
    with strategy.scope():
        summed, averaged = (hs.Variable(np.zeros(2), name=name) for name in "sa")
        sums = hs.optimizers.SGD(1.0)
        means = hs.optimizers.SGD(1.0, aggregation="mean")
    gradient = np.full(2, job.rank + 1.0)

    def step() -> None:
        sums.apply_gradients([(gradient, summed)])
        means.apply_gradients([(gradient, averaged)])

    strategy.run(step)
    total = sum(range(1, job.size + 1))
    np.testing.assert_allclose(summed.numpy(), -total)
    np.testing.assert_allclose(averaged.numpy(), -total / job.size)


def test_each_row_comes_once_and_some_replicas_may_have_none(
    strategy: Any, job: Any
) -> None:
    # The last batch has one row, which only one of the replicas receives.
    rows = np.arange(9.0)
    batches = strategy.experimental_distribute_dataset(
        hs.Dataset(rows, batch_size=4, shuffle=True)
    )
    orders = []
    for _ in range(2):
        own = [strategy.local_value(batch) for batch in batches]
        assert len(own) == 3
        # A batch size is the number of rows of all replicas together.
        assert job.allreduce(len(own[0])) == 4
        assert job.allreduce(len(own[-1])) == 1
        gathered = [
            np.concatenate(parts) for parts in zip(*job.allgather(own), strict=True)
        ]
        orders.append(np.concatenate(gathered))
        np.testing.assert_array_equal(np.sort(orders[-1]), rows)
    # Each iteration is the next epoch, in a new order.
    assert not np.array_equal(*orders)


def test_run_gives_parts_of_each_replica(strategy: Any, job: Any) -> None:
    shared = np.ones(2)
    value = strategy.run(lambda: shared)
    assert isinstance(value, hs.PerReplica) == (job.size > 1)
    np.testing.assert_array_equal(strategy.local_value(value), shared)
    # A plain value is the contribution of this rank.
    np.testing.assert_array_equal(strategy.reduce("sum", shared), job.size * shared)


def test_types_of_python_numbers(strategy: Any) -> None:
    with strategy.scope():
        kinds = [hs.Variable(value).dtype for value in (0.1, 1, np.zeros(3))]
    assert kinds == [np.float32, np.int32, np.float64]


def test_checkpoints_as_in_the_reference(strategy: Any, folder: Path) -> None:
    with strategy.scope():
        variable = hs.Variable(np.zeros(2), name="v")
    manager = hs.CheckpointManager(folder, keep_every=timedelta(hours=6), v=variable)
    called = []

    def begin() -> None:
        called.append(variable.assign(np.ones(2)))

    assert manager.restore_or_initialize(begin) is None
    assert len(called) == 1
    manager.save(1)
    variable.assign(np.zeros(2))
    assert manager.restore_or_initialize(begin) == 1
    assert len(called) == 1
    np.testing.assert_array_equal(variable.numpy(), 1)


def test_metrics_of_all_replicas_are_summed_on_read(strategy: Any, job: Any) -> None:
    with strategy.scope():
        total = hs.Variable(
            np.zeros(()), synchronization="on_read", aggregation="sum", name="total"
        )
    strategy.run(lambda: total.assign_add(np.float64(job.rank)))
    assert total.numpy() == sum(range(job.size))
