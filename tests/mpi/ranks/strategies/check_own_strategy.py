"""A user-defined strategy, as in the recipe, which averages variables every few steps.

The strategy uses all extension points: arguments, variables, steps of optimizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.options import VariableOptions
from hpcstrat.strategies.on_mpi import MpiStrategy
from hpcstrat.strategies.update_backends import Copies
from hpcstrat.variables import SyncOnReadVariable

pytestmark = pytest.mark.rule


class AveragedVariable(SyncOnReadVariable):
    """A variable that outside of replica functions is the mean of all copies."""

    def _initialize(self, initial_value: Any, dtype: Any) -> Any:
        self.synchronization = hs.VariableSynchronization.ON_READ
        self.aggregation = hs.VariableAggregation.MEAN
        return super()._initialize(initial_value, dtype)


class AveragedCopies(Copies):
    """An update backend in which each rank applies its own gradients to its copies."""

    sums_whole = False
    sums_in_place = False

    def reduce(self, gradients: list[Any], out: Any) -> list[Any]:
        # Rows in IndexedSlices need no copy, because merging them makes new arrays.
        return [g if isinstance(g, IndexedSlices) else g.copy() for g in gradients[0]]

    def all_finite(self, finite: bool) -> bool:
        return not self._call("sum", np.int64(not finite), "not finite")

    def gather_whole(self, reduced: list[Any], own: list[Any]) -> list[Any]:
        found: list[Any] = self._call("sum", own, "all gradients")
        return found

    def end_update(self, number: int, targets: Any) -> None:
        if number % self._strategy.every == 0:
            # Average the targets of this step: all variables, and the optimizer's
            # state.
            arrays = [array for _, wholes in targets for array in wholes]
            self._call("mean", arrays, "average", out=arrays)

    def _call(self, op: str, value: Any, what: str, **options: Any) -> Any:
        batch_reduce = self._strategy.collectives.batch_reduce
        label = f"{what} of {self._label}"
        return batch_reduce(hs.ReduceOp.parse(op), value, label, **options)


class AveragingStrategy(MpiStrategy):
    """Training on each rank separately, with averages of variables every few steps."""

    sums_each_step = False

    def __init__(self, every: int, **options: Any) -> None:
        problem = None
        if every < 1:
            problem = ValueError(f"expected every >= 1, found {every}; change it")
        super().__init__(own={"every": every}, problem=problem, **options)
        self.every = every
        self._bind()

    def variable_class(self, options: VariableOptions) -> Any:
        on_read = options.synchronization is hs.VariableSynchronization.ON_READ
        return SyncOnReadVariable if on_read else AveragedVariable

    def update_backend(self) -> type[Copies]:
        return AveragedCopies


@pytest.fixture
def averaging(topology_layout: Any, kept_strategies: dict[str, Any]) -> Any:
    name = f"averaging {topology_layout.name}"
    if name not in kept_strategies:
        each = topology_layout.replicas_per_worker
        kept_strategies[name] = AveragingStrategy(3, replicas_per_worker=each)
    return kept_strategies[name]


def _expected(size: int, steps: int, limit: float) -> Any:
    """Return the value of each replica after some steps of SGD with momentum."""
    values, speeds = np.ones((size, 4)), np.zeros((size, 4))
    for step in range(steps):
        for replica in range(size):
            gradient = np.arange(4.0) * (replica + 1) + step
            # Each replica clips by the norm of its own gradient.
            gradient *= min(1.0, limit / np.linalg.norm(gradient))
            speeds[replica] = 0.5 * speeds[replica] + gradient
            values[replica] -= 0.25 * speeds[replica]
        if (step + 1) % 3 == 0:
            values[:], speeds[:] = values.mean(axis=0), speeds.mean(axis=0)
    return values


def _made(strategy: Any, limit: float = 1e9) -> dict[str, Any]:
    with strategy.scope():
        rule = hs.optimizers.SGD(0.25, momentum=0.5, clip_global_norm=limit)
        return {"w": hs.Variable(np.ones(4), name="w"), "rule": rule}


def _train(strategy: Any, made: dict[str, Any], steps: int) -> Any:
    """Return this replica's value after some steps."""

    def step(number: int) -> Any:
        own = np.arange(4.0) * (strategy.replica_id + 1) + number
        made["rule"].apply_gradients([(own, made["w"])])
        return made["w"].value().copy()

    for number in range(steps):
        value = strategy.run(step, args=(number,))
    return strategy.local_value(value)


@pytest.mark.parametrize(("steps", "limit"), [(2, 1e9), (3, 1e9), (7, 4.0)])
def test_replicas_are_apart_until_the_average(
    averaging: Any, job: Any, steps: int, limit: float
) -> None:
    made = _made(averaging, limit)
    own, expected = _train(averaging, made, steps), _expected(job.size, steps, limit)
    np.testing.assert_allclose(own, expected[job.rank], rtol=1e-12)
    np.testing.assert_allclose(made["w"].numpy(), expected.mean(axis=0), rtol=1e-12)


def test_arguments_of_its_own_are_the_same_on_all_ranks(job: Any) -> None:
    if job.size == 1:
        pytest.skip("there is nobody to differ from")
    with pytest.raises(hs.CollectiveError, match=r"AveragingStrategy\(every=2\)"):
        AveragingStrategy(2 + job.rank % 2)
    with pytest.raises((ValueError, hs.ReplicaError), match="expected every >= 1"):
        AveragingStrategy(0 if job.rank else 2)


def test_what_needs_whole_sums_is_refused(averaging: Any, job: Any) -> None:
    if job.size == 1:
        pytest.skip("the sums of one replica are whole")
    made = _made(averaging)
    pairs = [(np.ones(4), made["w"])]
    with pytest.raises(NotImplementedError, match="expected apply_gradients under"):
        averaging.run(lambda: made["rule"].apply_combined(pairs))
    with averaging.scope():
        rule = hs.optimizers.SGD(0.25, sharded=True)
    with pytest.raises((ValueError, hs.ReplicaError), match="leave out sharded=True"):
        averaging.run(lambda: rule.apply_gradients(pairs))


def test_a_step_is_left_out_on_all_ranks_or_none(job: Any) -> None:
    # Other settings than those of open strategies need a separate communicator.
    comm, settings = hs.Topology.world(), hs.Settings(non_finite="skip")
    with AveragingStrategy(2, comm=comm, settings=settings) as strategy:
        made = _made(strategy)
        bad = np.full(4, np.nan if job.rank == job.size - 1 else 1.0)
        pairs = [(bad, made["w"])]
        updated = strategy.run(lambda: made["rule"].apply_gradients(pairs))
        assert not strategy.local_value(updated)
        assert made["rule"].skipped_steps == 1


def test_saved_values_are_those_of_other_strategies(
    averaging: Any, strategy: Any, job: Any, folder: Path
) -> None:
    made, other = _made(averaging), _made(strategy)
    _train(averaging, made, 2)
    mean = _expected(job.size, 2, 1e9).mean(axis=0)
    with averaging.scope():
        hs.CheckpointManager(folder / "averaging", **made).save(1)
    with strategy.scope():
        hs.CheckpointManager(folder / "averaging", **other).restore()
        np.testing.assert_allclose(other["w"].numpy(), mean, rtol=1e-12)
        hs.CheckpointManager(folder / "mirrored", **other).save(1)
    _train(averaging, made, 1)
    with averaging.scope():
        hs.CheckpointManager(folder / "mirrored", **made).restore()
    own = averaging.local_value(averaging.run(lambda: made["w"].value().copy()))
    np.testing.assert_allclose(own, mean, rtol=1e-12)
    assert int(made["rule"].iterations) == 2
