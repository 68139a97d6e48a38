"""Rows of files equal those that the files' own libraries read, or errors help."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.data import Dataset, DatasetOptions
from hpcstrat.data.files import columns as file_columns
from hpcstrat.data.files.columns import BlockCache
from hpcstrat.data.files.open_files import OpenFiles
from hpcstrat.data.sources import runs_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunks": {"chunks": True},
    "gzip": {"compression": "gzip", "chunks": True},
    "shuffle": {"compression": "gzip", "shuffle": True, "chunks": True},
    "lzf": {"compression": "lzf", "chunks": True},
    "checksum": {"compression": "gzip", "fletcher32": True, "chunks": True},
}


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(["f4", ">f4", "f8", "i2", ">i8", "u1", "c8", "?", "f2"]),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    shape=st.lists(st.integers(1, 5), max_size=2),
    chunk=st.lists(st.integers(1, 7), min_size=3, max_size=3),
    userblock=st.sampled_from([0, 512]),
    seed=st.integers(0, 99),
)
def test_rows_of_hdf5_files_are_those_of_h5py(
    tmp_path_factory: pytest.TempPathFactory,
    layout: str,
    dtype: str,
    lengths: list[int],
    shape: list[int],
    chunk: list[int],
    userblock: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(seed)
    whole = []
    for index, length in enumerate(lengths):
        values = rng.integers(0, 100, (length, *shape)).astype(dtype)
        whole.append(values)
        options = dict(LAYOUTS[layout])
        if options.pop("chunks", False):
            sizes = [min(a, b) for a, b in zip(chunk, (length, *shape), strict=False)]
            options["chunks"] = tuple(max(size, 1) for size in sizes)
            options["maxshape"] = (None, *shape)
        with h5py.File(folder / f"{index}.h5", "w", userblock_size=userblock) as file:
            file.create_dataset("x", data=values, **options)
    expected = np.concatenate(whole)
    dataset = Dataset.from_files(str(folder / "*.h5"), columns="x")
    assert dataset.cardinality() == len(expected)
    stage: Any = dataset.stage
    assert stage.read(slice(0, 0), 0).dtype == np.dtype(dtype).newbyteorder("=")
    places = rng.permutation(len(expected))[: rng.integers(0, len(expected) + 1)]
    np.testing.assert_array_equal(stage.read(places, 0), expected[places])
    np.testing.assert_array_equal(
        stage.read(slice(0, len(expected)), 0), expected, strict=False
    )
    with_twice = np.concatenate([places, places])
    np.testing.assert_array_equal(stage.read(with_twice, 0), expected[with_twice])


def test_special_datasets_are_read_by_h5py(tmp_path: Path) -> None:
    path = tmp_path / "special.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("never", (6,), "f4", fillvalue=3.5)
        file.create_dataset("never_in_chunks", (6,), "f4", chunks=(2,), fillvalue=2)
        part = file.create_dataset("part", (6, 2), "i4", chunks=(2, 2), fillvalue=7)
        part[2:4] = 1
        masked = file.create_dataset("masked", (6,), "f4", chunks=(6,), compression=1)
        masked.id.write_direct_chunk((0,), np.arange(6, dtype="f4").tobytes(), 1)
        file["text"] = [f"name {index}" for index in range(6)]
        file["enum"] = np.array([True, False] * 3)
        outside = tmp_path / "outside.bin"
        outside.write_bytes(np.arange(6.0).tobytes())
        file.create_dataset("outside", (6,), "f8", external=[(str(outside), 0, 48)])
        layout = h5py.VirtualLayout((6,), "f8")
        layout[:] = h5py.VirtualSource(str(path), "outside", (6,))
        file.create_virtual_dataset("virtual", layout)
        file["group/deep"] = np.arange(6)
        file["about"] = "a scalar"
    (batch,) = Dataset.from_files(path).batch(6)
    assert batch["never"].tolist() == [3.5] * 6
    assert batch["never_in_chunks"].tolist() == [2] * 6
    assert batch["part"].tolist() == [[7, 7]] * 2 + [[1, 1]] * 2 + [[7, 7]] * 2
    for name in ("masked", "outside", "virtual"):
        assert batch[name].tolist() == list(range(6)), name
    assert batch["text"].tolist() == [f"name {index}" for index in range(6)]
    assert batch["enum"].tolist() == [True, False] * 3
    assert batch["group"]["deep"].tolist() == list(range(6))
    assert "about" not in batch


def test_columns_are_chosen_by_name_and_pattern(tmp_path: Path) -> None:
    path = tmp_path / "columns.h5"
    with h5py.File(path, "w") as file:
        file["fields/t"], file["fields/u"] = np.arange(3.0), np.arange(3)
        file["label"], file["axis"] = np.arange(3), np.arange(5)
    with pytest.raises(
        ValueError, match=r"axis: 5.*choose the columns of the examples"
    ):
        Dataset.from_files(path)
    chosen = Dataset.from_files(path, columns=["fields/*", "label"])
    element = next(iter(chosen))
    assert sorted(element) == ["fields", "label"]
    assert sorted(element["fields"]) == ["t", "u"]
    assert next(iter(Dataset.from_files(path, columns="axis").batch(5))).shape == (5,)
    with pytest.raises(ValueError, match="found axis, fields/t"):
        Dataset.from_files(path, columns=["fields/v"])


def _two(tmp_path: Path, first: Any, second: Any) -> list[Path]:
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for path, columns in zip(paths, (first, second), strict=True):
        with h5py.File(path, "w") as file:
            for name, values in columns.items():
                file[name] = values
    return paths


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    paths = _two(tmp_path, {"x": np.zeros((3, 2))}, {"x": np.zeros((3, 2), "f4")})
    with pytest.raises(ValueError, match=r"float64\[2\] in .*b\.h5, as in .*a\.h5"):
        Dataset.from_files(paths)
    paths = _two(tmp_path, {"x": np.zeros(3)}, {"y": np.zeros(3)})
    with pytest.raises(ValueError, match="x, y in one of them only"):
        Dataset.from_files(paths)
    with pytest.raises(FileNotFoundError, match="nothing at"):
        Dataset.from_files(tmp_path / "none.h5")
    with pytest.raises(ValueError, match="expected paths of files"):
        Dataset.from_files([np.zeros(3)])
    broken = tmp_path / "broken.h5"
    broken.write_bytes(b"not HDF5")
    with pytest.raises(ValueError, match="h5py cannot open"):
        Dataset.from_files(broken)
    old = tmp_path / "old.nc"
    old.write_bytes(b"CDF\x01" + bytes(40))
    with pytest.raises(ValueError, match="nccopy"):
        Dataset.from_files(old)
    empty = tmp_path / "empty.h5"
    h5py.File(empty, "w").close()
    with pytest.raises(ValueError, match="found none"):
        Dataset.from_files(empty)


@pytest.mark.parametrize("layout", ["contiguous", "shuffle", "lzf"])
def test_files_that_change_are_errors(tmp_path: Path, layout: str) -> None:
    def make(name: str) -> Any:
        path = tmp_path / f"{name}.h5"
        values = np.random.default_rng(0).normal(size=(4000, 20))
        options = dict(LAYOUTS[layout])
        if options.pop("chunks", False):
            options["chunks"] = (100, 20)
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, **options)
        stage: Any = Dataset.from_files(path, columns="x").stage
        return path, stage, values

    path, stage, values = make("shortened")
    np.testing.assert_array_equal(stage.read(slice(0, 5), 0), values[:5])
    os.truncate(path, path.stat().st_size // 3)
    with pytest.raises(ValueError, match="shortened"):
        stage.read(slice(3500, 3600), 0)
    if layout == "lzf":
        return
    path, stage, values = make("changed")
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="that it has changed"):
        stage.read(slice(0, 5), 0)
    path, stage, values = make("gone")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="that it was removed"):
        stage.read(slice(0, 5), 0)
    if layout == "contiguous":
        return
    path, _, values = make("damaged")
    with h5py.File(path) as file:
        place = file["x"].id.get_chunk_info(3)
    with path.open("r+b") as raw:
        raw.seek(place.byte_offset + 10)
        raw.write(bytes(50))
    stage = Dataset.from_files(path, columns="x").stage
    np.testing.assert_array_equal(stage.read(slice(0, 50), 0), values[:50])
    with pytest.raises(ValueError, match=r"damaged bytes.*h5dump"):
        stage.read(slice(300, 400), 0)
    np.testing.assert_array_equal(stage.read(slice(400, 450), 0), values[400:450])


def test_without_libdeflate_zlib_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "packed.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(1000.0), compression=4, shuffle=True)
    monkeypatch.setitem(__import__("sys").modules, "deflate", None)
    (batch,) = Dataset.from_files(path, columns="x").batch(1000)
    np.testing.assert_array_equal(batch, np.arange(1000.0))


def test_a_file_that_the_program_has_open_is_read(tmp_path: Path) -> None:
    path = tmp_path / "open.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(5)
    for locking in (True, False, None):
        with h5py.File(path, "r", locking=locking):
            rows = list(Dataset.from_files(path, "x"))
        assert [int(row) for row in rows] == [0, 1, 2, 3, 4]


def test_descriptors_are_closed_and_opened_again(tmp_path: Path) -> None:
    paths = []
    for index in range(12):
        paths.append(tmp_path / f"{index:02}.npy")
        np.save(paths[-1], np.full((2, 3), index))
    before = len(os.listdir("/proc/self/fd"))
    dataset = Dataset.from_files(paths)
    stage: Any = dataset.stage
    stage._files._most = 4
    (batch,) = dataset.batch(24)
    assert batch[:, 0].tolist() == sorted([*range(12)] * 2)
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    assert len(list(dataset)) == 24
    del dataset, stage
    assert len(os.listdir("/proc/self/fd")) == before


def test_npy_files_that_have_no_rows_are_refused(tmp_path: Path) -> None:
    for name, array in (
        ("scalar", np.array(3)),
        ("fortran", np.asfortranarray(np.zeros((3, 2)))),
    ):
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(ValueError, match="ascontiguousarray"):
            Dataset.from_files(tmp_path / f"{name}.npy")
    (tmp_path / "text.npy").write_text("text")
    with pytest.raises(ValueError, match=r"numpy\.save"):
        Dataset.from_files(tmp_path / "text.npy")


def _random_dtype(chance: random.Random, depth: int = 0) -> np.dtype[Any]:
    """Return a dtype whose fields differ in byte order, size and padding."""
    if depth == 3 or (depth and chance.random() < 0.6):
        kinds = ["i2", "u4", "i8", "f2", "f8", "c8", "U3", "M8[s]", "S3", "?", "V5"]
        return np.dtype(chance.choice("<>") + chance.choice(kinds))
    shapes: list[Any] = [(), (2,), (2, 3)]
    fields = [
        (f"f{index}", _random_dtype(chance, depth + 1), chance.choice(shapes))
        for index in range(chance.randint(1, 4))
    ]
    return np.dtype(fields, align=chance.random() < 0.5)


def _values(array: Any) -> Any:
    """Return the values of each field as text, without the padding."""
    if array.dtype.names:
        return [_values(array[name]) for name in array.dtype.names]
    return repr(array.tolist())


@pytest.mark.parametrize("reader", ["compiled", "python"])
@pytest.mark.parametrize("seed", range(20))
def test_structured_npy_files_are_those_of_numpy(
    tmp_path: Path, monkeypatch: Any, seed: int, reader: str
) -> None:
    if reader == "python":
        monkeypatch.setattr("hpcstrat.data.files.columns._READER", None)
    chance, dtype = random.Random(seed), _random_dtype(random.Random(seed))
    shape = (chance.choice([1, 7, 20]), *chance.choice([(), (2,), (3, 2)]))
    data = np.arange(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8) % 2
    array = data.view(dtype).reshape(shape)
    np.save(tmp_path / "a.npy", array)
    stage: Any = Dataset.from_files(tmp_path / "a.npy").stage
    places = np.array([chance.randrange(len(array)) for _ in range(9)])
    order = np.random.default_rng(seed).permutation(len(array))
    assert _values(stage.read(slice(0, len(array)), 0)) == _values(array)
    assert _values(stage.read(places, 0)) == _values(array[places])
    assert _values(stage.read(order, 0)) == _values(array[order])


def test_names_with_characters_of_patterns_are_chosen(tmp_path: Path) -> None:
    names = ["temperature [K]", "temperature K", "x*", "xy"]
    path = tmp_path / "columns [1].h5"
    with h5py.File(path, "w") as file:
        for number, name in enumerate(names):
            file[name] = np.arange(3) + 10 * number
    for number, name in enumerate(names):
        found = Dataset.from_files(path, name)
        assert [int(row) for row in found] == [10 * number + i for i in range(3)]
    several: Any = next(iter(Dataset.from_files(path, ["temperature ?", "x*"])))
    assert [*several] == ["temperature K", "x*"]
    assert [*map(str, Dataset.list_files(str(path)))] == [str(path)]


def test_archives_and_fields_of_npy_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(ValueError, match=r"a\.npz.*numpy\.save"):
        Dataset.from_files(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="leave out columns="):
        Dataset.from_files(tmp_path / "a.npy", "x")


def test_cold_runs_are_announced_and_rows_stay_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(1).normal(size=(5000, 300))
    np.save(tmp_path / "x.npy", values)
    monkeypatch.setattr(file_columns, "_COLD_SECONDS", -1.0)
    stage: Any = Dataset.from_files(tmp_path / "x.npy").stage
    for seed in range(3):
        places = np.random.default_rng(seed).permutation(5000)[:200]
        np.testing.assert_array_equal(stage.read(places, 0), values[places])


@given(st.sets(st.integers(0, 60)))
def test_runs_have_all_rows_and_no_gap(found: set[int]) -> None:
    rows = np.array(sorted(found), np.int64)
    runs = list(runs_of(rows))
    assert [place for run in runs for place in range(*run)] == list(range(len(rows)))
    for start, end in runs:
        assert (np.diff(rows[start:end]) == 1).all()
    for (_, end), (start, _) in itertools.pairwise(runs):
        assert rows[start] - rows[end - 1] > 1


def test_blocks_are_loaded_once_and_dropped_when_they_are_too_many() -> None:
    cache, loads = BlockCache(most_bytes=300), []

    def load(key: int) -> Any:
        loads.append(key)
        return np.full(100, key, np.uint8)

    for key in (0, 1, 0, 2, 0, 3, 0, 1):
        assert cache.get(key, lambda: load(key))[0] == key  # noqa: B023
    assert loads == [0, 1, 2, 3, 1]

    def fail() -> Any:
        raise OSError("the disk fails")

    with pytest.raises(OSError, match="the disk fails"):
        cache.get(5, fail)
    assert not cache.holds(5)
    assert OpenFiles()._most > 16


def test_memory_of_dropped_blocks_is_reused_unless_a_view_of_it_exists() -> None:
    cache, addresses = BlockCache(most_bytes=3000), set()

    def load(key: int) -> Any:
        block = cache.empty((10, 25), np.dtype(np.float32))
        block[:] = key
        return block

    views = []
    for key in range(100):
        block = cache.get(key, lambda: load(key))  # noqa: B023
        addresses.add(block.ctypes.data)
        if key % 20 == 0:
            views.append(block[5:])
    assert [int(view[0, 0]) for view in views] == list(range(0, 100, 20))
    assert len(addresses) < 15


def test_files_are_divided_between_workers_by_policy_file(tmp_path: Path) -> None:
    for index in range(3):
        np.save(tmp_path / f"{index}.npy", np.full(4, index))
    dataset = Dataset.from_files(str(tmp_path / "*.npy")).batch(2)
    dataset = dataset.with_options(DatasetOptions("file"))
    parts = [dataset.auto_shard(2, worker) for worker in range(2)]
    assert [[b.tolist() for b in part] for part in parts] == [
        [[0, 0], [0, 0], [2, 2], [2, 2]],
        [[1, 1], [1, 1]],
    ]


netcdf = pytest.mark.framework("netCDF4")


@netcdf
def test_fields_of_netcdf_are_decoded_as_netcdf4_does(tmp_path: Path) -> None:
    import netCDF4

    path = tmp_path / "by_hand.nc"
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        file.createDimension("level", 3)
        file.createDimension("nv", 2)
        time = file.createVariable("time", "f8", ("time",))
        time.units, time.bounds = "hours since 1900-01-01", "time_bnds"
        file.createVariable("time_bnds", "f8", ("time", "nv"))
        q = file.createVariable("q", "i2", ("time", "level"), fill_value=-999)
        q.scale_factor, q.add_offset, q.valid_min = 0.01, 5.0, np.int16(-100)
        q.missing_value, q.coordinates = np.int16(-998), "lat lon"
        plain = file.createVariable("plain", "f4", ("time", "level"), fill_value=-1.0)
        unfilled = file.createVariable("unfilled", "f8", ("time",))
        small = file.createVariable("small", "i1", ("time",))
        small._Unsigned = "true"
        for name in ("lat", "lon"):
            file.createVariable(name, "f4", ("time",))
        file.createVariable("name", str, ("time",))
        file.createVariable("crs", "i4", ()).grid_mapping_name = "latitude_longitude"
        time[:] = [0, 6, 12, 18]
        q[0] = [5, 5.5, 6]
        q[2] = np.ma.masked_array([1, 4.5, 3.0], [0, 1, 0])
        plain[1] = [1, 2, 3]
        unfilled[:2] = [1, 2]
        small[:] = np.array([1, -1, 3, -3], "i1")
    dataset = Dataset.from_files(path)
    assert sorted(dataset.element_spec) == ["plain", "q", "small", "unfilled"]
    (batch,) = dataset.batch(10)
    assert batch["small"].tolist() == [1, 255, 3, 253]
    with netCDF4.Dataset(path) as file:
        for name, dtype in (("q", "f4"), ("plain", "f4"), ("unfilled", "f8")):
            expected = np.ma.filled(file[name][:].astype(dtype), np.nan)
            np.testing.assert_allclose(batch[name], expected, rtol=1e-6)
            assert batch[name].dtype == dtype
    (raw,) = Dataset.from_files(path, columns=["q"], decode=False).batch(10)
    assert raw["q"].dtype == np.int16
    assert raw["q"][1].tolist() == [-999] * 3
    times = Dataset.from_files(path, columns=["time", "q"])
    assert float(list(times)[3]["time"]) == 18
    levels = tmp_path / "levels.nc"
    with netCDF4.Dataset(levels, "w") as file:
        file.createDimension("level", 3)
        file.createVariable("u", "f4", ("level",))[:] = [1, 2, 3]
        file.createVariable("level", "f4", ("level",))
    (batch,) = Dataset.from_files(levels, dimension="level").batch(3)
    assert batch["u"].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="found those along"):
        Dataset.from_files(levels, dimension="time")


@netcdf
def test_months_of_xarray_are_one_data_set(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    pandas = pytest.importorskip("pandas")
    times = pandas.date_range("2020-01-01", "2020-06-30 18:00", freq="6h")
    rng = np.random.default_rng(0)
    months = []
    for month in range(1, 7):
        own = times[times.month == month]
        shape = (len(own), 7, 9)
        fields = {
            "t2m": (("time", "lat", "lon"), rng.normal(280, 5, shape).astype("f4")),
            "u10": (("time", "lat", "lon"), rng.normal(size=shape).astype("f4")),
            "z": (("lat", "lon"), np.zeros((7, 9), "f4")),
        }
        coords = {"time": own, "lat": np.arange(7.0), "lon": np.arange(9.0)}
        months.append(xarray.Dataset(fields, coords))
        packed = {
            "dtype": "i2",
            "scale_factor": 0.002,
            "add_offset": 280.0,
            "_FillValue": -32767,
            "zlib": True,
            "shuffle": True,
        }
        months[-1].to_netcdf(
            tmp_path / f"2020-{month:02}.nc",
            engine="netcdf4",
            encoding={"t2m": packed, "u10": {"zlib": True}},
            unlimited_dims=["time"],
        )
    whole = xarray.concat(
        [xarray.open_dataset(p) for p in sorted(tmp_path.glob("*.nc"))],
        "time",
        data_vars="minimal",
    )
    dataset = Dataset.from_files(str(tmp_path / "*.nc"))
    assert dataset.cardinality() == len(times)
    assert sorted(dataset.element_spec) == ["t2m", "u10"]
    stage: Any = dataset.stage
    places = rng.permutation(len(times))
    batch = stage.read(places, 0)
    np.testing.assert_allclose(batch["t2m"], whole["t2m"].values[places], rtol=1e-6)
    np.testing.assert_array_equal(batch["u10"], whole["u10"].values[places])


@pytest.mark.framework("zarr")
def test_rows_of_a_zarr_store(tmp_path: Path) -> None:
    import zarr

    values = np.random.default_rng(0).normal(size=(50, 4, 5))
    root = zarr.open_group(str(tmp_path / "store.zarr"), mode="w")
    root.create_array("fields/t", data=values, chunks=(7, 2, 5))
    root.create_array("label", data=np.arange(50), chunks=(20,))
    for number in range(9):
        root.create_array(f"more/{number}", data=np.arange(50), chunks=(20,))
    dataset = Dataset.from_files(tmp_path / "store.zarr")
    # The order of columns is the same on every rank, although Zarr lists them in any
    # order.
    names = list(dataset.stage.columns())  # type: ignore[attr-defined]
    assert names == sorted(names)
    stage: Any = dataset.stage
    places = np.random.default_rng(1).permutation(50)[:30]
    batch = stage.read(places, 0)
    np.testing.assert_array_equal(batch["fields"]["t"], values[places])
    np.testing.assert_array_equal(batch["label"], places)


@pytest.mark.framework("zarrs")
@pytest.mark.parametrize("is_installed", [True, False])
def test_zarrs_decodes_the_arrays_that_it_supports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    import numcodecs
    import zarr

    values = np.random.default_rng(0).normal(size=(50, 4)).astype("f4")
    path = str(tmp_path / "store.zarr")
    root = zarr.open_group(path, mode="w", zarr_format=2)
    for name, compressor in {
        "blosc": numcodecs.Blosc("zstd"),
        "lzma": numcodecs.LZMA(),
    }.items():
        root.create_array(name, data=values, chunks=(7, 4), compressors=compressor)
    if not is_installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    stage: Any = Dataset.from_files(path).stage
    how = {name: column.how for name, column in stage.columns().items()}
    decoder = "zarrs" if is_installed else "zarr"
    assert how["blosc"] == f"through {decoder}, 7 rows at once"
    assert how["lzma"] == "through zarr, 7 rows at once"
    places = np.random.default_rng(1).permutation(50)[:30]
    for array in stage.read(places, 0).values():
        np.testing.assert_array_equal(array, values[places])


@pytest.mark.framework("pyarrow")
def test_rows_of_a_folder_of_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    count = 0
    for index, length in enumerate((10, 3, 21)):
        rows = np.arange(count, count + length)
        count += length
        table = pyarrow.table(
            {
                "x": rows * 0.5,
                "label": rows,
                "name": [f"row {row}" for row in rows],
                "vector": [[float(row), -float(row)] for row in rows],
            }
        )
        parquet.write_table(table, tmp_path / f"{index}.parquet", row_group_size=4)
    dataset = Dataset.from_files(tmp_path)
    assert dataset.cardinality() == count
    stage: Any = dataset.stage
    places = np.random.default_rng(1).permutation(count)
    batch = stage.read(places, 0)
    np.testing.assert_array_equal(batch["label"], places)
    np.testing.assert_array_equal(batch["x"], places * 0.5)
    np.testing.assert_array_equal(batch["vector"], np.stack([places, -places], 1))
    assert batch["name"].tolist() == [f"row {row}" for row in places]
    hole = pyarrow.table({"x": [1.0, None]})
    parquet.write_table(hole, tmp_path / "hole.parquet")
    with pytest.raises(ValueError, match=r"a value in each row .* column 'x'"):
        list(Dataset.from_files(tmp_path / "hole.parquet"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="pyarrow cannot open"):
        Dataset.from_files(tmp_path / "broken.parquet")
