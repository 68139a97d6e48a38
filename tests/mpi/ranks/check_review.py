"""Errors that a review of the whole library once found."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = pytest.mark.rule


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


def test_pipelines_may_fill_the_same_buffer_again(strategy: Any, job: Any) -> None:
    def batches(context: Any) -> Any:
        buffer = np.zeros(2)
        for number in range(2 * job.size):
            buffer[:] = number
            yield buffer

    dataset = strategy.distribute_datasets_from_function(batches)
    mine = [strategy.local_value(batch)[:1].tolist() for batch in dataset]
    # Each worker has its own pipeline, and its replicas get elements in turn.
    seen = strategy.topology.worker_comm.allgather(mine)
    dealt = [
        number for step in zip(*seen, strict=True) for part in step for number in part
    ]
    assert dealt == list(range(2 * job.size))


def test_work_on_a_batch_in_place_cannot_change_the_data_set(strategy: Any) -> None:
    rows = np.arange(8.0)
    dataset = strategy.experimental_distribute_dataset(hs.Dataset(rows, 4))
    strategy.local_value(next(iter(dataset)))[...] = -1
    assert rows.tolist() == list(range(8))


def test_arrays_in_place_of_batches_are_refused(strategy: Any) -> None:
    for arrays in (np.zeros((4, 2)), (np.zeros(4), np.zeros(4)), {"x": np.zeros(4)}):
        with pytest.raises(ValueError, match="wrap it"):
            strategy.experimental_distribute_dataset(arrays)


def test_errors_without_text_are_told_all_the_same(
    make_strategy: Any, job: Any
) -> None:
    def step() -> Any:
        if job.rank == 0:
            raise _Unprintable
        return hs.get_replica_context().all_reduce("sum", 1.0)

    with make_strategy(on_error="raise") as strategy:
        error = outcome(strategy.run, step)
        assert isinstance(error, _Unprintable if job.rank == 0 else hs.ReplicaError)
        assert_usable(strategy, job)


def test_parts_that_cannot_be_pickled_fail_on_all(strategy: Any, job: Any) -> None:
    class Pair(NamedTuple):
        x: np.ndarray
        y: np.ndarray

    batch = Pair(np.arange(4.0), np.arange(4.0))
    dataset = strategy.experimental_distribute_dataset([batch])
    error = outcome(next, iter(dataset))
    # Pickling happens only if a part is sent to another rank of the worker.
    topology = strategy.topology
    travels = topology.num_workers < topology.num_replicas
    assert (error is not None) == travels
    assert_usable(strategy, job)


def test_data_set_made_by_one_rank_alone_is_a_mismatch(strategy: Any, job: Any) -> None:
    call = strategy.experimental_distribute_dataset if job.rank == 0 else None
    error = outcome(call, [np.ones(4)]) if call else outcome(strategy.barrier)
    assert (type(error) is hs.CollectiveError) == (job.size > 1)
    assert_usable(strategy, job)


def test_the_world_given_on_one_rank_only_is_a_mismatch(job: Any) -> None:
    if job.size == 1:
        pytest.skip("one rank agrees with itself")
    with hs.MirroredStrategy() as strategy:
        options = {"comm": job} if job.rank == 0 else {}
        error = outcome(hs.MirroredStrategy, **options)
        assert type(error) is hs.CollectiveError
        assert_usable(strategy, job)


def test_errors_of_another_strategy_are_told(make_strategy: Any, job: Any) -> None:
    other = hs.MirroredStrategy()
    other.close()

    def step() -> Any:
        if job.rank == 0:
            other.barrier()
        return hs.get_replica_context().all_reduce("sum", 1.0)

    with make_strategy(on_error="raise") as strategy:
        error = outcome(strategy.run, step)
        assert isinstance(error, hs.CollectiveError)
        assert isinstance(error, hs.ReplicaError) == (job.rank > 0)
        assert_usable(strategy, job)


def test_rows_are_read_by_place_never_by_label(strategy: Any) -> None:
    class Labeled:
        iloc = None

        def to_numpy(self) -> np.ndarray:
            return np.arange(6.0)

    source = (np.arange(6.0), Labeled())
    dataset = hs.Dataset(source, 6, shuffle=True)
    for batch in strategy.experimental_distribute_dataset(dataset):
        x, y = strategy.local_value(batch)
        np.testing.assert_array_equal(x, y)


def test_scalar_variables_are_no_sequences(strategy: Any) -> None:
    with strategy.scope():
        scalar, vector = hs.Variable(1.5), hs.Variable([1.0, 2.0])
    with pytest.raises(TypeError, match="0-d"):
        list(scalar)
    assert list(vector) == [1.0, 2.0]
    assert 2.0 in vector
    kept = vector[:]
    vector.assign([5.0, 6.0])
    np.testing.assert_array_equal(kept, [1.0, 2.0])


def test_reading_goes_on_after_a_bad_batch(make_strategy: Any, job: Any) -> None:
    class Column:
        shape = (6,)

        def __len__(self) -> int:
            return 6

        def __getitem__(self, rows: slice) -> np.ndarray:
            if job.rank == 0 and rows.start == 2:
                raise OSError("bad sector")
            return np.arange(6.0)[rows]

    with make_strategy(on_error="raise") as strategy:
        if strategy.num_replicas_in_sync == 1:
            return
        batch = 2 * job.size
        source = hs.Dataset({"x": _Repeated(Column(), batch)}, batch)
        iterator = iter(strategy.experimental_distribute_dataset(source))
        totals = []
        for _ in range(3):
            error = outcome(_total, strategy, iterator)
            totals.append(error is None)
        assert totals == [True, False, True]
        assert outcome(next, iterator).__class__ is StopIteration


class _Repeated:
    """Three batches; rank 0 cannot read the second of them."""

    def __init__(self, column: Any, batch: int) -> None:
        self.column = column
        self.batch = batch
        self.shape = (3 * batch,)

    def __len__(self) -> int:
        return 3 * self.batch

    def __getitem__(self, rows: slice) -> np.ndarray:
        number = rows.start // self.batch
        self.column[slice(2 * number, 2 * number + 2)]
        return np.zeros(rows.stop - rows.start)


def _total(strategy: Any, iterator: Any) -> Any:
    return strategy.reduce("sum", next(iterator)["x"], axis=0)


def test_plain_variables_are_not_aggregated_by_mistake(strategy: Any, job: Any) -> None:
    plain = hs.Variable(np.zeros(2), aggregation="sum", name="forgotten")
    if job.size == 1:
        return
    with pytest.raises(ValueError, match="scope"):
        strategy.run(plain.assign_add, args=(np.ones(2),))
    with strategy.scope():
        optimizer = hs.optimizers.SGD(0.1)
    pairs = [(np.ones(2), plain)]
    with pytest.raises(ValueError, match="scope"):
        strategy.run(optimizer.apply_gradients, args=(pairs,))
    with strategy.scope():
        mirrored = hs.Variable(np.zeros(2), name="w")
    with pytest.raises(RuntimeError, match=r"strategy\.run"):
        optimizer.apply_gradients([(np.ones(2), mirrored)])
    assert_usable(strategy, job)


def test_older_names_and_whole_data_sets(strategy: Any, job: Any) -> None:
    hints = hs.CollectiveHints(bytes_per_pack=8)
    total = strategy.run(
        lambda: hs.get_replica_context().all_reduce(
            "sum", np.ones(3), experimental_hints=hints
        )
    )
    size = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(strategy.local_value(total), np.full(3, size))
    dataset = strategy.experimental_distribute_dataset(hs.Dataset(np.arange(10.0), 4))
    assert dataset.cardinality == 3

    def add(state: Any, batch: Any) -> Any:
        return state + strategy.reduce("sum", batch, axis=0)

    assert dataset.reduce(0.0, add) == 45


def test_results_that_are_held_are_never_overwritten(strategy: Any, job: Any) -> None:
    # Memory of old results is reused, but not while any view of the memory exists.
    size = strategy.num_replicas_in_sync
    held = []
    for step in range(6):
        total = strategy.reduce("sum", np.full(20_000, float(step)), axis=None)
        held.append((step, total if step % 2 else total[100:].reshape(100, -1)))
        if step == 3:
            del held[1]
        for number, array in held:
            assert np.all(array == number * size)
    addresses = set()
    for _ in range(6):
        total = strategy.reduce("sum", np.ones(20_000), axis=None)
        addresses.add(total.ctypes.data)
    assert len(addresses) <= 3


def test_local_results_may_be_none_on_some_ranks(make_strategy: Any, job: Any) -> None:
    with make_strategy() as strategy:
        value = None if job.rank else 7
        result = strategy.run(lambda: value)
        found = strategy.experimental_local_results(result)
        if isinstance(strategy, hs.MirroredStrategy):
            assert found == (7, *[None] * (job.size - 1))
        else:
            assert found == (value,)
        assert_usable(strategy, job)


def test_wrong_arguments_of_strategies_are_refused_before_anything_is_made(
    job: Any,
) -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="on_error"):
            hs.MirroredStrategy(on_error="abrot")
    with pytest.raises(TypeError, match="comm="):
        hs.MultiWorkerMirroredStrategy(job)
    with hs.MirroredStrategy() as strategy:
        assert_usable(strategy, job)
