"""Logical replicas: the same bits, and the same errors, on any number of ranks.

The tests compare the results of a job with those of one process that has all replicas,
and sums with sums over the tree of replicas.
"""

from __future__ import annotations

import contextvars
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.arrays.packing import wire_dtype
from hpcstrat.engine.logical.tree_order import TreeOrder
from tests.mpi.ranks.aggregations import AGGREGATIONS, combined
from tests.mpi.ranks.outcomes import outcome

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.rule

TYPES = [np.dtype(code) for code in "efdFDbBhiql"]
TYPES.append(np.dtype(ml_dtypes.bfloat16))
COUNTS = [5, 8, pytest.param(32, marks=pytest.mark.full)]
STEPS = 9


@pytest.fixture(params=[1, None], ids=["lonely", "one_worker"])
def each(request: pytest.FixtureRequest) -> Any:
    """Return the number of ranks that form a worker."""
    return request.param


def made(count: int, **options: Any) -> Any:
    return hs.MultiWorkerMirroredStrategy(logical_replicas=count, **options)


def alone(count: int) -> Any:
    """Return a strategy in which this process has all replicas."""
    from mpi4py import MPI

    return made(count, comm=MPI.COMM_SELF)


@pytest.mark.parametrize("count", [2, 5])
def test_context_variables_that_a_replica_sets_end_with_run(
    each: Any, job: Any, count: int
) -> None:
    strategy = made(max(count, job.size), replicas_per_worker=each)
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)

    def step() -> int:
        seen = variable.get()
        number = hs.get_replica_context().replica_id_in_sync_group
        variable.set(100 + number)
        hs.get_replica_context().all_reduce("sum", np.ones(2))
        return 1000 * seen + variable.get()

    for before in (5, 5, 7):
        variable.set(before)
        results = strategy.experimental_local_results(strategy.run(step))
        numbers = [1000 * before + 100 + n for n in strategy.replicas.block]
        assert [int(result) for result in results] == numbers
        assert variable.get() == before
    strategy.close()


def leaves_of(seed: int, count: int, dtype: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return an array for each replica; the sum of the arrays depends on the order."""
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal((count, *shape)) * 10.0 ** rng.integers(
        -3, 4, (count, *shape)
    )
    if dtype.kind == "c":
        wide = wide + 1j * wide[..., ::-1]
    if dtype.kind in "iub":
        wide = np.trunc(wide * 9) % 100
    return list(wide.astype(dtype))


def by_the_tree(leaves: list[Any], op: str) -> Any:
    """Return the sum or mean over the replicas in tree order, by its definition."""
    dtype, count = leaves[0].dtype, len(leaves)
    wire, narrows = wire_dtype(dtype, op == "mean")
    order = TreeOrder(count, 1)
    with np.errstate(all="ignore"):
        [total] = order.sum_roots(
            0, [leaf.astype(wide) for leaf in leaves for wide in [wire]]
        )
        total = np.asarray(total)
        if op == "mean":
            power = count & (count - 1) == 0 and wire.kind == "f"
            total = total * (1 / count) if power else total / count
            total = np.asarray(total).astype(wire)
        return total.astype(dtype) if narrows else total


@pytest.mark.algorithm
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_are_those_of_the_tree(each: Any, job: Any, count: int, op: str) -> None:
    with made(count, replicas_per_worker=each) as strategy:
        for number, dtype in enumerate(TYPES):
            shapes = [(), (0,), (7,), (3, 5), (9001,)]
            every = [leaves_of(number, count, dtype, s) for s in shapes if s]
            every.append(
                [leaf.reshape(()) for leaf in leaves_of(7, count, dtype, (1,))]
            )

            def values(every: Any = every) -> Any:
                replica = hs.get_replica_context().replica_id_in_sync_group
                return [leaves[replica] for leaves in every]

            def inside() -> Any:
                context = hs.get_replica_context()
                own = values()
                found = context.all_reduce(op, own)
                one = context.all_reduce(op, own[0])
                assert one.tobytes() == found[0].tobytes()
                return [found, own]

            found, given = strategy.run(inside)
            across = strategy.reduce(op, given, axis=None)
            for leaves, cross, within in zip(every, across, found, strict=True):
                wanted = by_the_tree(leaves, op)
                assert cross.dtype == wanted.dtype
                assert cross.tobytes() == wanted.tobytes(), (dtype, wanted.shape)
                for part in within.values:
                    assert part.tobytes() == wanted.tobytes(), (dtype, wanted.shape)


@pytest.mark.parametrize(
    "ops",
    [
        hs.MpiAllReduce(),
        hs.HierarchicalCopyAllReduce(),
        hs.ReductionToOneDevice(),
    ],
    ids=["mpi", "hierarchical", "one_device"],
)
def test_no_algorithm_changes_the_bits(each: Any, job: Any, ops: Any) -> None:
    leaves = leaves_of(1, 8, np.dtype(np.float32), (40_001,))
    wanted = by_the_tree(leaves, "sum")
    with made(8, replicas_per_worker=each, cross_device_ops=ops) as strategy:
        values = strategy.experimental_distribute_values_from_function(
            lambda context: leaves[context.replica_id_in_sync_group]
        )
        assert strategy.reduce("sum", values, axis=None).tobytes() == wanted.tobytes()
        options = hs.CommunicationOptions(bytes_per_pack=4096)
        found = strategy.run(
            lambda own: hs.get_replica_context().all_reduce("sum", own, options),
            args=(values,),
        )
        assert found.values[0].tobytes() == wanted.tobytes()


def training(strategy: Any) -> list[bytes]:
    """Train with all features of the library; return all state as bytes."""
    state = _parts(strategy)
    _train(strategy, state, 0, STEPS)
    return _bytes_of(state)


def _train(strategy: Any, state: dict[str, Any], step: int, stop: int) -> None:
    batches = iter(state["data"])
    while step < stop:
        batch = next(batches, None)
        if batch is None:
            batches = iter(state["data"])
            continue
        strategy.run(_step, args=(batch, state))
        step += 1


def _bytes_of(state: dict[str, Any]) -> list[bytes]:
    variables = [*state["net"], state["seen"]]
    for name in ("optimizer", "norm"):
        variables += state[name].checkpoint_variables().values()
    found = [variable.numpy() for variable in variables]
    found += [np.asarray(state["loss"].result()), state["noise"].state()["state"]]
    return [one.tobytes() for one in found]


def _parts(strategy: Any) -> dict[str, Any]:
    """Return the objects of a training: variables, optimizer, data and metrics."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((203, 6)).astype(np.float32)
    y = (x @ rng.standard_normal((6, 3))).astype(np.float32)
    with strategy.scope():
        parts: dict[str, Any] = {
            "net": [
                hs.Variable(np.full((6, 3), 0.1, np.float32), name="w"),
                hs.Variable(np.zeros(3, np.float32), name="b"),
            ],
            "optimizer": hs.optimizers.Adam(0.05, clip_global_norm=1.0),
            "loss": hs.metrics.Mean("loss"),
            "norm": hs.layers.SyncBatchNormalization(3),
            "seen": hs.Variable(
                np.float32(0), synchronization="on_read", aggregation="sum", name="seen"
            ),
        }
    parts["noise"] = strategy.random("noise", seed=5)
    parts["data"] = strategy.experimental_distribute_dataset(
        hs.Dataset((x, y), 48, shuffle=True, seed=1)
    )
    return parts


def _step(batch: Any, state: dict[str, Any]) -> None:
    rows, targets = batch
    weights, bias = state["net"]
    noise = state["noise"].generator.standard_normal(targets.shape).astype(np.float32)
    out = rows @ weights.value() + bias.value() + np.float32(0.01) * noise
    normal = state["norm"].forward(out, training=True)
    error = (normal - targets) / 48
    back, dgamma, dbeta = state["norm"].backward(error)
    norm = state["norm"]
    state["optimizer"].apply_gradients(
        [
            (rows.T @ back, weights),
            (back.sum(0), bias),
            (dgamma, norm.gamma),
            (dbeta, norm.beta),
        ]
    )
    state["loss"].update_state((error**2).sum(1))
    state["seen"].assign_add(np.float32(len(rows)) * np.float32(0.1))


@pytest.mark.algorithm
@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.full)])
def test_training_has_the_bits_of_one_process(each: Any, job: Any, count: int) -> None:
    with alone(count) as one:
        wanted = training(one)
    with made(count, replicas_per_worker=each) as strategy:
        assert training(strategy) == wanted


def test_training_without_the_kernel_has_the_same_bits(job: Any) -> None:
    with alone(4) as one:
        wanted = training(one)
    settings = hs.Settings(native=False)
    with made(4, comm=job.Dup(), settings=settings) as strategy:
        assert training(strategy) == wanted


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_resumed_elsewhere_it_has_the_bits_of_one_that_was_not(
    job: Any, folder: Path, seed: int
) -> None:
    from mpi4py import MPI

    with alone(4) as one:
        wanted = training(one)
    rng = np.random.default_rng(seed)
    stops = sorted({*rng.integers(1, STEPS, 3).tolist(), STEPS})
    begin, found = 0, None
    for stop in stops:
        # Each time, another number of the job's ranks continues, beginning with rank 0.
        size = int(rng.integers(1, job.size + 1))
        comm = job.Split(0 if job.rank < size else MPI.UNDEFINED, job.rank)
        if job.rank < size:
            with made(4, comm=comm) as strategy:
                state = _parts(strategy)
                manager = hs.CheckpointManager(folder / "steps", **state)
                if begin:
                    assert manager.restore() == begin
                _train(strategy, state, begin, stop)
                manager.save(stop)
                found = _bytes_of(state)
        begin = stop
        job.Barrier()
    assert job.bcast(found) == wanted


def test_components_come_back_as_they_were(job: Any, folder: Path) -> None:
    def variable(strategy: Any, how: str) -> Any:
        with strategy.scope():
            return hs.Variable(
                np.zeros(2, np.float32),
                synchronization="on_read",
                aggregation=how,
                name=how,
            )

    def part(replica: int) -> Any:
        return np.array([replica, -0.1 * replica], np.float32)

    hows, parts = AGGREGATIONS, list(map(part, range(5)))
    with made(5) as strategy:
        own = {how: variable(strategy, how) for how in hows}

        def fill() -> None:
            replica = hs.get_replica_context().replica_id_in_sync_group
            for how in hows:
                own[how].assign(part(replica))

        strategy.run(fill)
        hs.CheckpointManager(folder / "c", **own).save(1)
        wanted = {how: own[how].numpy() for how in hows if how != "none"}
        for how, value in wanted.items():
            np.testing.assert_allclose(value, combined(how, parts), rtol=1e-6)
    with alone(5) as one:
        back = {how: variable(one, how) for how in hows}
        hs.CheckpointManager(folder / "c", **back).restore()
        for how in hows:
            for replica, found in enumerate(back[how].values):
                assert found.tolist() == part(replica).tolist()
    # The combined value is the same on 3 replicas, and without replicas.
    with alone(3) as other:
        back = {how: variable(other, how) for how in hows}
        manager = hs.CheckpointManager(folder / "c", **back)
        manager.restore(per_replica="cycle")
        for how, value in wanted.items():
            assert np.allclose(back[how].numpy(), value, rtol=1e-6)
    plain = hs.Variable(np.zeros(2, np.float32), name="sum")
    manager = hs.CheckpointManager(folder / "c", sum=plain, independent=True)
    manager.restore(expect_partial=True)
    assert plain.numpy().tobytes() == wanted["sum"].tobytes()


def test_other_threads_than_those_of_the_checkpoint_are_told(
    job: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for threads in (1, 2):
        settings = hs.Settings(math_threads=threads)
        with made(4, comm=job.Dup(), settings=settings) as strategy:
            with strategy.scope():
                weights = hs.Variable(np.zeros(2), name="w")
            manager = hs.CheckpointManager(folder / "t", w=weights)
            if threads == 1:
                manager.save(1)
                continue
            logger = logging.getLogger("hpcstrat.checkpoint")
            logger.addHandler(caplog.handler)
            try:
                manager.restore()
            finally:
                logger.removeHandler(caplog.handler)
    told = "HPCSTRAT_MATH_THREADS=1" in caplog.text
    assert told == (job.rank == 0)


def test_fewer_replicas_than_ranks_are_refused(job: Any) -> None:
    if job.size > 1:
        error = outcome(made, job.size - 1)
        assert isinstance(error, ValueError), repr(error)
        assert f"logical_replicas >= {job.size}" in str(error)
    for wrong in (0, -1, 2.5, True, "4"):
        assert isinstance(outcome(made, wrong), ValueError)
    with made(job.size) as strategy:
        assert strategy.num_replicas_in_sync == job.size


def test_ranks_with_other_numbers_of_replicas_are_told(job: Any) -> None:
    if job.size < 2:
        pytest.skip("one rank agrees with itself")
    error = outcome(made, 8 + (job.rank == 1), comm=job.Dup())
    assert isinstance(error, hs.CollectiveError), repr(error)


def test_replicas_that_call_otherwise_are_named(job: Any) -> None:
    with made(2 * job.size, on_error="raise") as strategy:

        def step() -> Any:
            context = hs.get_replica_context()
            if context.replica_id_in_sync_group == 1:
                return context.all_reduce("mean", np.float32(1))
            return context.all_reduce("sum", np.float32(1))

        error = outcome(strategy.run, step)
        assert isinstance(error, hs.CollectiveError), repr(error)
        if job.rank == 0:
            assert "replica 1 all_reduce(MEAN)" in str(error)

        def ends_early() -> Any:
            context = hs.get_replica_context()
            if context.replica_id_in_sync_group:
                context.all_reduce("sum", np.float32(1))

        error = outcome(strategy.run, ends_early)
        assert isinstance(error, hs.CollectiveError), repr(error)
        total = strategy.run(
            lambda: hs.get_replica_context().all_reduce("sum", np.float32(1))
        )
        assert total.values[0] == 2 * job.size


def test_an_error_of_a_replica_is_the_error_of_the_run(job: Any) -> None:
    with made(2 * job.size, on_error="raise") as strategy:
        for meets in (False, True):

            def step(meets: bool = meets) -> Any:
                context = hs.get_replica_context()
                if context.replica_id_in_sync_group == 1:
                    raise KeyError("replica 1")
                if meets:
                    context.all_reduce("sum", np.float32(1))

            error = outcome(strategy.run, step)
            kind = KeyError if job.rank == 0 else hs.ReplicaError
            assert isinstance(error, kind), repr(error)
        strategy.barrier()


def test_what_would_depend_on_the_ranks_is_refused(job: Any) -> None:
    half = hs.CommunicationOptions(wire_dtype="float16")
    own = hs.ReductionToOneDevice(accumulation_fn=sum)
    assert isinstance(outcome(made, 8, communication_options=half), ValueError)
    assert isinstance(outcome(made, 8, cross_device_ops=own), ValueError)
    for count in (job.size, 2 * job.size):
        with made(count, on_error="raise") as strategy:

            def rounded() -> None:
                hs.get_replica_context().all_reduce("sum", np.ones(3), half)

            assert isinstance(outcome(strategy.run, rounded), ValueError)
            error = outcome(strategy.run, hs.Variable, (1.0,))
            assert isinstance(error, RuntimeError), repr(error)
            assert "outside of strategy.run" in str(error)
            optimizer = None
            with strategy.scope():
                weights = hs.Variable(1.0)
                optimizer = hs.optimizers.SGD(0.1, accumulate_steps=2)
            error = outcome(
                strategy.run, optimizer.apply_gradients, ([(1.0, weights)],)
            )
            assert isinstance(error, ValueError), repr(error)
            assert "accumulate_steps" in str(error)


def test_values_and_variables_have_a_part_for_each_replica(job: Any) -> None:
    count = 2 * job.size + 1
    with made(count) as strategy, strategy.scope():
        mine = strategy.local_replicas
        per = strategy.run(lambda: hs.get_replica_context().replica_id_in_sync_group)
        assert list(per.values) == list(mine)
        assert strategy.experimental_local_results(per) == tuple(mine)
        mirrored = hs.Variable(1.0)
        assert len(mirrored.values) == len(mine)
        gathered = strategy.gather(
            strategy.run(
                lambda: np.full(
                    hs.get_replica_context().replica_id_in_sync_group % 3, 1.0
                )
            ),
            axis=0,
        )
        assert len(gathered) == sum(replica % 3 for replica in range(count))
        if len(mine) > 1:
            with pytest.raises(ValueError, match="experimental_local_results"):
                strategy.local_value(per)


def test_devices_of_one_process_are_replicas(job: Any) -> None:
    from mpi4py import MPI

    names = ["CPU:0", "CPU:1", "CPU:2"]
    with hs.MirroredStrategy(names, comm=MPI.COMM_SELF) as strategy:
        assert strategy.num_replicas_in_sync == 3
        assert strategy.devices == tuple(names)
        found = strategy.run(lambda: hs.get_replica_context().devices[0])
        assert found.values == tuple(names)


def test_updates_of_mirrored_variables_act_once(job: Any) -> None:
    with made(2 * job.size) as strategy:
        with strategy.scope():
            total = hs.Variable(np.float32(1), aggregation="sum")
            first = hs.Variable(np.float32(1), aggregation="only_first_replica")
            rows = hs.Variable(np.zeros((4, 2), np.float32), aggregation="sum")

        def step() -> Any:
            replica = hs.get_replica_context().replica_id_in_sync_group
            total.assign_add(np.float32(replica))
            first.assign_add(np.float32(replica + 5))
            part = hs.IndexedSlices(np.ones((1, 2), np.float32), [replica % 4], (4, 2))
            rows.scatter_add(part)
            return total.value() + 0

        seen = strategy.run(step)
        count = strategy.num_replicas_in_sync
        assert total.numpy() == 1 + count * (count - 1) / 2
        assert all(part == total.numpy() for part in seen.values)
        assert first.numpy() == 6
        assert rows.numpy().sum() == 2 * count
