"""Checkpoints of variables on GPUs: the same bits are restored, and no save waits."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path
from typing import Any

import cupy
import h5py
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint import manager
from hpcstrat.checkpoint.file import image
from hpcstrat.engine.gpu import transfers
from hpcstrat.errors import CheckpointError
from tests.folders import listed
from tests.gpu.held import counted_waits, held_stream, on_host
from tests.mpi.ranks.aggregations import combined, part_of, signs
from tests.mpi.ranks.saved import KINDS, POLICIES

pytestmark = pytest.mark.gpu

DTYPES = (
    *("bool", "int8", "int64", "uint16", "float16", "float32", "float64"),
    *("complex64", "complex128"),
)
SHAPES = {"none": (0, 3), "number": (), "odd": (3, 5, 7), "long": (70_001,)}


def _count(job: Any) -> int:
    """Return a number of floats so large that a rank writes more than two blocks."""
    return (job.size << 18) + 5


def _value(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    drawn = np.random.default_rng([seed, len(shape)]).standard_normal(shape)
    return (np.asarray(drawn) * 100).astype(dtype)


def _variable(
    strategy: Any, value: Any, kind: str = "mirrored", name: str = "x"
) -> Any:
    """Return a variable on this replica's GPU."""
    options: dict[str, Any] = {"name": name}
    if kind != "mirrored":
        options |= {"synchronization": "on_read", "aggregation": kind}
    with strategy.scope():
        made = hs.Variable(cupy.asarray(value), **options)
    assert isinstance(made.component, cupy.ndarray)
    return made


def _set(variable: Any, value: Any) -> None:
    """Write this replica's component in place, in stream order."""
    variable.component[...] = cupy.asarray(np.asarray(value, variable.dtype))


def _same(variable: Any, value: Any) -> None:
    found = on_host(variable.component)
    assert found.dtype == np.asarray(value).dtype
    assert found.tobytes() == np.asarray(value).tobytes()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the comparison of copies, because a program must wait for its result."""
    monkeypatch.setattr(manager, "compare_copies", lambda *args: None)


def _everything(job: Any) -> dict[str, Any]:
    values = {
        f"{dtype}_{name}": _value(dtype, shape)
        for dtype in DTYPES
        for name, shape in SHAPES.items()
    }
    return {**values, "large": _value("float64", (_count(job),))}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_are_those_of_host_variables(
    asynchronous: bool, strategy: Any, folder: Path, job: Any
) -> None:
    values = _everything(job)
    there = {name: _variable(strategy, v, name=name) for name, v in values.items()}
    with strategy.scope():
        here = {name: hs.Variable(v, name=name) for name, v in values.items()}
    paths = []
    for name, variables in (("device", there), ("host", here)):
        with hs.CheckpointManager(folder / name, net=variables) as keeper:
            paths.append(keeper.save(1, asynchronous=asynchronous))
    with h5py.File(paths[0], locking=False) as a, h5py.File(paths[1]) as b:
        assert a.keys() == b.keys()
        for name, value in values.items():
            one, other = (file[f"variables/net/{name}"] for file in (a, b))
            assert one.dtype == other.dtype
            assert one[()].tobytes() == other[()].tobytes() == value.tobytes()
            assert dict(one.attrs) == dict(other.attrs)
    # Restore each of the two files into the variables of the other kind.
    for variables in (there, here):
        for variable in variables.values():
            variable.component[...] = 0
    for path, variables in zip(paths, (here, there), strict=True):
        keeper = hs.CheckpointManager(os.path.dirname(path), net=variables)
        assert keeper.restore() == 1
        assert keeper.last_restore.verified
        for name, value in values.items():
            _same(variables[name], value)


def test_values_may_change_at_once_while_the_gpu_has_not_come_to_them(
    strategy: Any, folder: Path, job: Any, unchecked: None
) -> None:
    value = _value("float64", (_count(job),))
    x = _variable(strategy, value)
    with hs.CheckpointManager(folder, x=x) as keeper:
        for step in (1, 2):
            with held_stream() as goes_on:
                # Neither this update nor the next one has run when ``save`` returns.
                _set_later(x, step)
                path = keeper.save(step, asynchronous=True)
                own = x.component
                own *= -7.0
                own += 1.0
                assert not os.path.exists(path)
                goes_on.set()
            keeper.wait()
            _set(x, np.zeros_like(value))
            assert keeper.restore() == step
            _same(x, np.full_like(value, step))


def _set_later(variable: Any, value: Any) -> None:
    """Write without a copy from the host, because such a copy waits."""
    variable.component.fill(value)


def test_a_save_in_the_background_never_waits_for_the_gpu(
    strategy: Any,
    folder: Path,
    job: Any,
    unchecked: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [_value("float32", (_count(job),), seed) for seed in range(3)]
    variables = [_variable(strategy, value) for value in values]
    with hs.CheckpointManager(folder, net=variables) as keeper:
        for step in (1, 2):
            with counted_waits(monkeypatch) as waits:
                keeper.save(step, asynchronous=True)
                assert waits.here == []
                keeper.wait()
            # At most one wait for each block, and no copy from pageable memory.
            assert 0 < len(waits.elsewhere) <= 2 + 2 * len(values)
            assert "pageable" not in waits.elsewhere
        for variable in variables:
            _set(variable, 0)
        assert keeper.restore() == 2
    for variable, value in zip(variables, values, strict=True):
        _same(variable, value)


def test_pages_are_locked_once_and_unlocked_before_they_go_back(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    register, unregister = transfers.register_host, transfers.unregister_host

    class Watched(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            if option == mmap.MADV_FREE:
                events.append("lend")
            super().madvise(option, *args)

    def noted_pages(nbytes: int) -> mmap.mmap:
        events.append("make")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return Watched(-1, nbytes, flags=flags)

    def noted(name: str, call: Any) -> Any:
        def wrapped(array: Any) -> None:
            events.append(name)
            call(array)

        return wrapped

    monkeypatch.setattr(image, "_pages", noted_pages)
    monkeypatch.setattr(transfers, "register_host", noted("lock", register))
    monkeypatch.setattr(transfers, "unregister_host", noted("unlock", unregister))
    x = _variable(strategy, _value("float64", (_count(job),)))
    keeper = hs.CheckpointManager(folder, x=x)
    for step in (1, 2):
        keeper.save(step, asynchronous=True)
    keeper.wait()
    first = list(events)
    keeper.restore()
    grown = events[len(first) :]
    keeper.save(3, asynchronous=True)
    keeper.close()
    # Pages are locked in one place after the other, and each place only once.
    assert first == ["make", *["lock"] * first.count("lock")]
    assert len(first) > 2
    # Locked memory is not lent. A restore that needs more memory gets a new mapping,
    # which is then lent.
    assert grown in ([], [*["unlock"] * (len(first) - 1), "make", "lend"])
    assert events[-1] == "unlock"
    assert events.count("lock") == events.count("unlock")
    # A restore that comes before the first save lends memory; the next save takes all
    # of it back.
    events.clear()
    assert keeper.restore() == 3
    keeper.save(4, asynchronous=True)
    keeper.close()
    assert events[:2] == ["make", "lend"]
    locks = events.count("lock")
    assert events[-2 * locks :] == [*["lock"] * locks, *["unlock"] * locks]
    assert keeper.restore() == 4
    _same(x, _value("float64", (_count(job),)))
    keeper.close()


def test_a_place_is_copied_to_before_the_next_is_locked(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a place cannot be locked, the remaining places are filled through a buffer."""
    events: list[str] = []
    register, fetch = transfers.register_host, transfers.Downloads.fetch
    allowed = [100]

    def locks(array: Any) -> None:
        allowed[0] -= 1
        if allowed[0] < 0:
            raise MemoryError("no more pages can be locked")
        events.append("lock")
        register(array)

    def fetches(self: Any, pairs: Any, locked: bool = False) -> Any:
        events.append("copy" if locked else "through a buffer")
        return fetch(self, pairs, locked)

    monkeypatch.setattr(transfers, "register_host", locks)
    monkeypatch.setattr(transfers.Downloads, "fetch", fetches)
    value = _value("float64", (_count(job),))
    x = _variable(strategy, value, name="x")
    keeper = hs.CheckpointManager(folder, x=x)
    keeper.save(1, asynchronous=True)
    keeper.wait()
    places = events.count("lock")
    assert places >= 2
    assert events == ["lock", "copy"] * places
    keeper.save(2, asynchronous=True)
    keeper.wait()
    assert events[2 * places :] == ["copy"] * places
    keeper.close()
    events.clear()
    allowed[0] = 1
    with hs.CheckpointManager(folder, x=x) as keeper:
        for step in (3, 4):
            keeper.save(step, asynchronous=True)
            _set(x, np.zeros_like(value))
            keeper.wait()
            assert keeper.restore() == step
            _same(x, value)
    assert events[:3] == ["lock", "copy", "through a buffer"]
    assert events.count("lock") == 1


def test_where_pages_cannot_be_locked_copies_are_waited_for(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(array: Any) -> None:
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    told: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, handler = hs.get_logger("device"), Collector(logging.INFO)
    monkeypatch.setattr(transfers, "register_host", refuse)
    monkeypatch.setattr(transfers._RefusalTold, "refusal", False)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    values = _everything(job)
    variables = {n: _variable(strategy, v, name=n) for n, v in values.items()}
    try:
        with hs.CheckpointManager(folder, net=variables) as keeper:
            for step, asynchronous in ((1, True), (2, False), (3, True)):
                for variable, value in zip(
                    variables.values(), values.values(), strict=True
                ):
                    _set(variable, value)
                keeper.save(step, asynchronous=asynchronous)
                for variable in variables.values():
                    _set(variable, np.zeros(variable.shape))
                keeper.wait()
                assert keeper.restore() == step
                for name, value in values.items():
                    _same(variables[name], value)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len([text for text in told if "page-locked" in text]) == 1


_ROWS = {
    "number": ("int64", ()),
    "odd": ("bool", (1, 3)),
    "pages": ("complex64", (5001,)),
    "half": ("float32", ((1 << 18) + 77,)),
    "even": ("float32", (1 << 19,)),
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_of_replicas_are_found_in_the_file(
    asynchronous: bool, strategy: Any, folder: Path, job: Any
) -> None:
    variables = {}
    for name, (dtype, shape) in _ROWS.items():
        variables[name] = _variable(strategy, np.zeros(shape, dtype), "none", name)
        _set(variables[name], _value(dtype, shape, job.rank))
    with hs.CheckpointManager(folder, net=variables) as keeper:
        path = keeper.save(1, asynchronous=asynchronous)
        for variable in variables.values():
            _set(variable, np.zeros(variable.shape))
        keeper.wait()
        with h5py.File(path, "r", locking=False) as file:
            for name, (dtype, shape) in _ROWS.items():
                wanted = [_value(dtype, shape, rank) for rank in range(job.size)]
                found = file[f"variables/net/{name}"][()]
                np.testing.assert_array_equal(found, np.stack(wanted))
        assert keeper.restore() == 1
    for name, (dtype, shape) in _ROWS.items():
        _same(variables[name], _value(dtype, shape, job.rank))


def _logical(kind: str, count: int) -> Any:
    parts = [_part(rank) for rank in range(count)]
    return parts[0] if kind == "mirrored" else combined(kind, parts)


def _part(rank: int) -> Any:
    return (np.arange(6.0).reshape(2, 3) * 4 + 12 * rank) * signs(2, 3)


@pytest.mark.parametrize("saved_as", KINDS[:-1])
def test_every_kind_comes_back_on_any_number_of_replicas(
    saved_as: str, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    for saved in range(1, job.size + 1):
        path = folder / str(saved)
        if saved in strategies:
            strategy = strategies[saved]
            x = _variable(strategy, np.zeros((2, 3)), saved_as)
            rank = 0 if saved_as == "mirrored" else strategy.replica_id
            _set(x, _part(rank))
            with hs.CheckpointManager(path, x=x) as keeper:
                keeper.save(saved, asynchronous=saved % 2 > 0)
        job.Barrier()
        value = _logical(saved_as, saved)
        for restoring, strategy in strategies.items():
            for kind in KINDS[:-1]:
                x = _variable(strategy, np.full((2, 3), 99.0), kind)
                assert hs.CheckpointManager(path, x=x).restore() == saved
                part = part_of(kind, value, restoring, strategy.replica_id)
                np.testing.assert_allclose(on_host(x.component), part, rtol=1e-12)
        job.Barrier()


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_other_replicas_follow_the_policy(
    policy: str, strategies: dict[int, Any], folder: Path, job: Any
) -> None:
    for saved in range(1, job.size + 1):
        path = folder / str(saved)
        if saved in strategies:
            strategy = strategies[saved]
            x = _variable(strategy, np.zeros((2, 3)), "none")
            _set(x, _part(strategy.replica_id))
            hs.CheckpointManager(path, x=x).save(1)
        job.Barrier()
        for restoring, strategy in strategies.items():
            x = _variable(strategy, np.full((2, 3), 99.0), "none")
            keeper = hs.CheckpointManager(path, x=x)
            replica = strategy.replica_id
            own = {"first": 0, "cycle": replica % saved, "init": None}
            row = replica if restoring == saved else own.get(policy)
            if restoring != saved and policy == "error":
                with pytest.raises(CheckpointError, match="per_replica="):
                    keeper.restore(per_replica=policy)
            else:
                keeper.restore(per_replica=policy)
            _same(x, np.full((2, 3), 99.0) if row is None else _part(row))
        job.Barrier()


def test_values_are_cast_as_in_host_memory(
    strategy: Any, folder: Path, job: Any
) -> None:
    value = _value("float64", (1000,))
    hs.CheckpointManager(folder, x=_variable(strategy, value)).save(1)
    for dtype in ("float16", "int32", "complex64"):
        x = _variable(strategy, np.zeros(1000, dtype))
        hs.CheckpointManager(folder, x=x).restore(allow_cast=True)
        with np.errstate(all="ignore"):
            _same(x, value.astype(dtype))


def test_optimizers_go_on_where_they_stood(
    strategy: Any, folder: Path, job: Any
) -> None:
    def program() -> tuple[Any, Any, Any]:
        x = _variable(strategy, np.ones(1000, np.float32))
        with strategy.scope():
            optimizer = hs.optimizers.Adam(0.1)

        def step() -> None:
            gradient = cupy.asarray(np.linspace(-1, 1, 1000, dtype=np.float32))
            optimizer.apply_gradients([(gradient * x.component, x)])

        return x, optimizer, step

    x, optimizer, step = program()
    with hs.CheckpointManager(folder, x=x, optimizer=optimizer) as keeper:
        strategy.run(step)
        keeper.save(asynchronous=True)
        strategy.run(step)
        wanted = on_host(x.component)
    # A new program makes its slots later, from the restored values.
    again, new_optimizer, new_step = program()
    assert hs.CheckpointManager(folder, x=again, optimizer=new_optimizer).restore() == 1
    strategy.run(new_step)
    _same(again, wanted)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_one_gpu_cannot_copy_is_an_error_on_all(
    asynchronous: bool,
    strategy: Any,
    folder: Path,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = _value("float64", (_count(job),))
    x = _variable(strategy, value)
    keeper = hs.CheckpointManager(folder, x=x)
    last, copy, calls = job.size - 1, transfers._copy, []

    def fail(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise RuntimeError("cudaErrorIllegalAddress")
        copy(*args)

    with monkeypatch.context() as patch:
        if job.rank == last:
            patch.setattr(transfers, "_copy", fail)
        text = f"rank {last} .*IllegalAddress"
        with pytest.raises(CheckpointError, match=text):
            _save(keeper, asynchronous)
    job.Barrier()
    assert listed(folder) == []
    job.Barrier()
    _save(keeper, asynchronous)
    _set(x, np.zeros_like(value))
    assert keeper.restore() == 1
    _same(x, value)
    keeper.close()


def _save(keeper: Any, asynchronous: bool) -> None:
    keeper.save(1, asynchronous=asynchronous)
    keeper.wait()


def test_a_failed_restore_changes_nothing(
    strategy: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = _value("float64", (_count(job),))
    x = _variable(strategy, value)
    keeper = hs.CheckpointManager(folder, x=x)
    path = keeper.save(1)
    _set(x, np.full_like(value, 3.0))
    if job.rank == 0:
        with open(path, "r+b") as file:
            file.seek(-5000 - 4096, os.SEEK_END)
            file.write(b"\xff\x00\xff")
    job.Barrier()
    with pytest.raises(CheckpointError):
        keeper.restore(path)
    _same(x, np.full_like(value, 3.0))


def test_host_and_device_variables_go_into_one_file(
    strategy: Any, folder: Path, job: Any
) -> None:
    value = _value("float64", (_count(job),))
    x = _variable(strategy, value)
    with strategy.scope():
        y = hs.Variable(value + 1)
    with hs.CheckpointManager(folder, x=x, y=y) as keeper:
        keeper.save(1, asynchronous=True)
        _set(x, np.zeros_like(value))
        y.assign(np.zeros_like(value))
        assert keeper.restore() == 1
        assert keeper._saver._downloads is not None
    _same(x, value)
    _same(y, value + 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_divided_variables_are_restored(
    asynchronous: bool, folder: Path, job: Any
) -> None:
    value = _value("float32", (5, 1 << 16, 7))
    with hs.MultiWorkerMirroredStrategy(ranks_per_replica=job.size) as strategy:
        rows = strategy.inside.part(value.shape[1])
        with strategy.scope():
            x = hs.Variable(cupy.asarray(value[:, rows]), split=1, name="x")
        assert isinstance(x.component, cupy.ndarray)
        keeper = hs.CheckpointManager(folder, x=x)
        path = keeper.save(1, asynchronous=asynchronous)
        x.component[...] = 0
        keeper.wait()
        with h5py.File(path, "r", locking=False) as file:
            assert file["variables/x"][()].tobytes() == value.tobytes()
        keeper.restore()
        _same(x, value[:, rows])
