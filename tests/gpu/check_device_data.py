"""Batches on GPUs: complete, copied ahead of the computation, and without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.gpu import feeding
from hpcstrat.errors import ReplicaError
from tests.gpu.held import counted_waits, held_stream, on_host

pytestmark = pytest.mark.gpu

_ROWS = 23


@pytest.fixture
def placed(make_strategy: Any) -> Iterator[Any]:
    """Yield a strategy that places variables and batches on the GPUs."""
    with make_strategy(settings=hs.Settings(device="gpu", share_gpus=True)) as made:
        assert made.puts_on_gpu
        yield made


@pytest.fixture
def strategy(make_strategy: Any) -> Iterator[Any]:
    """Yield a strategy that leaves variables and batches in their memory."""
    with make_strategy() as made:
        assert not made.puts_on_gpu
        yield made


def _columns() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {
        "x": rng.standard_normal((_ROWS, 3, 2)).astype(np.float32),
        "more": (
            rng.standard_normal(_ROWS).astype(np.float16),
            [rng.random(_ROWS) < 0.5, np.arange(_ROWS) * (1 + 2j)],
        ),
        "label": np.arange(_ROWS),
        "text": np.array([f"row {i}" for i in range(_ROWS)]),
    }


def _leaves(batch: Any) -> list[Any]:
    return [
        *(batch["x"], batch["more"][0], *batch["more"][1], batch["label"]),
        batch["text"],
    ]


def _local(strategy: Any, batch: Any) -> Any:
    """Return this replica's part of a batch."""
    found: list[Any] = []
    strategy.run(found.append, args=(batch,))
    return found[0]


def _check(part: Any, wanted: Any, on_gpu: bool = True) -> None:
    *numbers, text = zip(_leaves(part), _leaves(wanted), strict=True)
    for found, value in numbers:
        assert isinstance(found, cupy.ndarray) is on_gpu
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(on_host(found), value)
    assert isinstance(text[0], np.ndarray)
    np.testing.assert_array_equal(*text)


def _rows_of(columns: Any, rows: Any) -> Any:
    return {
        "x": columns["x"][rows],
        "more": (columns["more"][0][rows], [c[rows] for c in columns["more"][1]]),
        "label": columns["label"][rows],
        "text": columns["text"][rows],
    }


def _own_rows(start: int, stop: int, strategy: Any) -> slice:
    size = -(-(stop - start) // strategy.num_replicas_in_sync)
    first = min(start + strategy.replica_id * size, stop)
    return slice(first, min(first + size, stop))


def _batches(columns: Any, size: int) -> Iterator[Any]:
    for start in range(0, _ROWS, size):
        yield _rows_of(columns, slice(start, start + size))


@pytest.mark.parametrize("kind", ["rows", "iterable", "function", "per_replica"])
def test_numbers_come_on_the_gpu_and_text_does_not(kind: str, placed: Any) -> None:
    columns = _columns()
    wanted: Any = None
    if kind == "rows":
        given = hs.Dataset(columns, batch_size=5)
        dataset = placed.experimental_distribute_dataset(given)
    elif kind == "iterable":
        given = list(_batches(columns, 5))
        dataset = placed.experimental_distribute_dataset(given)
    else:
        mode = "per_worker" if kind == "function" else kind
        options = hs.InputOptions(experimental_replication_mode=mode)
        dataset = placed.distribute_datasets_from_function(
            lambda context: _batches(columns, 4), options
        )
    seen = 0
    for step, batch in enumerate(dataset):
        if kind in ("rows", "iterable"):
            start = 5 * step
            rows = _own_rows(start, min(start + 5, _ROWS), placed)
        elif kind == "per_replica":
            rows = slice(4 * step, 4 * step + 4)
        else:
            topology = placed.topology
            count = topology.worker_comm.size
            number = count * step + topology.worker_comm.rank
            rows = slice(4 * number, 4 * number + 4)
        wanted = _rows_of(columns, rows)
        _check(_local(placed, batch), wanted)
        seen += 1
    assert seen > 1


def test_options_leave_batches_where_they_are(placed: Any) -> None:
    _check_stay(placed, hs.InputOptions(experimental_fetch_to_device=False))


def test_settings_leave_batches_where_they_are(strategy: Any) -> None:
    _check_stay(strategy, None)


def _check_stay(strategy: Any, options: Any) -> None:
    columns = _columns()
    for given in (hs.Dataset(columns, 5), list(_batches(columns, 5))):
        dataset = strategy.experimental_distribute_dataset(given, options)
        for step, batch in enumerate(dataset):
            rows = _own_rows(5 * step, min(5 * step + 5, _ROWS), strategy)
            _check(_local(strategy, batch), _rows_of(columns, rows), on_gpu=False)


def _on_gpu(columns: Any) -> dict[str, Any]:
    return {
        "x": cupy.asarray(columns["x"]),
        "label": cupy.asarray(columns["label"]),
        "host": columns["label"],
    }


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_columns_on_the_gpu_are_taken_there(
    shuffle: bool, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = _columns()
    given = hs.Dataset(_on_gpu(columns), 6, shuffle=shuffle, seed=3)
    dataset = strategy.experimental_distribute_dataset(given)
    standin = pytest.importorskip("cupy._standin", reason="needs the stand-in")
    order = given.order(0) if shuffle else np.arange(_ROWS)
    parts = []
    # The number of batches equals the most that may be staged at once.
    assert len(dataset) == feeding._MOST_STAGED
    standin.reset()
    with counted_waits(monkeypatch) as waits:
        for batch in dataset:
            part = _local(strategy, batch)
            part["x"] *= 2.0
            parts.append(part)
    assert waits.here == []
    assert standin.counts.device_to_host == 0
    for step, part in enumerate(parts):
        rows = order[_own_rows(6 * step, min(6 * step + 6, _ROWS), strategy)]
        # A program that changes its batch does not change the dataset.
        np.testing.assert_array_equal(on_host(part["x"]), 2 * columns["x"][rows])
        np.testing.assert_array_equal(on_host(part["label"]), columns["label"][rows])
        assert isinstance(part["host"], np.ndarray)
        np.testing.assert_array_equal(part["host"], rows)


def test_batches_made_on_the_gpu_are_dealt(strategy: Any) -> None:
    columns = _columns()
    one = cupy.zeros((5, 3, 2), np.float32)

    def generate() -> Iterator[Any]:
        for start in range(0, _ROWS - _ROWS % 5, 5):
            # Fill the same memory for each batch.
            one[...] = cupy.asarray(columns["x"][start : start + 5])
            yield {"x": one + 0, "n": (cupy.arange(start, start + 5), "abcde")[0]}

    dataset = strategy.experimental_distribute_dataset(generate())
    kept = []
    for step, batch in enumerate(dataset):
        part = _local(strategy, batch)
        assert isinstance(part["x"], cupy.ndarray)
        rows = _own_rows(5 * step, 5 * step + 5, strategy)
        kept.append((part, columns["x"][rows], np.arange(_ROWS)[rows]))
    assert len(kept) == _ROWS // 5
    for part, x, n in kept:
        np.testing.assert_array_equal(on_host(part["x"]), x)
        np.testing.assert_array_equal(on_host(part["n"]), n)


def test_slots_and_elements_on_the_gpu(strategy: Any) -> None:
    class Sized:
        batch_size = 6
        auto_shard_policy = "off"

        def __iter__(self) -> Iterator[Any]:
            return iter(cupy.arange(k, k + 4) for k in range(0, 16, 4))

    found = []
    for batch in strategy.experimental_distribute_dataset(Sized()):
        part = _local(strategy, batch)
        assert isinstance(part, cupy.ndarray)
        assert part.dtype == np.int64
        found += strategy.collectives.all_gather_object(on_host(part).tolist(), "rows")
    # Each worker reads the whole dataset.
    rows = sorted(row for part in found for row in part)
    count = 1
    if strategy.num_replicas_in_sync > 1:
        count = strategy.topology.num_workers
    assert rows == sorted(list(range(16)) * count)

    def scalars(context: Any) -> Any:
        return [cupy.asarray(np.float32(k)) for k in range(4)]

    options = hs.InputOptions(experimental_replication_mode="per_replica")
    dataset = strategy.distribute_datasets_from_function(scalars, options)
    values = [float(_local(strategy, batch)) for batch in dataset]
    assert values == [0.0, 1.0, 2.0, 3.0]


def test_a_part_without_rows_has_the_form_of_the_others(placed: Any) -> None:
    rows = [cupy.arange(6.0).reshape(2, 3), cupy.arange(3.0).reshape(1, 3)]
    dataset = placed.experimental_distribute_dataset(rows)
    for batch in dataset:
        part = _local(placed, batch)
        assert isinstance(part, cupy.ndarray)
        assert part.shape[1:] == (3,)
        assert part.dtype == np.float64


def test_batches_come_while_the_gpu_is_busy(
    placed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = np.arange(4.0 * 40).reshape(40, 4)
    dataset = placed.experimental_distribute_dataset(hs.Dataset(host, 8))
    with counted_waits(monkeypatch) as waits, held_stream() as goes_on:
        iterator = iter(dataset)
        sums = [_local(placed, next(iterator)).sum() for _ in range(3)]
        assert waits.here == []
        goes_on.set()
    for step, found in enumerate(sums):
        rows = _own_rows(8 * step, 8 * step + 8, placed)
        assert float(found) == host[rows].sum()


def test_memory_of_batches_is_used_again_only_when_they_are_done_with(
    placed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin = pytest.importorskip("cupy._standin", reason="needs the stand-in")
    monkeypatch.setattr(standin, "longest_delay", 0.004)
    count, steps = 64 * placed.num_replicas_in_sync, 60
    host = np.arange(float(steps * count)).reshape(steps * count)
    dataset = placed.experimental_distribute_dataset(hs.Dataset(host, count))
    totals, views = [], []
    for step, batch in enumerate(dataset):
        part = _local(placed, batch)
        # This program queues work far ahead of the GPU.
        totals.append((part * 2.0).sum())
        if step % 10 == 0:
            views.append((part[3:7], step))
        if step == 10:
            standin.reset()
    assert standin.counts.pinned_allocations <= feeding._MOST_STAGED
    # The batches in ``views`` are still in use, and a few others are kept.
    assert len(dataset._placer._feeder._ready) <= feeding._MOST_READY
    for step, total in enumerate(totals):
        rows = _own_rows(count * step, count * step + count, placed)
        assert float(total) == 2 * host[rows].sum()
    for view, step in views:
        rows = _own_rows(count * step, count * step + count, placed)
        np.testing.assert_array_equal(on_host(view), host[rows][3:7])


def test_batches_of_many_sizes(placed: Any) -> None:
    rng = np.random.default_rng(1)
    size = placed.num_replicas_in_sync
    lengths = rng.integers(1, 3000, 30)
    given = [np.full((int(n) * size, 3), i, np.int16) for i, n in enumerate(lengths)]
    dataset = placed.experimental_distribute_dataset(given)
    for i, batch in enumerate(dataset):
        part = _local(placed, batch)
        assert part.shape == (lengths[i], 3)
        assert int((part == i).sum()) == part.size


def test_workers_compare_the_first_batch_on_gpus_without_waiting_for_more(
    strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if job.size == 1 or strategy.topology.num_workers < job.size:
        pytest.skip("parts for other replicas of a worker go through host memory")

    def batches(first: int, later: int) -> Iterator[Any]:
        # Parts of batches in host memory are compared in every step.
        yield {"x": cupy.full(6, first), "text": np.array(["a"] * 6)}
        for _ in range(4):
            yield {"x": cupy.full(6, later), "text": np.array(["b"] * 6)}

    dataset = strategy.experimental_distribute_dataset(batches(job.rank, 0))
    with pytest.raises(hs.CollectiveError, match="batch 0 of iteration 0") as caught:
        next(iter(dataset))
    assert len(set(job.allgather(str(caught.value)))) == 1

    iterator = iter(strategy.experimental_distribute_dataset(batches(7, job.rank)))
    next(iterator)
    standin = pytest.importorskip("cupy._standin", reason="needs the stand-in")
    standin.reset()
    with counted_waits(monkeypatch) as waits:
        assert len(list(iterator)) == 4
    assert waits.here == []
    assert standin.counts.device_to_host == 0


def test_a_pipeline_may_fill_the_same_buffer_again(placed: Any) -> None:
    def generate() -> Iterator[Any]:
        buffer = np.zeros(8)
        for step in range(6):
            buffer[:] = step
            yield buffer

    dataset = placed.experimental_distribute_dataset(generate())
    parts = [_local(placed, batch) for batch in dataset]
    for step, part in enumerate(parts):
        np.testing.assert_array_equal(on_host(part), np.full(part.shape, step))


def test_what_one_gpu_has_no_memory_for_is_an_error_on_all(
    make_strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = hs.Settings(device="gpu", share_gpus=True)
    with make_strategy(settings=settings, on_error="raise") as strategy:
        dataset = strategy.experimental_distribute_dataset([np.arange(8.0)] * 3)
        iterator = iter(dataset)
        next(iterator)

        def none(nbytes: int) -> Any:
            raise MemoryError("out of memory")

        with monkeypatch.context() as patch:
            if job.rank == job.size - 1:
                patch.setattr(feeding, "pinned_memory", none)
                patch.setattr(feeding, "_MOST_STAGED", 1)
                dataset._placer._feeder._staged.clear()
            with pytest.raises((MemoryError, ReplicaError), match="out of memory"):
                next(iterator)
        rest = [_local(strategy, batch) for batch in iterator]
        assert len(rest) == 1
        assert strategy.num_replicas_in_sync == job.size


def test_one_device(job: Any) -> None:
    strategy = hs.OneDeviceStrategy("GPU:0")
    options = hs.InputOptions(independent=True)
    columns = _columns()
    dataset = strategy.experimental_distribute_dataset(hs.Dataset(columns, 5), options)
    for step, batch in enumerate(dataset):
        _check(batch, _rows_of(columns, slice(5 * step, 5 * step + 5)))


def test_types_of_which_gpus_know() -> None:
    fitting = "?bBhHiIlLqQefdFD"
    others = ("g", "G", "U3", "S2", "M8[s]", "m8[s]", "O", "V4")
    assert all(feeding.fits_device(np.dtype(code)) for code in fitting)
    assert not any(feeding.fits_device(np.dtype(code)) for code in others)


def test_batches_are_in_native_byte_order() -> None:
    values = np.arange(8, dtype=">f4").reshape(8, 1)
    strategy = hs.OneDeviceStrategy("GPU:0")
    batches = strategy.experimental_distribute_dataset(
        hs.Dataset(values, 4, shuffle=False), hs.InputOptions(independent=True)
    )
    for number, batch in enumerate(batches):
        assert batch.dtype.isnative
        expected = values[4 * number : 4 * number + 4]
        np.testing.assert_array_equal(cupy.asnumpy(batch), expected)
