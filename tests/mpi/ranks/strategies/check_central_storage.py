"""Central storage: one copy per worker, with the same values as mirrored variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import optimizers
from tests.mpi.ranks.aggregations import AGGREGATIONS, combined, signs
from tests.mpi.ranks.outcomes import assert_told, assert_usable, outcome

pytestmark = pytest.mark.rule

# Shapes smaller than a cache line, without elements, uneven, and of several blocks.
SHAPES = [(3,), (), (0, 2), (33, 7), (5, 14009)]
RULES: dict[str, Any] = {
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: optimizers.Adam(0.1, clip_global_norm=5.0),
    "adagrad": lambda: optimizers.Adagrad(0.1, aggregation="mean"),
    "lamb": lambda: optimizers.LAMB(0.1),
}


def make_central(layout: Any, **options: Any) -> Any:
    each = layout.replicas_per_worker
    return hs.CentralStorageStrategy(replicas_per_worker=each, **options)


@pytest.fixture
def central(topology_layout: Any, kept_strategies: dict[str, Any]) -> Any:
    name = f"central {topology_layout.name}"
    if name not in kept_strategies:
        kept_strategies[name] = make_central(topology_layout)
    return kept_strategies[name]


def _variables(strategy: Any, dtype: Any, shapes: Any = SHAPES) -> list[Any]:
    numbers = np.random.default_rng(5)
    with strategy.scope():
        return [
            hs.Variable(numbers.normal(size=shape).astype(dtype), name=f"v{index}")
            for index, shape in enumerate(shapes)
        ]


def _gradients(rank: int, step: int, variables: list[Any], sparse: bool) -> list[Any]:
    numbers = np.random.default_rng((rank, step))
    found: list[Any] = [numbers.normal(size=v.shape).astype(v.dtype) for v in variables]
    if sparse:
        # Some rows occur twice, also on several replicas.
        index = max(n for n, v in enumerate(variables) if v.ndim and v.size)
        count = len(found[index])
        rows, picked = numbers.integers(0, count, (2, 5))
        shape = variables[index].shape
        found[index] = hs.IndexedSlices(found[index][picked], rows, shape)
    return found


def _train(strategy: Any, optimizer: Any, variables: list[Any], *steps: Any) -> None:
    for step, sparse in steps:
        own = _gradients(strategy.replica_id, step, variables, sparse)
        pairs = list(zip(own, variables, strict=True))
        strategy.run(optimizer.apply_gradients, args=(pairs,))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        pytest.param("momentum", ("f2", "f8"), marks=pytest.mark.algorithm),
        pytest.param("adam", ("f4", "f8 rows"), marks=pytest.mark.algorithm),
        ("adagrad", ("f8", "f4 rows")),
        ("lamb", ("f8 rows", "f4")),
    ],
)
def test_steps_are_those_of_mirrored_variables(
    strategy: Any, central: Any, name: str, kinds: tuple[str, ...]
) -> None:
    one_worker = strategy.topology.num_workers == 1
    numbers = np.random.default_rng(sum(name.encode()))
    some = [tuple(numbers.integers(1, 99, n)) for n in numbers.integers(0, 4, 7)]
    for kind, shapes in zip(kinds, (SHAPES, some), strict=True):
        dtype, sparse = kind[:2], "rows" in kind
        found = []
        for each in (strategy, central):
            variables = _variables(each, dtype, shapes)
            with each.scope():
                optimizer = RULES[name]()
            _train(each, optimizer, variables, *((n, sparse) for n in range(3)))
            slots = optimizer.checkpoint_variables()
            found.append([*(v.numpy() for v in (*variables, *slots.values()))])
            assert int(optimizer.iterations) == 3
        for mirrored, own in zip(*found, strict=True):
            assert own.dtype == mirrored.dtype
            # For other rules the bits may differ: they sum a norm by slices, and
            # workers' sums are added in another order.
            if one_worker and name in ("momentum", "adagrad"):
                assert own.tobytes() == mirrored.tobytes()
            else:
                tolerance = {"f8": 1e-12, "f4": 1e-4, "f2": 0.05}[dtype]
                np.testing.assert_allclose(own, mirrored, tolerance, tolerance)


def test_values_of_variables_may_be_gradients_of_others(central: Any, job: Any) -> None:
    one, two = np.arange(400_000) % 7 / 4.0, np.ones(400_000)
    with central.scope():
        first, second = hs.Variable(one, name="first"), hs.Variable(two, name="second")
        optimizer = hs.optimizers.SGD(1 / 4)

    def step() -> None:
        pairs = [(second.value(), first), (first.value(), second)]
        optimizer.apply_gradients(pairs)

    for _ in range(4):
        central.run(step)
        one, two = one - job.size * two / 4, two - job.size * one / 4
        np.testing.assert_array_equal(first.numpy(), one)
        np.testing.assert_array_equal(second.numpy(), two)


def test_gradients_that_were_combined_are_refused(central: Any, job: Any) -> None:
    if job.size == 1:
        pytest.skip("there are no slices")
    with central.scope():
        value = hs.Variable(np.ones(3), name="value")
        optimizer = hs.optimizers.SGD(1.0)
    with pytest.raises(NotImplementedError, match="apply_gradients"):
        central.run(lambda: optimizer.apply_combined([(np.ones(3), value)]))


def test_memory_is_once_in_a_worker(central: Any, job: Any) -> None:
    with central.scope():
        variable = hs.Variable(lambda: np.full((5, 3), job.rank), name="v")
        optimizer = optimizers.Adam()
    assert isinstance(variable, hs.CentralVariable)
    np.testing.assert_array_equal(variable, np.zeros((5, 3)))
    with pytest.raises(ValueError, match="read-only"):
        variable.value()[0] = 1
    job.Barrier()
    position = central.topology.worker_comm.rank
    if position == 0:
        variable.component[...] = 7
    job.Barrier()
    np.testing.assert_array_equal(variable, np.full((5, 3), 7))
    job.Barrier()
    with central.scope():
        weights = hs.Variable(np.zeros(4), name="w")
    central.run(optimizer.apply_gradients, args=([(np.ones(4), weights)],))
    slots = optimizer.checkpoint_variables()
    kinds = {name: type(slot) for name, slot in slots.items()}
    assert kinds.pop("iterations") is hs.MirroredVariable
    assert set(kinds.values()) == {hs.CentralVariable}


def test_updates_in_replica_context_are_aggregated(central: Any, job: Any) -> None:
    count = job.size
    parts = [(np.arange(6.0) + rank) * signs(6) for rank in range(count)]
    own = parts[job.rank]
    for aggregation in AGGREGATIONS[1:]:
        expected = combined(aggregation, parts)
        for synchronization in ("auto", "on_read"):
            with central.scope():
                variable = hs.Variable(
                    np.zeros(6),
                    name="v",
                    aggregation=aggregation,
                    synchronization=synchronization,
                )
            for times in range(1, 4):
                # Every rank sees each whole update, and nothing of the next update.
                new = central.run(lambda v=variable: v.assign_add(own))
                np.testing.assert_allclose(central.local_value(new), times * expected)
                np.testing.assert_allclose(variable.value(), times * expected)
            central.run(lambda v=variable: v.assign(own))
            np.testing.assert_allclose(variable, expected)
    with central.scope():
        variable = hs.Variable(np.zeros(6), synchronization="on_read")
    if count > 1:
        error = outcome(central.run, lambda: variable.assign(own))
        assert isinstance(error, ValueError)
        assert "aggregation" in str(error)
        assert "overwrite" in str(error)
        assert_usable(central, job)


def test_updates_in_cross_replica_context_are_made_once(central: Any) -> None:
    with central.scope():
        variable = hs.Variable(np.arange(5.0), name="v", aggregation="sum")
        variable.assign_add(np.ones(5))
        variable.assign(variable.value()[::-1])
        np.testing.assert_array_equal(variable, [5, 4, 3, 2, 1])
        central.extended.update(variable, lambda v, x: v.assign_sub(x), (np.ones(5),))
    np.testing.assert_array_equal(variable, [4, 3, 2, 1, 0])
    with central.scope():
        table = hs.Variable(np.zeros((5, 2)), name="t", aggregation="sum")
    rows = hs.IndexedSlices(np.ones((3, 2)), [4, 0, 4])
    table.scatter_add(rows)
    assert table.numpy()[:, 0].tolist() == [1, 0, 0, 0, 2]
    central.run(lambda: table.scatter_add(rows))
    count = central.num_replicas_in_sync
    assert table.numpy()[:, 1].tolist() == [1 + count, 0, 0, 0, 2 + 2 * count]


def test_checkpoints_go_between_strategies(
    central: Any, strategies: dict[int, Any], job: Any, folder: Path
) -> None:
    steps = [(step, False) for step in range(3)]

    def trained(strategy: Any, *, restores: Path | None, saves: Path | None) -> Any:
        variables = _variables(strategy, "f8")
        with strategy.scope():
            optimizer = optimizers.Adam(0.1)
            manager = hs.CheckpointManager(
                restores or saves, model=variables, optimizer=optimizer
            )
        if restores:
            assert manager.restore() == 3
        else:
            _train(strategy, optimizer, variables, *steps)
        if saves:
            manager.save(3)
        state = optimizer.checkpoint_variables()
        values = [v.numpy() for v in (*variables, *state.values())]
        _train(strategy, optimizer, variables, (9, False))
        manager.close()
        return values, [variable.numpy() for variable in variables]

    saved, after = trained(central, restores=None, saves=folder / "central")
    for count, strategy in sorted(strategies.items()):
        found, then = trained(strategy, restores=folder / "central", saves=None)
        for one, other in zip(saved, found, strict=True):
            np.testing.assert_array_equal(one, other)
        if count == job.size:
            for one, other in zip(after, then, strict=True):
                np.testing.assert_allclose(one, other, 1e-12, 1e-12)
    job.Barrier()
    alone = strategies.get(1)
    saved = None
    if alone is not None:
        saved, _ = trained(alone, restores=None, saves=folder / "alone")
    saved = job.bcast(saved)
    found, _ = trained(central, restores=folder / "alone", saves=None)
    for one, other in zip(saved, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_accumulation_and_metrics_stay_with_each_replica(
    central: Any, job: Any
) -> None:
    with central.scope():
        variable = hs.Variable(np.zeros(5), name="v")
        optimizer = optimizers.SGD(1.0, accumulate_steps=3)
        seen = hs.metrics.Sum()
    for call in range(6):
        pairs = [(np.full(5, 1.0 + job.rank), variable)]
        updated = central.run(optimizer.apply_gradients, args=(pairs,))
        assert central.local_value(updated) == (call % 3 == 2)
        central.run(seen.update_state, args=(1.0 + job.rank,))
    total = 6.0 * job.size * (job.size + 1) / 2
    np.testing.assert_array_equal(variable, np.full(5, -total))
    assert seen.result() == total


class _Failing(optimizers.SGD):
    """An update rule that fails if its ``fails`` is set."""

    fails = False

    def update(self, step: Any, gradient: Any, value: Any, *slots: Any) -> None:
        if self.fails:
            raise ZeroDivisionError("here")
        super().update(step, gradient, value, *slots)


def test_an_error_of_one_rank_is_one_of_all(central: Any, job: Any) -> None:
    faulty = job.rank == job.size - 1
    with central.scope():
        variable = hs.Variable(np.zeros(64), name="v", aggregation="sum")
        # Make a variable for each rank: a rule that may not act by elements updates
        # whole variables, so each rank must have one.
        others = [hs.Variable(np.zeros(9), name=f"o{n}") for n in range(job.size)]
        optimizer = _Failing(1.0)
    optimizer.fails = faulty
    wrong = np.zeros(3) if faulty else np.zeros(64)
    pairs = [(np.ones(9), other) for other in others]
    attempts: list[Any] = [
        (ValueError, lambda: variable.assign(wrong)),
        (ValueError, lambda: central.run(lambda: variable.assign_add(wrong))),
        (ZeroDivisionError, lambda: central.run(optimizer.apply_gradients, (pairs,))),
        (ValueError, lambda: _made(central, hs.PerReplica(1) if faulty else 1.0)),
    ]
    for kind, attempt in attempts:
        if kind is ZeroDivisionError and central.topology.num_workers > 1:
            # The last rank may have no slice, and then nothing fails.
            optimizer.fails = True
            assert isinstance(outcome(attempt), (ZeroDivisionError, hs.ReplicaError))
        else:
            assert_told(outcome(attempt), kind, faulty)
        assert_usable(central, job)
    np.testing.assert_array_equal(variable, np.zeros(64))


def _made(strategy: Any, value: Any) -> Any:
    with strategy.scope():
        return hs.Variable(value, name="w")


def test_steps_that_are_not_finite_are_left_out_by_all(
    topology_layout: Any, job: Any
) -> None:
    settings = hs.Settings(non_finite="skip")
    with make_central(topology_layout, comm=job, settings=settings) as central:
        with central.scope():
            variable = hs.Variable(np.zeros(400), name="v")
            optimizer = optimizers.SGD(1.0)
        for bad in (False, True, False):
            gradient = np.ones(400)
            if bad and job.rank == 0:
                gradient[7] = np.nan
            pairs = [(gradient, variable)]
            updated = central.run(optimizer.apply_gradients, args=(pairs,))
            assert central.local_value(updated) is not bad
        np.testing.assert_array_equal(variable, np.full(400, -2.0 * job.size))
        assert optimizer.skipped_steps == 1
        assert int(optimizer.iterations) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compute_devices": ["GPU:0"]}, "use MirroredStrategy for GPUs"),
        ({"parameter_device": "GPU:0"}, "expected parameter_device 'CPU:0'"),
        ({"compute_devices": ["CPU:0"] * 9}, "different devices, one for each rank"),
    ],
)
def test_what_cannot_be_is_refused(job: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hs.CentralStorageStrategy(comm=job, **options)


def test_memory_of_others_is_not_adopted(central: Any, job: Any) -> None:
    with central.scope(), pytest.raises(ValueError, match="found memory to adopt"):
        hs.Variable.adopt(np.zeros(3), name="v")
    assert_usable(central, job)


def test_copies_of_several_workers_are_compared(central: Any, job: Any) -> None:
    with central.scope():
        variable = hs.Variable(np.zeros(50), name="v")
    topology = central.topology
    job.Barrier()
    if topology.worker_id == 1 and topology.worker_comm.rank == 0:
        variable.component[7] = 1
    job.Barrier()
    error = outcome(central.check_divergence)
    if topology.num_workers == 1:
        assert error is None
    else:
        assert isinstance(error, hs.DivergenceError)
        assert "'v'" in str(error)
    with central.scope():
        variable.assign(np.zeros(50))
    central.check_divergence()
