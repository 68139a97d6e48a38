"""Datasets: no row is lost or repeated, on any number of replicas, resumed or not."""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.data.batches import piece, slot_sizes, warn_of_idle
from tests.mpi.ranks.dealing import epoch_rows, flat, rows_of
from tests.mpi.ranks.effort import SHORT, examples
from tests.mpi.ranks.outcomes import assert_only_one_failed, assert_usable, outcome

pytestmark = pytest.mark.rule


Columns = dict[str, Any]


def columns(num_rows: int) -> Columns:
    """Return columns in which each row has a different number."""
    numbers = np.arange(num_rows)
    return {"x": np.stack([numbers, -numbers], axis=1), "y": (numbers * 0.5,)}


def on_fewer(job: Any, count: int, function: Callable[[Any], Any]) -> Any:
    """Call a function on the first ranks only; return its result on all ranks."""
    from mpi4py import MPI

    comm = job.Split(0 if job.rank < count else MPI.UNDEFINED, job.rank)
    result = None
    if comm != MPI.COMM_NULL:
        result = function(comm)
        comm.Free()
    return job.bcast(result, root=0)


def expected_steps(order: Any, batch: int, count: int, drop: bool) -> list[Any]:
    """Cut global batches into parts of replicas, as tf.distribute does."""
    steps = []
    for start in range(0, len(order), batch):
        rows = list(order[start : start + batch])
        if drop and len(rows) < batch:
            break
        size = -(-len(rows) // count)
        steps.append([rows[r * size : (r + 1) * size] for r in range(count)])
    return steps


def test_parts_of_all_replicas_are_the_global_batch(strategy: Any, job: Any) -> None:
    rng = np.random.default_rng(1)
    for case in range(30):
        num_rows, batch = int(rng.integers(0, 30)), int(rng.integers(1, 12))
        drop, shuffle = bool(rng.integers(2)), bool(rng.integers(2))
        dataset = hs.Dataset(
            columns(num_rows), batch, shuffle=shuffle, seed=case, drop_remainder=drop
        )
        distributed = strategy.experimental_distribute_dataset(dataset)
        for epoch in range(2):
            order = dataset.order(epoch) if shuffle else range(num_rows)
            steps = epoch_rows(strategy, distributed, job)
            assert steps == expected_steps(order, batch, job.size, drop)
            assert len(steps) == len(distributed) == len(dataset)
            if not drop:
                assert sorted(flat(steps)) == list(range(num_rows))
            else:
                assert len(set(flat(steps))) == len(flat(steps))


def test_global_batches_are_those_of_one_process(strategy: Any, job: Any) -> None:
    arguments: Any = {"batch_size": 7, "shuffle": True, "seed": 3}
    alone = hs.Dataset(columns(25), **arguments)
    distributed = strategy.experimental_distribute_dataset(
        hs.Dataset(columns(25), **arguments)
    )
    for _ in range(3):
        expected = [rows_of(batch) for batch in alone]
        steps = epoch_rows(strategy, distributed, job)
        assert [[row for part in step for row in part] for step in steps] == expected


def test_shuffled_epochs_differ_and_depend_on_the_seed(strategy: Any, job: Any) -> None:
    orders = []
    for seed in (0, 1):
        dataset = hs.Dataset(columns(50), 8, shuffle=True, seed=seed)
        distributed = strategy.experimental_distribute_dataset(dataset)
        orders += [tuple(flat(epoch_rows(strategy, distributed, job))) for _ in "ab"]
        distributed.epoch = 0
        again = tuple(flat(epoch_rows(strategy, distributed, job)))
        assert again == orders[-2]
    assert len(set(orders)) == 4
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(50))}


@pytest.mark.parametrize("drop", [False, True])
def test_resuming_at_any_batch_on_any_number_of_replicas(
    make_strategy: Any, job: Any, drop: bool
) -> None:
    num_rows, batch, epochs = 23, 5, 2
    arguments: Any = {"shuffle": True, "seed": 4, "drop_remainder": drop}
    dataset = hs.Dataset(columns(num_rows), batch, **arguments)
    kept = len(dataset) * batch if drop else num_rows
    whole = [int(r) for e in range(epochs) for r in dataset.order(e)[:kept]]
    total = epochs * len(dataset)

    def train(comm: Any, state: Any, num_steps: int) -> Any:
        """Return the rows of some steps and the state after them."""
        with make_strategy(comm=comm) as strategy:
            fresh = hs.Dataset(columns(num_rows), batch, **arguments)
            distributed = strategy.experimental_distribute_dataset(fresh)
            if state is not None:
                distributed.restore_state(state)
            own: list[Any] = []
            while len(own) < num_steps:
                for element in distributed:
                    own.append(rows_of(strategy.local_value(element)))
                    if len(own) == num_steps:
                        break
            state = distributed.state()
            assert comm.allgather(state) == [state] * comm.size
            parts = comm.allgather(own)
        return [
            row for step in zip(*parts, strict=True) for p in step for row in p
        ], state

    stops: Any = range(total + 1)
    if SHORT:
        # Stop at both ends of the data, and around the end of an epoch.
        stops = [0, 1, len(dataset) - 1, len(dataset), len(dataset) + 1, total]
    for stop in stops:
        first, second = stop % job.size + 1, (stop + 1) % job.size + 1
        head, state = on_fewer(job, first, lambda c, n=stop: train(c, None, n))
        rest = total - stop
        tail, _ = on_fewer(job, second, lambda c, s=state, n=rest: train(c, s, n))
        assert head + tail == whole, f"stopped after {stop} steps"


def test_state_of_another_data_set_is_refused(strategy: Any, job: Any) -> None:
    distributed = strategy.experimental_distribute_dataset(hs.Dataset(columns(8), 2))
    state = distributed.state()
    for change in ({"num_rows": 9}, {"shuffle_seed": 1}):
        assert (
            type(outcome(distributed.restore_state, {**state, **change})) is ValueError
        )
    distributed.restore_state(state)


@pytest.fixture
def path(job: Any, tmp_path: Path) -> Any:
    """Return the path of a file of 19 rows, with nested groups."""
    import h5py

    path = job.bcast(tmp_path / "rows.h5")
    if job.rank == 0:
        with h5py.File(path, "w") as file:
            numbers = np.arange(19)
            file["x"] = np.stack([numbers, -numbers], axis=1)
            file.create_dataset("deep/er/y", data=numbers * 0.5, chunks=(4,))
            file["deep/z"] = numbers.astype(">i2")
            file["scalar"] = 3
    job.Barrier()
    return path


@pytest.mark.parametrize("shuffle", [False, True])
def test_hdf5_files_and_groups_are_columns(
    strategy: Any, job: Any, path: Any, shuffle: bool
) -> None:
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        for source, whole in ((path, True), (file, True), (file["deep"], False)):
            dataset = hs.Dataset(source, 4, shuffle=shuffle, seed=2)
            found = []
            for element in strategy.experimental_distribute_dataset(dataset):
                batch = strategy.local_value(element)
                assert set(batch) == ({"x", "deep"} if whole else {"er", "z"})
                deep = batch["deep"] if whole else batch
                np.testing.assert_array_equal(deep["er"]["y"], deep["z"] * 0.5)
                assert not whole or list(batch["x"][:, 0]) == list(deep["z"])
                found.append([int(row) for row in deep["z"]])
            parts = job.allgather(found)
            steps = [list(step) for step in zip(*parts, strict=True)]
            order = dataset.order(0) if shuffle else range(19)
            assert steps == expected_steps(order, 4, job.size, False)


def test_next_is_refused_inside_a_replica_function(strategy: Any, job: Any) -> None:
    batches = iter(strategy.experimental_distribute_dataset(hs.Dataset(columns(8), 4)))
    assert type(outcome(strategy.run, lambda: next(batches))) is ValueError
    assert len(list(batches)) == 2


def test_different_data_sets_on_the_ranks_are_a_mismatch(
    strategy: Any, job: Any
) -> None:
    for options in ({"seed": job.rank}, {"batch_size": job.rank + 1}):
        dataset = hs.Dataset(
            columns(8), **{"batch_size": 4, "shuffle": True, **options}
        )
        distributed = strategy.experimental_distribute_dataset(dataset)
        assert (type(outcome(iter, distributed)) is hs.CollectiveError) == (
            job.size > 1
        )
    assert_usable(strategy, job)


class _Broken:
    """A column whose reading fails on one rank."""

    dtype, shape = np.dtype(np.int64), (6,)

    def __init__(self, breaks: bool) -> None:
        self.aborts = breaks

    def __len__(self) -> int:
        return 6

    def __getitem__(self, rows: Any) -> Any:
        if self.aborts:
            raise OSError("cannot read")
        return np.arange(6)[rows]


def test_reading_that_fails_on_one_rank_fails_on_all(
    make_strategy: Any, job: Any
) -> None:
    with make_strategy(on_error="raise") as strategy:
        dataset = hs.Dataset(_Broken(job.rank == job.size - 1), 3)
        distributed = strategy.experimental_distribute_dataset(dataset)

        def train() -> None:
            for batch in distributed:
                strategy.reduce("sum", strategy.run(np.sum, args=(batch,)), axis=None)

        assert_only_one_failed(outcome(train), OSError, job.size - 1, job)
        assert_usable(strategy, job)


def test_rows_of_iterables_are_neither_lost_nor_repeated(
    strategy: Any, job: Any
) -> None:
    # Each process that runs the iterable draws the same order of rows.
    rng = np.random.default_rng(8)

    def batches() -> Iterator[Any]:
        order = rng.permutation(20)
        for start in range(0, 20, 6):
            rows = order[start : start + 6]
            yield {"x": np.stack([rows, -rows], axis=1), "y": (rows * 0.5,)}

    class Iterable:
        def __iter__(self) -> Iterator[Any]:
            return batches()

    distributed = strategy.experimental_distribute_dataset(Iterable())
    for _ in range(2):
        steps = epoch_rows(strategy, distributed, job)
        assert [sum(map(len, step)) for step in steps] == [6, 6, 6, 2]
        assert sorted(flat(steps)) == list(range(20))


class _Files:
    """Rows of files in batches of one size; the last batch of a file may be smaller."""

    def __init__(self, policy: str, files: list[list[int]], batch: int) -> None:
        self.auto_shard_policy, self.files, self.batch = policy, files, batch

    def shard_files(self, num_shards: int, index: int) -> Any:
        part = self.files[index::num_shards]
        return type(self)(self.auto_shard_policy, part, self.batch)

    def __iter__(self) -> Iterator[Any]:
        for rows in map(np.array, self.files):
            for start in range(0, len(rows), self.batch):
                own = rows[start : start + self.batch]
                yield {"x": np.stack([own, -own], axis=1), "y": (own * 0.5,)}


class _SizedFiles(_Files):
    """Rows of files with a known ``batch_size``."""

    @property
    def batch_size(self) -> int:
        return self.batch


@pytest.mark.parametrize("kind", [_Files, _SizedFiles])
@pytest.mark.parametrize("policy", ["off", "file", "auto"])
@pytest.mark.parametrize("seed", range(examples(6)))
def test_workers_give_all_rows_that_they_read_in_their_order(
    strategy: Any, job: Any, kind: Any, policy: str, seed: int
) -> None:
    """All rows arrive in order, with a known or an unknown size of batches."""
    drawn = np.random.default_rng(seed)
    topology = strategy.topology
    count = topology.num_workers + int(drawn.integers(3))
    ends = np.cumsum(drawn.integers(1, 9, count)).tolist()
    starts = [0, *ends[:-1]]
    files = [[*range(*pair)] for pair in zip(starts, ends, strict=True)]
    source = kind(policy, files, int(drawn.integers(1, 7)))
    distributed = strategy.experimental_distribute_dataset(source)
    for _ in range(2):
        steps = epoch_rows(strategy, distributed, job)
        place, workers = topology.worker_id, topology.num_workers
        own = files if policy == "off" else files[place::workers]
        given = [
            row for step in steps for r in topology.worker_replicas for row in step[r]
        ]
        assert given == [row for rows in own for row in rows]


def test_functions_make_one_pipeline_per_worker(strategy: Any, job: Any) -> None:
    seen = []

    def make(context: Any) -> Any:
        seen.append(context)
        first = 100 * context.input_pipeline_id
        numbers = [np.array([first + i, first + i]) for i in range(8)]
        return [{"x": np.stack([n, -n], axis=1), "y": (n * 0.5,)} for n in numbers]

    distributed = strategy.distribute_datasets_from_function(make)
    topology = strategy.topology
    assert len(seen) == (topology.worker_comm.rank == 0)
    for context in seen:
        assert context.num_input_pipelines == topology.num_workers
        assert context.input_pipeline_id == topology.worker_id
        assert context.num_replicas_in_sync == job.size
    own = [rows_of(strategy.local_value(batch)) for batch in distributed]
    mine = topology.worker_comm.allgather([row for rows in own for row in rows])
    rows = sorted(row for part in mine for row in part)
    first = 100 * topology.worker_id
    assert rows == sorted(2 * list(range(first, first + 8)))


def test_one_replica_per_program_must_be_asked_for(job: Any) -> None:
    strategy = hs.OneDeviceStrategy()
    dataset = hs.Dataset(columns(6), 4)
    error = outcome(strategy.experimental_distribute_dataset, dataset)
    assert (type(error) is RuntimeError) == (job.size > 1)
    options = hs.InputOptions(independent=True)
    for _ in range(2):
        batches = list(strategy.experimental_distribute_dataset(dataset, options))
        assert [rows_of(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5]]


def test_slots_share_the_batch_among_replicas() -> None:
    for batch_size in range(20):
        for count in range(1, 8):
            sizes = slot_sizes(batch_size, count)
            assert sum(sizes) == batch_size
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_may_be_written_and_the_data_stay(
    strategy: Any, job: Any, shuffle: bool
) -> None:
    whole, fixed = columns(11), columns(11)
    fixed["x"].flags.writeable = fixed["y"][0].flags.writeable = False
    sources = [hs.Dataset(whole, 4, shuffle=shuffle), [fixed]]
    for source in sources:
        for _ in range(2):
            steps = []
            for element in strategy.experimental_distribute_dataset(source):
                batch = strategy.local_value(element)
                steps.append(rows_of(batch))
                batch["x"] += 100
                batch["y"][0][...] = -1
            assert sorted(
                row for p in job.allgather(steps) for s in p for row in s
            ) == [*range(11)]
    for batch in sources[0]:
        batch["x"] += 100
    np.testing.assert_array_equal(whole["x"], columns(11)["x"])


def test_torch_takes_batches_without_a_warning(strategy: Any) -> None:
    torch = pytest.importorskip("torch")
    rows = np.arange(12, dtype=np.float32)
    source = hs.Dataset(rows, 4)
    for element in strategy.experimental_distribute_dataset(source):
        # The test fails if torch warns, because warnings are errors in tests.
        tensor = torch.from_numpy(strategy.local_value(element))
        tensor += 1
    np.testing.assert_array_equal(rows, np.arange(12))


def test_a_thread_may_read_ahead(strategy: Any, job: Any) -> None:
    make = strategy.experimental_distribute_dataset
    dataset = make(hs.Dataset(np.arange(40), 4))
    # The thread gets the iterator or the dataset, or makes both.
    for given in ("iterator", "data set", ""):
        batches: queue.Queue[Any] = queue.Queue()
        ahead, goes_on = threading.Event(), threading.Event()

        def fill(begun: Any, out: Any, *events: threading.Event) -> None:
            begun = begun or make(hs.Dataset(np.arange(40), 4))
            for number, batch in enumerate(begun):
                out.put(batch)
                if number == job.rank:
                    events[0].set()
                    assert events[1].wait(60)
            out.put(None)

        begun = dataset if given else None
        begun = iter(dataset) if given == "iterator" else begun
        arguments = begun, batches, ahead, goes_on
        thread = threading.Thread(target=fill, args=arguments)
        thread.start()
        assert ahead.wait(60)
        total = 0
        while (batch := batches.get(timeout=60)) is not None:
            # The first time, each rank's thread has read ahead to a different batch.
            total += int(strategy.reduce("sum", strategy.run(np.sum, args=(batch,))))
            goes_on.set()
        thread.join()
        assert total == sum(range(40))
    assert_usable(strategy, job)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the log messages about data; warnings that were given before may repeat."""
    warn_of_idle.cache_clear()
    told: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(
        handler, "emit", lambda record: told.append(record.getMessage())
    )
    logger = hs.get_logger("data")
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


@pytest.mark.parametrize("kind", ["rows", "iterable"])
def test_replicas_without_rows_are_told_once_with_a_better_batch_size(
    strategy: Any, job: Any, warnings: list[str], kind: str
) -> None:
    for size in range(1, 3 * job.size + 1):
        for _ in range(2):
            # The last batch is smaller than the other batches.
            whole = np.arange(2 * size + 1)
            source = hs.Dataset(whole, size)
            given = source if kind == "rows" else list(source)
            for _ in strategy.experimental_distribute_dataset(given):
                pass
        starts = [piece(size, job.size, r) for r in range(job.size)]
        idle = sum(start == stop for start, stop in starts)
        if not idle or job.rank > 0:
            assert warnings == []
            continue
        (text,) = warnings
        assert text.startswith(f"in global batches of {size} rows, {idle} of")
        better = int(re.findall(r"batch size of (\d+)", text)[0])
        longest = max(stop - start for start, stop in starts)
        assert better == longest * job.size
        warnings.clear()


def test_nine_replicas_are_told_of_72_rows(warnings: list[str]) -> None:
    for _ in range(2):
        for rows in (63, 64, 65, 72):
            warn_of_idle(rows, 9)
    (text,) = warnings
    assert "64 rows, 1 of 9 replicas have no rows" in text
    assert "batch size of 72" in text
