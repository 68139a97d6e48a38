"""Files on replicas: each replica reads its rows of all files, and all see errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.dealing import joined
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = pytest.mark.rule


@pytest.fixture
def files(job: Any, folder: Path) -> list[Path]:
    """Write three files of unequal lengths; the middle one is compressed."""
    paths = [folder / f"{index}.h5" for index in range(3)]
    if job.rank == 0:
        start = 0
        for index, (path, length) in enumerate(zip(paths, (9, 17, 5), strict=True)):
            rows = np.arange(start, start + length)
            start += length
            packed = {"chunks": (4, 3), "compression": "gzip"} if index == 1 else {}
            with h5py.File(path, "w") as file:
                values = np.stack([rows, -rows, rows * 2], axis=1).astype("f4")
                file.create_dataset("fields/x", data=values, **packed)
                file["label"] = rows
                file["axis"] = np.zeros(2)
    job.Barrier()
    return paths


def labels(strategy: Any, batch: Any) -> list[int]:
    own = strategy.local_value(batch)
    expected = np.stack([own["label"], -own["label"], own["label"] * 2], axis=1)
    np.testing.assert_array_equal(own["fields"]["x"], expected)
    return [int(label) for label in own["label"]]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("order", ["file", "shuffled", "blocks"])
def test_each_row_of_all_files_comes_once(
    strategy: Any, job: Any, files: list[Path], order: str, ahead: int
) -> None:
    dataset = hs.Dataset.from_files(files, columns=["fields/*", "label"])
    assert dataset.cardinality() == 31
    if order != "file":
        dataset = dataset.shuffle(seed=2, blocks=4 if order == "blocks" else None)
    alone = [batch["label"].tolist() for batch in dataset.batch(6)]
    batches = dataset.batch(6).prefetch(ahead)
    distributed = strategy.experimental_distribute_dataset(batches)
    found = [labels(strategy, batch) for batch in distributed]
    steps = [joined(list(step)) for step in zip(*job.allgather(found), strict=True)]
    assert steps == alone
    assert sorted(joined(steps)) == list(range(31))


def test_policy_file_gives_each_worker_its_files(
    strategy: Any, job: Any, files: list[Path]
) -> None:
    topology = strategy.topology
    if topology.num_workers > len(files):
        pytest.skip("there are fewer files than workers")
    dataset = hs.Dataset.from_files(files, columns=["fields/*", "label"]).batch(6)
    dataset = dataset.with_options(hs.data.DatasetOptions("file"))
    distributed = strategy.experimental_distribute_dataset(dataset)
    found = [labels(strategy, batch) for batch in distributed]
    steps = list(zip(*job.allgather(found), strict=True))
    borders = [0, 9, 26, 31]
    worker = topology.worker_id
    mine = [row for step in steps for r in topology.worker_replicas for row in step[r]]
    expected = [
        row
        for index in range(worker, 3, topology.num_workers)
        for row in range(borders[index], borders[index + 1])
    ]
    assert mine == expected if job.size > 1 else sorted(mine) == list(range(31))


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_file_that_is_shortened_is_an_error_on_all_and_the_rest_is_read(
    make_strategy: Any, job: Any, files: list[Path], ahead: int
) -> None:
    with make_strategy(on_error="raise") as strategy:
        dataset = hs.Dataset.from_files(files, columns=["label"]).batch(5)
        options = hs.InputOptions(experimental_per_replica_buffer_size=ahead)
        distributed = strategy.experimental_distribute_dataset(dataset, options)
        job.Barrier()
        if job.rank == 0:
            os.truncate(files[2], 900)
        job.Barrier()
        iterator = iter(distributed)
        found: list[Any] = []
        for _ in range(7):
            error = outcome(
                lambda: found.append(strategy.local_value(next(iterator))["label"])
            )
            if error is not None:
                found.append(type(error).__name__)
            assert len(set(job.allgather(error is not None))) == 1
        parts = job.allgather(found)
        good = [
            step for step in zip(*parts, strict=True) if not isinstance(step[0], str)
        ]
        rows = joined([part.tolist() for step in good for part in step])
        assert rows == list(range(25))
        assert isinstance(found[5], str)
        assert isinstance(found[6], str)
        assert next(iterator, None) is None
        assert_usable(strategy, job)


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_file_that_vanishes_or_is_replaced_is_an_error_on_all(
    make_strategy: Any, job: Any, files: list[Path], change: str
) -> None:
    """Also if a rank has the file open, or its rows in memory."""
    with make_strategy(on_error="raise") as strategy:
        dataset = hs.Dataset.from_files(files, columns=["label"]).batch(12)
        distributed = strategy.experimental_distribute_dataset(dataset)
        iterator = iter(distributed)
        next(iterator)
        job.Barrier()
        if job.rank == 0 and change == "removed":
            files[1].unlink()
        elif job.rank == 0:
            with h5py.File(files[1].with_suffix(".new"), "w") as file:
                file["label"] = np.arange(100, 117)
            files[1].with_suffix(".new").replace(files[1])
        job.Barrier()
        # All rows of this batch are in the file.
        error = outcome(lambda: next(iterator))
        found = job.allgather(None if error is None else str(error))
        assert all(message and "1.h5" in message for message in found)
        assert_usable(strategy, job)


def _as_netcdf(folder: Path, x: Any, y: Any) -> Any:
    """Write 24 monthly files with packed integers, in the form of ERA5 files."""
    import netCDF4

    for month, rows in enumerate(np.array_split(np.arange(len(x)), 24)):
        with netCDF4.Dataset(folder / f"era5-{month:02}.nc", "w") as file:
            file.createDimension("time", None)
            file.createDimension("level", x.shape[1])
            file.createVariable("time", "f8", ("time",))[:] = rows
            file.createVariable("level", "f4", ("level",))[:] = np.arange(x.shape[1])
            packed = file.createVariable("x", "i2", ("time", "level"), zlib=True)
            packed.scale_factor, packed.add_offset = 0.5, 10.0
            packed[:] = x[rows]
            file.createVariable("y", "f4", ("time",), zlib=True)[:] = y[rows]
    return str(folder / "era5-*.nc")


def _as_zarr(folder: Path, x: Any, y: Any) -> Any:
    import zarr

    store = zarr.open_group(str(folder / "store.zarr"), mode="w")
    store.create_array("x", data=x, chunks=(7, 2))
    store.create_array("y", data=y, chunks=(20,))
    return folder / "store.zarr"


def _as_parquet(folder: Path, x: Any, y: Any) -> Any:
    import pyarrow
    from pyarrow import parquet

    for number, rows in enumerate(np.array_split(np.arange(len(x)), 5)):
        table = pyarrow.table({"x": list(x[rows]), "y": y[rows]})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=9)
    return folder


@pytest.mark.once
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(_as_netcdf, marks=pytest.mark.framework("netCDF4")),
        pytest.param(_as_zarr, marks=pytest.mark.framework("zarr")),
        pytest.param(_as_parquet, marks=pytest.mark.framework("pyarrow")),
    ],
)
def test_files_of_other_libraries_train(
    strategy: Any, job: Any, folder: Path, write: Any
) -> None:
    """The trained model equals one that a single process trains on the arrays."""
    rng = np.random.default_rng(0)
    x = (rng.integers(0, 40, (96, 3)) / 2).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)
    paths = job.bcast(write(folder, x, y) if job.rank == 0 else None)
    with strategy.scope():
        weights = hs.Variable(np.zeros(3), name="weights")
        optimizer = hs.optimizers.SGD(1e-3)

    def train_step(batch: Any) -> None:
        error = batch["x"] @ weights.numpy() - batch["y"]
        optimizer.apply_gradients([(batch["x"].T @ error / 16, weights)])

    dataset = (
        hs.Dataset.from_files(paths).shuffle(blocks=8, seed=1).batch(16).prefetch(2)
    )
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(3):
        for batch in distributed:
            strategy.run(train_step, args=(batch,))
    expected = np.zeros(3)
    alone = hs.Dataset.from_tensor_slices({"x": x, "y": y}).shuffle(blocks=8, seed=1)
    alone = alone.batch(16)
    for _ in range(3):
        for batch in alone:
            error = batch["x"] @ expected - batch["y"]
            expected -= 1e-3 * batch["x"].T @ error / 16
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["rows", "lines", "names"])
def test_ranks_with_other_files_are_told_apart(
    strategy: Any, job: Any, tmp_path: Path, kind: str
) -> None:
    """Each rank has a folder of its own, as on disks of nodes; names must be equal."""

    def distribute(lengths: dict[str, int], single: bool = False) -> Any:
        for path in folder.iterdir():
            path.unlink()
        for name, length in lengths.items():
            np.save(folder / name, np.arange(length))
        paths = [str(folder / name) for name in lengths]
        if kind == "rows":
            data = hs.Dataset.from_files(paths)
        elif kind == "lines":
            data = hs.Dataset.from_text_files(paths)
        else:
            data = hs.Dataset.list_files(paths, shuffle=False)
        options = hs.InputOptions(single_pipeline=single)
        return strategy.experimental_distribute_dataset(data.batch(2), options)

    folder = tmp_path / f"of-rank-{job.rank}"
    folder.mkdir()
    usual = {f"{index}.npy": 3 + index % 2 for index in range(6)}
    distribute(usual)
    last = job.rank == job.size - 1
    other = {("3a.npy" if n == "3.npy" else n): length for n, length in usual.items()}
    fewer = {name: length for name, length in usual.items() if name != "5.npy"}
    longer = {**usual, "4.npy": 5}
    if kind == "lines":
        # Only replica 0 reads its files.
        distribute(fewer if last else usual, single=True)
    cases = [(other, 3), (fewer, 5), *([(longer, 4)] if kind == "rows" else [])]
    for changed, index in cases:
        error = outcome(distribute, changed if last else usual)
        if job.size == 1:
            assert error is None, error
            continue
        assert isinstance(error, hs.CollectiveError), error
        assert f"found as file {index}, counted from 0" in str(error)
        assert all(name in str(error) for name in usual.keys() ^ changed.keys())
        assert len(error.ranks) < job.size
    assert_usable(strategy, job)
