"""Ranks of a replica get slabs of the same rows, and replicas together all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import outcome

ROWS, SHAPE = 14, (5, 6)


def replicas_of(count: int, **options: Any) -> Any:
    """Return a strategy whose replicas consist of ``count`` neighboring ranks."""
    return hs.MultiWorkerMirroredStrategy(ranks_per_replica=count, **options)


@pytest.fixture(scope="module")
def replicas(job: Any) -> Iterator[dict[int, Any]]:
    """Yield strategies by the number of ranks of their replicas."""
    counts = [count for count in range(1, job.size + 1) if job.size % count == 0]
    with ExitStack() as stack:
        yield {c: stack.enter_context(replicas_of(c)) for c in counts}


@pytest.fixture
def whole(job: Any, folder: Path) -> Any:
    """Write a file of fields, and return them."""
    rng = np.random.default_rng(5)
    arrays = {
        "u": rng.integers(0, 999, (ROWS, *SHAPE)),
        "v": rng.integers(0, 999, (ROWS, 3)).astype("f4"),
        "label": np.arange(ROWS),
    }
    if job.rank == 0:
        with h5py.File(folder / "fields.h5", "w") as file:
            file["u"] = arrays["u"]
            file.create_dataset("v", data=arrays["v"], chunks=(4, 2), compression=4)
            file["label"] = arrays["label"]
    job.Barrier()
    return arrays


def _rows(folder: Path, whole: Any) -> Any:
    return hs.Dataset.from_files(folder / "fields.h5")


def _arrays(folder: Path, whole: Any) -> Any:
    return hs.Dataset.from_tensor_slices(whole)


def _stream(folder: Path, whole: Any) -> Any:
    return _rows(folder, whole).filter(lambda row: row["label"] != 3)


def _joined(job: Any, count: int, batches: list[Any]) -> list[Any]:
    """Return the whole batches, given this rank's slabs of them."""
    steps = []
    for parts in zip(*job.allgather(batches), strict=True):
        replicas = [parts[first : first + count] for first in range(0, job.size, count)]
        for ranks in replicas:
            for one in ranks:
                np.testing.assert_array_equal(one["label"], ranks[0]["label"])
        axes = {"u": 2, "v": 1}
        steps.append(
            {
                name: np.concatenate(
                    [
                        np.concatenate([rank[name] for rank in ranks], axes[name])
                        if name in axes
                        else ranks[0][name]
                        for ranks in replicas
                    ]
                )
                for name in parts[0]
            }
        )
    return steps


@pytest.mark.rule
@pytest.mark.algorithm
@pytest.mark.parametrize(
    ("source", "ahead"), [(_rows, 0), (_rows, 2), (_arrays, 0), (_stream, 2)]
)
def test_slabs_of_all_ranks_are_the_whole_batches(
    job: Any,
    replicas: dict[int, Any],
    folder: Path,
    whole: Any,
    source: Callable[..., Any],
    ahead: int,
) -> None:
    rows = source(folder, whole).shuffle(8, seed=3)
    batches = rows.split({"u": 1, "v": 0}).batch(4).prefetch(ahead)
    epochs = [list(batches), list(batches)]
    for count, strategy in replicas.items():
        distributed = strategy.experimental_distribute_dataset(batches)
        for expected in epochs:
            own = [strategy.local_value(batch) for batch in distributed]
            found = _joined(job, count, own)
            for one, other in zip(found, expected, strict=True):
                for name, array in other.items():
                    np.testing.assert_array_equal(one[name], array)


@pytest.mark.algorithm
def test_a_position_continues_with_another_number_of_ranks(
    job: Any, replicas: dict[int, Any], folder: Path, whole: Any
) -> None:
    rows = _rows(folder, whole).shuffle(seed=1).split({"u": 1, "v": 0}).batch(3)
    expected = list(rows)[2:]
    for strategy in replicas.values():
        distributed = strategy.experimental_distribute_dataset(rows)
        iterator = iter(distributed)
        for _ in range(2):
            next(iterator)
        state = distributed.state()
        for count, other in replicas.items():
            distributed = other.experimental_distribute_dataset(rows)
            distributed.restore_state(state)
            own = [other.local_value(batch) for batch in distributed]
            found = _joined(job, count, own)
            for one, whole_one in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one["u"], whole_one["u"])
                np.testing.assert_array_equal(one["v"], whole_one["v"])


@pytest.mark.rule
def test_logical_replicas_get_slabs(job: Any, folder: Path, whole: Any) -> None:
    rows = _rows(folder, whole).split({"u": 1}).batch(4)
    with replicas_of(job.size, logical_replicas=2) as strategy:
        part = strategy.inside.part(SHAPE[1])
        for batch in strategy.experimental_distribute_dataset(rows):
            # A batch has one component for each of this rank's replicas.
            labels = strategy.experimental_local_results(batch["label"])
            fields = strategy.experimental_local_results(batch["u"])
            assert len(labels) == len(fields) == 2
            for label, field in zip(labels, fields, strict=True):
                np.testing.assert_array_equal(field, whole["u"][label][:, :, part])


@pytest.mark.rule
def test_input_functions_and_own_rows_get_slabs(
    job: Any, replicas: dict[int, Any], folder: Path, whole: Any
) -> None:
    chain = _rows(folder, whole).split({"u": 1}).cache().shuffle(seed=1).batch(4)
    for strategy in replicas.values():
        part = strategy.inside.part(SHAPE[1])
        owned = strategy.experimental_distribute_dataset(
            chain, hs.InputOptions(own_rows=True)
        )
        made = strategy.distribute_datasets_from_function(lambda _: chain)
        for batches in (owned, owned, made):
            for batch in batches:
                own = strategy.local_value(batch)
                expected = whole["u"][own["label"]][:, :, part]
                np.testing.assert_array_equal(own["u"], expected)


@pytest.mark.calls
def test_wrong_splits_are_errors_on_all_ranks(
    job: Any, replicas: dict[int, Any], folder: Path, whole: Any
) -> None:
    rows = _rows(folder, whole)
    for axes in ({"u": 2}, {"label": 0}, {"w": 0}):
        error = outcome(rows.split, axes)
        texts = job.allgather(str(error))
        assert isinstance(error, ValueError)
        assert set(texts) == {str(error)}
    if job.size == 1:
        return
    batches = rows.split({"u": 0}, along="x").batch(4)
    with replicas_of(job.size) as strategy:
        error = outcome(strategy.experimental_distribute_dataset, batches)
        assert isinstance(error, ValueError)
        assert "found 'x'" in str(error)
