"""Checkpoints of replicas of several ranks, restored by any number of these."""

from __future__ import annotations

import errno
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.file import extents
from hpcstrat.checkpoint.file.image import ImageMemory
from hpcstrat.checkpoint.file.reader import open_checkpoint
from hpcstrat.checkpoint.restore import parallel_read
from hpcstrat.checkpoint.save import part_exchange, part_writer
from hpcstrat.errors import CheckpointError, DivergenceError
from hpcstrat.variables import DividedVariable
from tests.folders import listed
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.outcomes import outcome
from tests.mpi.ranks.saved import make_variable

pytestmark = pytest.mark.algorithm

DTYPES = ("float64", "float32", "int16", "bool", "complex128", "float16")


@pytest.fixture(scope="module")
def strategies(job: Any) -> Iterator[dict[int, Any]]:
    """Yield strategies by the number of ranks of their replicas."""
    counts = [count for count in range(1, job.size + 1) if job.size % count == 0]
    # With 3 ranks, workers of unequal sizes.
    workers = 2 if job.size > 2 else None
    with ExitStack() as stack:
        yield {
            count: stack.enter_context(
                hs.MultiWorkerMirroredStrategy(
                    ranks_per_replica=count, replicas_per_worker=workers
                )
            )
            for count in counts
        }


@pytest.fixture
def divided(strategies: dict[int, Any]) -> Any:
    """Return the strategy with all ranks in one replica."""
    return strategies[max(strategies)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small files consist of many blocks, and save them in many rounds."""
    monkeypatch.setattr(extents, "_LEAST_BLOCK_BYTES", 4096)
    monkeypatch.setattr(part_exchange, "_ROUND_BYTES", 8192)


def _draw(rng: Any) -> tuple[Any, list[int | None]]:
    """Return a random array, and axes along which strategies divide it, or None."""
    shape = tuple(rng.choice([1, 2, 3, 7, 20, 41], rng.integers(1, 5)).tolist())
    value = 100 * rng.standard_normal(shape)
    value = value.astype(DTYPES[rng.integers(len(DTYPES))])
    axes = [None, *range(len(shape)), "on"]
    return value, [axes[k] for k in rng.integers(0, len(axes), 8)]


def _variable(strategy: Any, whole: Any, split: Any, name: str) -> Any:
    """Return a variable that the ranks of a replica divide along an axis, or do not.

    With "on" as ``split``, one rank of each replica has it.
    """
    own = whole
    if split == "on":
        with strategy.scope():
            return hs.Variable(own, on=whole.size % strategy.inside.size, name=name)
    if split is not None:
        rows = strategy.inside.part(whole.shape[split])
        own = whole[(slice(None),) * split + (rows,)]
    with strategy.scope():
        return hs.Variable(own, split=split, name=name)


def _check(variable: Any, whole: Any) -> None:
    found = variable.numpy()
    assert found.dtype == whole.dtype
    assert found.shape == whole.shape
    assert found.tobytes() == whole.tobytes()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", seeds(24))
def test_any_division_is_restored_into_any_other(
    seed: int, job: Any, strategies: dict[int, Any], folder: Path
) -> None:
    rng = np.random.default_rng(seed)
    drawn = [_draw(rng) for _ in range(rng.integers(1, 5))]
    for number, (count, strategy) in enumerate(strategies.items()):
        variables = [
            _variable(strategy, whole, axes[number], f"v{k}")
            for k, (whole, axes) in enumerate(drawn)
        ]
        kinds = [isinstance(each, DividedVariable) for each in variables]
        splits = [axes[number] is not None for _, axes in drawn]
        assert kinds == [split and count > 1 for split in splits]
        with hs.CheckpointManager(folder / str(count), net=variables) as manager:
            path = manager.save(1, asynchronous=bool(seed % 2))
            for variable in variables:
                # A save in the background has copied all values.
                variable.component[...] = 0
        assert open_checkpoint(path).header.num_replicas == job.size // count
        with h5py.File(path, "r", locking=False) as file:
            for k, (whole, _) in enumerate(drawn):
                assert file[f"variables/net/{k}"][()].tobytes() == whole.tobytes()
        for shift, other in enumerate(strategies.values(), start=1):
            variables = [
                _variable(other, np.zeros_like(whole), axes[-shift], f"v{k}")
                for k, (whole, axes) in enumerate(drawn)
            ]
            with hs.CheckpointManager(folder, net=variables) as manager:
                assert manager.restore(path) == 1
                assert manager.last_restore.verified
            for variable, (whole, _) in zip(variables, drawn, strict=True):
                _check(variable, whole)
            other.check_divergence()


@pytest.mark.usefixtures("small_blocks")
def test_grids_of_ranks_are_restored_into_any_other_division(
    job: Any, strategies: dict[int, Any], folder: Path
) -> None:
    """Two axes of the array are divided, or ranks along an axis have equal parts."""
    x = 2 if job.size % 2 == 0 else 1
    whole = np.random.default_rng(5).standard_normal((13, 1, 41, 7))
    splits = [{"x": 2, "y": 0}, {"x": 3, "y": 2}, {"x": 0}, {"y": 3}]
    shape = {"x": x, "y": job.size // x}
    with hs.MultiWorkerMirroredStrategy(replica_shape=shape) as grid:
        variables = []
        for split in splits:
            own = [slice(None)] * whole.ndim
            for along, axis in split.items():
                own[axis] = grid.inside.part(whole.shape[axis], along)
            with grid.scope():
                part = whole[tuple(own)]
                variables.append(hs.Variable(part, split=split, name=f"v{split}"))
        manager = hs.CheckpointManager(folder / "grid", net=variables)
        path = manager.save(1, asynchronous=True)
        for variable in variables:
            variable.component[...] = 0
        manager.wait()
        manager.restore()
        for variable in variables:
            _check(variable, whole)
    for count, other in strategies.items():
        axes = [None, 0, 2, 3]
        lines = [
            _variable(other, np.zeros_like(whole), axis, f"w{axis}") for axis in axes
        ]
        manager = hs.CheckpointManager(folder / str(count), net=lines)
        manager.restore(path)
        for line in lines:
            _check(line, whole)


def _train(strategy: Any, optimizer: Any, variables: Any, steps: range) -> None:
    """Make steps whose gradients depend on the step and on the element."""

    def step(number: int) -> None:
        found = []
        for variable in variables:
            whole = np.arange(1.0, 1 + 5 * 6).reshape(5, 6)
            if variable.split is not None:
                whole = whole[strategy.inside.region(whole.shape, variable.split)]
            found.append(whole / strategy.num_replicas_in_sync * np.cos(number))
        optimizer.apply_gradients(zip(found, variables, strict=True))

    for number in steps:
        strategy.run(step, args=(number,))


@pytest.mark.parametrize(("builds", "accumulate"), [(True, 3), (False, 1)])
def test_training_continues_with_another_division(
    builds: bool, accumulate: int, job: Any, strategies: dict[int, Any], folder: Path
) -> None:
    """Optimizers have state of each part; programs may make it before or after."""
    start = np.random.default_rng(1).standard_normal((5, 6))

    def made(strategy: Any, axis: int | str | None) -> dict[str, Any]:
        names = {"f": axis, "g": None}
        variables = [_variable(strategy, start, a, n) for n, a in names.items()]
        with strategy.scope():
            optimizer = hs.optimizers.Adam(0.01, accumulate_steps=accumulate)
        return {"variables_": variables, "optimizer": optimizer}

    found = []
    for count, strategy in strategies.items():
        whole = made(strategy, None)
        _train(strategy, whole["optimizer"], whole["variables_"], range(7))
        objects = made(strategy, count % 2 if builds else "on")
        _train(strategy, objects["optimizer"], objects["variables_"], range(4))
        path = hs.CheckpointManager(folder / str(count), **objects).save(4)
        for other in strategies.values():
            objects = made(other, 0)
            if builds:
                with other.scope():
                    objects["optimizer"].build(objects["variables_"])
            hs.CheckpointManager(folder, **objects).restore(path)
            _train(other, objects["optimizer"], objects["variables_"], range(4, 7))
            for variable, wanted in zip(
                objects["variables_"], whole["variables_"], strict=True
            ):
                np.testing.assert_allclose(
                    variable.numpy(), wanted.numpy(), rtol=1e-12, atol=0
                )
            found.append(objects["variables_"][0].numpy())
            other.check_divergence()


def test_state_of_replicas_has_the_replica_as_its_unit(
    job: Any, strategies: dict[int, Any], folder: Path
) -> None:
    def rows_of(batches: Any) -> list[float]:
        """Return this replica's rows of the next batch."""
        [own] = strategy.experimental_local_results(next(batches))
        return [float(row) for row in own]

    for count, strategy in strategies.items():
        replica, replicas = strategy.replica_id, job.size // count
        with strategy.scope():
            objects = {
                "rows": make_variable("none", np.zeros((3, 5)), "rows"),
                "seen": make_variable("sum", np.int64(0), "seen"),
                "mean": make_variable("mean", np.float64(0), "mean"),
            }
        streams = strategy.random("noise", seed=3)
        data = strategy.experimental_distribute_dataset(
            hs.Dataset(np.arange(24.0), batch_size=4, shuffle=True, seed=1)
        )
        manager = hs.CheckpointManager(folder, streams=streams, data=data, **objects)
        rows = np.arange(15.0).reshape(3, 5) + replica
        objects["rows"].component[...] = rows
        objects["seen"].component[...] = replica + 1
        objects["mean"].component[...] = replica
        streams.generator.standard_normal(replica + 1)
        batches = iter(data)
        next(batches)
        path = manager.save(count)
        wanted = streams.generator.standard_normal(2).tolist(), rows_of(batches)
        for name in ("rows", "seen", "mean"):
            objects[name].component[...] = -1
        manager.restore(path)
        assert objects["rows"].component.tobytes() == rows.tobytes()
        with strategy.scope():
            assert objects["seen"].numpy() == replicas * (replicas + 1) // 2
            assert objects["mean"].numpy() == (replicas - 1) / 2
        assert streams.generator.standard_normal(2).tolist() == wanted[0]
        assert rows_of(iter(data)) == wanted[1]
        with h5py.File(path, "r", locking=False) as file:
            assert file["variables/rows"].shape == (replicas, 3, 5)
            np.testing.assert_array_equal(
                file["variables/rows"][:, 0, 0], np.arange(replicas)
            )
        # The total is divided among the replicas of other strategies.
        for other in strategies.values():
            with other.scope():
                seen = make_variable("sum", np.int64(0), "seen")
            hs.CheckpointManager(folder, seen=seen).restore(path, expect_partial=True)
            with other.scope():
                assert seen.numpy() == replicas * (replicas + 1) // 2
        job.Barrier()


def test_saved_types_may_differ(
    divided: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = np.arange(70.0, dtype=np.float32).reshape(2, 5, 7)
    path = hs.CheckpointManager(folder, x=_variable(divided, whole, 1, "x")).save(1)
    for dtype, axis in (("float64", 2), ("int32", 0), ("float16", 1)):
        target = _variable(divided, np.zeros(whole.shape, dtype), axis, "x")
        manager = hs.CheckpointManager(folder, x=target)
        error = outcome(manager.restore, path)
        assert isinstance(error, CheckpointError), error
        manager.restore(path, allow_cast=True)
        _check(target, whole.astype(dtype))
    error = outcome(
        hs.CheckpointManager(
            folder, x=_variable(divided, np.zeros((2, 5, 8)), 0, "x")
        ).restore,
        path,
    )
    assert isinstance(error, CheckpointError)
    assert "has shape (2, 5, 7), not (2, 5, 8)" in str(error)


@pytest.mark.once
def test_no_rank_holds_more_than_its_part_and_some_blocks(
    divided: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_exchange, "_ROUND_BYTES", 1 << 20)
    monkeypatch.setattr(parallel_read, "_KEPT_ON_THE_WAY_BYTES", 1 << 20)
    whole = np.arange(3 * job.size << 17, dtype=np.float64).reshape(8, -1)
    variable = _variable(divided, whole, 1, "x")
    manager = hs.CheckpointManager(folder, x=variable)
    manager.save(1)
    for call in (lambda: manager.save(2), manager.restore):
        tracemalloc.start()
        try:
            call()
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # Blocks have 1 MiB: one is sent, one received, and one assembled.
        assert most < 3.5 * (1 << 20), most
    _check(variable, whole)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_errors_of_one_rank_reach_all_ranks(
    asynchronous: bool,
    job: Any,
    strategies: dict[int, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = job.size - 1

    def memory(*args: Any) -> Any:
        raise MemoryError("no memory")

    def disk(*args: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    faults: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "plan": (part_exchange, "_rounds", memory),
        "image": (ImageMemory, "image", memory),
        "piece": (part_exchange.DividedDataset, "__getitem__", memory),
        "open": (part_writer, "open_to_write", disk),
        "write": (part_writer, "write_all", disk),
    }
    for count, strategy in strategies.items():
        whole = np.arange(5.0 * job.size * 400).reshape(400, -1)
        x = _variable(strategy, whole, 1, "x")
        manager = hs.CheckpointManager(folder / str(count), x=x)
        manager.save(1)
        for name, fault in faults.items():
            if count == 1 and name in ("plan", "piece"):
                continue
            with monkeypatch.context() as patch:
                if job.rank == last:
                    patch.setattr(*fault)
                error = outcome(manager.save, 2, asynchronous=asynchronous)
                error = error or outcome(manager.wait)
            assert error is not None, name
            wanted = "no memory" if fault[2] is memory else "Input/output"
            assert wanted in str(error), (name, error)
            job.Barrier()
            assert listed(folder / str(count)) == ["ckpt-0000000001.h5"]
            job.Barrier()
        manager.save(2, asynchronous=asynchronous)
        manager.wait()
        x.component[...] = 7
        with monkeypatch.context() as patch:
            if job.rank == last:
                patch.setattr(ImageMemory, "image", memory)
            error = outcome(manager.restore)
        assert isinstance(error, CheckpointError), error
        assert (x.component == 7).all()
        assert manager.restore() == 2
        _check(x, whole)
        job.Barrier()


class _Broken:
    """An object with plain state that cannot be saved, on some ranks."""

    def __init__(self) -> None:
        self.state: Any = {}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_values_that_ranks_must_share_are_compared(
    job: Any, strategies: dict[int, Any], folder: Path
) -> None:
    last = job.size - 1
    for count, strategy in strategies.items():
        if count == 1 or job.size == 1:
            continue
        part = _variable(strategy, np.zeros((8, 8)), 1, "part")
        copy = _variable(strategy, np.zeros(5), None, "copy")
        with strategy.scope():
            rows = make_variable("none", np.zeros(3), "rows")
            seen = make_variable("sum", np.zeros(3), "seen")
        plain = _Broken()
        streams = strategy.random("noise")
        manager = hs.CheckpointManager(
            folder / str(count),
            part=part,
            copy=copy,
            rows=rows,
            seen=seen,
            plain=plain,
            streams=streams,
        )
        cases: list[tuple[Any, str, Any, str]] = [
            (copy.component, "copy", DivergenceError, "copy"),
            (rows.component, "rows", hs.CollectiveError, "inside"),
            (seen.component, "seen", hs.CollectiveError, "inside"),
        ]
        if count < job.size:
            cases.append((part.component, "part", DivergenceError, "part"))
        for component, name, kind, word in cases:
            if job.rank == last:
                component[...] = 1
            errors = job.allgather(outcome(manager.save, 1))
            assert all(isinstance(e, hs.CollectiveError) for e in errors), errors
            assert isinstance(errors[last], kind), (name, errors)
            assert word in str(errors[last])
            assert not listed(folder / str(count))
            component[...] = 0
            job.Barrier()
        if job.rank == last:
            plain.state = {"file": object()}
        errors = job.allgather(repr(outcome(manager.save, 1)))
        assert "plain" in errors[last], errors
        assert "None" not in errors, errors
        plain.state = {}
        if job.rank == last:
            streams.generator.random()
        errors = job.allgather(repr(outcome(manager.save, 1)))
        assert "None" not in errors, errors
        assert "inside" in errors[last], errors
        job.Barrier()
        if job.rank != last:
            streams.generator.random()
        # The streams of one replica are equal again on its ranks.
        manager.save(1)
        manager.close()
