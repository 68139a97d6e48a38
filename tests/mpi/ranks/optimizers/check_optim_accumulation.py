"""Accumulated gradients survive checkpoints, lost ranks and bad batches.

The expected values are those of one process without interruptions. Lost ranks only take
no part here; `test_elastic.py` kills them.
"""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import optimizers
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.outcomes import outcome

pytestmark = pytest.mark.rule


DATA = Path(__file__).parents[3] / "old_files"
CALLS = 7
MOST = 4


@dataclass
class Plan:
    """The gradients of each call, and the replicas that have them."""

    seed: int
    steps: int = 3
    op: str = "sum"
    missing: str = "zeros"
    totals: Any = field(init=False)
    has: Any = field(init=False)
    noise: Any = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.totals = rng.standard_normal((CALLS, 3, 2))
        # Whether a replica has gradients of the second and third variable in a call;
        # all replicas have gradients of the first variable.
        self.has = rng.random((CALLS, 2, MOST)) < rng.choice([0.0, 0.3, 0.8])
        if self.missing == "error":
            self.has[...] = self.has[:, :, :1]
        self.noise = rng.standard_normal((CALLS, 3, MOST, 2))

    def owners(self, call: int, count: int) -> list[list[int]]:
        """Return for each variable the replicas that have a gradient."""
        return [
            [r for r in range(count) if number == 0 or self.has[call, number - 1, r]]
            for number in range(3)
        ]

    def gradients(self, call: int, replica: int, count: int) -> list[Any]:
        """Return the gradients of a replica, which add up to the totals."""
        given: list[Any] = []
        for number, owners in enumerate(self.owners(call, count)):
            if replica not in owners:
                given.append(None)
                continue
            noise = self.noise[call, number, owners]
            noise = noise - noise.mean(axis=0)
            part = self.totals[call, number] / len(owners)
            part = part + noise[owners.index(replica)]
            given.append(part * count if self.op == "mean" else part)
        return given

    def expected(self, counts: list[int]) -> list[Any]:
        """Return the final variables, for the number of replicas in each call."""
        values, speeds = np.zeros((3, 2)), np.zeros((3, 2))
        for first in range(0, CALLS - self.steps + 1, self.steps):
            calls = range(first, first + self.steps)
            for number in range(3):
                some = [c for c in calls if self.owners(c, counts[c])[number]]
                if not some:
                    continue
                gradient = sum(self.totals[c, number] for c in some)
                if self.op == "mean":
                    gradient = gradient / self.steps
                speeds[number] = 0.5 * speeds[number] - gradient
                values[number] += speeds[number]
        return list(values)


class Program:
    """Variables and an optimizer, made again after each interruption."""

    def __init__(self, plan: Plan, strategy: Any, build: bool = False) -> None:
        self.plan, self.strategy = plan, strategy
        with strategy.scope():
            self.variables = [hs.Variable(np.zeros(2), name=f"v/{n}") for n in "abc"]
            self.optimizer = optimizers.SGD(
                *(1.0, 0.5),
                accumulate_steps=plan.steps,
                aggregation=plan.op,
                missing_gradients=plan.missing,
            )
        if build:
            strategy.run(self.optimizer.build, args=(self.variables,))
        self.objects = {"model": self.variables, "optimizer": self.optimizer}

    def train(self, calls: range) -> None:
        """Make some calls, each with this replica's gradients."""
        count, own = self.strategy.num_replicas_in_sync, self.strategy.replica_id
        for call in calls:
            given = self.plan.gradients(call, own, count)
            pairs = list(zip(given, self.variables, strict=True))
            self.strategy.run(self.optimizer.apply_gradients, args=(pairs,))

    def check(self, counts: list[int]) -> None:
        """Assert that the variables equal those of one process."""
        wanted = self.plan.expected(counts)
        found = [variable.numpy() for variable in self.variables]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def among(job: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that returns a strategy over ordered ranks; None elsewhere."""
    made: dict[tuple[int, ...], Any] = {}

    def of(ranks: tuple[int, ...]) -> Any:
        if ranks not in made:
            inside = job.rank in ranks
            key = ranks.index(job.rank) if inside else job.rank
            part = job.Split(int(not inside), key)
            kind = hs.MultiWorkerMirroredStrategy
            made[ranks] = (part, kind(comm=part) if inside else None)
        return made[ranks][1]

    yield of
    for part, strategy in made.values():
        if strategy is not None:
            strategy.close()
        part.Free()


def _plans(count: int) -> list[Plan]:
    choices = itertools.product((2, 3), ("sum", "mean"), ("zeros", "error"))
    every = list(choices)
    plans = [Plan(seed, *every[seed]) for seed in range(len(every))]
    # The first four plans contain each pair of choices once.
    return [plans[seed] for seed in (3, 5, 6, 0, 1, 2, 4, 7)][:count]


def _interrupted(
    job: Any, among: Any, folder: Path, plan: Plan, parts: list[tuple[int, int]]
) -> None:
    """Train on some replicas, save, and continue on another number of replicas."""
    start, counts, saved = 0, [], False
    for number, (count, stop) in enumerate(parts):
        strategy = among(tuple(range(count)))
        if strategy is not None:
            program = Program(plan, strategy, build=plan.seed % 3 == 0)
            manager = hs.CheckpointManager(folder, **program.objects)
            if saved:
                manager.restore()
            program.train(range(start, stop))
            if stop < CALLS:
                manager.save(number)
        counts += [count] * (stop - start)
        start, saved = stop, True
        job.Barrier()
        if strategy is not None and stop == CALLS:
            program.check(counts)


@pytest.mark.parametrize("plan", _plans(len(seeds(8))), ids=lambda plan: f"{plan.seed}")
def test_sums_go_on_on_any_number_of_replicas(
    job: Any, among: Any, folder: Path, plan: Plan
) -> None:
    counts = range(1, job.size + 1)
    cases = list(itertools.product(counts, counts, range(1, CALLS)))
    rng = np.random.default_rng(plan.seed)
    for number in rng.permutation(len(cases))[:6]:
        before, after, split = cases[number]
        parts = [(before, split), (after, CALLS)]
        _interrupted(job, among, folder / f"{number}", plan, parts)


def test_sums_of_an_older_version_go_on(strategy: Any, job: Any, folder: Path) -> None:
    # Two replicas saved this file with a version that did not store their number for
    # the division of sums.
    if job.rank == 0:
        shutil.copyfile(DATA / "accumulating.h5", folder / "ckpt-0000000002.h5")
    job.Barrier()
    program = Program(Plan(1, 3, "mean", "zeros"), strategy)
    assert hs.CheckpointManager(folder, **program.objects).restore() == 2
    program.train(range(2, CALLS))
    program.check([2, 2, *[job.size] * (CALLS - 2)])


@pytest.mark.parametrize("plan", _plans(4), ids=lambda plan: f"{plan.seed}")
def test_sums_that_wait_for_their_variables_are_saved_again(
    job: Any, among: Any, folder: Path, plan: Plan
) -> None:
    # Three numbers of replicas in a row; the second one makes no call.
    n = job.size
    for number, counts in enumerate([(n, 1, n), (1, n, 1), (n, max(1, n - 1), 1)]):
        parts = list(zip(counts, (2, 2, CALLS), strict=True))
        _interrupted(job, among, folder / f"{number}", plan, parts)


@pytest.mark.parametrize("way", ["file", "memory"])
def test_gradients_that_differ_after_a_restore_are_refused(
    strategy: Any, job: Any, folder: Path, way: str
) -> None:
    # At the restore, no replica has had a gradient of the second variable; then the
    # first replica has one, and the third variable has none on the others.
    plan = Plan(0, steps=2, missing="error")
    memory = hs.elastic.Memory()

    def program(restores: bool) -> Program:
        made = Program(plan, strategy)
        if way == "memory":
            memory.begin(strategy, 1 + restores)
            memory.track(**made.objects)
            assert memory.restore() == (0 if restores else None)
        elif restores:
            assert hs.CheckpointManager(folder, **made.objects).restore() == 0
        return made

    def apply(to: Program, *given: float | None) -> None:
        gradients = [None if x is None else np.full(2, x) for x in given]
        pairs = list(zip(gradients, to.variables, strict=True))
        strategy.run(to.optimizer.apply_gradients, args=(pairs,))

    first = program(False)
    apply(first, 1.0, None, 1.0)
    if way == "memory":
        memory.commit(0)
    else:
        hs.CheckpointManager(folder, **first.objects).save(0)
    is_first = job.rank == 0
    error = outcome(apply, program(True), 1.0, 1.0 if is_first else None, 1.0)
    if job.size > 1:
        assert isinstance(error, hs.CollectiveError), repr(error)
        assert "without gradients for v/b" in str(error)
    else:
        assert error is None
    again = program(True)
    apply(again, 1.0, None, 1.0 if is_first else None)
    totals = [2.0 * job.size, 0.0, job.size + 1.0]
    for variable, total in zip(again.variables, totals, strict=True):
        np.testing.assert_array_equal(variable.numpy(), [-total, -total])


def _lose(
    job: Any, among: Any, plan: Plan, groups: list[tuple[int, ...]], stops: list[int]
) -> None:
    """Train on some ranks, then continue on others from `hs.elastic.Memory`."""
    memory = hs.elastic.Memory(partner_copies=True)
    start, counts = 0, []
    for number, (ranks, stop) in enumerate(zip(groups, stops, strict=True)):
        strategy = among(ranks)
        if strategy is not None:
            program = Program(plan, strategy, build=plan.seed % 3 == 0)
            memory.begin(strategy, 1 + number)
            memory.track(**program.objects)
            assert memory.restore() == (start if number else None)
            memory.commit(start)
            for call in range(start, stop):
                program.train(range(call, call + 1))
                memory.commit(call + 1)
            if stop < CALLS:
                # Train one step after the commit, which is lost and then repeated.
                program.train(range(stop, stop + 1))
        counts += [len(ranks)] * (stop - start)
        start = stop
        job.Barrier()
        if strategy is not None and stop == CALLS:
            program.check(counts)


@pytest.mark.parametrize("plan", _plans(len(seeds(8))), ids=lambda plan: f"{plan.seed}")
def test_sums_outlive_the_loss_of_any_rank(job: Any, among: Any, plan: Plan) -> None:
    everyone = tuple(range(job.size))
    rng = np.random.default_rng(plan.seed)
    for lost in everyone:
        left = tuple(rank for rank in everyone if rank != lost)
        split = int(rng.integers(1, CALLS))
        if left:
            _lose(job, among, plan, [everyone, left], [split, CALLS])
        if len(left) > 1:
            # The rank that waits as a spare rank replaces the last rank.
            spare = (*left[:-1], lost)
            _lose(job, among, plan, [left, spare], [split, CALLS])
    if job.size > 2:
        stops = sorted(rng.choice(np.arange(1, CALLS), 2, replace=False).tolist())
        groups = [everyone, everyone[1:], everyone[2:]]
        _lose(job, among, plan, groups, [*stops, CALLS])
    _lose(job, among, plan, [everyone, everyone], [2, CALLS])


LIMIT = 1.5


def _run_of(plan: Plan, program: Program, calls: list[int], fault: Any) -> None:
    """Make calls in one ``run``, in which one replica may fail at one place."""
    strategy, failing, place, how = program.strategy, *fault
    count, own = strategy.num_replicas_in_sync, strategy.replica_id

    def run() -> None:
        for index, call in enumerate(calls):
            pairs = list(
                zip(plan.gradients(call, own, count), program.variables, strict=True)
            )
            if own == failing and index == place:
                if how == "function":
                    raise ValueError("a bad batch")
                pairs[0] = (np.zeros(5), program.variables[0])
            program.optimizer.apply_gradients(pairs)
        if own == failing and place == len(calls):
            raise ValueError("a bad batch")

    strategy.run(run)


class Oracle:
    """The same training in one process; a run that fails adds nothing."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.values, self.speeds = np.zeros((3, 2)), np.zeros((3, 2))
        self.calls: list[int] = []
        self.steps = 0

    def run(self, calls: list[int], fault: Any, count: int) -> None:
        """Compute the effect of a run on all replicas."""
        failing, place, _ = fault
        fails = 0 <= failing < count
        before = list(self.calls)
        for call in calls[:place] if fails else calls:
            self.calls.append(call)
            if len(self.calls) == self.plan.steps:
                self._step(count)
                self.calls, before = [], []
        if fails:
            self.calls = before

    def _step(self, count: int) -> None:
        plan = self.plan
        gradients = np.zeros((3, 2))
        has = np.zeros(3, bool)
        for call in self.calls:
            for number, owners in enumerate(plan.owners(call, count)):
                if owners:
                    has[number] = True
                    gradients[number] += plan.totals[call, number]
        gradients /= plan.steps if plan.op == "mean" else 1
        norm = np.sqrt((gradients[has] ** 2).sum())
        gradients *= min(1.0, LIMIT / norm)
        self.speeds[has] = 0.5 * self.speeds[has] - gradients[has]
        self.values[has] += self.speeds[has]
        self.steps += 1


@pytest.mark.parametrize("seed", seeds(6))
def test_runs_that_fail_on_one_replica_add_nothing_on_any(
    make_strategy: Any, job: Any, folder: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    plan = _plans(8)[seed]
    with make_strategy(on_error="raise") as strategy:
        program, oracle = Program(plan, strategy), Oracle(plan)
        program.optimizer.clip_global_norm = LIMIT
        for number in range(14):
            calls = rng.integers(CALLS, size=rng.integers(1, 4)).tolist()
            failing = int(rng.integers(job.size)) if rng.random() < 0.4 else -1
            how = str(rng.choice(["function", "gradient"]))
            fault = failing, int(rng.integers(len(calls) + 1)), how
            error = outcome(_run_of, plan, program, calls, fault)
            assert isinstance(error, ValueError) == (failing >= 0), error
            oracle.run(calls, fault, job.size)
            found = [variable.numpy() for variable in program.variables]
            np.testing.assert_allclose(found, oracle.values, rtol=0, atol=1e-12)
            assert int(program.optimizer.iterations) == oracle.steps
            # Gradients that a run added and withdrew are in no checkpoint, and no
            # commit.
            keep = rng.choice(["nowhere", "in a file", "in memory"], p=[0.6, 0.2, 0.2])
            if keep == "in a file":
                hs.CheckpointManager(folder, **program.objects).save(number)
            elif keep == "in memory":
                memory = hs.elastic.Memory(partner_copies=True)
                memory.begin(strategy, 1)
                memory.track(**program.objects)
                memory.restore()
                memory.commit(number)
            if keep != "nowhere":
                program = Program(plan, strategy)
                program.optimizer.clip_global_norm = LIMIT
            if keep == "in a file":
                hs.CheckpointManager(folder, **program.objects).restore()
            elif keep == "in memory":
                memory.begin(strategy, 2)
                memory.track(**program.objects)
                assert memory.restore() == number


def test_one_bad_batch_costs_one_batch(make_strategy: Any, job: Any) -> None:
    with make_strategy(on_error="raise") as strategy:
        with strategy.scope():
            variable = hs.Variable(np.zeros(1), name="v")
            optimizer = optimizers.SGD(1.0, accumulate_steps=2)

        def step(number: int) -> bool:
            if number == 4 and job.rank == job.size - 1:
                raise ArithmeticError("a bad batch")
            return optimizer.apply_gradients([(np.ones(1) / job.size, variable)])

        errors = [outcome(strategy.run, step, args=(n,)) for n in range(40)]
    assert [n for n, error in enumerate(errors) if error is not None] == [4]
    assert int(optimizer.iterations) == 19
    np.testing.assert_allclose(variable, [-38], rtol=1e-12)


def test_nan_in_a_sum_does_not_stay(make_strategy: Any, job: Any) -> None:
    settings = hs.Settings(non_finite="raise")
    with make_strategy(on_error="raise", comm=job, settings=settings) as strategy:
        with strategy.scope():
            variable = hs.Variable(np.zeros(1), name="v")
            optimizer = optimizers.SGD(1.0, accumulate_steps=2)
        bad = [np.nan if n == 2 and job.rank == 0 else 1.0 for n in range(8)]
        errors = [
            outcome(
                strategy.run,
                *(optimizer.apply_gradients, ([(np.array([number]), variable)],)),
            )
            for number in bad
        ]
    assert [type(error).__name__ for error in errors if error] == ["NonFiniteError"]
    np.testing.assert_array_equal(variable, [-6 * job.size])


def test_numbers_out_of_range_take_no_replica_out(strategy: Any, job: Any) -> None:
    with strategy.scope():
        variable = hs.Variable(np.zeros(2, np.float32), name="v")
        optimizer = optimizers.Adam(
            *(1.0,), accumulate_steps=2, clip_global_norm=1.0, aggregation="mean"
        )
        metric = hs.metrics.Mean()

    def step() -> None:
        # One replica has gradients that are too large and too small for the variable's
        # type.
        gradient = np.array([1e300, 1e-300]) if job.rank == 0 else np.ones(2)
        optimizer.apply_gradients([(gradient, variable)])
        metric.update_state(gradient, gradient)
        hs.compute_average_loss(gradient, gradient)

    with np.errstate(all="raise"):
        for _ in range(4):
            assert outcome(strategy.run, step) is None
        metric.result()
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("name", ["old", "v"])
def test_the_garbage_collector_decides_nothing(
    make_strategy: Any, job: Any, folder: Path, name: str
) -> None:
    gc.disable()
    try:
        with make_strategy() as strategy:
            with strategy.scope():
                optimizer = optimizers.SGD(1.0, 0.5)
                variables = [hs.Variable(np.zeros(1), name=n) for n in (name, "v")]
            # Make a reference cycle, like a model that refers to itself.
            cycle: list[Any] = [variables.pop(0)]
            cycle.append(cycle)
            manager = hs.CheckpointManager(folder, v=variables, optimizer=optimizer)
            for variable in (cycle[0], *variables):
                pairs = [(np.ones(1), variable)]
                strategy.run(optimizer.apply_gradients, args=(pairs,))
            del cycle, variable, pairs
            if job.rank == 0:
                gc.collect()
            manager.save(1)
            assert list(optimizer.checkpoint_variables()) == [
                "iterations",
                "momentum/v",
            ]
    finally:
        gc.enable()
