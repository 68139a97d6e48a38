"""Checkpoints on every rank: saved values are restored on any number of replicas.

Jobs of other sizes are strategies over the first ranks of this job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.errors import CheckpointError, CollectiveError
from tests.mpi.ranks.aggregations import DIVIDED, combined, part_of, signs
from tests.mpi.ranks.saved import KINDS, POLICIES, Counter, fill, make_variable

pytestmark = pytest.mark.files


def _contribution(kind: str, dtype: str, replica: int) -> Any:
    """Return the value that a replica assigns to a variable of shape (2, 3)."""
    own = signs(2, 3) * (1 if kind == "mirrored" else replica + 1)
    if dtype == "int64":
        # The sum over replicas is not divisible by their number, and exceeds float64.
        return np.arange(6).reshape(2, 3) * own + own * (2**54 + 1)
    return ((np.arange(6).reshape(2, 3) + 0.1) * own).astype(dtype)


def _logical(kind: str, dtype: str, count: int) -> Any:
    """Return the expected value of the variable, computed by NumPy in one process."""
    parts = [_contribution(kind, dtype, replica) for replica in range(count)]
    return parts[0] if kind == "mirrored" else combined(kind, parts)


def _check_restored(
    kind: str, variable: Any, value: Any, tolerance: float, strategy: Any
) -> None:
    """Check this replica's component against the rule for the kind of variable."""
    count, replica = strategy.num_replicas_in_sync, strategy.replica_id
    component = variable.component
    part = part_of(kind, value, count, replica)
    within = tolerance if component.dtype.kind == "f" else 0
    np.testing.assert_allclose(component, part, rtol=within)
    if kind in DIVIDED:
        with strategy.scope():
            np.testing.assert_allclose(variable.numpy(), value, rtol=within)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
@pytest.mark.parametrize("saved_as", KINDS[:-1])
def test_every_kind_comes_back_as_every_kind_on_any_number_of_replicas(
    saved_as: str, dtype: str, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    kinds = [
        kind
        for kind in KINDS[:-1]
        if "mean" not in (kind, saved_as) or (dtype != "int64")
    ]
    if saved_as not in kinds:
        return
    tolerance = 1e-6 if saved_as in ("sum", "mean") else 0
    for saved in range(1, job.size + 1):
        path = folder / str(saved)
        if saved in strategies:
            strategy = strategies[saved]
            with strategy.scope():
                x = make_variable(saved_as, np.zeros((2, 3), dtype))
            fill(x, _contribution(saved_as, dtype, strategy.replica_id))
            hs.CheckpointManager(path, x=x).save(saved)
        job.Barrier()
        value = _logical(saved_as, dtype, saved)
        for restoring, strategy in strategies.items():
            for kind in kinds:
                with strategy.scope():
                    x = make_variable(kind, np.full((2, 3), 99, dtype))
                step = hs.CheckpointManager(path, x=x).restore()
                assert step == saved
                one = kind == "sum" and dtype != "int64" and restoring in (1, 2, 4)
                exact = tolerance == 0 and (kind != "sum" or one)
                _check_restored(kind, x, value, 0 if exact else 1e-6, strategy)
        job.Barrier()


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_other_replicas_follow_the_policy(
    policy: str, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    for saved in range(1, job.size + 1):
        path = folder / str(saved)
        if saved in strategies:
            strategy = strategies[saved]
            with strategy.scope():
                x = make_variable("none", np.zeros((2, 3), np.float32))
            fill(x, _contribution("none", "float32", strategy.replica_id))
            hs.CheckpointManager(path, x=x).save(1)
        job.Barrier()
        rows = _logical("none", "float32", saved)
        for restoring, strategy in strategies.items():
            with strategy.scope():
                x = make_variable("none", np.full((2, 3), 99, np.float32))
            manager = hs.CheckpointManager(path, x=x)
            replica = strategy.replica_id
            own = {"first": 0, "cycle": replica % saved, "init": None}
            row = replica if restoring == saved else own.get(policy)
            if restoring != saved and policy == "error":
                with pytest.raises(CheckpointError, match=r"variables/x.*per_replica="):
                    manager.restore(per_replica=policy)
            else:
                manager.restore(per_replica=policy)
            wanted = np.full((2, 3), 99, np.float32) if row is None else rows[row]
            np.testing.assert_array_equal(x.component, wanted)
        job.Barrier()


def test_rows_of_all_replicas_go_into_no_single_value(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    with strategy.scope():
        x = make_variable("none", np.zeros(3))
    hs.CheckpointManager(folder, x=x).save(1)
    for kind in KINDS[:-1]:
        with strategy.scope():
            y = make_variable(kind, np.full(3, 5.0))
        with pytest.raises(CheckpointError, match="variables/x has a value for each"):
            hs.CheckpointManager(folder, x=y).restore()
        np.testing.assert_array_equal(y.component, np.full(3, 5.0))


def test_unknown_policy_is_refused(strategy: Any, folder: Path) -> None:
    with strategy.scope():
        x = hs.Variable(1.0)
    manager = hs.CheckpointManager(folder, x=x)
    manager.save(1)
    with pytest.raises(ValueError, match="per_replica"):
        manager.restore(per_replica="last")


def _dtypes() -> list[str]:
    whole = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    floats = ["float16", "float32", "float64", "complex64", "complex128"]
    return ["bool", *whole, *floats, "bfloat16"]


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


@pytest.mark.parametrize("name", _dtypes())
def test_every_dtype_comes_back_bit_for_bit(
    name: str, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    dtype, strategy = _dtype(name), strategies[job.size]
    bits = np.random.default_rng(5).integers(0, 256, 24 * dtype.itemsize, np.uint8)
    if name == "bool":
        bits &= 1
    shapes = {"full": (2, 3, 4), "scalar": (), "empty": (0, 3), "none": (0,)}

    def make(fill: bool) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, shape in shapes.items():
            count = int(np.prod(shape)) * dtype.itemsize
            value = bits[:count] if fill else np.zeros(count, np.uint8)
            array = value.view(dtype).reshape(shape)
            for kind in ("mirrored", "only_first_replica", "none"):
                made[f"{key}_{kind}"] = make_variable(kind, array, f"{key}_{kind}")
        return made

    with strategy.scope():
        first, second = make(True), make(False)
    hs.CheckpointManager(folder, x=first).save(1)
    hs.CheckpointManager(folder, x=second).restore()
    for key, variable in second.items():
        assert variable.dtype == dtype
        assert variable.component.tobytes() == first[key].component.tobytes(), key


@pytest.mark.parametrize(
    "name", ["uint8", "uint64", "float16", "complex64", "bfloat16", "bool"]
)
def test_sums_of_unusual_types_come_back(
    name: str, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    dtype, strategy = _dtype(name), strategies[job.size]
    with strategy.scope():
        first = make_variable("sum", np.zeros((2, 3), dtype))
        second = make_variable("sum", np.full((2, 3), 1, dtype))
    own = 2**62 + 1 if name == "uint64" else 1 + (name == "uint8") * 20
    fill(first, np.asarray(own if strategy.replica_id < 3 else 0).astype(dtype))
    if name == "bool":
        with pytest.raises((ValueError, CollectiveError, CheckpointError)):
            hs.CheckpointManager(folder, x=first).save(1)
        return
    hs.CheckpointManager(folder, x=first).save(1)
    hs.CheckpointManager(folder, x=second).restore()
    with strategy.scope():
        total, again = first.numpy(), second.numpy()
    if dtype.kind == "u":
        np.testing.assert_array_equal(again, total)
    else:
        tolerance = 1e-6 if name == "complex64" else 2e-2
        np.testing.assert_allclose(
            again.astype(np.complex128), total.astype(np.complex128), rtol=tolerance
        )


def test_negative_totals_are_divided_exactly(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    strategy = strategies[job.size]
    totals = np.arange(-9, 9, dtype=np.int32)
    with strategy.scope():
        first, second = (make_variable("sum", np.zeros(18, np.int32)) for _ in range(2))
        first.assign(totals)
    hs.CheckpointManager(folder, x=first).save(1)
    hs.CheckpointManager(folder, x=second).restore()
    parts = job.allgather(second.component)
    np.testing.assert_array_equal(np.sum(parts, axis=0), totals)
    assert np.ptp(parts, axis=0).max() <= 1


def test_structures_and_names_beyond_ascii(strategy: Any, folder: Path) -> None:
    def make(scale: float) -> dict[str, Any]:
        parts = [hs.Variable(np.full(k + 1, scale * k)) for k in range(12)]
        return {
            "größe": hs.Variable(scale),
            "net": {"層": {"β": hs.Variable(2 * scale)}, "parts": parts, 7: parts[3]},
            "pair": (hs.Variable(3 * scale), [hs.Variable(4 * scale)]),
            "none": {},
        }

    with strategy.scope():
        first, second = make(1.0), make(0.0)
    hs.CheckpointManager(folder, **first).save(1)
    hs.CheckpointManager(folder, **second).restore()
    assert second["größe"].numpy() == 1.0
    assert second["net"]["層"]["β"].numpy() == 2.0
    assert second["pair"][1][0].numpy() == 4.0
    for k, part in enumerate(second["net"]["parts"]):
        np.testing.assert_array_equal(part.numpy(), np.full(k + 1, 1.0 * k))


class Training:
    """A small model that is trained with momentum on a shuffled dataset."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        rows = np.random.default_rng(1).standard_normal((37, 3)).astype(np.float32)
        with strategy.scope():
            self.w = hs.Variable(np.full(3, 0.5, np.float32), name="w")
            self.seen = make_variable("sum", np.int64(0), "seen")
            self.optimizer = hs.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
        dataset = hs.Dataset(rows, 8, shuffle=True, seed=4)
        self.data = strategy.experimental_distribute_dataset(dataset)

    def manager(self, folder: Path) -> Any:
        """Return a checkpoint manager that saves all of the training state."""
        objects = {"w": self.w, "seen": self.seen, "optimizer": self.optimizer}
        return hs.CheckpointManager(folder, data=self.data, **objects)

    def train(self, batches: Iterator[Any], steps: int) -> None:
        """Train for some steps; the gradient depends on the weights."""

        def step(batch: Any) -> None:
            gradient = (batch * self.w.value()).sum(axis=0, dtype=np.float32)
            self.optimizer.apply_gradients([(gradient, self.w)])
            self.seen.assign_add(len(batch))

        for _ in range(steps):
            self.strategy.run(step, args=(next(batches),))

    def state(self) -> dict[str, bytes]:
        """Return all state that must be equal, bit for bit."""
        with self.strategy.scope():
            found = {"w": self.w.numpy(), "seen": self.seen.numpy()}
        for name, variable in self.optimizer.checkpoint_variables().items():
            found[name] = variable.component
        position = repr(self.data.state()).encode()
        return {k: v.tobytes() for k, v in found.items()} | {"position": position}


def test_training_goes_on_bit_for_bit(
    make_strategy: Callable[..., Any], folder: Path
) -> None:
    """Also restore optimizer state that is only created after the restore."""
    strategy = make_strategy()
    first, second, built = (Training(strategy) for _ in range(3))
    batches = iter(first.data)
    first.train(batches, 3)
    first.manager(folder).save()
    first.train(batches, 2)
    built.optimizer.build([built.w])
    for other in (second, built):
        assert other.manager(folder).restore_or_initialize() == 3
        assert other.data.state()["global_position"] == 24
        other.train(iter(other.data), 2)
        assert other.state() == first.state()
    strategy.close()


def test_save_right_after_a_restore_keeps_what_no_variable_holds_yet(
    make_strategy: Callable[..., Any], folder: Path
) -> None:
    strategy = make_strategy()
    first, second, third = (Training(strategy) for _ in range(3))
    batches = iter(first.data)
    first.train(batches, 3)
    first.manager(folder).save()
    second.manager(folder).restore()
    second.manager(folder / "again").save()
    third.manager(folder / "again").restore()
    first.train(batches, 2)
    third.train(iter(third.data), 2)
    assert third.state() == first.state()
    strategy.close()


def test_positions_and_plain_state_come_back_on_other_numbers_of_replicas(
    strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    def make(strategy: Any) -> dict[str, Any]:
        data = hs.Dataset(np.arange(23), 5, shuffle=True, seed=9)
        with strategy.scope():
            return {
                "x": hs.Variable(1.0),
                "data": strategy.experimental_distribute_dataset(data),
                "counter": Counter(),
            }

    if 1 in strategies:
        state = make(strategies[1])
        seen: list[int] = []
        for _, batch in zip(range(2), state["data"], strict=False):
            seen += batch.tolist()
        state["counter"].state = {"größe": 7, "list": [1, None, 2.5]}
        hs.CheckpointManager(folder, **state).save(1)
    else:
        seen = []
    seen = job.bcast(seen)
    for strategy in strategies.values():
        state = make(strategy)
        hs.CheckpointManager(folder, **state).restore()
        assert state["counter"].state == {"größe": 7, "list": [1, None, 2.5]}
        rest: list[int] = []
        for batch in state["data"]:
            rest += strategy.gather(batch, axis=0).tolist()
        assert sorted(seen + rest) == list(range(23))
