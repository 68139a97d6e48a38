"""Failures on any ranks: all ranks get an error, have equal state, and can continue.

Random programs, equal on all ranks, run with planned failures, and a model predicts
what each rank must see. A program has numbered points. A planned failure is a point, a
rank and an error. Ranks that do not fail continue to the first later point at which
they need the other ranks.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import metrics, optimizers
from hpcstrat.engine.channel import headers
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.outcomes import ERRORS, BadBatch, assert_usable, outcome

# Two ranks have special algorithms, and a special rule for a majority.
pytestmark = [pytest.mark.rule, pytest.mark.algorithm]


BAD_ARGUMENT = -1

REPLICA = ("all_reduce", "assign", "count", "start", "wait", "gather", "gradients")
REPLICA_SCOPES = ("merge", "update", "guarded")
CROSS = ("reduce", "assign_cross", "gather_cross", "read", "values")
CROSS_SCOPES = ("run", "update_cross")
# Calls that a rank makes alone; all other calls need all ranks.
LOCAL = ("count", "start", "run", "guarded")
TAKES_BAD = ("all_reduce", "assign", "gather", "gradients", "reduce", "assign_cross")


@dataclass
class Op:
    """A call of a program; ``end`` is the point after the calls inside of it."""

    kind: str
    number: int
    body: list[Op] = field(default_factory=list)
    end: int = -1


def make_ops(rng: Any, counter: Iterator[int], cross: bool, depth: int) -> list[Op]:
    """Return a list of random calls for one context."""
    ops = []
    for _ in range(int(rng.integers(1, 4 if depth else 6))):
        kinds = CROSS if cross else REPLICA
        if depth < 3 and rng.random() < 0.3:
            kinds = CROSS_SCOPES if cross else REPLICA_SCOPES
        op = Op(str(rng.choice(kinds)), next(counter))
        if op.kind in ("merge", "run"):
            op.body = make_ops(rng, counter, op.kind == "merge", depth + 1)
        elif op.kind == "guarded":
            kind = str(rng.choice(("all_reduce", "assign", "gather")))
            op.body = [Op(kind, next(counter))]
        if op.kind in (*REPLICA_SCOPES, *CROSS_SCOPES):
            op.end = next(counter)
        ops.append(op)
    return ops


def walk(ops: list[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        yield from walk(op.body)


@dataclass
class Plan:
    """A plan of the ranks that fail, with the points and the errors.

    ``lost`` are the calls whose error the program caught. ``active`` are the ranks
    whose errors end the run, at the point ``stop``.
    """

    failures: dict[int, tuple[int, int]] = field(default_factory=dict)
    stop: int = 1 << 60
    active: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    def done(self, point: int) -> bool:
        """Return whether the call at a point succeeds."""
        return point not in self.lost and (not self.active or point < self.stop)

    def common(self) -> Any:
        """Return the class that the errors of all ranks have in common."""
        number = self.failures[self.active[0]][1]
        return ValueError if number == BAD_ARGUMENT else ERRORS[number][1]


def make_plan(rng: Any, ops: list[Op], last: int, size: int) -> Plan:
    """Return planned failures with the effects that they must have."""
    every = list(walk(ops))
    bad = [op.number for op in every if op.kind in TAKES_BAD]
    meets = {op.number for op in every if op.kind not in LOCAL} | {last}
    meets |= {op.end for op in every if op.end >= 0 and op.kind != "guarded"}
    starts = {op.number for op in every if op.kind == "start"}
    failures = {}
    for rank in rng.permutation(size)[: int(rng.choice([1, 1, 1, 2, size]))]:
        if bad and rng.random() < 0.25:
            failures[int(rank)] = int(rng.choice(bad)), BAD_ARGUMENT
        else:
            point = int(rng.integers(0, last + 1))
            failures[int(rank)] = point, int(rng.integers(len(ERRORS)))
    # The program's own ``try`` catches an error in its body, on one rank alone.
    guarded = {op.body[0].number: op for op in every if op.kind == "guarded"}
    for rank, (point, number) in failures.items():
        ends = [op for op in guarded.values() if op.end == point]
        if ends or (point in guarded and number != BAD_ARGUMENT):
            op = ends[0] if ends else guarded[point]
            failures[rank] = op.number, number if number >= 0 else 0
    plan, left = Plan(failures), dict(failures)
    while left:
        first = min(point for point, _ in left.values())
        stop = min(point for point in meets if point >= first)
        # The other ranks may notice the error in a call that they start, or later.
        limit = min((s for s in starts if first <= s < stop), default=stop)
        for rank, (point, number) in left.items():
            if limit < point <= stop and limit < stop:
                left[rank] = failures[rank] = limit, max(number, 0)
        active = sorted(rank for rank, (point, _) in left.items() if point <= stop)
        caught = all(left.pop(rank) == (stop, BAD_ARGUMENT) for rank in active)
        if stop not in guarded or not caught:
            plan.stop, plan.active = stop, active
            break
        plan.lost.add(stop)
    return plan


class Model:
    """Variables, metric and optimizer of a strategy, with their expected values."""

    def __init__(self, strategy: Any, job: Any) -> None:
        self.strategy, self.job = strategy, job
        with strategy.scope():
            self.total = hs.Variable(np.zeros(3, np.int64), aggregation="sum")
            self.parts = hs.Variable(
                np.int64(0), synchronization="on_read", aggregation="sum"
            )
            self.weights = hs.Variable(np.zeros(2), name="weights")
            self.mean = metrics.Mean()
            self.optimizer = optimizers.SGD(self._rate)
        self.expected_total = np.zeros(3, np.int64)
        self.expected_weights = np.zeros(2)
        self.expected_parts = 0
        self.plan = Plan()
        self.planted: Exception | None = None
        self.handles: list[tuple[Any, int]] = []

    def _rate(self, step: int) -> float:
        return 0.5

    def fail(self, point: int) -> None:
        """Raise the error that is planned for this rank and point, if any."""
        where, number = self.plan.failures.get(self.job.rank, (-1, 0))
        if where == point and number != BAD_ARGUMENT:
            self.planted = ERRORS[number][0]()
            raise self.planted

    def value(self, point: int, good: Any) -> Any:
        """Return the good argument, or a bad one if this failure is planned."""
        where, number = self.plan.failures.get(self.job.rank, (-1, 0))
        if (where, number) == (point, BAD_ARGUMENT):
            return np.array(["no", "number", "at all"])
        return good

    def execute(self, ops: list[Op]) -> None:
        """Make the calls of a context, with the planned failures."""
        for op in ops:
            self.fail(op.number)
            getattr(self, f"do_{op.kind}")(op)

    def _sum(self, point: int) -> int:
        return sum(point + rank for rank in range(self.job.size))

    def do_all_reduce(self, op: Op) -> None:
        context = hs.get_replica_context()
        own = np.full(3, op.number + self.job.rank)
        found = context.all_reduce("sum", self.value(op.number, own))
        assert found.tolist() == [self._sum(op.number)] * 3

    def do_reduce(self, op: Op) -> None:
        own = np.full(3, op.number + self.job.rank)
        found = self.strategy.reduce("sum", self.value(op.number, own), axis=None)
        assert found.tolist() == [self._sum(op.number)] * 3

    def do_assign(self, op: Op) -> None:
        own = np.full(3, op.number + self.job.rank)
        self.total.assign_add(self.value(op.number, own))

    def do_assign_cross(self, op: Op) -> None:
        self.total.assign(self.value(op.number, np.full(3, op.number)))

    def do_count(self, op: Op) -> None:
        self.parts.assign_add(1)
        self.mean.update_state(float(self.job.rank))
        self.expected_parts += 1

    def do_start(self, op: Op) -> None:
        own = np.full(40, op.number + self.job.rank)
        handle = hs.get_replica_context().start_all_reduce("sum", own)
        self.handles.append((handle, op.number))

    def do_wait(self, op: Op) -> None:
        hs.get_replica_context().all_reduce("sum", np.ones(2))
        while self.handles:
            handle, point = self.handles.pop()
            assert set(handle.wait().tolist()) == {self._sum(point)}

    def do_gather(self, op: Op) -> None:
        own = np.array([op.number, self.job.rank])
        axis = 0 if self.value(op.number, own) is own else 7
        found = hs.get_replica_context().all_gather(own, axis)
        assert found[1::2].tolist() == list(range(self.job.size))

    def do_gather_cross(self, op: Op) -> None:
        found = self.strategy.gather(np.array([self.job.rank]), 0)
        assert found.tolist() == list(range(self.job.size))

    def do_gradients(self, op: Op) -> None:
        gradient = self.value(op.number, np.full(2, 0.25))
        self.optimizer.apply_gradients([(gradient, self.weights)])

    def do_read(self, op: Op) -> None:
        self.parts.read_value()
        self.mean.result()

    def do_values(self, op: Op) -> None:
        found = self.strategy.experimental_distribute_values_from_function(
            lambda context: np.array([context.replica_id_in_sync_group])
        )
        mean = self.strategy.reduce("mean", found, axis=None)
        assert mean.tolist() == [(self.job.size - 1) / 2]

    def do_merge(self, op: Op) -> None:
        def merge(strategy: Any) -> None:
            self.execute(op.body)
            self.fail(op.end)

        hs.get_replica_context().merge_call(merge)

    def do_run(self, op: Op) -> None:
        def inner() -> None:
            self.execute(op.body)
            self.fail(op.end)

        self.strategy.run(inner)

    def do_update(self, op: Op) -> None:
        def change(variable: Any) -> None:
            variable.assign_add(np.full(3, 5))
            self.fail(op.end)

        self.strategy.extended.update(self.total, change)

    do_update_cross = do_update

    def do_guarded(self, op: Op) -> None:
        # The program continues, unless the failure ends more than this call.
        with contextlib.suppress(Exception):
            self.execute(op.body)
        self.fail(op.end)

    def apply(self, ops: list[Op]) -> None:
        """Update the expected values of the variables by the calls that succeeded."""
        for op in walk(ops):
            point = op.end if op.kind.startswith("update") else op.number
            if not self.plan.done(point):
                continue
            if op.kind == "assign":
                self.expected_total += self._sum(op.number)
            elif op.kind == "assign_cross":
                self.expected_total[:] = op.number
            elif op.kind.startswith("update"):
                self.expected_total += 5
            elif op.kind == "gradients":
                self.expected_weights -= 0.5 * 0.25 * self.job.size

    def check_error(self, error: Any) -> str:
        """Return a text that says what is wrong with this rank's error, or ""."""
        plan = self.plan
        if not plan.active:
            return "" if error is None else f"an error without a failure: {error!r}"
        rank, origin, common = self.job.rank, plan.active[0], plan.common()
        if rank == origin or type(error) is type(self.planted):
            own = plan.failures[origin][1] == BAD_ARGUMENT or error is self.planted
            return "" if own else f"another error than the own: {error!r}"
        if common is not hs.ReplicaError and not isinstance(error, common):
            return f"no {common.__name__}: {error!r}"
        if rank in plan.active and not isinstance(error, hs.ReplicaError):
            # This rank raised an error of the common class by itself.
            own = plan.failures[rank][1] == BAD_ARGUMENT or error is self.planted
            return "" if own else f"another error than the own: {error!r}"
        if not isinstance(error, hs.ReplicaError):
            return f"no ReplicaError: {error!r}"
        wrong = origin not in error.ranks or not set(error.ranks) <= set(plan.active)
        return f"ranks {error.ranks}" if wrong else ""

    def state(self) -> Any:
        """Return the state that must be equal on all ranks."""
        return (
            self.total.component.tolist(),
            self.weights.component.tolist(),
            int(self.optimizer.iterations.component),
        )

    def check(self, error: Any) -> list[str]:
        """Return the problems of all ranks; collective."""
        expected = self.expected_total.tolist(), self.expected_weights.tolist()
        own = self.check_error(error), self.state(), int(self.parts.component)
        # All ranks compare everything, so that all of them fail together.
        wrong, states, _ = zip(*self.job.allgather(own), strict=True)
        problems = [text for text in wrong if text]
        if any(state != states[0] for state in states):
            problems.append(f"variables that differ: {states}")
        if states[0][:2] != expected:
            problems.append(f"{states[0]}, not {expected}")
        if own[2] != self.expected_parts:
            problems.append(f"{own[2]} calls of this rank, not {self.expected_parts}")
        return problems


def run_programs(strategy: Any, job: Any, seed: int, steps: int) -> int:
    """Run random programs; return the number of failures."""
    rng, model, count = np.random.default_rng(seed), Model(strategy, job), 0
    for step in range(steps):
        counter = itertools.count()
        ops = make_ops(rng, counter, False, 0)
        last = next(counter)
        model.plan = make_plan(rng, ops, last, job.size)
        if rng.random() < 0.1:
            model.plan = Plan()
        model.planted, model.handles = None, []

        def program(ops: list[Op] = ops, last: int = last) -> None:
            model.execute(ops)
            model.fail(last)

        error = outcome(strategy.run, program)
        model.apply(ops)
        count += len(model.plan.active) + len(model.plan.lost)
        problems = model.check(error)
        assert not problems, (seed, step, problems, ops, model.plan)
    assert_usable(strategy, job)
    return count


def num_steps(job: Any) -> int:
    """Return the number of steps that take a few seconds on two busy cores."""
    return len(seeds({1: 100, 2: 250, 3: 75}.get(job.size, 60)))


@pytest.mark.parametrize("seed", seeds(4))
def test_thousands_of_random_failures_leave_all_ranks_alike(
    make_strategy: Any, job: Any, seed: int
) -> None:
    """The whole matrix makes over 2000 failures with 2 ranks in both layouts."""
    with make_strategy(on_error="raise") as strategy:
        steps = num_steps(job)
        assert run_programs(strategy, job, seed, steps) >= 0.8 * steps


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 200))
def test_many_more_random_failures_leave_all_ranks_alike(
    make_strategy: Any, job: Any, seed: int
) -> None:
    with make_strategy(on_error="raise") as strategy:
        run_programs(strategy, job, seed, num_steps(job))


def test_an_error_caught_on_one_rank_only_is_noticed(
    make_strategy: Any, job: Any
) -> None:
    """Without ``on_error="raise"``, an error is noticed in the next call."""
    if job.size == 1:
        pytest.skip("one rank agrees with itself")

    def step(fails: bool) -> Any:
        if fails:
            raise BadBatch("bad")
        return hs.get_replica_context().all_reduce("sum", np.ones(2))

    for rank in range(job.size):
        with make_strategy() as strategy:
            error = outcome(strategy.run, step, (job.rank == rank,))
            if job.rank == rank:
                assert type(error) is BadBatch
                # The program of this rank continues here; the other ranks are in the
                # first step.
                error = outcome(strategy.run, step, (False,))
            for _ in range(3):
                assert type(error) is hs.CollectiveError
                assert f"rank {rank}: " in str(error) or job.size > 2
                # This rank stays one step ahead, whatever errors the program catches.
                error = outcome(strategy.run, step, (False,))
    with make_strategy() as strategy:
        assert_usable(strategy, job)


@pytest.mark.parametrize(
    ("num_batches", "num_failures"),
    [
        *[(0, 1), (1, 2), (2, 1), (3, 2)],
        *[
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((0, 2), (1, 1), (2, 2), (3, 1))
        ],
    ],
)
def test_a_rank_that_is_ahead_is_noticed_where_copies_are_compared(
    make_strategy: Any, job: Any, num_batches: int, num_failures: int
) -> None:
    """The hash of the copies includes the numbers of runs and batches."""
    if job.size == 1:
        pytest.skip("one rank agrees with itself")

    def step(number: int, fails: bool) -> Any:
        if fails:
            raise BadBatch("bad")
        return hs.get_replica_context().all_reduce("sum", np.int64(number))

    with make_strategy() as strategy:
        with strategy.scope():
            _variable = hs.Variable(1.0, name="variable")
        batches = hs.Dataset(np.arange(12.0), batch_size=2)
        for _ in range(num_batches):
            next(iter(strategy.experimental_distribute_dataset(batches)))
        if job.rank == 1:
            for _ in range(num_failures):
                assert type(outcome(strategy.run, step, (0, True))) is BadBatch
        for number in range(12):
            error = outcome(strategy.run, step, (number, False))
            assert type(error) is hs.CollectiveError, number
    with make_strategy() as strategy:
        assert_usable(strategy, job)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_left_out_on_one_rank_is_noticed(
    make_strategy: Any, job: Any, late: bool
) -> None:
    """Only the numbers of batches differ; the calls and runs of all ranks are equal."""
    if job.size == 1:
        pytest.skip("one rank agrees with itself")
    rows = np.arange(12.0)

    def step(batch: Any) -> Any:
        return hs.get_replica_context().all_reduce("sum", batch.sum())

    def train(strategy: Any, sums: list[float]) -> None:
        batches = hs.Dataset(rows, batch_size=2)
        steps = strategy.experimental_distribute_dataset(batches)
        for number, batch in enumerate(steps):
            if number == 2 and (job.rank == 1) is not late:
                continue
            sums.append(float(strategy.local_value(strategy.run(step, (batch,)))))

    with make_strategy() as strategy:
        sums: list[float] = []
        for _ in range(3):
            error = outcome(train, strategy, sums)
            assert type(error) is hs.CollectiveError
            # Every sum so far has values of one step only.
            assert sums == [1.0, 5.0]
        assert "of run, 4 of next()" in str(error)
    with make_strategy() as strategy:
        assert_usable(strategy, job)


def test_ranks_that_are_apart_meet_in_a_restore(
    make_strategy: Any, job: Any, folder: str
) -> None:
    if job.size == 1:
        pytest.skip("one rank agrees with itself")

    def step() -> Any:
        return hs.get_replica_context().all_reduce("sum", np.ones(2))

    with make_strategy() as strategy:
        with strategy.scope():
            x = hs.Variable(3.0, name="x")
        manager = hs.CheckpointManager(folder, x=x)
        manager.save(1)
        if job.rank == 0:
            strategy.run(lambda: None)
        for _ in range(2):
            assert type(outcome(strategy.run, step)) is hs.CollectiveError
        if job.rank == 1:
            # A restore on this rank alone cannot synchronize with other ranks.
            assert type(outcome(manager.restore)) is hs.CollectiveError
        else:
            assert type(outcome(strategy.barrier)) is hs.CollectiveError
        assert type(outcome(strategy.barrier)) is hs.CollectiveError
        assert manager.restore() == 1
        assert_usable(strategy, job)
        manager.close()


def test_ranks_that_are_apart_meet_in_a_new_strategy(
    make_strategy: Any, job: Any
) -> None:
    if job.size == 1:
        pytest.skip("one rank agrees with itself")
    with make_strategy() as strategy:
        if job.rank == 0:
            strategy.run(lambda: None)
        assert type(outcome(strategy.barrier)) is hs.CollectiveError
        # The first strategy is still open, and works again like the new one.
        with make_strategy() as other:
            assert_usable(other, job)
            assert_usable(strategy, job)


@pytest.mark.parametrize("on_error", ["abort", "raise"])
def test_an_interrupt_is_not_told_but_noticed(
    make_strategy: Any, job: Any, on_error: str
) -> None:
    if job.size == 1:
        pytest.skip("one rank agrees with itself")

    def step(fails: bool) -> Any:
        if fails:
            raise KeyboardInterrupt
        return hs.get_replica_context().merge_call(
            lambda strategy: strategy.reduce("sum", 1.0, axis=None)
        )

    def interrupted() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            strategy.run(step, (job.rank == 0,))
        strategy.barrier()

    with make_strategy(on_error=on_error) as strategy:
        for _ in range(3):
            assert type(outcome(interrupted)) is hs.CollectiveError
            assert_usable(strategy, job)


def test_started_calls_end_with_the_run_that_failed(
    make_strategy: Any, job: Any
) -> None:
    with make_strategy(on_error="raise") as strategy:
        for when in range(4):
            handles: list[Any] = []

            def step(when: int = when, handles: list[Any] = handles) -> None:
                context = hs.get_replica_context()
                for number in range(3):
                    if job.rank == 0 and number == when:
                        raise BadBatch("in flight")
                    own = np.full(9, number + job.rank)
                    handles.append(context.start_all_reduce("sum", own))
                if when == 3 and job.rank == 0:
                    context.start_all_reduce("sum", np.array(["no sum"]))

            error = outcome(strategy.run, step)
            assert isinstance(error, BadBatch if when < 3 else ValueError)
            assert all(handle.test() for handle in handles)
            for number, handle in enumerate(handles):
                found = outcome(handle.wait)
                if number < when:
                    assert found is None
                    total = sum(number + rank for rank in range(job.size))
                    assert set(handle.wait().tolist()) == {total}
                else:
                    assert isinstance(found, hs.ReplicaError)
            assert_usable(strategy, job)


def test_the_place_of_the_error_is_named(make_strategy: Any, job: Any) -> None:
    if job.size == 1:
        pytest.skip("one rank has its own traceback")

    def step() -> None:
        if job.rank == 1:
            raise BadBatch("no rows")

    with make_strategy(on_error="raise") as strategy:
        error = outcome(strategy.run, step)
        assert isinstance(error, BadBatch)
        if job.rank != 1:
            line = step.__code__.co_firstlineno + 2
            assert f"check_failures.py:{line}): BadBatch: no rows" in str(error)
            assert error.ranks == (1,)


def test_a_rank_that_fails_with_a_plain_exception_raises_it(
    make_strategy: Any, job: Any
) -> None:
    def step() -> None:
        if job.rank == 0:
            raise Exception("no class of its own")

    with make_strategy(on_error="raise") as strategy:
        error = outcome(strategy.run, step)
        if job.rank == 0:
            assert type(error) is Exception
        else:
            assert type(error) is hs.ReplicaError
            assert error.ranks == (0,)


def test_a_rule_that_fails_on_one_rank_changes_nothing(
    make_strategy: Any, job: Any
) -> None:
    def rate(step: int) -> float:
        if step == 1 and job.rank == job.size - 1 and not warned:
            warned.append(step)
            raise ZeroDivisionError
        return 1.0

    warned: list[int] = []
    with make_strategy(on_error="raise") as strategy:
        with strategy.scope():
            weights = hs.Variable(np.zeros(2), name="weights")
            optimizer = optimizers.SGD(rate)

        def step() -> None:
            optimizer.apply_gradients([(np.ones(2), weights)])

        errors = [outcome(strategy.run, step) for _ in range(3)]
        assert [isinstance(e, ZeroDivisionError) for e in errors] == [0, 1, 0]
        assert weights.numpy().tolist() == [-2.0 * job.size] * 2
        assert int(optimizer.iterations.numpy()) == 2


def test_what_one_rank_cannot_assign_none_assigns(make_strategy: Any, job: Any) -> None:
    with make_strategy(on_error="raise") as strategy:
        with strategy.scope():
            mirrored = hs.Variable([1.0, 2.0])
            parts = hs.Variable(0.0, synchronization="on_read", aggregation="mean")
        bad = job.rank == 0
        rows = hs.IndexedSlices(np.ones(1, np.float32), np.array([5 if bad else 0]))
        calls: list[Callable[[], Any]] = [
            lambda: mirrored.assign("text" if bad else [3.0, 4.0]),
            lambda: mirrored.assign(np.ones(3 if bad else 2, np.float32)),
            lambda: mirrored.assign_add(hs.PerReplica([1.0, 1.0]) if bad else [1, 1]),
            lambda: mirrored.scatter_add(rows),
            lambda: parts.assign("text" if bad else 3.0),
        ]
        for number, call in enumerate(calls):
            assert isinstance(outcome(call), (ValueError, TypeError, IndexError)), (
                number
            )
            assert mirrored.numpy().tolist() == [1.0, 2.0], number
            assert float(parts.component) == 0.0, number
        assert_usable(strategy, job)


def test_a_process_that_cannot_be_looked_up_is_not_taken_for_dead(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = strategy.collectives.channel
    if channel is None:
        return

    def no_descriptor(*_: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(headers, "process_stat", no_descriptor)
    assert channel.steps.dead() == []
