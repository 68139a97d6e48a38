"""Slabs of rows equal NumPy's slices of whole rows, and few other bytes are read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest

from hpcstrat.data import Dataset, mix


class Inside:
    """Stands for ``strategy.inside`` of a rank in a replica of shape ``axes``."""

    def __init__(self, position: int, **axes: int) -> None:
        self.axes = axes
        self.size = int(np.prod(list(axes.values())))
        self.position = position
        self.coords = np.unravel_index(position, tuple(axes.values()))

    def part(self, length: int, axis: str | None = None) -> slice:
        place, count = self.position, self.size
        if axis is not None:
            index = list(self.axes).index(axis)
            place, count = int(self.coords[index]), self.axes[axis]
        return slice(place * length // count, (place + 1) * length // count)


def _hdf5(path: Path, arrays: dict[str, Any], chance: random.Random) -> Any:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            kind = chance.choice(["contiguous", "chunks", "gzip", "shuffle", "lzf"])
            options: dict[str, Any] = {}
            if kind in {"gzip", "shuffle", "lzf"}:
                options["compression"] = kind.replace("shuffle", "gzip")
                options["shuffle"] = kind == "shuffle"
            if kind != "contiguous" and array.size:
                options["chunks"] = tuple(chance.randint(1, n) for n in array.shape)
            file.create_dataset(name, data=array, **options)
    if chance.random() < 0.2:
        return Dataset(h5py.File(path))
    return Dataset.from_files(path)


def _netcdf(path: Path, arrays: dict[str, Any], chance: random.Random) -> Any:
    path = path.with_suffix(".nc")
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        for name, array in arrays.items():
            packs = array.dtype == np.int16 and chance.random() < 0.5
            _netcdf_variable(file, name, array, {"scale_factor": 0.5} if packs else {})
    return Dataset.from_files(path)


def _netcdf_variable(file: Any, name: str, array: Any, attributes: Any) -> None:
    names = [f"{name}{axis}" for axis in range(array.ndim)]
    for each, length in zip(names[1:], array.shape[1:], strict=True):
        file.createDimension(each, length)
    if "time" in file.dimensions:
        names[0] = "time"
    else:
        file.createDimension(names[0], len(array))
    variable = file.createVariable(name, array.dtype, names)
    variable.setncatts(attributes)
    variable.set_auto_scale(False)
    variable[:] = array


def _zarr(path: Path, arrays: dict[str, Any], chance: random.Random) -> Any:
    import zarr

    group = zarr.open_group(path, mode="w")
    for name, array in arrays.items():
        chunks = tuple(chance.randint(1, n) for n in array.shape)
        group.create_array(name, data=array, chunks=chunks)
    return Dataset.from_files(path)


def _memory(path: Path, arrays: dict[str, Any], chance: random.Random) -> Any:
    return Dataset.from_tensor_slices(arrays)


def _numpy_files(path: Path, arrays: dict[str, Any], chance: random.Random) -> Any:
    sets = {}
    for name, array in arrays.items():
        np.save(path.with_name(f"{name}.npy"), array)
        sets[name] = Dataset.from_files(path.with_name(f"{name}.npy"))
    return Dataset.zip(sets)


class _Items:
    """A sequence of mappings."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, row: int) -> Any:
        return {name: array[row] for name, array in self.arrays.items()}


def _items(path: Path, arrays: dict[str, Any], chance: random.Random) -> Any:
    return Dataset(_Items(arrays))


def _stream(path: Path, arrays: dict[str, Any], chance: random.Random) -> Any:
    return _memory(path, arrays, chance).filter(lambda row: True)


def _parquet(path: Path, arrays: dict[str, Any], chance: random.Random) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({name: list(array.tolist()) for name, array in arrays.items()})
    path = path.with_suffix(".parquet")
    parquet.write_table(table, path, row_group_size=chance.randint(1, 9))
    return Dataset.from_files(path)


SOURCES: list[Callable[..., Any]] = [
    _hdf5,
    _netcdf,
    _zarr,
    _memory,
    _numpy_files,
    _items,
    _stream,
    _parquet,
]


def _changed(dataset: Any, chance: random.Random) -> Any:
    """Apply random methods that keep the rows' shapes."""
    for _ in range(chance.randrange(3)):
        kind = chance.choice(["shuffle", "take", "repeat", "cache", "map", "twice"])
        if kind == "shuffle":
            dataset = dataset.shuffle(6, seed=chance.randrange(9))
        elif kind == "take":
            dataset = dataset.take(chance.randint(1, 9))
        elif kind == "repeat":
            dataset = dataset.repeat(2)
        elif kind == "cache":
            dataset = dataset.cache()
        elif kind == "map":
            dataset = dataset.map(lambda row: {n: a * 2 for n, a in row.items()})
        else:
            dataset = dataset.concatenate(dataset)
    return dataset


class _Drawn:
    """Draws a source, the axes of its columns, and a chain of methods."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, rng = random.Random(seed), np.random.default_rng(seed)
        chance = self.random
        source = SOURCES[seed % len(SOURCES)]
        count = chance.randint(1, 12)
        arrays, self.axes = {}, {}
        for name in chance.sample("abc", chance.randint(1, 3)):
            shape = [chance.randint(1, 9) for _ in range(chance.randint(1, 3))]
            dtype = chance.choice(["f4", "f8", "i4", ">f4", "i2"])
            if source in {_parquet, _netcdf, _zarr}:
                dtype = dtype.strip(">")
            if source is _parquet:
                shape = shape[:1]
            arrays[name] = rng.integers(0, 99, (count, *shape)).astype(dtype)
            self.axes[name] = chance.randrange(-len(shape), len(shape))
        if len(self.axes) > 1 and chance.random() < 0.5:
            self.axes.popitem()
        self._rows = source(folder / "file.h5", arrays, chance)
        self._steps = chance.randrange(1 << 30)

    def batches(self, split: Callable[[Any], Any]) -> Any:
        """Return the chain's batches; ``split`` is called somewhere in the chain."""
        chance, dataset = random.Random(self._steps), self._rows
        steps: list[Callable[[Any], Any]] = [
            lambda rows: _changed(rows, chance),
            lambda rows: rows.batch(chance.randint(1, 5), chance.random() < 0.3),
            lambda some: some.prefetch(2) if chance.random() < 0.3 else some,
            lambda some: some.repeat(2).take(5) if chance.random() < 0.3 else some,
        ]
        steps.insert(chance.randrange(4), split)
        for step in steps:
            dataset = step(dataset)
        return dataset

    def slab(self, name: str, batch: Any, inside: Inside) -> Any:
        """Return the slab of whole rows of a column."""
        if name not in self.axes:
            return batch
        axis = self.axes[name] % (batch.ndim - 1) + 1
        return batch[(slice(None),) * axis + (inside.part(batch.shape[axis]),)]


@pytest.mark.parametrize("seed", range(72))
def test_slabs_are_slices_of_whole_rows(tmp_path: Path, seed: int) -> None:
    drawn = _Drawn(tmp_path, seed)
    whole = drawn.batches(lambda rows: rows)
    count = drawn.random.randint(1, 4)
    split = drawn.batches(lambda rows: rows.split(drawn.axes))
    epochs = [list(whole), list(whole)]
    # Without a strategy, and with one rank for a replica, rows stay whole.
    assert split.slabs(Inside(0, x=1)) is split
    assert split.describe() == whole.describe()
    assert str(split.element_spec) == str(whole.element_spec)
    for position in range(count) if count > 1 else ():
        inside = Inside(position, x=count)
        slabs = split.slabs(inside)
        assert slabs.stage.order_words() == whole.stage.order_words()
        spec = slabs.element_spec
        for epoch in epochs:
            found = list(slabs)
            assert len(found) == len(epoch)
            for one, other in zip(found, epoch, strict=True):
                assert one.keys() == other.keys()
                for name, array in other.items():
                    expected = drawn.slab(name, array, inside)
                    np.testing.assert_array_equal(one[name], expected)
                    assert one[name].dtype == array.dtype
                    assert one[name].flags.c_contiguous
                    assert one[name].flags.writeable
                    assert spec[name].shape[1:] == expected.shape[1:]
                    assert spec[name].dtype == whole.element_spec[name].dtype


@pytest.mark.parametrize("seed", range(12))
def test_two_axes_of_a_replica_divide_two_axes_of_rows(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    shape = [chance.randint(1, 9) for _ in range(3)]
    whole = np.random.default_rng(seed).integers(0, 99, (7, *shape))
    source = SOURCES[seed % len(SOURCES)]
    if source is _parquet:
        source = _hdf5
    rows = source(tmp_path / "file.h5", {"a": whole, "b": whole[..., 0] + 1}, chance)
    axes = chance.sample(range(3), 2)
    if chance.random() < 0.3:
        axes[1] = axes[0]
    batches = rows.split({"a": axes[0]}, along="x").batch(3)
    batches = batches.split({"a": axes[1]}, along="y")
    for position in range(6):
        inside = Inside(position, x=2, y=3)
        slabs = batches.slabs(inside)
        expected = whole
        for axis, name in zip(axes, "xy", strict=True):
            part = inside.part(expected.shape[axis + 1], name)
            expected = expected[(slice(None),) * (axis + 1) + (part,)]
        found = list(slabs)
        np.testing.assert_array_equal(np.concatenate([f["a"] for f in found]), expected)
        np.testing.assert_array_equal(
            np.concatenate([f["b"] for f in found]), whole[..., 0] + 1
        )


def test_functions_after_a_split_get_slabs_and_those_before_it_whole_rows() -> None:
    shapes = []

    def note(row: Any) -> Any:
        shapes.append(row.shape)
        return row + 1

    rows = Dataset.from_tensor_slices(np.arange(40.0).reshape(4, 10))
    inside = Inside(1, x=3)
    for dataset in (rows.map(note).split(0), rows.split(0).map(note)):
        slabs = dataset.batch(2).slabs(inside)
        shapes.clear()
        found = np.concatenate(list(slabs))
        np.testing.assert_array_equal(found, np.arange(40.0).reshape(4, 10)[:, 3:6] + 1)
    assert set(shapes) == {(3,)}


def test_mixed_and_joined_data_sets_are_split() -> None:
    one, two = np.arange(30).reshape(3, 10), 100 + np.arange(50).reshape(5, 10)
    sets = [Dataset.from_tensor_slices(array) for array in (one, two)]
    inside = Inside(2, x=4)
    for whole in (mix(sets, seed=3).take(9), sets[0].concatenate(sets[1])):
        found = list(whole.split(-1).slabs(inside))
        assert [f.tolist() for f in found] == [row[5:7].tolist() for row in whole]
    zipped = Dataset.zip((sets[0].split(0), {"b": sets[1]})).enumerate()
    for number, (slab, other) in zipped.slabs(inside):
        assert slab.tolist() == one[number, 5:7].tolist()
        assert other["b"].tolist() == two[number].tolist()
    named = Dataset.zip((sets[0], {"b": sets[1]})).split({"1/b": 0})
    for (row, other), index in zip(named.slabs(inside), range(3), strict=True):
        assert row.tolist() == one[index].tolist()
        assert other["b"].tolist() == two[index, 5:7].tolist()


def test_padded_batches_are_split_after_they_were_padded() -> None:
    lengths = [3, 1, 4, 2]
    rows = Dataset.from_generator(lambda: (np.ones((n, 6)) * n for n in lengths))
    batches = rows.padded_batch(2).split(-1)
    for whole, slab in zip(batches, batches.slabs(Inside(1, x=4)), strict=True):
        np.testing.assert_array_equal(slab, whole[:, :, 1:3])


def _columns() -> Any:
    return Dataset({"a": np.zeros((4, 3, 2)), "b": np.arange(4)})


def _ragged(*shapes: tuple[int, ...]) -> Any:
    return Dataset.from_generator(lambda: (np.zeros(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _columns().split(0), "in b to split, found rows with none"),
        (lambda: _columns().split({"a": 2}), r"an axis from -2 to 1 .* found 2"),
        (lambda: _columns().split({"a": -3}), r"shape \[3, 2\], found -3"),
        (
            lambda: _columns().split({"c": 0}),
            "found 'c', but .* are 'a', 'b'",
        ),
        (lambda: Dataset(np.zeros((3, 3))).split({"a": 0}), "are a single array"),
        (lambda: _columns().split({"a": 0}).split({"a": 1}), "would be on no rank"),
        (
            lambda: _columns().split({"a": 0}, along="x").split({"a": 1}),
            "over the ranks along x",
        ),
        (lambda: _ragged((3,), (4,)).split(0), "found lengths that differ"),
        (lambda: _ragged((3,), (4, 2)).split(0), "a different number of dimensions"),
        (
            lambda: _columns().batch(2).enumerate().split({"1/a": 0}),
            "made of batches: .* before batch",
        ),
        (
            lambda: list(_columns().flat_map(lambda row: _columns().split({"a": 0}))),
            "result of interleave",
        ),
    ],
)
def test_wrong_splits_are_told_what_to_do(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_an_axis_must_be_an_integer() -> None:
    with pytest.raises(TypeError, match="an integer as axis of split"):
        _columns().split({"a": 0.5})


def test_a_row_of_another_shape_is_an_error() -> None:
    dataset = _ragged(*[(4,)] * 5, (5,)).split(0).slabs(Inside(1, x=2))
    elements = iter(dataset)
    assert [len(next(elements)) for _ in range(5)] == [2] * 5
    with pytest.raises(ValueError, match=r"shape \[4\] .* found \[5\]"):
        next(elements)


def _read_bytes(read: Callable[[], Any]) -> int:
    """Return the number of bytes that system calls read during a call."""

    def count() -> int:
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    start = count()
    own = count() - start
    start = count()
    read()
    return count() - start - own


LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "a chunk of 1 row": {"chunks": (1, 50, 30)},
    "a chunk of 4 rows": {"chunks": (4, 50, 30)},
    "chunks of parts": {"chunks": (4, 10, 30)},
    "compressed chunks of parts": {"chunks": (4, 10, 30), "compression": "gzip"},
    "small chunks": {"chunks": (2, 5, 6)},
}


@pytest.mark.parametrize("layout", [*LAYOUTS, "npy", "netcdf", "h5py"])
@pytest.mark.parametrize("shuffles", [False, True])
def test_a_slab_of_the_first_axis_reads_no_other_bytes(
    tmp_path: Path, layout: str, shuffles: bool
) -> None:
    # Random bytes cannot be compressed. HDF5 itself reads at least 64 KiB at once.
    shape = (6, 50, 1000) if layout == "h5py" else (24, 50, 30)
    whole = np.random.default_rng(0).integers(0, 1 << 63, shape)
    path = tmp_path / ("rows.npy" if layout == "npy" else "rows.h5")
    if layout == "npy":
        np.save(path, whole)
    elif layout == "netcdf":
        path = path.with_suffix(".nc")
        with netCDF4.Dataset(path, "w") as file:
            _netcdf_variable(file, "field", whole, {})
    else:
        with h5py.File(path, "w") as file:
            options = LAYOUTS.get(layout, {})
            file.create_dataset("field", data=whole.astype(">i8"), **options)
    rows = Dataset(h5py.File(path)) if layout == "h5py" else Dataset.from_files(path)
    if shuffles:
        # Whole chunks are read of the rows that are not in the first batches.
        rows = rows.shuffle(blocks=4, window=1)
    batches = rows.split(0).batch(6).slabs(Inside(2, x=5))
    own = whole.nbytes // 5
    assert own <= _read_bytes(lambda: list(batches)) <= 1.1 * own
