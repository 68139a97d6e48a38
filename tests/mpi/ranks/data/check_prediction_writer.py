"""Predictions of all replicas in the order of the rows, in memory and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import hpcstrat as hs
from tests.mpi.ranks.effort import examples
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = pytest.mark.files

TYPES = ["float32", "float64", "int16", "complex64", "bool"]


def _expected(like: Any, num_rows: int) -> Any:
    """Return the predictions of all rows, by a formula of the row."""
    rows = np.arange(num_rows) % 251
    return {
        name: np.broadcast_to(
            rows.reshape(-1, *[1] * len(one.shape)), (num_rows, *one.shape)
        ).astype(one.dtype)
        for name, one in like.items()
    }


def _read(path: Path, names: Any) -> Any:
    if path.suffix == ".zarr":
        store = zarr.open(path, mode="r")
        return {name: store[name][:] for name in names}
    with h5py.File(path) as file:
        return {name: file[name][:] for name in names}


@pytest.mark.parametrize("suffix", ["", ".h5", ".zarr"])
def test_rows_come_in_order_from_any_division_and_after_a_restart(
    strategy: Any, job: Any, folder: Path, suffix: str
) -> None:
    draw = np.random.default_rng(8)
    for number in range(examples(12)):
        num_rows = int(draw.integers(0, 60))
        shapes = [(), (3,), (2, 0), (160, 160)]
        like = {
            name: hs.data.ArraySpec(
                shapes[draw.integers(4)], np.dtype(TYPES[draw.integers(5)])
            )
            for name in ("energy", "more/forces")[: draw.integers(1, 3)]
        }
        path = folder / f"{number}{suffix}" if suffix else None
        expected = _expected(like, num_rows)
        writer = hs.data.PredictionWriter(strategy, num_rows, like, path)
        stops = int(draw.integers(0, num_rows + 1)) if suffix else num_rows
        order = draw.permutation(num_rows)
        assert writer.remaining.tolist() == list(range(num_rows))
        _add(writer, order[:stops], expected, job, draw)
        if suffix:
            writer.flush()
            strategy.barrier()
            # A program that was started again sees what is left.
            writer = hs.data.PredictionWriter(strategy, num_rows, like, path)
            assert writer.remaining.tolist() == sorted(order[stops:].tolist())
            _add(writer, writer.remaining, expected, job, draw)
        found = writer.result()
        if suffix:
            assert found is None
            found = _read(path, like)
        for name, values in expected.items():
            assert found[name].dtype == values.dtype
            np.testing.assert_array_equal(found[name], values)


def _add(writer: Any, rows: Any, expected: Any, job: Any, draw: Any) -> None:
    """Add rows in pieces; each rank adds its own, and some rows of another rank."""
    for part in np.array_split(rows, int(draw.integers(1, 5))):
        own = np.concatenate([part[job.rank :: job.size], part[:1], part[:1]])
        writer.add(own, {name: values[own] for name, values in expected.items()})


def test_predictions_of_batches_by_cost_are_in_order(strategy: Any) -> None:
    x = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    rows = hs.Dataset({"x": x, "row": np.arange(50)}).shuffle(seed=3)
    chain = rows.batch(16, costs=np.arange(50))
    writer = hs.data.PredictionWriter(strategy, 50, np.float32(0))
    for batch in strategy.experimental_distribute_dataset(chain):
        own = strategy.local_value(batch)
        writer.add(own["row"], own["x"].sum(axis=1))
    np.testing.assert_array_equal(writer.result(), x.sum(axis=1))


def test_errors_are_raised_on_all_ranks(strategy: Any, job: Any, folder: Path) -> None:
    path = folder / "predictions.h5"
    like = np.zeros(2, np.float32)
    writer = hs.data.PredictionWriter(strategy, 9, like, path)
    for rows, values, words in (
        ([9], np.zeros((1, 2), np.float32), "expected rows from 0 to 8"),
        ([-1], np.zeros((1, 2), np.float32), "expected rows from 0 to 8"),
        ([1, 2], np.zeros((1, 2), np.float32), "expected predictions of 2 rows"),
        ([1], np.zeros((1, 2)), "found float64"),
        ([1], {"a": np.zeros((1, 2), np.float32)}, "expected predictions of 1 rows"),
    ):
        assert words in str(outcome(writer.add, rows, values))
    if job.rank == 0:
        writer.add(np.arange(7), np.zeros((7, 2), np.float32))
    error = outcome(writer.result)
    assert "found none of 2 rows, the first of which is row 7" in str(error)
    for other in (10, like), (9, np.zeros(2)):
        error = outcome(hs.data.PredictionWriter, strategy, *other, path)
        assert isinstance(error, ValueError | hs.ReplicaError)
        assert "found another file" in str(error)
    error = outcome(hs.data.PredictionWriter, strategy, 9, like, folder / "no" / "a.h5")
    assert isinstance(error, OSError | hs.ReplicaError)
    assert_usable(strategy, job)
