"""Replicas of several ranks compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.strategies import connection
from tests.mpi.ranks.outcomes import assert_same_bits, outcome

pytestmark = pytest.mark.rule

NX, NY, STEPS = 11, 3, 20
RULES: list[Callable[[], Any]] = [
    lambda: hs.optimizers.SGD(0.004, momentum=0.5),
    lambda: hs.optimizers.SGD(0.004, clip_global_norm=0.4),
    lambda: hs.optimizers.Adam(0.01),
]


@pytest.fixture(scope="module")
def strategies(job: Any) -> Iterator[dict[int, Any]]:
    """Yield strategies by the number of ranks of their replicas."""
    counts = [count for count in range(1, job.size + 1) if job.size % count == 0]
    with ExitStack() as stack:
        yield {
            count: stack.enter_context(
                hs.MultiWorkerMirroredStrategy(ranks_per_replica=count)
            )
            for count in counts
        }


@pytest.fixture
def divided(strategies: dict[int, Any]) -> Any:
    """Return the strategy with all ranks in one replica."""
    return strategies[max(strategies)]


class Whole:
    """Stands for `Inside` in one process, with NumPy on whole fields."""

    def sum(self, value: Any) -> Any:
        return value

    def halo(self, field: Any, axis: int, width: int) -> Any:
        assert axis == 0
        return np.pad(field, ((width, width), (0, 0)))

    def halo_adjoint(self, field: Any, axis: int, width: int) -> Any:
        assert axis == 0
        return field[width:-width]


def gradients(inside: Any, field: Any, theta: Any, target: Any) -> tuple[Any, ...]:
    """Return the loss of a smoothed field, and its gradients."""
    padded = inside.halo(field, 0, 1)
    curved = padded[2:] - 2 * field + padded[:-2]
    error = field + theta * curved - target
    loss = inside.sum(np.float64((error**2).sum())) / target[0].size
    d_error = 2 * error / target[0].size
    d_curved = theta * d_error
    d_padded = np.zeros_like(padded)
    d_padded[2:] += d_curved
    d_padded[:-2] += d_curved
    d_field = d_error - 2 * d_curved + inside.halo_adjoint(d_padded, 0, 1)
    d_theta = inside.sum((d_error * curved).sum(0))
    return loss, d_field, d_theta


def start(replicas: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(3)
    targets = rng.standard_normal((replicas, NX, NY))
    return rng.standard_normal((NX, NY)), rng.random(NY) / 4, targets


def reference(rule: Callable[[], Any], replicas: int) -> tuple[Any, ...]:
    """Return losses, field and parameters of one process that has all replicas."""
    field, theta, targets = start(replicas)
    losses = []
    with hs.OneDeviceStrategy("CPU:0").scope() as strategy:
        variables = [hs.Variable(field, name="f"), hs.Variable(theta, name="t")]
        optimizer = rule()

        def step() -> float:
            found = [
                gradients(Whole(), variables[0].value(), variables[1].value(), target)
                for target in targets
            ]
            sums = [sum(parts[1:], parts[0]) for parts in zip(*found, strict=True)]
            optimizer.apply_gradients(zip(sums[1:], variables, strict=True))
            return float(sums[0])

        losses = [strategy.run(step) for _ in range(STEPS)]
        return losses, variables[0].numpy(), variables[1].numpy()


def train(strategy: Any, rule: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the same results of a strategy's ranks, and the optimizer."""
    inside, count = strategy.inside, strategy.num_replicas_in_sync
    field, theta, targets = start(count)
    rows = inside.part(NX)
    with strategy.scope():
        variables = [
            hs.Variable(field[rows], name="f", split=0),
            hs.Variable(theta, name="t"),
        ]
        optimizer = rule()

    def step() -> Any:
        replica = hs.get_replica_context().replica_id_in_sync_group
        target = targets[replica][rows]
        loss, *found = gradients(
            inside, variables[0].value(), variables[1].value(), target
        )
        optimizer.apply_gradients(zip(found, variables, strict=True))
        return loss

    losses = [
        float(strategy.reduce("sum", strategy.run(step), axis=None))
        for _ in range(STEPS)
    ]
    strategy.check_divergence()
    return losses, variables[0].numpy(), variables[1].numpy(), variables[0]


@pytest.mark.parametrize("rule", RULES, ids=["momentum", "clipped", "adam"])
def test_steps_are_those_of_one_process(
    job: Any, strategies: dict[int, Any], rule: Callable[[], Any]
) -> None:
    for count, strategy in strategies.items():
        assert strategy.num_replicas_in_sync == job.size // count
        assert strategy.replica_id == job.rank // count
        assert strategy.inside.position == job.rank % count
        *found, divided = train(strategy, rule)
        expected = reference(rule, job.size // count)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
        assert_same_bits(job, *found)
        if count > 1:
            assert divided.whole_shape == (NX, NY)
            assert divided.shape == (
                len(range(*strategy.inside.part(NX).indices(NX))),
                NY,
            )


def test_logical_replicas_have_the_same_bits_on_any_number_of_replicas(
    job: Any,
) -> None:
    """With one number of ranks per replica, as sums inside of a replica have."""
    for count in (1, 2):
        bits = []
        for ranks in range(count, min(job.size, 4 * count) + 1, count):
            part = job.Split(int(job.rank < ranks), job.rank)
            if job.rank < ranks:
                with hs.MultiWorkerMirroredStrategy(
                    comm=part, ranks_per_replica=count, logical_replicas=4
                ) as strategy:
                    *found, _ = train(strategy, RULES[0])
                    bits.append(b"".join(np.asarray(a).tobytes() for a in found))
            part.Free()
        assert len(set(bits)) <= 1


@pytest.mark.parametrize("rule", RULES, ids=["momentum", "clipped", "adam"])
def test_layers_on_positions_are_trained_as_in_one_process(
    strategies: dict[int, Any], rule: Callable[[], Any]
) -> None:
    rng = np.random.default_rng(4)
    starts = [rng.standard_normal((3, 3)) for _ in range(3)]
    targets = rng.standard_normal((12, 3))
    with hs.get_strategy().scope():
        plain = [hs.Variable(start, name=str(i)) for i, start in enumerate(starts)]
        optimizer = rule()
    for step in range(STEPS):
        rows = targets[step % 4 :: 4]
        parts = [2 * (v.value() - rows.mean(0)) for v in plain]
        optimizer.apply_gradients(list(zip(parts, plain, strict=True)))
    for count, strategy in strategies.items():
        inside, replicas = strategy.inside, strategy.num_replicas_in_sync
        if 3 % replicas:
            continue
        places = [i % count for i in range(3)]
        with strategy.scope():
            variables = [
                hs.Variable(start.copy, name=str(i), on=place)
                for (i, start), place in zip(enumerate(starts), places, strict=True)
            ]
            optimizer = rule()
        for step in range(STEPS):
            rows = targets[step % 4 :: 4][strategy.replica_id :: replicas]
            parts = [2 * (v.value() - rows.mean(0)) / replicas for v in variables]
            pairs = list(zip(parts, variables, strict=True))
            strategy.run(optimizer.apply_gradients, args=(pairs,))
        for place, variable, expected in zip(places, variables, plain, strict=True):
            mine = inside.position == place
            assert variable.shape == (3 if mine else 0, 3)
            np.testing.assert_allclose(
                variable.numpy(), expected.numpy(), rtol=1e-12, atol=1e-12
            )
        # Each rank keeps the state of its own layers only.
        for variable in optimizer.checkpoint_variables().values():
            if len(variable.shape) == 2:
                place = places[int(variable.name.rsplit("/")[-1])]
                assert len(variable.value()) == (3 if inside.position == place else 0)
        strategy.check_divergence()


def test_wrong_positions_of_variables_are_errors_on_all_ranks(
    divided: Any, strategies: dict[int, Any]
) -> None:
    size = divided.inside.size
    one = np.zeros(3)
    cases = [
        ({"on": 0, "split": 0}, one, "found both", ValueError),
        ({"on": "x"}, one, "found 'x'", TypeError),
        ({"on": 0, "synchronization": "on_read"}, one, "ON_READ", ValueError),
    ]
    if size > 1:
        cases += [
            ({"on": size}, one, f"found {size}", ValueError),
            ({"on": -1}, one, "found -1", ValueError),
            ({"on": 0}, 0.0, "shape (1,)", ValueError),
        ]
    with divided.scope():
        for words, value, found, kind in cases:
            error = outcome(hs.Variable, value, **words)
            assert isinstance(error, kind), (words, error)
            assert found in str(error), error
    # Without replicas of several ranks, the only rank has all positions.
    with strategies[1].scope():
        assert hs.Variable(one, on=5).shape == (3,)


def test_a_forgotten_sum_inside_is_an_error_on_all_ranks(divided: Any) -> None:
    if divided.inside.size == 1:
        return
    own = np.float64(divided.inside.position)

    def all_reduce() -> Any:
        return hs.get_replica_context().all_reduce("sum", own)

    with divided.scope():
        theta = hs.Variable(np.zeros(3), name="theta", aggregation="sum")
        optimizer = hs.optimizers.SGD(0.1)
    calls = {
        "all_reduce": lambda: divided.run(all_reduce),
        "reduce": lambda: divided.reduce("sum", own, axis=None),
        "gather": lambda: divided.gather(np.full(2, own), 0),
        "'theta'": lambda: divided.run(theta.assign_add, args=(np.full(3, own),)),
        "the gradient of 'theta'": lambda: divided.run(
            lambda: optimizer.apply_gradients([(np.full(3, own), theta)])
        ),
    }
    for name, call in calls.items():
        error = outcome(call)
        assert isinstance(error, hs.CollectiveError), (name, error)
        assert name in str(error), error
        assert "strategy.inside.sum" in str(error)
    assert theta.numpy().tolist() == [0, 0, 0]
    # Values that stay divided are reduced position by position.
    with divided.inside.divided():
        assert divided.reduce("sum", own, axis=None) == own
    assert divided.reduce("sum", divided.inside.sum(own), axis=None) >= 0


def test_a_call_inside_that_one_rank_leaves_out_is_an_error(job: Any) -> None:
    """Ranks find it in the next step, though their calls inside look equal."""
    if job.size == 1:
        return
    count = 2 if job.size == 4 else job.size
    comm = job.Dup()
    with hs.MultiWorkerMirroredStrategy(comm=comm, ranks_per_replica=count) as strategy:

        def step(number: int) -> Any:
            value = np.float64(number)
            if (number, job.rank) != (1, job.size - 1):
                value = strategy.inside.sum(value)
            return value

        errors = (outcome(strategy.run, step, args=(number,)) for number in range(3))
        found = next((error for error in errors if error is not None), None)
        if strategy.replica_id == job.size // count - 1:
            # The error names ranks of the job, not positions of the replica.
            assert isinstance(found, hs.CollectiveError), found
            assert f"rank {job.size - 1}: 3 calls of run" in str(found), found
        else:
            assert found is None
    comm.Free()


def test_a_broadcast_sends_the_values_of_the_first_rank_of_a_replica(
    job: Any, strategies: dict[int, Any]
) -> None:
    for strategy in strategies.values():
        root = strategy.num_replicas_in_sync - 1
        sent = strategy.broadcast_object({"rank": job.rank}, root)
        assert sent == {"rank": root * strategy.inside.size}
        strategy.barrier()


def test_logical_devices_of_tf_distribute(job: Any, strategies: dict[int, Any]) -> None:
    whole = np.arange(7 * 5).reshape(7, 5)
    for count, strategy in strategies.items():
        inside = strategy.inside
        counts = [2, 2] if count == 4 else [1, count]
        block = strategy.experimental_split_to_logical_devices(whole, counts)
        row, column = divmod(inside.position, counts[1])
        rows = slice(row * 7 // counts[0], (row + 1) * 7 // counts[0])
        columns = slice(column * 5 // counts[1], (column + 1) * 5 // counts[1])
        np.testing.assert_array_equal(block, whole[rows, columns])
        first = strategy.experimental_replicate_to_logical_devices(np.float64(job.rank))
        assert first == job.rank - inside.position
        kept = strategy.experimental_assign_to_logical_device(whole, count - 1)
        assert (kept is whole) == (inside.position == count - 1)
        with pytest.raises(ValueError, match="logical_device_id"):
            strategy.experimental_assign_to_logical_device(whole, count)
        if count > 1:
            with pytest.raises(ValueError, match="dimensions"):
                strategy.experimental_split_to_logical_devices(whole, [count])
            with pytest.raises(ValueError, match="blocks"):
                strategy.experimental_split_to_logical_devices(whole, [1, count + 1])


def test_a_barrier_waits_for_all_ranks(
    job: Any, strategies: dict[int, Any], folder: Any
) -> None:
    """The last rank writes a file when all others are about to wait for it."""
    for count, strategy in strategies.items():
        written, last = folder / f"written_{count}", job.size - 1
        if job.rank < last:
            job.send(None, dest=last, tag=count)
        else:
            for rank in range(last):
                job.recv(source=rank, tag=count)
            np.linalg.svd(np.ones((300, 300)))
            written.touch()
        strategy.barrier()
        assert written.exists()


def test_values_that_must_be_equal_are_compared_inside(divided: Any) -> None:
    if divided.inside.size == 1:
        return
    divided.check_equal({"a": np.ones(2)})
    error = outcome(divided.check_equal, {"a": np.full(2, divided.inside.position)})
    assert isinstance(error, hs.CollectiveError), error
    error = outcome(
        divided.reduce, "sum", object() if divided.inside.position else 1.0, axis=None
    )
    assert isinstance(error, (TypeError, ValueError, hs.ReplicaError)), error


def test_mirrored_variables_start_with_the_value_of_rank_0(
    job: Any, strategies: dict[int, Any]
) -> None:
    for strategy in strategies.values():
        with strategy.scope():
            variable = hs.Variable(np.full(3, float(job.rank)), name="v")
        assert variable.numpy().tolist() == [0, 0, 0]
        on_read = hs.get_strategy()
        assert on_read is not strategy


def test_copies_of_a_replica_that_differ_are_found(divided: Any) -> None:
    if divided.inside.size == 1:
        return
    with divided.scope():
        variable = hs.Variable(np.zeros(64), name="drifting")
    divided.check_divergence()
    if divided.inside.position == 1:
        variable.component[5] = 1e-9
    error = outcome(divided.check_divergence)
    assert isinstance(error, hs.DivergenceError), error
    if divided.replica_id == 0:
        assert "copies of variable 'drifting' on all ranks of replica 0" in str(error)
        assert "from rank 0 on ranks [1], first in element (5,)" in str(error)
        assert error.ranks == (1,)
    variable.component[5] = 0.0
    divided.check_divergence()


def test_parts_of_axes_of_a_replica(job: Any) -> None:
    shapes = {1: {"x": 1}, 2: {"x": 1, "y": 2}, 3: {"y": 3}, 4: {"x": 2, "y": 2}}
    shapes |= {8: {"x": 2, "y": 4}, 9: {"x": 3, "y": 3}, 16: {"x": 4, "y": 4}}
    whole = np.arange(5 * 7 * 2, dtype=np.float64).reshape(5, 7, 2)
    shape = shapes[job.size]
    with hs.MirroredStrategy(replica_shape=shape) as strategy:
        inside = strategy.inside
        split = {
            along: axis for along, axis in {"x": 0, "y": 1}.items() if along in shape
        }
        region = [slice(None)] * 3
        for along, axis in split.items():
            region[axis] = inside.part(whole.shape[axis], along)
        own = whole[tuple(region)]
        with strategy.scope():
            field = hs.Variable(own, name="field", split=split)
        np.testing.assert_array_equal(field.value(), own)
        np.testing.assert_array_equal(field.numpy(), whole)
        strategy.run(lambda: None)
        for along, axis in split.items():
            padded = inside.halo(own, axis, 1, along=along, periodic=True)
            lines = np.take(whole, range(-1, whole.shape[axis] + 1), axis, mode="wrap")
            rows = region[axis].indices(whole.shape[axis])
            index = list(region)
            index[axis] = slice(rows[0], rows[1] + 2)
            np.testing.assert_array_equal(padded, lines[tuple(index)])
        assert inside.comm.size == inside.size == job.size
        assert inside.comm.allreduce(1) == job.size


@pytest.fixture
def grid(job: Any) -> Iterator[Any]:
    """Yield a strategy whose replica is a grid of 2 x 2 ranks, or of 1 x ranks."""
    x = 2 if job.size == 4 else 1
    shape = {"x": x, "y": job.size // x}
    with hs.MultiWorkerMirroredStrategy(replica_shape=shape) as strategy:
        yield strategy


def assert_other_parts(strategy: Any, error: Any, what: str) -> None:
    """Assert that an error names rank 1, whose part is not that of rank 0."""
    if strategy.inside.size == 1:
        assert error is None
        return
    assert isinstance(error, hs.CollectiveError), error
    assert what in str(error)
    assert "that have the same part, found other values on rank 1 " in str(error)
    assert error.ranks == (1,)
    assert strategy.inside.sum(np.int64(1)) == strategy.inside.size


def test_equal_parts_along_an_axis_that_does_not_divide_are_compared(
    grid: Any,
) -> None:
    """Rank 1 has the same part of the rows as rank 0, and other columns."""
    inside, shift = grid.inside, 1e-9 * (grid.inside.position == 1)
    own = np.arange(5.0)[inside.part(5, "x")]
    with grid.scope():
        error = outcome(hs.Variable, own + shift, name="v", split={"x": 0})
        assert_other_parts(grid, error, "in creation of variable 'v'")
        variable = hs.Variable(own, name="v", split={"x": 0})
        optimizer = hs.optimizers.SGD(1.0)

    def update(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, variable)])

    error = outcome(grid.run, update, args=(own + shift,))
    assert_other_parts(grid, error, "of the gradient of 'v' in apply_gradients")
    error = outcome(grid.run, variable.assign, args=(own + shift,))
    assert_other_parts(grid, error, "in assign of variable 'v'")
    error = outcome(variable.assign, own + shift)
    assert_other_parts(grid, error, "in assign of variable 'v'")
    grid.run(update, args=(own / 2,))
    np.testing.assert_array_equal(variable.numpy(), np.arange(5.0) / 2)
    grid.check_divergence()
    variable.component[...] += shift
    error = outcome(grid.check_divergence)
    assert_other_parts(grid, error, "of variable 'v' in check_divergence")
    assert isinstance(error, (hs.DivergenceError, type(None)))


def test_norms_for_clipping_count_equal_parts_once(grid: Any) -> None:
    inside = grid.inside
    rows = inside.part(5, "x")
    with grid.scope():
        variable = hs.Variable(np.zeros(5)[rows], name="v", split={"x": 0})
        optimizer = hs.optimizers.SGD(1.0, clip_global_norm=1.0)

    def update() -> None:
        optimizer.apply_gradients([(np.full(5, 2.0)[rows], variable)])

    grid.run(update)
    np.testing.assert_allclose(variable.numpy(), -np.full(5, 1 / np.sqrt(5)))


def test_wrong_arguments(job: Any) -> None:
    many = job.size + 1
    cases = [
        (ValueError, "multiple", {"ranks_per_replica": many}),
        (ValueError, "both", {"ranks_per_replica": 1, "replica_shape": {"x": 1}}),
        (ValueError, ">= 1", {"ranks_per_replica": 0}),
        (TypeError, "replica_shape", {"replica_shape": 2}),
    ]
    if job.size > 1:
        cases.append(
            (ValueError, "on_error", {"ranks_per_replica": 2, "on_error": "raise"})
        )
    for kind, word, arguments in cases:
        error = outcome(hs.MultiWorkerMirroredStrategy, **arguments)
        assert isinstance(error, kind), error
        assert word in str(error), error


def test_nodes_with_other_replicas_at_other_positions_are_refused(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two nodes with three ranks each, and replicas of two ranks."""
    if job.size != 4:
        return

    class Uneven(Topology):
        def _number_workers(self) -> None:
            super()._number_workers()
            self.worker_id = int(job.rank == job.size - 1)

    # The topology of all ranks has been made, and those of its parts are made now.
    with hs.MultiWorkerMirroredStrategy(comm=job):
        monkeypatch.setattr(connection, "Topology", Uneven)
        error = outcome(hs.MultiWorkerMirroredStrategy, comm=job, ranks_per_replica=2)
        monkeypatch.undo()
    assert isinstance(error, hs.TopologyError), error
    assert "multiple of 2 ranks" in str(error)
    with hs.MultiWorkerMirroredStrategy(comm=job, ranks_per_replica=2) as strategy:
        assert strategy.inside.sum(np.int64(1)) == 2


def test_wrong_parts_of_variables(divided: Any) -> None:
    inside = divided.inside
    if inside.size == 1:
        return
    with divided.scope():
        rows = np.zeros((3 if inside.position else 9, 2))
        error = outcome(hs.Variable, rows, name="uneven", split=0)
        assert isinstance(error, ValueError), error
        assert "strategy.inside.part" in str(error)
        error = outcome(hs.Variable, np.zeros((4, 2)), name="axis", split=2)
        assert isinstance(error, ValueError), error
        error = outcome(
            hs.Variable, np.zeros(4), name="read", split=0, synchronization="on_read"
        )
        assert isinstance(error, ValueError), error
    assert inside.sum(np.int64(1)) == inside.size


def test_refused_with_several_ranks(divided: Any) -> None:
    if divided.inside.size == 1:
        return
    with divided.scope():
        variable = hs.Variable(np.zeros(4), name="v")
        sharded = hs.optimizers.SGD(0.1, sharded=True)
        lamb = hs.optimizers.LAMB(0.1)
        rows = divided.inside.part(divided.inside.size)
        part = hs.Variable(np.zeros(divided.inside.size)[rows], name="p", split=0)
    for optimizer, target in ((sharded, variable), (lamb, part)):
        gradient = np.zeros(target.shape)
        error = outcome(
            divided.run,
            lambda o=optimizer, g=gradient, t=target: o.apply_gradients([(g, t)]),
        )
        assert isinstance(error, ValueError), error
