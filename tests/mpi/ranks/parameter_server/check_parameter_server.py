"""Variables on servers, and functions that a coordinator schedules on workers."""

from __future__ import annotations

import dataclasses
import errno
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.errors import CancelledError, OutOfRangeError
from hpcstrat.parameter_server import mailbox, pieces
from hpcstrat.parameter_server.wakeup_pipes import WakeupPipes

pytestmark = pytest.mark.algorithm


@pytest.fixture(autouse=True)
def _needs_three_ranks(job: Any) -> None:
    if job.size < 3:
        pytest.skip("a coordinator, a server and a worker are three ranks")


class Cluster:
    """A cluster in which rank 0 runs the body of a test, and the other ranks serve."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def run(
        self, body: Callable[[Any, Any], None], num_ps: int = 1, **more: Any
    ) -> None:
        if self.job.rank:
            hs.Server(num_ps=num_ps).join()
            if self.job.rank <= num_ps:
                # Collect files that this rank mapped in an earlier test as a worker.
                gc.collect()
                files = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
                assert not [file for file in files if "hpcstrat-shards" in file.name]
            return
        strategy = hs.ParameterServerStrategy(num_ps=num_ps, **more)
        try:
            body(strategy, hs.coordinator.ClusterCoordinator(strategy))
        finally:
            strategy.close()


@pytest.fixture(params=["shared_memory", "messages"])
def cluster(
    job: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Cluster:
    """Return a cluster; with "messages", it acts as if each rank had its own node."""
    if request.param == "messages":
        found = WakeupPipes.place
        monkeypatch.setattr(
            WakeupPipes,
            "place",
            lambda self, r: found(self, r) if r == job.rank else None,
        )
    return Cluster(job)


def made(strategy: Any, value: Any, **more: Any) -> Any:
    with strategy.scope():
        return hs.Variable(value, **more)


def test_functions_return_what_they_have_computed(cluster: Cluster) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        large = np.arange(100_000)
        values = [coordinator.schedule(lambda x: x * 2, (i,)) for i in range(50)]
        kept = coordinator.schedule(lambda x: x + 1, (large,))
        none = coordinator.schedule(int.bit_length, (0,))
        tree = {"all": values, "plain": 3, "none": none}
        coordinator.join()
        assert coordinator.done()
        fetched = coordinator.fetch(tree)
        assert fetched == {"all": [2 * i for i in range(50)], "plain": 3, "none": 0}
        np.testing.assert_array_equal(kept.fetch(), large + 1)
        np.testing.assert_array_equal(kept.get(), large + 1)
        assert coordinator.schedule(lambda: None).fetch() is None
        assert coordinator is hs.coordinator.ClusterCoordinator(strategy)
        assert strategy.num_replicas_in_sync == 1
        twice = coordinator.schedule(lambda: strategy.run(lambda x: 2 * x, (3,)))
        assert twice.fetch() == 6

    cluster.run(body)


def test_an_error_is_raised_once_and_cancels_what_is_queued(cluster: Cluster) -> None:
    def slow() -> None:
        time.sleep(0.02)

    def fail() -> None:
        # Wait until all functions are scheduled, even on a busy machine.
        time.sleep(0.5)
        raise KeyError("of the function")

    def body(strategy: Any, coordinator: Any) -> None:
        first = coordinator.schedule(fail)
        rest = [coordinator.schedule(slow) for _ in range(60)]
        with pytest.raises(KeyError, match="of the function") as caught:
            coordinator.join()
        assert "raised on rank" in caught.value.__notes__[0]
        with pytest.raises(KeyError):
            first.fetch()
        with pytest.raises(CancelledError):
            rest[-1].fetch()
        coordinator.join()
        assert coordinator.schedule(lambda: 5).fetch() == 5
        coordinator.schedule(fail)
        deadline = time.monotonic() + 20
        while not coordinator.done() and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(KeyError):
            coordinator.schedule(slow)
        assert coordinator.schedule(lambda: 6).fetch() == 6

    cluster.run(body)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A function whose instances all compare equal."""

    factor: int = dataclasses.field(compare=False)
    unseen: list[int] = dataclasses.field(default_factory=list, compare=False)

    def __call__(self, number: int) -> int:
        return self.factor * number

    def count(self) -> int:
        """Return the number of calls of this instance in this process."""
        self.unseen.append(0)
        return len(self.unseen)


def test_functions_that_compare_equal_are_told_apart(job: Any) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        functions = [Scaled(factor) for factor in range(4)]
        assert len(set(functions)) == 1
        values = [coordinator.schedule(function, (10,)) for function in functions]
        values += [coordinator.schedule(f.__call__, (10,)) for f in functions]
        assert coordinator.fetch(values) == 2 * [0, 10, 20, 30]
        # Methods of the same object share one pickle, so a worker keeps its count.
        for function in functions[:2]:
            counts = [coordinator.schedule(function.count) for _ in range(20)]
            assert sum(coordinator.fetch(counts)) >= 20 * 21 / 2 / (job.size - 2)
        numbers = iter(range(100))
        drawn = [coordinator.schedule(numbers.__next__) for _ in range(20)]
        assert max(coordinator.fetch(drawn)) >= 19 // (job.size - 2)

    Cluster(job).run(body)


def test_threads_of_the_coordinator_may_schedule_fetch_and_update(
    cluster: Cluster, job: Any
) -> None:
    many, threads = 100, 4

    def body(strategy: Any, coordinator: Any) -> None:
        table, count = made(strategy, np.zeros((4, 3))), made(strategy, np.int64(0))
        one = np.int64(1)

        def use(index: int) -> None:
            for number in range(many):
                value = coordinator.schedule(lambda *x: x, (index, number))
                count.assign_add(one)
                rows = hs.IndexedSlices(np.ones((1, 3)), [index])
                table.scatter_add(rows)
                # A thread reads the values that it has written.
                assert table.numpy()[index].tolist() == [number + 1.0] * 3
                assert value.fetch() == (index, number)
            coordinator.join()

        with ThreadPoolExecutor(threads) as pool:
            tasks = [pool.submit(copy_context().run, use, i) for i in range(threads)]
            for task in tasks:
                task.result()
        assert count.numpy() == threads * many
        assert coordinator.done()

    cluster.run(body)


def test_a_thread_that_waits_holds_up_no_other(cluster: Cluster) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        begun, go_on = made(strategy, 0.0), made(strategy, 0.0)

        def wait() -> None:
            begun.assign(1.0)
            while not go_on.numpy():
                time.sleep(0.001)

        coordinator.schedule(wait)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(copy_context().run, coordinator.join)
            while not begun.numpy():
                assert not joined.done()
            go_on.assign(1.0)
            joined.result()
        assert coordinator.done()

    cluster.run(body)


def test_threads_of_a_function_may_update(cluster: Cluster) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        table = made(strategy, np.zeros((4, 3)))

        def use(index: int) -> None:
            for number in range(50):
                table.scatter_add(hs.IndexedSlices(np.ones((1, 3)), [index]))
                assert table.numpy()[index, 0] == number + 1

        def several() -> None:
            with ThreadPoolExecutor(4) as pool:
                for task in [pool.submit(copy_context().run, use, i) for i in range(4)]:
                    task.result()

        coordinator.schedule(several).fetch()
        np.testing.assert_array_equal(table.numpy(), np.full((4, 3), 50.0))

    cluster.run(body)


def test_wrong_arguments_are_refused_at_once(cluster: Cluster) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        value = coordinator.schedule(lambda: 1)
        with pytest.raises(TypeError, match="a function to schedule"):
            coordinator.schedule(3)
        with pytest.raises(ValueError, match="RemoteValue"):
            coordinator.schedule(lambda x: x, (value,))
        with pytest.raises(ValueError, match="RemoteValue"):
            coordinator.schedule(lambda: value)
        lock = threading.Lock()
        for fn, args in ((lambda: lock, ()), (id, (lock,))):
            with pytest.raises(TypeError, match="cannot pickle") as caught:
                coordinator.schedule(fn, args)
            assert "was pickled for the workers" in caught.value.__notes__[0]
        with pytest.raises(AssertionError):
            hs.coordinator.PerWorkerValues([3])
        with pytest.raises(RuntimeError, match="index"):
            hs.coordinator.experimental_get_current_worker_index()
        with pytest.raises(ValueError, match="by the coordinator"):
            coordinator.schedule(lambda: hs.Variable(0.0)).fetch()
        with pytest.raises(TypeError):
            hs.coordinator.ClusterCoordinator(hs.OneDeviceStrategy())
        variable = made(strategy, [1.0, 2.0])
        with pytest.raises(ValueError, match="expected shape"):
            variable.assign([1.0])
        with pytest.raises(ValueError, match="indices from 0 to 1"):
            hs.embedding_lookup(variable, [2])

    cluster.run(body)


class Trainer:
    """A program as an object, whose methods are scheduled."""

    def __init__(self, strategy: Any, coordinator: Any) -> None:
        self.strategy, self.coordinator = strategy, coordinator
        self.total = made(strategy, 0.0)

    def step(self, number: float) -> str:
        """Use the coordinator's attributes on a worker, which is allowed."""
        assert self.coordinator.strategy is self.strategy
        assert hs.coordinator.ClusterCoordinator(self.strategy) is self.coordinator
        self.total.assign_add(number)
        return repr(self.coordinator)

    def schedule_from_worker(self) -> None:
        """Schedule from a worker, which only the coordinator may do."""
        self.coordinator.schedule(self.step, (1.0,))


def test_a_function_may_hold_the_coordinator_and_not_use_it(job: Any) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        trainer = Trainer(strategy, coordinator)
        shown = coordinator.schedule(trainer.step, (2.0,)).fetch()
        assert shown == repr(coordinator)
        assert trainer.total.numpy() == 2
        with pytest.raises(RuntimeError, match="found that a scheduled function uses"):
            coordinator.schedule(trainer.schedule_from_worker).fetch()
        with pytest.raises(RuntimeError, match="found that a scheduled function uses"):
            coordinator.join()
        assert coordinator.schedule(lambda: trainer.coordinator).fetch() is coordinator

    Cluster(job).run(body)


def test_a_coordinator_that_would_serve_leaves_nobody_waiting(job: Any) -> None:
    if job.rank:
        hs.Server().join()
        return
    with pytest.raises(ValueError, match="other than the coordinator, found rank 0"):
        hs.Server().join()


def test_many_writers_lose_no_update_and_readers_see_whole_ones(
    cluster: Cluster,
) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        vector = made(strategy, np.zeros(20_000))
        # The repr shows where the variable is, without a request to a server.
        assert "float64[20000] on ranks" in repr(vector)
        assert "on ranks" in vector._repr_html_()
        count = made(strategy, np.int64(0))
        one = np.ones(20_000)

        def step() -> int:
            vector.assign_add(one, read_value=False)
            count.assign_add(np.int64(1), read_value=False)
            seen = vector.numpy()
            return len(np.unique(seen))

        kinds = [coordinator.schedule(step) for _ in range(150)]
        while not coordinator.done():
            assert len(np.unique(vector.numpy())) == 1
        coordinator.join()
        assert set(coordinator.fetch(kinds)) == {1}
        assert count.numpy() == 150
        np.testing.assert_array_equal(vector.numpy(), np.full(20_000, 150.0))

    cluster.run(body)


def test_updates_of_a_worker_are_made_in_order(cluster: Cluster) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        variables = [made(strategy, 0.0) for _ in range(3)]

        def step() -> list[float]:
            seen = []
            for value in range(20):
                for variable in variables:
                    variable.assign(float(value))
                    variable.assign_add(0.5)
                    variable.assign_sub(0.25)
                seen.append(float(variables[value % 3].numpy()))
            return seen

        seen = coordinator.schedule(step).fetch()
        assert seen == [value + 0.25 for value in range(20)]
        assert [float(v.numpy()) for v in variables] == [19.25] * 3

    cluster.run(body)


def test_shards_are_dealt_to_servers_and_act_as_one_variable(
    cluster: Cluster, job: Any
) -> None:
    num_ps = job.size - 2

    def body(strategy: Any, coordinator: Any) -> None:
        start = np.arange(33.0, dtype=np.float32).reshape(11, 3)
        table = made(strategy, start, name="table")
        assert isinstance(table, hs.ShardedVariable)
        assert table.shard_rows == ((0, 4), (4, 8), (8, 11))
        servers = [shard.server for shard in table._shards]
        assert servers == [1 + i % num_ps for i in range(3)]
        np.testing.assert_array_equal(table.numpy(), start)
        ids = [[10, 0], [4, 10]]
        rows = coordinator.schedule(lambda: hs.embedding_lookup(table, ids)).fetch()
        np.testing.assert_array_equal(rows, start[np.array(ids)])

        def scatter() -> None:
            rows = np.ones((4, 3), np.float32)
            table.scatter_add(hs.IndexedSlices(rows, [0, 10, 0, 5]))
            table.scatter_update(hs.IndexedSlices(rows[:1] * 9, [7]))
            table.scatter_max(hs.IndexedSlices(rows[:1] * 20, [4]))

        coordinator.schedule(scatter).fetch()
        np.add.at(start, [0, 10, 0, 5], 1)
        start[7], start[4] = 9, np.maximum(start[4], 20)
        np.testing.assert_array_equal(table.numpy(), start)
        np.testing.assert_array_equal(np.asarray(table) + 1, start + 1)
        made_there = made(
            strategy,
            hs.Rows((11, 2), "float32", lambda a, b: np.full((b - a, 2), a, "f4")),
        )
        np.testing.assert_array_equal(
            made_there.numpy()[:, 0], [0] * 4 + [4] * 4 + [8] * 3
        )

    partitioner = hs.partitioners.FixedShardsPartitioner(3)
    cluster.run(body, num_ps, variable_partitioner=partitioner)


@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adam"])
def test_optimizers_make_their_steps_at_the_servers(
    cluster: Cluster, kind: str
) -> None:
    def optimizer() -> Any:
        if kind == "Adam":
            return hs.optimizers.Adam(0.1, clip_global_norm=3.0)
        momentum = 0.9 if kind == "momentum" else 0.0
        return hs.optimizers.SGD(lambda step: 0.1 / (1 + step), momentum=momentum)

    def gradients(step: int) -> list[Any]:
        rows = np.full((3, 2), 1.0 + step, np.float32)
        dense = np.linspace(-1, 1, 4, dtype=np.float32) * (step + 1)
        return [hs.IndexedSlices(rows, [0, 4, 0], (5, 2)), dense]

    def body(strategy: Any, coordinator: Any) -> None:
        starts = np.ones((5, 2), np.float32), np.zeros(4, np.float32)
        with strategy.scope():
            own = optimizer()
            variables = [hs.Variable(s, name=f"v{i}") for i, s in enumerate(starts)]

        def step(number: int) -> None:
            pairs = list(zip(gradients(number), variables, strict=True))
            strategy.run(lambda: own.apply_gradients(pairs))

        plain = optimizer()
        wanted = [hs.Variable(s, name=f"v{i}") for i, s in enumerate(starts)]
        for number in range(4):
            coordinator.schedule(step, (number,))
            coordinator.join()
            plain.apply_gradients(list(zip(gradients(number), wanted, strict=True)))
        for found, expected in zip(variables, wanted, strict=True):
            np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6)
        assert own.iterations.numpy() == 4

    cluster.run(body)


def test_each_worker_has_a_data_set_of_its_own(cluster: Cluster, job: Any) -> None:
    def index() -> int:
        return hs.coordinator.experimental_get_current_worker_index()

    def body(strategy: Any, coordinator: Any) -> None:
        dataset = coordinator.create_per_worker_dataset(lambda: [index()] * 40)
        iterator = iter(dataset)

        def step(own: Any) -> bool:
            time.sleep(0.001)
            return next(own) == index()

        fetched = coordinator.fetch(
            [coordinator.schedule(step, (iterator,)) for _ in range(30)]
        )
        assert fetched == [True] * 30
        with pytest.raises(NotImplementedError):
            next(iterator)
        for _ in range(40 * job.size):
            try:
                coordinator.schedule(step, (iterator,))
            except OutOfRangeError:
                break
        else:
            with pytest.raises(OutOfRangeError):
                coordinator.join()
        coordinator.join()
        with pytest.raises(ZeroDivisionError):
            coordinator.create_per_worker_dataset(lambda: 1 / 0)

    cluster.run(body)


def test_a_checkpoint_is_restored_on_other_shards(job: Any, tmp_path: Path) -> None:
    cluster = Cluster(job)
    start = np.arange(21.0).reshape(7, 3)

    def save(strategy: Any, coordinator: Any) -> None:
        table = made(strategy, start, name="table")
        count = made(strategy, np.int64(3), name="count")
        coordinator.schedule(lambda: count.assign_add(np.int64(4))).fetch()
        hs.CheckpointManager(tmp_path, table=table, count=count).save(1)

    def restore(strategy: Any, coordinator: Any) -> None:
        table = made(strategy, np.zeros((7, 3)), name="table")
        count = made(strategy, np.int64(0), name="count")
        with strategy.scope():
            hs.CheckpointManager(tmp_path, table=table, count=count).restore()
        np.testing.assert_array_equal(table.numpy(), start)
        assert coordinator.schedule(lambda: int(count.numpy())).fetch() == 7

    partitioner = hs.partitioners.FixedShardsPartitioner(3)
    cluster.run(save, variable_partitioner=partitioner)
    cluster.run(restore)


def test_rules_that_need_a_whole_variable_are_refused_for_shards(job: Any) -> None:
    class Own(hs.optimizers.Optimizer):
        def update(self, step: Any, gradient: Any, value: Any) -> None:
            value -= step.rate * gradient

    def steps(strategy: Any, coordinator: Any) -> None:
        with strategy.scope():
            table = hs.Variable(np.ones((6, 2)), name="table")
            rules = hs.optimizers.LAMB(0.5), Own(0.5), hs.optimizers.Adam(0.5)
        lamb, own, adam = (
            lambda rule=rule: rule.apply_gradients([(np.ones((6, 2)), table)])
            for rule in rules
        )
        for step in (lamb, own):
            with pytest.raises(ValueError, match="'table', which lies in 3 shards"):
                coordinator.schedule(step).fetch()
        assert coordinator.schedule(adam).fetch()
        assert (table.numpy() != 1).all()

    partitioner = hs.partitioners.FixedShardsPartitioner(3)
    Cluster(job).run(steps, variable_partitioner=partitioner)


def test_a_save_while_functions_write_is_refused(job: Any, tmp_path: Path) -> None:
    cluster = Cluster(job)

    def save(strategy: Any, coordinator: Any) -> None:
        count = made(strategy, np.int64(0), name="count")
        manager = hs.CheckpointManager(tmp_path, count=count)

        def late() -> None:
            time.sleep(0.01)
            count.assign_add(np.int64(1))

        for _ in range(20):
            coordinator.schedule(late)
        for call in (manager.save, manager.restore):
            with pytest.raises(RuntimeError, match=r"that have not ended; call .*join"):
                call()
        coordinator.join()
        manager.save()
        count.assign(np.int64(0))
        manager.restore()
        assert count.numpy() == 20

    cluster.run(save)


@pytest.mark.once
def test_large_values_are_saved_and_restored_in_pieces(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither pieces nor shards end at the ends of the file's blocks.
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 300_001)
    start = np.random.default_rng(0).normal(size=(40_001, 10)).astype(np.float32)
    steps = []

    def body(strategy: Any, coordinator: Any) -> None:
        for _ in range(2):
            with strategy.scope():
                table = hs.Variable(np.zeros_like(start), name="table/of/rows")
                count = hs.Variable(np.int8(3), name="count")
                optimizer = hs.optimizers.SGD(1.0, momentum=0.5)
            objects = {"net": [table, count], "optimizer": optimizer}
            manager = hs.CheckpointManager(tmp_path, **objects)
            if steps:
                assert manager.restore() == steps[-1]
                np.testing.assert_array_equal(table.numpy(), -start)
                assert count.numpy() == 4
            strategy.apply_gradients(optimizer, [(start, table)])
            if steps:
                # The momentum of the previous step is part of this step.
                np.testing.assert_allclose(table.numpy(), -2.5 * start, rtol=1e-6)
                continue
            count.assign_add(np.int8(1))
            for asynchronous in (False, True):
                steps.append(1 + len(steps))
                manager.save(steps[-1], asynchronous=asynchronous)
            manager.wait()
            first, last = (Path(path) for path in manager.checkpoints)
            with h5py.File(first) as one, h5py.File(last) as other:
                for file in (one, other):
                    np.testing.assert_array_equal(file["variables/net/0"], -start)
            # Delete the variables, so that the next program starts without them.
            del table, count, optimizer, objects, manager

    partitioner = hs.partitioners.FixedShardsPartitioner(3)
    cluster, num_ps = Cluster(job), job.size - 2
    cluster.run(body, num_ps, variable_partitioner=partitioner)


def rise(call: Callable[[], Any]) -> int:
    """Return the increase of this process's peak memory in a call, in bytes."""

    def bytes_of(kind: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if kind in line).split()[1]) << 10

    # See proc(5): this resets the peak to the current memory.
    Path("/proc/self/clear_refs").write_text("5")
    before = bytes_of("VmRSS")
    call()
    return bytes_of("VmHWM") - before


@pytest.mark.slow
@pytest.mark.once
def test_a_table_is_saved_and_restored_without_memory_for_it(
    job: Any, tmp_path: Path
) -> None:
    num_rows, width, limit = 1 << 21, 128, 200 << 20

    def make(first: int, last: int) -> Any:
        numbers = np.arange(first, last, dtype=np.float32)
        return np.broadcast_to(numbers[:, None], (last - first, width))

    def body(strategy: Any, coordinator: Any) -> None:
        rows = hs.Rows((num_rows, width), np.float32, make)
        table = made(strategy, rows, name="table")
        ends = np.array([end for a, b in table.shard_rows for end in (a, b - 1)])
        manager = hs.CheckpointManager(tmp_path, table=table)
        saved = rise(lambda: manager.save(1))
        zeros = np.zeros((len(ends), width), np.float32)
        table.scatter_update(hs.IndexedSlices(zeros, ends))
        restored = rise(manager.restore)
        print(f"{saved >> 20} MiB to save, {restored >> 20} MiB to restore")
        np.testing.assert_array_equal(table.read_rows(ends)[:, 5], ends)
        assert max(saved, restored) < limit

    partitioner = hs.partitioners.FixedShardsPartitioner(2)
    Cluster(job).run(body, job.size - 2, variable_partitioner=partitioner)


STARTS = np.ones((7, 3)), np.zeros(())


def variables_of_net() -> list[Any]:
    return [hs.Variable(start, name=f"v{i}") for i, start in enumerate(STARTS)]


def apply(optimizer: Any, variables: Any, number: int, replicas: int = 1) -> None:
    """Make a step whose effect does not depend on the number of replicas."""
    rows = np.arange(21.0).reshape(7, 3) - 3.0 * number
    gradients = rows / replicas, np.float64(number) / replicas
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))


def two_steps(folder: Path, strategy: Any, first: int, run: Any) -> list[Any]:
    """Restore, make two steps of Adam, and save; return the variables."""
    with strategy.scope():
        variables, optimizer = variables_of_net(), hs.optimizers.Adam(0.1)
    manager = hs.CheckpointManager(folder, net=variables, optimizer=optimizer)
    if first:
        assert manager.restore() == first
    for number in (first, first + 1):
        run(apply, (optimizer, variables, number))
    manager.save(first + 2)
    return variables


def test_state_of_optimizers_goes_to_other_servers_to_replicas_and_back(
    job: Any, tmp_path: Path
) -> None:
    cluster, folder = Cluster(job), job.bcast(tmp_path)
    plain, wanted = hs.optimizers.Adam(0.1), variables_of_net()
    for number in range(8):
        apply(plain, wanted, number)

    def served(first: int) -> Callable[[Any, Any], None]:
        def body(strategy: Any, coordinator: Any) -> None:
            def run(function: Any, args: Any) -> None:
                coordinator.schedule(function, args).fetch()

            found = two_steps(folder, strategy, first, run)
            for variable, value in zip(found, wanted, strict=True):
                assert first < 6 or np.allclose(variable, value, rtol=1e-9)

        return body

    def on_all(function: Any, args: Any) -> None:
        replicas.run(function, (*args, job.size))

    partitioner = hs.partitioners.FixedShardsPartitioner(3)
    cluster.run(served(0), job.size - 2, variable_partitioner=partitioner)
    cluster.run(served(2))
    job.Barrier()
    replicas = hs.MirroredStrategy()
    two_steps(folder, replicas, 4, on_all)
    replicas.close()
    cluster.run(served(6), job.size - 2, variable_partitioner=partitioner)


def test_state_waits_for_a_variable_that_comes_after_the_restore(
    job: Any, tmp_path: Path
) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        for round_ in range(2):
            with strategy.scope():
                optimizer = hs.optimizers.SGD(1.0, momentum=0.5)
            manager = hs.CheckpointManager(tmp_path, optimizer=optimizer)
            if round_:
                assert manager.restore() == 1
                again = hs.CheckpointManager(tmp_path / "again", optimizer=optimizer)
                again.save(1)
            variable = made(strategy, np.zeros(3), name="late/one")
            pairs = [(np.ones(3), variable)]
            coordinator.schedule(optimizer.apply_gradients, (pairs,)).fetch()
            manager.save(1 + round_)
            # One step has no earlier momentum, the next one has that of the first step.
            np.testing.assert_allclose(variable.numpy(), -1 - 0.5 * round_)
            del variable, pairs

    Cluster(job).run(body)


class HeldError(Exception):
    """An error that cannot be pickled, because it has a lock."""

    def __init__(self) -> None:
        super().__init__("of the server")
        self.lock = threading.Lock()


def rows_that_fail(start: int, stop: int) -> Any:
    raise HeldError


def test_an_error_that_cannot_be_pickled_is_told_and_ends_no_server(
    cluster: Cluster,
) -> None:
    class Failing(hs.optimizers.SGD):
        def update_arrays(self, *args: Any) -> None:
            raise HeldError

    def body(strategy: Any, coordinator: Any) -> None:
        with pytest.raises(RuntimeError, match="HeldError: of the server"):
            made(strategy, hs.Rows((3, 2), "float32", rows_that_fail))
        variable = made(strategy, np.zeros(3))
        with strategy.scope():
            optimizer = Failing(1.0)
        pairs = [(np.ones(3), variable)]
        for _ in range(2):
            call = coordinator.schedule(optimizer.apply_gradients, (pairs,))
            with pytest.raises(RuntimeError, match="HeldError: of the server"):
                call.fetch()
            with pytest.raises(RuntimeError):
                coordinator.join()
        assert coordinator.schedule(lambda: float(variable.numpy()[0])).fetch() == 0

    cluster.run(body)


class RootedError(Exception):
    """An error that can be unpickled only in the process that pickled it."""

    def __reduce__(self) -> Any:
        return rooted, (os.getpid(),)


def rooted(pid: int) -> RootedError:
    if os.getpid() != pid:
        raise OSError("elsewhere")
    return RootedError()


def test_an_error_that_is_unknown_here_is_told(job: Any) -> None:
    def fail() -> None:
        raise RootedError("of the worker")

    def body(strategy: Any, coordinator: Any) -> None:
        coordinator.schedule(fail)
        with pytest.raises(RuntimeError, match="RootedError: of the worker"):
            coordinator.join()

    Cluster(job).run(body)


class Slow(hs.optimizers.SGD):
    """An optimizer whose steps are slow, and may fail."""

    fails = False

    def update_arrays(self, *args: Any) -> None:
        time.sleep(0.1)
        if self.fails:
            raise ZeroDivisionError("at the server")
        super().update_arrays(*args)


def test_each_function_has_its_own_errors(cluster: Cluster, job: Any) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        variable = made(strategy, np.zeros(3))
        with strategy.scope():
            good, bad = Slow(1.0), Slow(1.0)
        bad.fails = True
        pairs = [(np.ones(3), variable)]

        def step(optimizer: Any, seconds: float) -> None:
            optimizer.apply_gradients(pairs)
            time.sleep(seconds)

        def fail() -> None:
            raise KeyError("of the function")

        # Schedule more functions, so that each worker has some in its queue.
        for _ in range(20):
            coordinator.schedule(int)
        coordinator.join()
        first = coordinator.schedule(step, (good, 0.0))
        second = coordinator.schedule(step, (bad, 0.4))
        with pytest.raises(ZeroDivisionError):
            coordinator.join()
        assert first.fetch() is None
        with pytest.raises(ZeroDivisionError):
            second.fetch()
        for _ in range(20):
            coordinator.schedule(int)
        coordinator.join()
        first = coordinator.schedule(step, (bad, 0.0))
        second = coordinator.schedule(fail)
        with pytest.raises(ZeroDivisionError):
            first.fetch()
        with pytest.raises((KeyError, CancelledError)):
            second.fetch()
        with pytest.raises(ZeroDivisionError):
            coordinator.join()

    cluster.run(body, job.size - 2)


def test_functions_scheduled_after_an_error_all_run(cluster: Cluster, job: Any) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        variable, ran = made(strategy, np.zeros(3)), made(strategy, np.int64(0))
        with strategy.scope():
            bad = Slow(1.0)
        bad.fails = True

        def fail(error: Exception) -> None:
            raise error

        def schedule_until_an_error() -> None:
            while True:
                coordinator.schedule(int)

        # Schedule more functions, so that each worker has some in its queue.
        for _ in range(20):
            coordinator.schedule(int)
        coordinator.join()
        # The server notices that this update fails long after the error of the other
        # function is known.
        pairs = [(np.ones(3), variable)]
        late = coordinator.schedule(bad.apply_gradients, (pairs,))
        coordinator.schedule(fail, (KeyError("of the function"),))
        with pytest.raises((KeyError, ZeroDivisionError)):
            schedule_until_an_error()
        assert coordinator.done()
        with pytest.raises(ZeroDivisionError):
            late.fetch()
        for _ in range(20):
            coordinator.schedule(lambda: ran.assign_add(np.int64(1)))
        coordinator.join()
        assert ran.numpy() == 20

    cluster.run(body)


class Hollow:
    """An object that cannot be iterated over."""

    def __iter__(self) -> Any:
        raise LookupError("of the iterator")


def test_a_value_that_cannot_be_made_fails_those_alone_who_take_it(job: Any) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        dataset = coordinator.create_per_worker_dataset(Hollow)
        coordinator.schedule(time.sleep, (0.1,))
        iterator = iter(dataset)
        assert coordinator.schedule(int).fetch() == 0
        coordinator.join()
        coordinator.schedule(next, (iterator,))
        with pytest.raises(LookupError, match="of the iterator"):
            coordinator.join()

    Cluster(job).run(body, job.size - 2)


def test_an_interrupted_question_leaves_its_answer_to_no_other(
    cluster: Cluster, job: Any
) -> None:
    def ring(*_: Any) -> None:
        raise TimeoutError

    def body(strategy: Any, coordinator: Any) -> None:
        values = [coordinator.schedule(np.full, (20_000, i)) for i in range(3)]
        coordinator.join()

        def interrupt(value: Any) -> None:
            coordinator.schedule(time.sleep, (0.3,))
            time.sleep(0.1)
            before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(TimeoutError):
                value.fetch()
            signal.signal(signal.SIGALRM, before)

        interrupt(values[0])
        assert [value.fetch()[-1] for value in values[1::-1]] == [1, 0]
        # The worker does not wait at its end for a receiver of the answer.
        interrupt(values[2])

    cluster.run(body, job.size - 2)


def test_large_messages_come_in_pieces_and_in_order(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "_PIECE_BYTES", 30_001)

    def body(strategy: Any, coordinator: Any) -> None:
        lengths = [10, 200_000, 0, 90_000, 5] * 6
        # Send one value pickled in one piece, and one value with a separate array.
        texts = [str(number) * length for number, length in enumerate(lengths)]
        both = {"text": texts[1], "array": np.arange(50_000)}
        values = [coordinator.schedule(lambda x: x + x, (text,)) for text in texts]
        tree = coordinator.schedule(lambda **named: named, kwargs=both)
        captured = coordinator.schedule(lambda: len(texts[6]))
        coordinator.join()
        assert coordinator.fetch(values) == [text + text for text in texts]
        assert captured.fetch() == len(texts[6])
        found = tree.fetch()
        assert found["text"] == both["text"]
        np.testing.assert_array_equal(found["array"], both["array"])

    Cluster(job).run(body)


@pytest.mark.slow
@pytest.mark.once
def test_arguments_and_results_may_be_larger_than_two_gibibytes(job: Any) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        large = np.zeros((2 << 30) + 3, np.uint8)
        large[-1] = 7
        found = coordinator.schedule(lambda x: x, (large,)).fetch()
        assert found.nbytes == large.nbytes
        assert found[-1] == 7

    Cluster(job).run(body, job.size - 2)


def test_changed_options_reach_workers_and_servers(job: Any) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        variable = made(strategy, np.zeros(3))
        with strategy.scope():
            optimizer = hs.optimizers.SGD(1.0, momentum=0.5)

        def step(own: Any) -> None:
            own.apply_gradients([(np.ones(3), variable)])

        coordinator.schedule(step, (optimizer,)).fetch()
        optimizer.learning_rate, optimizer.momentum = 0.25, 0.0
        coordinator.schedule(step, (optimizer,)).fetch()
        np.testing.assert_array_equal(variable.numpy(), np.full(3, -1.25))

    Cluster(job).run(body, job.size - 2)


@pytest.mark.parametrize("make", ["SGD", "Adam"])
def test_sparse_steps_do_not_depend_on_the_number_of_shards(
    job: Any, make: str
) -> None:
    found: list[Any] = []

    def body(strategy: Any, coordinator: Any) -> None:
        options = {"momentum": 0.5} if make == "SGD" else {}
        with strategy.scope():
            optimizer = getattr(hs.optimizers, make)(0.5, **options)
        table = made(strategy, np.zeros((8, 2)))
        for rows in ([0, 7], [1], [7, 7, 2]):
            gradient = hs.IndexedSlices(np.ones((len(rows), 2)), rows, (8, 2))
            strategy.apply_gradients(optimizer, [(gradient, table)])
        found.append(table.numpy())

    for count in (1, 2, 4):
        partitioner = hs.partitioners.FixedShardsPartitioner(count)
        Cluster(job).run(body, job.size - 2, variable_partitioner=partitioner)
    for table in found[1:]:
        np.testing.assert_array_equal(table, found[0])
    if found and make == "SGD":
        # Momentum moves the velocity of row 0 in steps without a gradient for it.
        np.testing.assert_array_equal(found[0][0], [-0.875] * 2)


def test_options_that_are_changed_back_are_those_of_each_step(job: Any) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        variable = made(strategy, np.zeros(3))
        with strategy.scope():
            optimizer = hs.optimizers.SGD(1.0, momentum=0.5)

        def step(own: Any) -> None:
            own.apply_gradients([(np.ones(3), variable)])

        coordinator.schedule(step, (optimizer,)).fetch()
        # A different client of the server makes this step.
        optimizer.momentum = 0.0
        strategy.apply_gradients(optimizer, [(np.ones(3), variable)])
        optimizer.momentum = 0.5
        coordinator.schedule(step, (optimizer,)).fetch()
        np.testing.assert_array_equal(variable.numpy(), np.full(3, -3.5))

    Cluster(job).run(body, job.size - 2)


def test_servers_keep_nothing_of_what_is_gone(job: Any) -> None:
    def body(strategy: Any, coordinator: Any) -> None:
        variable, other = made(strategy, np.zeros(3)), made(strategy, 0.0)
        with strategy.scope():
            optimizer = hs.optimizers.SGD(1.0, momentum=0.5)
        strategy.apply_gradients(optimizer, [(np.ones(3), variable)])
        client, key = strategy.client, optimizer.key

        def states() -> list[list[int]]:
            return [client.ask(rank, "stateful", key) for rank in client.servers]

        assert sum(map(len, states())) == 1
        del optimizer
        gc.collect()
        coordinator.done()
        assert sum(map(len, states())) == 0
        # Variables on a lost server make no later calls fail.
        client.mailbox.lost.update(client.servers)
        del other
        gc.collect()
        coordinator.done()
        client.flush()
        client.mailbox.lost.clear()

    Cluster(job).run(body, job.size - 2)


def test_a_rank_without_a_role_is_refused(job: Any) -> None:
    kinds = ["chief", "ps", "worker", "evaluator"]
    if job.size < len(kinds):
        pytest.skip("all ranks have roles")
    resolver = hs.cluster_resolver.SimpleClusterResolver(
        hs.cluster_resolver.ClusterSpec({}), task_type=kinds[job.rank]
    )
    for make in (hs.ParameterServerStrategy, hs.ParameterServerStrategyV1):
        with pytest.raises(ValueError, match=r"no other, found .*'evaluator'"):
            make(resolver)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"spare_ranks": -1}, "spare_ranks >= 0, found -1"),
        ({"spare_ranks": 40}, "at least 3 ranks.*spare_ranks=40, found -"),
        ({"spare_ranks": 0}, "same num_ps and spare_ranks"),
    ],
)
def test_wrong_numbers_of_spare_ranks_are_refused(
    job: Any, arguments: dict[str, Any], problem: str
) -> None:
    if not job.rank and "same" in problem:
        arguments = {"spare_ranks": 1}
    with pytest.raises(ValueError, match=problem):
        hs.ParameterServerStrategy(**arguments)


def test_spare_ranks_wait_for_losses_alone(job: Any) -> None:
    spare_ranks, kinds = job.size - 3, ["chief", "ps", "worker", "spare"]
    if spare_ranks != 1:
        pytest.skip("one rank is spare")
    resolver = hs.cluster_resolver.SimpleClusterResolver(
        hs.cluster_resolver.ClusterSpec({}), task_type=kinds[job.rank]
    )
    for arguments in ({"spare_ranks": 1}, {"cluster_resolver": resolver}):
        with pytest.raises(ValueError, match="on_lost_rank='raise' with spare ranks"):
            hs.ParameterServerStrategy(**arguments)


@pytest.mark.parametrize("names_tasks", [False, True])
def test_a_resolver_says_which_rank_does_what(job: Any, names_tasks: bool) -> None:
    """Alternatively, the arguments of tf.distribute give the roles of serving ranks."""
    kinds = ["worker"] * (job.size - 2) + ["ps", "chief"]
    cluster = {kind: ["host:1"] * kinds.count(kind) for kind in kinds}
    spec = hs.cluster_resolver.ClusterSpec(cluster)
    kind, index = kinds[job.rank], kinds[: job.rank].count(kinds[job.rank])
    resolver = hs.cluster_resolver.SimpleClusterResolver(
        spec, task_type=kind, task_id=index
    )
    if job.rank < job.size - 1:
        given = (spec, kind, index, "grpc") if names_tasks else (resolver,)
        server = hs.Server(*given)
        server.start()
        server.join()
        return
    strategy = hs.ParameterServerStrategy(resolver)
    assert strategy.roles.servers == (job.size - 2,)
    assert strategy.roles.workers == tuple(range(job.size - 2))
    assert strategy.cluster_resolver is resolver
    variable = made(strategy, 1.0)
    coordinator = hs.coordinator.ClusterCoordinator(strategy)
    assert coordinator.schedule(variable.numpy).fetch() == 1
    strategy.close()


def test_workers_run_the_program_themselves_without_a_coordinator(
    job: Any, tmp_path: Path
) -> None:
    try:
        strategy = hs.ParameterServerStrategyV1(num_ps=1)
    except SystemExit:
        assert job.rank == 1
        return
    workers = strategy.roles.workers
    assert workers == (0, *range(2, job.size))
    assert workers[strategy.worker_index] == job.rank
    with strategy.scope():
        # The value of the first worker counts.
        count = hs.Variable(np.int64(1000 * job.rank), name="count")
        slow = hs.Variable(np.zeros(3), name="slow")
        optimizer = hs.optimizers.SGD(1.0, momentum=0.5)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: [
            np.full(2, 10 * context.num_input_pipelines + context.input_pipeline_id)
        ]
    )
    assert int(next(iter(dataset))[0]) == 10 * len(workers) + strategy.worker_index
    for _ in range(20):
        count.assign_add(np.int64(1))
        strategy.run(optimizer.apply_gradients, ([(np.zeros(3), slow)],))
    deadline = time.monotonic() + 20
    # A worker polls until the other workers are done, because no call waits for them.
    while optimizer.iterations.numpy() < 20 * len(workers):
        assert time.monotonic() < deadline
    assert count.numpy() == 20 * len(workers)
    with pytest.raises(TypeError):
        hs.coordinator.ClusterCoordinator(strategy)
    if strategy.worker_index:
        with pytest.raises(RuntimeError, match="only on worker 0"):
            hs.CheckpointManager(tmp_path, slow=slow, optimizer=optimizer)
    else:
        hs.CheckpointManager(tmp_path, slow=slow, optimizer=optimizer).save()
    with strategy.scope(), pytest.raises(RuntimeError, match="HeldError"):
        hs.Variable(hs.Rows((3, 2), "float32", rows_that_fail))
    name = "same" if job.size == 3 or job.rank != job.size - 1 else "another"
    with strategy.scope():
        if name == "same":
            hs.Variable(0.0, name=name)
        else:
            with pytest.raises(ValueError, match=r"'another', .*'same'"):
                hs.Variable(0.0, name=name)
    strategy.close()


def test_a_worker_that_makes_fewer_variables_is_told(job: Any) -> None:
    try:
        strategy = hs.ParameterServerStrategyV1(num_ps=1)
    except SystemExit:
        return
    makes_fewer = job.rank == job.size - 1
    with strategy.scope():
        hs.Variable(0.0, name="both")
        if not makes_fewer:
            hs.Variable(0.0, name="second")
            hs.Variable(np.zeros(3), name="third")
    if makes_fewer:
        problem = f"rank 0 has made 'second', 'third', and rank {job.rank} has not"
        with pytest.raises(ValueError, match=problem):
            strategy.close()
    strategy.close()


def test_a_rank_without_room_for_a_pipe_looks_by_itself(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(flags: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    if job.rank == 1:
        monkeypatch.setattr(os, "pipe2", refuse)

    def body(strategy: Any, coordinator: Any) -> None:
        variable = made(strategy, 0.0)
        for _ in range(10):
            coordinator.schedule(variable.assign_add, (1.0,)).fetch()
        assert variable.numpy() == 10

    Cluster(job).run(body)


class Waker(logging.Handler):
    """A log handler that resumes a stopped process when a message is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.pid, self.said = 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said += record.getMessage()
        os.kill(self.pid, signal.SIGCONT)


def test_a_stopped_worker_is_named_and_holds_up_nobody_else(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if job.size < 4:
        pytest.skip("there is one worker")
    waker = Waker()

    def body(strategy: Any, coordinator: Any) -> None:
        # Patch the mailbox: a setting would have to be equal for all open strategies.
        monkeypatch.setattr(strategy.client.mailbox, "warn_seconds", 0.2)
        where = made(strategy, np.int64(0))

        def stop() -> int:
            where.assign(np.int64(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return hs.coordinator.experimental_get_current_worker_index()

        stopped = coordinator.schedule(stop)
        while not (pid := int(where.numpy())):
            coordinator.done()
        waker.pid = pid
        others = [coordinator.schedule(lambda x: x, (i,)) for i in range(200)]
        assert coordinator.fetch(others) == list(range(200))
        assert "waiting" in repr(stopped)
        hs.get_logger().addHandler(waker)
        coordinator.join()
        index = stopped.fetch()
        rank = strategy.roles.workers[index]
        assert f"worker {index} (rank {rank}) has not ended" in waker.said

    try:
        Cluster(job).run(body)
    finally:
        hs.get_logger().removeHandler(waker)
