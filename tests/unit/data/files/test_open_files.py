"""Files that change or vanish while they are read are errors that name the file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcstrat.data import Dataset

VALUES = np.arange(400.0).reshape(100, 4)


def _hdf5(**options: Any) -> Callable[[Path, Any], None]:
    def write(path: Path, values: Any) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, **options)

    return write


def _netcdf(path: Path, values: Any) -> None:
    import netCDF4

    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        file.createDimension("level", 4)
        file.createVariable("x", "f8", ("time", "level"))[:] = values


def _parquet(path: Path, values: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": list(values)}), path, row_group_size=20)


def _zarr(**options: Any) -> Callable[[Path, Any], None]:
    def write(path: Path, values: Any) -> None:
        import zarr

        store = zarr.open_group(str(path), mode="w", zarr_format=options["zarr_format"])
        chunks = {"chunks": (20, 2)} | options
        del chunks["zarr_format"]
        store.create_array("x", data=values, **chunks)

    return write


FORMATS: dict[str, tuple[str, Any]] = {
    "contiguous HDF5": ("x.h5", _hdf5()),
    "HDF5 by gzip": ("x.h5", _hdf5(chunks=(20, 4), compression="gzip")),
    "HDF5 by lzf": ("x.h5", _hdf5(chunks=(20, 4), compression="lzf")),
    "NumPy": ("x.npy", np.save),
    "NetCDF": ("x.nc", _netcdf),
    "Parquet": ("x.parquet", _parquet),
    "Zarr 2": ("x.zarr", _zarr(zarr_format=2)),
    "Zarr 2, nested": (
        "x.zarr",
        _zarr(zarr_format=2, chunk_key_encoding={"name": "v2", "separator": "/"}),
    ),
    "Zarr 3": ("x.zarr", _zarr(zarr_format=3)),
    "Zarr 3, shards": ("x.zarr", _zarr(zarr_format=3, shards=(40, 4))),
}
LIBRARIES = {"NetCDF": "netCDF4", "Parquet": "pyarrow", "Zarr": "zarr"}


def _library(name: str) -> str:
    return next((LIBRARIES[each] for each in LIBRARIES if each in name), "h5py")


def _is_folder(path: Path) -> bool:
    return path.suffix == ".zarr"


def _remove(path: Path, write: Any) -> None:
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink()


def _replace(path: Path, write: Any) -> None:
    """Put another file of this size and time into the place of the file."""
    other = path.with_name(f"other{path.suffix}")
    write(other, -VALUES)
    if not _is_folder(path):
        os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)
    else:
        shutil.rmtree(path)
    other.replace(path)


def _write_again(path: Path, write: Any) -> None:
    if _is_folder(path):
        write(path, -VALUES)
        return
    before, other = path.stat().st_mtime_ns, path.with_name(f"other{path.suffix}")
    write(other, -VALUES)
    # This keeps the inode, as a program that writes into the file.
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(before + 1_000_000,) * 2)


def _append(path: Path, write: Any) -> None:
    other = path.with_name(f"other{path.suffix}")
    write(other, np.concatenate([VALUES, VALUES]))
    if _is_folder(path):
        shutil.rmtree(path)
        other.replace(path)
    else:
        path.write_bytes(other.read_bytes())


def _truncate(path: Path, write: Any) -> None:
    os.truncate(path, path.stat().st_size // 3)


def _remove_chunk(path: Path, write: Any) -> None:
    chunks = [each for each in path.rglob("x/**/*") if each.is_file()]
    max(each for each in chunks if re.match(r"[\d.]+$", each.name)).unlink()


def _remove_all_chunks(path: Path, write: Any) -> None:
    """Remove the files as ``rm -r`` does, but not yet the metadata."""
    for each in path.rglob("x/**/*"):
        if each.is_file() and re.match(r"[\d.]+$", each.name):
            each.unlink()


def _overwrite_rows(path: Path, write: Any) -> None:
    import zarr

    zarr.open_group(str(path), mode="r+")["x"][:] = -VALUES


CHANGES = [_remove, _replace, _write_again, _append]
OF_FILES = [*CHANGES, _truncate]
OF_STORES = [*CHANGES, _remove_chunk, _remove_all_chunks, _overwrite_rows]
CASES = [
    pytest.param(name, change, marks=pytest.mark.framework(_library(name)))
    for name in FORMATS
    for change in (OF_STORES if "Zarr" in name else OF_FILES)
]


@pytest.mark.parametrize("rows_before", [0, 10])
@pytest.mark.parametrize(("name", "change"), CASES)
def test_changed_files_are_errors(
    tmp_path: Path, name: str, change: Any, rows_before: int
) -> None:
    file_name, write = FORMATS[name]
    path = tmp_path / file_name
    write(path, VALUES)
    stage: Any = Dataset.from_files(path).stage
    before = stage.read(slice(0, rows_before), 0)
    found = before if name == "NumPy" else before["x"]
    np.testing.assert_array_equal(found, VALUES[:rows_before])
    change(path, write)
    with pytest.raises(
        (ValueError, FileNotFoundError), match=re.escape(str(path))
    ) as e:
        stage.read(slice(60, 100), 0)
    assert re.search("removed|changed", str(e.value))
    assert "make the data set again" in str(e.value)
    # Another data set reads the new rows, or says why not.
    if change in {_replace, _write_again, _overwrite_rows}:
        (again,) = Dataset.from_files(path).batch(100)
        np.testing.assert_array_equal(again if name == "NumPy" else again["x"], -VALUES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.framework(_library(n))) for n in FORMATS],
)
def test_unchanged_files_and_unwritten_chunks_are_read(
    tmp_path: Path, name: str
) -> None:
    file_name, write = FORMATS[name]
    path = tmp_path / file_name
    write(path, VALUES)
    expected = VALUES.copy()
    if _is_folder(path):
        _remove_chunk(path, write)
        expected = Dataset.from_files(path).batch(100)
        expected = next(iter(expected))["x"]
        assert (expected == 0).sum() > 1
    stage: Any = Dataset.from_files(path).stage
    path.chmod(0o755)
    os.utime(path.parent)
    for rows in (slice(0, 100), np.random.default_rng(0).permutation(100)[:30]):
        found = stage.read(rows, 0)
        np.testing.assert_array_equal(
            found if name == "NumPy" else found["x"], expected[rows]
        )


def test_errors_of_the_file_system_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.h5"
    _hdf5(chunks=(20, 4), compression="gzip")(path, VALUES)
    stage: Any = Dataset.from_files(path).stage

    def fail(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ValueError, match=r"rows of x in .*x\.h5.*Input/output error"):
        stage.read(slice(0, 5), 0)


def test_text_files_that_change_are_errors(tmp_path: Path) -> None:
    paths = [tmp_path / f"{index}.txt" for index in range(2)]
    for path in paths:
        path.write_text("".join(f"line {line}\n" for line in range(3000)))
    dataset = Dataset.from_text_files([os.fspath(path) for path in paths])
    assert len(list(dataset)) == 6000
    iterator = iter(dataset)
    next(iterator)
    os.truncate(paths[0], 9000)
    with pytest.raises(ValueError, match=r"0\.txt.*shortened"):
        list(iterator)
    with pytest.raises(ValueError, match=r"0\.txt.*shortened"):
        next(iter(dataset))
    # The iteration continues with the next file.
    assert len(list(dataset.ignore_errors())) == 3000
    paths[1].unlink()
    assert list(dataset.ignore_errors()) == []
