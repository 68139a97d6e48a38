"""Names from the first version of tf.distribute, and from its experimental module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.errors import OutOfRangeError

pytestmark = pytest.mark.rule

ROWS = np.arange(11.0)


def test_runs_with_an_iterator_see_each_row_once(strategy: Any, job: Any) -> None:
    iterator = strategy.make_dataset_iterator(hs.Dataset(ROWS).batch(4))
    iterator.initialize()
    total = 0.0
    for _ in range(3):
        sums = strategy.experimental_run(lambda batch: batch.sum(), iterator)
        total += strategy.reduce("sum", sums)
    assert total == ROWS.sum()
    with pytest.raises(OutOfRangeError):
        strategy.experimental_run(np.sum, iterator)
    # Start the next epoch.
    iterator.initialize()
    first = strategy.gather(iterator.get_next(), axis=0)
    np.testing.assert_array_equal(first, ROWS[:4])
    assert len(list(iterator)) == 2
    assert strategy.local_value(strategy.experimental_run(lambda: 7)) == 7


@pytest.mark.parametrize("mode", list(hs.InputReplicationMode))
def test_input_functions_know_their_pipeline(
    strategy: Any, job: Any, mode: Any
) -> None:
    def input_fn(context: hs.InputContext) -> Any:
        size = context.get_per_replica_batch_size(2 * job.size)
        yield from np.full((3 * job.size, size), context.input_pipeline_id)

    iterator = strategy.make_input_fn_iterator(input_fn, mode)
    batch = strategy.local_value(iterator.get_next())
    each = mode is hs.InputReplicationMode.PER_REPLICA
    own = job.rank if each else strategy.topology.worker_id
    np.testing.assert_array_equal(batch, [own, own])
    older = strategy.experimental_distribute_datasets_from_function(input_fn)
    batch = strategy.local_value(next(iter(older)))
    np.testing.assert_array_equal(batch, [strategy.topology.worker_id] * 2)


def test_older_names_do_what_those_of_today_do(strategy: Any, job: Any) -> None:
    value = strategy.experimental_run_v2(lambda x, y: x + y, (job.rank,), {"y": 1})
    assert strategy.local_value(value) == job.rank + 1
    assert strategy.unwrap(value) == strategy.experimental_local_results(value)
    assert (strategy.group(value) is None) == (job.size > 1)
    assert strategy.group(value, name="of replicas") is None
    dataset = strategy.experimental_make_numpy_dataset({"x": ROWS})
    assert len(list(dataset)) == len(ROWS)
    strategy.configure(session_config=object(), task_type="worker", task_id=0)
    given = object()
    assert strategy.update_config_proto(given) is given
    with strategy.scope():
        variable = hs.Variable(np.zeros(2), name="v")
        with strategy.colocate_vars_with(variable):
            hs.Variable(np.zeros(2), name="w")
    with pytest.raises(RuntimeError, match="inside of the scope"):
        strategy.colocate_vars_with(variable).__enter__()


def test_iterators_say_what_elements_there_are(strategy: Any) -> None:
    dataset = hs.Dataset(np.zeros((5, 3))).batch(2)
    for chain in (dataset, dataset.filter(lambda x: True)):
        distributed = strategy.experimental_distribute_dataset(chain)
        iterator = iter(distributed)
        assert isinstance(iterator, hs.DistributedIterator)
        assert iterator.element_spec == distributed.element_spec == chain.element_spec
        list(iterator)
    batches = strategy.experimental_distribute_dataset([np.zeros(2)])
    with pytest.raises(ValueError, match=r"expected a hpcstrat\.Dataset, which knows"):
        iter(batches).element_spec  # noqa: B018
    list(batches)


def test_the_older_constructor_makes_the_same_strategy(job: Any) -> None:
    older = hs.experimental.MultiWorkerMirroredStrategy
    hint = hs.experimental.CollectiveCommunication.RING
    with older(hint) as strategy:
        assert strategy.reduce("sum", np.float64(1)) == job.size
        assert isinstance(strategy, older)
        assert isinstance(strategy, hs.MultiWorkerMirroredStrategy)
        with hs.MultiWorkerMirroredStrategy() as newer:
            assert isinstance(newer, older)
    assert not isinstance(hs.get_strategy(), older)
