"""Calls from the first version of tf.distribute: steps, and non-slot updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.errors import OutOfRangeError, ReplicaError

pytestmark = pytest.mark.rule


ROWS = np.arange(23.0)


def test_call_for_each_replica_is_run(strategy: Any, job: Any) -> None:
    value = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )

    def replica_fn(part: Any, factor: int) -> Any:
        assert not hs.in_cross_replica_context()
        assert hs.get_strategy() is strategy
        return part * factor

    call = strategy.extended.call_for_each_replica
    for result in (
        call(replica_fn, (value,), {"factor": 3}),
        strategy.run(replica_fn, (value,), {"factor": 3}),
    ):
        assert strategy.local_value(result) == 3 * job.rank
        assert isinstance(result, hs.PerReplica) == (job.size > 1)
    assert call(lambda: None) is None


def test_the_old_calls_are_refused_in_replica_context(strategy: Any) -> None:
    extended = strategy.extended

    def replica_fn() -> None:
        for call in (
            lambda: extended.call_for_each_replica(int),
            lambda: extended.update_non_slot((), int),
            lambda: extended.experimental_run_steps_on_iterator(max, iter([1])),
        ):
            with pytest.raises(RuntimeError, match="in cross-replica context"):
                call()

    strategy.run(replica_fn)


def test_flags_choose_one_process(strategy: Any, job: Any) -> None:
    extended = strategy.extended
    for flag in (
        "experimental_should_init",
        "should_checkpoint",
        "should_save_summary",
    ):
        flags = job.allgather(getattr(extended, flag))
        assert flags == [rank == 0 for rank in range(job.size)]
        assert getattr(hs.get_strategy().extended, flag) is True
        assert getattr(hs.OneDeviceStrategy().extended, flag) is True
    several = strategy.topology.num_workers > 1
    assert extended.experimental_between_graph is several
    assert hs.get_strategy().extended.experimental_between_graph is False


def test_non_slot_devices_are_those_of_the_variables(
    strategy: Any, make_strategy: Any
) -> None:
    with strategy.scope():
        variables = [hs.Variable(1.0), hs.Variable(2.0, trainable=False)]
    extended = strategy.extended
    assert extended.non_slot_devices(variables) == extended.parameter_devices
    assert hs.OneDeviceStrategy("CPU:1").extended.non_slot_devices([]) == ("CPU:1",)
    assert len(hs.get_strategy().extended.non_slot_devices([hs.Variable(1.0)])) == 1
    with pytest.raises(ValueError, match="create it in the strategy's scope"):
        extended.non_slot_devices([*variables, hs.Variable(1.0)])


def test_update_non_slot_runs_once_with_components(strategy: Any, job: Any) -> None:
    with strategy.scope():
        power = hs.Variable(np.float64(2), name="beta_power", aggregation="sum")
        factor = strategy.extended.broadcast_to(np.float64(3.0), power)
        calls = []

        def update_fn(scale: Any, *, more: Any) -> Any:
            assert hs.in_cross_replica_context()
            assert not isinstance(scale, hs.DistributedValues)
            # In update context, an assignment changes this component, without
            # aggregation.
            power.assign(power.component * scale + more)
            calls.append(scale)
            return {"value": power.component * 2, "name": "beta"}

        where = strategy.extended.non_slot_devices([power])
        update = strategy.extended.update_non_slot
        result = update(where, update_fn, (factor,), {"more": 0.5})
        assert isinstance(result["value"], hs.Mirrored) == (job.size > 1)
        assert strategy.local_value(result) == {"value": 13.0, "name": "beta"}
        assert calls == [3.0]
        assert power.numpy() == 6.5
        own = update(where, update_fn, (factor,), {"more": 0.5}, group=False)
        assert own == ({"value": 40.0, "name": "beta"},)
        assert update(where, lambda: None) is None


def test_update_non_slot_refuses_what_would_come_to_differ(
    strategy: Any, job: Any
) -> None:
    value = hs.PerReplica(np.float64(job.rank))
    if job.size == 1:
        assert strategy.extended.update_non_slot((), lambda x: x, (value,)) == 0
        return
    for args, kwargs in (((value,), None), ((), {"x": [value]})):
        with pytest.raises(ValueError, match="found a PerReplica"):
            strategy.extended.update_non_slot((), lambda x: x, args, kwargs)


# Data sets of arrays


def test_numpy_examples_are_rows() -> None:
    source = {"x": np.arange(6.0).reshape(3, 2), "y": np.array([5, 6, 7])}
    examples = hs.get_strategy().extended.experimental_make_numpy_dataset(source)
    assert len(examples) == 3
    found = list(examples)
    assert [row["y"] for row in found] == [5, 6, 7]
    assert np.array_equal(np.stack([row["x"] for row in found]), source["x"])
    with pytest.raises(ValueError, match="expected"):
        hs.get_strategy().extended.experimental_make_numpy_dataset(
            (np.zeros(3), np.zeros(4))
        )


@pytest.mark.parametrize("size", [1, 4, 7, 50])
@pytest.mark.parametrize("drop", [False, True])
def test_numpy_examples_are_distributed_in_batches(
    strategy: Any, job: Any, size: int, drop: bool
) -> None:
    examples = strategy.extended.experimental_make_numpy_dataset(ROWS)
    batches = examples.batch(size, drop)
    seen = [
        strategy.local_value(batch)
        for batch in strategy.experimental_distribute_dataset(batches)
    ]
    parts = job.allgather(seen)
    whole = [np.concatenate(step) for step in zip(*parts, strict=True)]
    end = ROWS.size // size * size if drop else ROWS.size
    assert len(whole) == (end + size - 1) // size
    for index, batch in enumerate(whole):
        assert np.array_equal(batch, ROWS[index * size : min(end, (index + 1) * size)])


# Steps on an iterator


def _iterator(strategy: Any, batch_size: int = 5) -> Any:
    examples = strategy.extended.experimental_make_numpy_dataset(ROWS)
    data = strategy.experimental_distribute_dataset(examples.batch(batch_size))
    return iter(data)


@pytest.mark.parametrize("op", ["sum", hs.ReduceOp.MEAN, None])
@pytest.mark.parametrize("inside", [False, True])
def test_steps_keep_the_last_outputs(
    strategy: Any, job: Any, op: Any, inside: bool
) -> None:
    """Make five steps; the last batch is short, so that replicas may get no rows."""
    with strategy.scope():
        total = hs.Variable(np.float64(0), synchronization="on_read", aggregation="sum")
    steps = []

    def replica_fn(part: Any, context: Any) -> Any:
        total.assign_add(part.sum())
        if inside:
            context.set_last_step_output("sum", part.sum(), op)
        return part.sum()

    def step_fn(context: Any, batch: Any) -> Any:
        assert hs.in_cross_replica_context()
        assert hs.get_strategy() is strategy
        steps.append(sorted(context.last_step_outputs))
        sums = strategy.run(replica_fn, (batch, context))
        if not inside:
            context.set_last_step_output("sum", sums, op)
        return len(steps)

    context = strategy.extended.experimental_run_steps_on_iterator(
        step_fn, _iterator(strategy), 5, {"start": 1}
    )
    assert steps == [["start"], *[["start", "sum"]] * 4]
    assert context.run_op == 5
    assert context.last_step_outputs["start"] == 1
    found, last = context.last_step_outputs["sum"], ROWS[20:].sum()
    if op is None:
        assert isinstance(found, hs.PerReplica) == (job.size > 1)
        own = strategy.local_value(found)
        assert sum(job.allgather(own)) == pytest.approx(last, rel=1e-12)
    else:
        count = job.size if op is hs.ReduceOp.MEAN else 1
        assert np.asarray(found) == pytest.approx(last / count, rel=1e-12)
    assert total.numpy() == pytest.approx(ROWS.sum(), rel=1e-12)


def test_training_by_steps_is_that_of_one_process(strategy: Any, job: Any) -> None:
    """Gradient descent on a mean of squares, also with replicas that get no rows."""
    with strategy.scope():
        weight = hs.Variable(np.float64(0))
        optimizer = hs.optimizers.SGD(0.1)

    def replica_fn(part: Any, size: int) -> Any:
        error = weight.component - part
        optimizer.apply_gradients([(2 * error.sum() / size, weight)])
        return (error**2).sum() / size

    def step_fn(context: Any, batch: Any) -> None:
        size = int(strategy.reduce("sum", strategy.run(np.size, (batch,))))
        loss = strategy.run(replica_fn, (batch, size))
        context.set_last_step_output("loss", loss, "sum")

    iterator, expected, loss = _iterator(strategy), 0.0, 0.0
    for steps in (2, 0, 3):
        context = strategy.extended.experimental_run_steps_on_iterator(
            step_fn, iterator, steps
        )
    for start in range(0, ROWS.size, 5):
        error = expected - ROWS[start : start + 5]
        loss, expected = np.mean(error**2), expected - 0.2 * np.mean(error)
    assert weight.numpy() == pytest.approx(expected, rel=1e-12)
    found = float(np.asarray(context.last_step_outputs["loss"]))
    assert found == pytest.approx(loss, rel=1e-12)


def test_variables_are_colocated_in_their_scope_only(strategy: Any, job: Any) -> None:
    with strategy.scope():
        near = hs.Variable(1.0, name="near")
        with strategy.extended.colocate_vars_with(near):
            assert strategy.extended.variable_created_in_scope(hs.Variable(2.0))
        foreign = strategy.extended.colocate_vars_with(5)
        with pytest.raises(ValueError, match="create it in the strategy's"), foreign:
            pass
    outside = strategy.extended.colocate_vars_with(near)
    with pytest.raises(RuntimeError, match="inside of the scope"), outside:
        pass


def test_plain_outputs_are_local_results(strategy: Any, job: Any) -> None:
    def step_fn(context: Any, batch: Any) -> None:
        context.set_non_tensor_output("cross", {"kind": "batch"})
        strategy.run(
            lambda: context.set_non_tensor_output("own", f"replica {job.rank}")
        )

    context = strategy.extended.experimental_run_steps_on_iterator(
        step_fn, _iterator(strategy)
    )
    assert context.non_tensor_outputs["cross"] == {"kind": "batch"}
    expected = (f"replica {job.rank}",)
    if isinstance(strategy, hs.MirroredStrategy):
        expected = tuple(f"replica {rank}" for rank in range(job.size))
    assert context.non_tensor_outputs["own"] == expected
    assert context.last_step_outputs == {}


def test_too_few_batches_end_the_steps_on_every_rank(strategy: Any) -> None:
    seen = []
    with pytest.raises(OutOfRangeError, match="expected 9 batches, found 5"):
        strategy.extended.experimental_run_steps_on_iterator(
            lambda context, batch: seen.append(context), _iterator(strategy), 9
        )
    assert len(seen) == 5
    with pytest.raises(ValueError, match="iterations >= 0"):
        strategy.extended.experimental_run_steps_on_iterator(max, iter([]), -1)
    strategy.barrier()


def test_a_bad_operation_of_one_replica_is_raised_on_all(
    strategy: Any, job: Any
) -> None:
    def step_fn(context: Any, batch: Any) -> None:
        op = "sum" if job.rank else "product"
        strategy.run(lambda: context.set_last_step_output("x", np.ones(2), op))

    kind = ValueError if job.rank == 0 else ReplicaError
    with pytest.raises(kind, match="product"):
        strategy.extended.experimental_run_steps_on_iterator(
            step_fn, _iterator(strategy)
        )
    strategy.barrier()


def test_steps_of_one_replica_need_no_mpi() -> None:
    for strategy in (hs.OneDeviceStrategy(), hs.get_strategy()):
        context = strategy.extended.experimental_run_steps_on_iterator(
            lambda context, batch: context.set_last_step_output("x", batch, "sum"),
            iter([1.0, 2.0, 3.0]),
            iterations=2,
        )
        assert context.last_step_outputs == {"x": 2.0}
