"""Groups of replicas on every rank: results, checkpoints and refused arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.errors import CheckpointError, CollectiveError, ReplicaError
from tests.mpi.ranks.saved import Counter

pytestmark = pytest.mark.rule

START = np.array([3.0, -1.0, 0.5, 2.0, -4.0])
RATE, MOMENTUM = 0.125, 0.5
DILOCO: dict[str, Any] = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
PLAIN: dict[str, Any] = {"learning_rate": 1.0}


@pytest.fixture
def make(topology_layout: Any, strategy: Any, job: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes groups: workers, or halves of one worker."""
    made: list[Any] = []

    def make(**options: Any) -> Any:
        options.setdefault("replicas_per_worker", topology_layout.replicas_per_worker)
        halves = topology_layout.replicas_per_worker is None and job.size % 2 == 0
        if halves and "by" not in options:
            options.setdefault("size", job.size // 2)
        made.append(hs.SyncGroups(**options))
        return made[-1]

    yield make
    for groups in made:
        groups.close()


def gradient(replica: int, step: int, value: Any) -> Any:
    """Return a replica's gradient for its group, with a slope that only it has."""
    return (value - replica) * (1 + step % 3) / 4 + np.arange(5) - replica


class Training:
    """A network of one variable, in the scope of groups, beside a constant variable."""

    def __init__(self, groups: Any, start: Any = START, **optimizer: Any) -> None:
        self.groups = groups
        with groups.strategy.scope():
            self.value = hs.Variable(start, name="value")
            self.still = hs.Variable(np.int64(7), name="still")
            self.optimizer = hs.optimizers.SGD(RATE, MOMENTUM, **optimizer)
        self.steps = 0

    def step(self) -> bool:
        self.steps += 1
        self.groups.strategy.run(self._update)
        return bool(self.groups.step())

    def _update(self) -> None:
        replica = self.groups.everyone.replica_id
        own = gradient(replica, self.steps, self.value.value())
        self.optimizer.apply_gradients([(own, self.value)])


class Oracle:
    """The same training in NumPy, for all groups in one process."""

    def __init__(
        self, group_of: Sequence[int], every: int, delay: int, rule: dict[str, Any]
    ) -> None:
        self.group_of, self.every, self.delay, self.rule = group_of, every, delay, rule
        count = max(group_of) + 1
        self.local = np.stack([START] * count)
        self.inner = np.zeros_like(self.local)
        self.outer, self.velocity = START.copy(), np.zeros(5)
        self.steps, self.under_way, self.starts = 0, -1, self.local.copy()

    def step(self) -> bool:
        self.steps += 1
        total = np.zeros_like(self.local)
        for replica, group in enumerate(self.group_of):
            total[group] += gradient(replica, self.steps, self.local[group])
        self.inner = MOMENTUM * self.inner - RATE * total
        self.local = self.local + self.inner
        met = False
        if self.under_way >= 0:
            self.under_way += 1
            if self.under_way == self.delay:
                self.local = self.local + (self.outer_step(self.starts) - self.starts)
                self.under_way, met = -1, True
        if self.steps % self.every == 0:
            self.starts, self.under_way = self.local, 0
            if not self.delay:
                self.local = np.stack([self.outer_step(self.local)] * len(self.local))
                self.under_way, met = -1, True
        return met

    def outer_step(self, local: Any) -> Any:
        mean = np.mean([local[group] for group in self.group_of], axis=0)
        change, momentum = self.outer - mean, self.rule.get("momentum", 0.0)
        # Use the momentum formula of PyTorch's SGD, as DiLoCo does.
        self.velocity = momentum * self.velocity + change
        if self.rule.get("nesterov"):
            change = change + momentum * self.velocity
        self.outer = self.outer - self.rule["learning_rate"] * change
        return self.outer


@pytest.mark.parametrize(
    ("every", "delay", "rule"),
    [(3, 0, DILOCO), (3, 2, DILOCO), (2, 2, DILOCO), (2, 0, PLAIN)],
)
def test_groups_train_as_the_algorithm_says(
    make: Any, every: int, delay: int, rule: dict[str, Any]
) -> None:
    groups = make(every=every, delay=delay, outer=hs.optimizers.SGD(**rule))
    group_of = groups.everyone.split.group_of
    assert groups.group_id == group_of[groups.everyone.replica_id]
    assert groups.strategy.num_replicas_in_sync == group_of.count(groups.group_id)
    training, oracle = Training(groups), Oracle(group_of, every, delay, rule)
    for _ in range(8):
        assert training.step() is oracle.step()
        wanted = oracle.local[groups.group_id]
        np.testing.assert_allclose(training.value.numpy(), wanted, rtol=1e-12)
    groups.end_round()
    groups.everyone.check_equal(training.value.numpy())
    value, rounds = training.value.numpy(), groups.outer.iterations.numpy()
    groups.end_round()
    np.testing.assert_array_equal(training.value.numpy(), value)
    assert groups.outer.iterations.numpy() == rounds
    assert training.still.numpy() == 7


def test_a_variable_without_dimensions_is_averaged_with_a_delay(make: Any) -> None:
    groups = make(every=1, delay=1, outer=hs.optimizers.SGD(**PLAIN))
    with groups.strategy.scope():
        value = hs.Variable(1.0, name="value")
    value.assign(2.0 + groups.group_id)
    assert [groups.step(), groups.step()] == [False, True]
    of_replica = [2.0 + group for group in groups.everyone.split.group_of]
    np.testing.assert_allclose(value.numpy(), np.mean(of_replica), rtol=1e-6)


def test_groups_of_a_size_are_runs_of_replicas(make: Any, job: Any) -> None:
    groups = make(every=1, size=1)
    assert (groups.num_groups, groups.group_id) == (job.size, job.rank)
    assert groups.strategy.num_replicas_in_sync == 1
    whole = make(size=job.size, every=1)
    assert (whole.num_groups, whole.group_id) == (1, 0)
    assert repr(whole).startswith("SyncGroups(group 0 of 1, ")


@pytest.mark.parametrize("exact", [True, False])
def test_rounds_of_one_step_with_plain_averages_are_synchronous_training(
    make: Any, exact: bool
) -> None:
    groups = make(every=1, outer=hs.optimizers.SGD(1.0))
    whole = groups.everyone
    count, own = whole.num_replicas_in_sync, groups.strategy.num_replicas_in_sync
    # Small integers divided by a power of two are exact in float64.
    exact = exact and count & (count - 1) == 0 and count == own * groups.num_groups
    draw = np.random.default_rng(whole.replica_id)
    gradients = draw.integers(-8, 8, (6, 5)) if exact else draw.normal(size=(6, 5))
    values = []
    for strategy in (groups.strategy, whole):
        with strategy.scope():
            value = hs.Variable(START, name=f"value of {len(values)}")
            optimizer = hs.optimizers.SGD(RATE, MOMENTUM, aggregation="mean")
        for each in gradients.astype(np.float64):
            pairs = [(each, value)]
            strategy.run(lambda p=pairs, o=optimizer: o.apply_gradients(p))
            if strategy is groups.strategy:
                assert groups.step()
        values.append(value.numpy())
    if exact:
        np.testing.assert_array_equal(*values)
    else:
        np.testing.assert_allclose(*values, rtol=1e-13)


def test_all_groups_begin_with_the_values_of_replica_0(make: Any, job: Any) -> None:
    groups = make(every=1)
    with groups.strategy.scope():
        value = hs.Variable(np.full(3, float(job.rank)), name="value")
    assert value.numpy().tolist() == [0.0] * 3


def _made(make: Any, start: Any, delay: int, folder: Path) -> tuple[Training, Any]:
    groups = make(every=3, delay=delay)
    training = Training(groups, start)
    with groups.strategy.scope():
        seen = hs.Variable(
            np.int64(0), synchronization="on_read", aggregation="sum", name="seen"
        )
    groups.strategy.run(lambda: seen.assign_add(np.int64(groups.everyone.replica_id)))
    manager = hs.CheckpointManager(
        folder,
        groups=groups,
        value=training.value,
        optimizer=training.optimizer,
        seen=seen,
    )
    return training, manager


@pytest.mark.parametrize(("delay", "at"), [(0, 4), (2, 4), (2, 5)])
def test_a_checkpoint_in_the_midst_of_a_round_restores_to_the_same_bits(
    make: Any, folder: Path, delay: int, at: int
) -> None:
    values = []
    for saves in (False, True):
        training, manager = _made(make, START, delay, folder)
        for step in range(1, 10):
            training.step()
            if saves and step == at:
                manager.save(step)
        values.append(training.value.numpy())
    training, manager = _made(make, np.zeros(5), delay, folder)
    assert manager.restore() == at
    training.steps = at
    for _ in range(at, 10 - 1):
        training.step()
    values.append(training.value.numpy())
    np.testing.assert_array_equal(values[1], values[0])
    np.testing.assert_array_equal(values[2], values[0])


def test_a_pending_sum_restored_without_a_delay_is_refused(
    make: Any, folder: Path
) -> None:
    training, manager = _made(make, START, 2, folder)
    for _ in range(4):
        training.step()
    manager.save(4)
    training, manager = _made(make, START, 0, folder)
    manager.restore(expect_partial=True)
    before = training.value.numpy().copy()
    for call in (training.groups.step, training.groups.end_round):
        with pytest.raises(ValueError, match=r"delay=0; restore it with the delay"):
            call()
    np.testing.assert_array_equal(training.value.numpy(), before)
    training, manager = _made(make, START, 1, folder)
    manager.restore()
    training.groups.end_round()
    manager.save(5)
    training, manager = _made(make, START, 0, folder)
    manager.restore(expect_partial=True)
    for _ in range(4):
        training.step()


def test_files_have_a_row_for_each_group(make: Any, folder: Path, job: Any) -> None:
    import h5py

    training, manager = _made(make, START, 0, folder)
    training.step()
    path = manager.save(1)
    job.Barrier()
    split = training.groups.everyone.split
    with h5py.File(path, "r") as file:
        dataset = file["variables/value"]
        assert dataset.attrs["group_axis"] == 0
        assert dataset.shape == (split.num_groups, 5)
        own = dataset[split.own]
        ids = np.array(split.group_of)
        seen = [int(np.flatnonzero(ids == g).sum()) for g in range(split.num_groups)]
        assert file["variables/seen"][:].tolist() == seen
        np.testing.assert_array_equal(file["groups/value/value"], START)
    np.testing.assert_array_equal(own, training.value.numpy())


def test_other_groups_restore_by_a_rule_or_name_what_does_not_fit(
    make: Any, folder: Path, job: Any
) -> None:
    training, manager = _made(make, START, 0, folder)
    for _ in range(4):
        training.step()
    path = manager.save(4)
    rows = job.allgather((training.groups.group_id, training.value.numpy()))
    saved = dict(rows)
    groups = make(every=3, size=1)
    other = Training(groups, np.zeros(5))
    keeper = hs.CheckpointManager(
        folder, groups=groups, value=other.value, optimizer=other.optimizer
    )
    rules: dict[str, Any] = {"expect_partial": True}
    if len(saved) != groups.num_groups:
        with pytest.raises(CheckpointError, match=f"{len(saved)} groups, not of"):
            keeper.restore(path, **rules)
        assert not other.value.numpy().any()
    for policy, row in (("first", 0), ("cycle", job.rank % len(saved))):
        keeper.restore(path, per_replica=policy, **rules)
        fits = len(saved) == groups.num_groups
        wanted = saved[groups.group_id if fits else row]
        np.testing.assert_array_equal(other.value.numpy(), wanted)
        other.steps = 4
        other.step()
    # Synchronous training restores the outer parameters under the variable's name.
    with groups.everyone.scope():
        value = hs.Variable(np.zeros(5), name="value")
    alone = hs.CheckpointManager(folder, value=value)
    with pytest.raises(CheckpointError, match="value for each group"):
        alone.restore(path, expect_partial=True)
    alone.restore(
        path, rename={"variables": "old", "groups/value": "variables"}, **rules
    )
    outer = next(v for v in training.groups.checkpoint_variables().items())
    assert outer[0] == "counts"
    np.testing.assert_array_equal(
        value.numpy(), training.groups.checkpoint_variables()["value/value"].numpy()
    )


@pytest.mark.parametrize("fewer", [0, 1])
def test_what_groups_have_accumulated_is_theirs_on_fewer_replicas(
    job: Any, folder: Path, fewer: int
) -> None:
    """A mean over a group's single replica stays a mean over one replica."""
    if job.size <= fewer:
        pytest.skip("no replica would be left")
    options: dict[str, Any] = {"learning_rate": 1.0, "accumulate_steps": 2}
    options["aggregation"] = "mean"

    def made(comm: Any) -> tuple[Any, ...]:
        groups = hs.SyncGroups(every=2, size=1, comm=comm)
        with groups.strategy.scope():
            value = hs.Variable(np.zeros(2), name="value")
            optimizer = hs.optimizers.SGD(**options)
        manager = hs.CheckpointManager(
            folder, groups=groups, value=value, optimizer=optimizer
        )

        def step(gradient: float) -> None:
            pairs = [(np.full(2, gradient), value)]
            groups.strategy.run(optimizer.apply_gradients, args=(pairs,))

        return groups, manager, value, step

    groups, manager, _, step = made(job)
    with groups:
        step(10.0 + job.rank)
        manager.save(1)
        manager.close()
    count = job.size - fewer
    comm = job.Split(int(job.rank >= count), job.rank)
    if job.rank < count:
        groups, manager, value, step = made(comm)
        with groups:
            manager.restore(per_replica="cycle")
            step(20.0)
            assert value.numpy().tolist() == [-(30.0 + job.rank) / 2] * 2
    comm.Free()


def test_copies_that_differ_in_one_group_are_told_everywhere(
    make: Any, folder: Path, job: Any
) -> None:
    training, manager = _made(make, START, 0, folder)
    if training.groups.everyone.split.group_of.count(0) == 1:
        pytest.skip("a group of one replica has nothing to compare")
    if job.rank == 1:
        training.value.component[2] = 99.0
    with pytest.raises(hs.DivergenceError, match="value"):
        manager.save(1)
    assert manager.checkpoints == []


def test_plain_state_alone_is_saved_by_all_groups_together(
    make: Any, folder: Path
) -> None:
    groups, counter = make(every=2, size=1), Counter()
    with groups.strategy.scope():
        manager = hs.CheckpointManager(folder, counter=counter)
    counter.state = {"seen": 3}
    path = manager.save(1)
    counter.state = {}
    manager.restore()
    assert manager.checkpoints == [path]
    assert counter.state == {"seen": 3}


def test_what_groups_cannot_save_is_refused(make: Any, folder: Path) -> None:
    groups = make(every=2)
    with groups.strategy.scope():
        apart = hs.Variable(0.0, synchronization="on_read", name="apart")
    with pytest.raises(ValueError, match="expected an aggregation"):
        hs.CheckpointManager(folder, apart=apart)
    streams = groups.strategy.random("noise")
    with pytest.raises(ValueError, match=r"SyncGroups\.everyone"):
        hs.CheckpointManager(folder, noise=streams)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "host", "every": 2}, "by='worker'"),
        ({"by": "worker", "size": 1, "every": 2}, "by or size"),
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"every": 2, "delay": 3}, "delay <= every"),
        ({"every": 2, "delay": -1}, "delay"),
        ({"every": 2, "size": 7}, "divides the number of replicas"),
        ({"every": 2, "outer": 0.7}, "optimizer"),
        (
            {"every": 2, "outer": hs.optimizers.SGD(0.7, accumulate_steps=2)},
            "accumulate_steps=1",
        ),
    ],
)
def test_wrong_arguments_are_errors(
    make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make(**options)


def test_ranks_that_form_other_groups_are_told(make: Any, job: Any) -> None:
    if job.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(CollectiveError, match=r"every=2.*every=3|every=3.*every=2"):
        make(every=2 + (job.rank == 1))
    with pytest.raises(ValueError if job.rank == 1 else ReplicaError, match="every"):
        make(every=-1 if job.rank == 1 else 2)
    assert make(every=2).everyone.num_replicas_in_sync == job.size


def test_a_step_without_variables_or_in_a_replica_function_is_refused(
    make: Any,
) -> None:
    groups = make(every=1)
    with pytest.raises(ValueError, match="trainable variables"):
        groups.step()
    Training(groups)
    with pytest.raises(RuntimeError, match="outside of replica functions"):
        groups.strategy.run(groups.step)


def test_an_error_of_one_rank_in_a_round_is_raised_on_all(make: Any, job: Any) -> None:
    fails = [job.rank == job.size - 1]

    def rate(step: int) -> float:
        if fails.pop():
            raise KeyError("planned")
        return 1.0

    training = Training(make(every=2, outer=hs.optimizers.SGD(rate)))
    training.step()
    with pytest.raises(KeyError if fails[0] else ReplicaError, match="planned"):
        training.step()
    fails[:] = [False, False]
    assert training.step()
    training.groups.everyone.check_equal(training.value.numpy())


def test_an_error_of_one_group_leaves_the_others_alone(make: Any, job: Any) -> None:
    groups = make(every=2, on_error="raise")
    training = Training(groups)
    planned = job.size - 1
    is_its_group = groups.group_id == groups.num_groups - 1

    def fail() -> None:
        if job.rank == planned:
            raise KeyError("planned")

    training.step()
    if is_its_group:
        with pytest.raises((KeyError, ReplicaError), match="planned"):
            groups.strategy.run(fail)
    assert training.step()
    groups.everyone.check_equal(training.value.numpy())


def test_a_round_whose_delayed_sum_fails_is_part_of_the_next_one(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = make(every=2, delay=1, outer=hs.optimizers.SGD(**PLAIN))
    training = Training(groups)
    oracle = Oracle(groups.everyone.split.group_of, 2, 1, PLAIN)

    def fail(*_: Any) -> None:
        raise ValueError("planned")

    for _ in range(2):
        training.step()
        oracle.step()
    with monkeypatch.context() as patch:
        patch.setattr(groups.outer, "apply_combined", fail)
        with pytest.raises(ValueError, match="planned"):
            training.step()
    oracle.under_way = -1
    oracle.step()
    for _ in range(2):
        assert training.step() is oracle.step()
    wanted = oracle.local[groups.group_id]
    np.testing.assert_allclose(training.value.numpy(), wanted, rtol=1e-12)


def test_a_notice_of_one_rank_reaches_all_with_the_delayed_sum(
    make: Any, job: Any
) -> None:
    if job.size == 1:
        pytest.skip("there is nobody to be told")
    training = Training(make(every=2, delay=1))
    channel = training.groups.collectives.channel
    if job.rank == job.size - 1:
        channel.notice = "planned"
    for _ in range(2):
        training.step()
    assert not channel.noticed
    assert training.step()
    found, channel.noticed = channel.noticed, {}
    assert found == {job.size - 1: "planned"}
