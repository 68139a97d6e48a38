"""Chunks that are unpacked without HDF5 have the values that h5py reads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.data import Dataset
from hpcstrat.data.files import chunk_filters

hdf5plugin = pytest.importorskip("hdf5plugin")
pytest.importorskip("numcodecs")

ZSTD, LZ4, BLOSC, BLOSC2 = 32015, 32004, 32001, 32026
PARAMETERS: dict[int, list[dict[Any, Any]]] = {
    ZSTD: [hdf5plugin.Zstd(clevel=level) for level in (-1, 3, 19)],
    LZ4: [hdf5plugin.LZ4(nbytes=size) for size in (0, 8, 40, 1 << 12)],
    BLOSC: [
        hdf5plugin.Blosc(cname=name, clevel=level, shuffle=shuffle)
        for name in ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
        for level in (0, 5)
        for shuffle in (0, 1, 2)
    ],
}


def filtered(rng: Any, compressors: list[int]) -> Any:
    """Return creation properties with some filters in a random order."""
    made = h5p.create(h5p.DATASET_CREATE)
    code = int(rng.choice(compressors))
    chosen = [code] if code else []
    for extra in (h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32):
        if rng.random() < 0.5:
            chosen.insert(int(rng.integers(0, len(chosen) + 1)), extra)
    if rng.random() < 0.1:
        chosen.append(h5z.FILTER_DEFLATE)
    for one in chosen:
        if one == h5z.FILTER_SHUFFLE:
            made.set_shuffle()
        elif one == h5z.FILTER_FLETCHER32:
            made.set_fletcher32()
        elif one == h5z.FILTER_DEFLATE:
            made.set_deflate(int(rng.integers(0, 10)))
        else:
            options = PARAMETERS[one][int(rng.integers(0, len(PARAMETERS[one])))]
            made.set_filter(one, h5z.FLAG_OPTIONAL, options["compression_opts"])
    return made


def write_random_file(path: Path, rng: Any) -> None:
    """Write a column of random filters, chunks and values, some of them missing."""
    kinds = ["i1", "u2", "<i4", ">f4", "f8", "c16", "?"]
    dtype = np.dtype(str(rng.choice(kinds)))
    shape = (int(rng.integers(1, 300)), *rng.integers(1, 9, rng.integers(0, 3)))
    shape = tuple(int(each) for each in shape)
    made = filtered(rng, [0, h5z.FILTER_DEFLATE, ZSTD, LZ4, BLOSC, ZSTD, LZ4, BLOSC])
    made.set_chunk(tuple(int(rng.integers(1, n + 3)) for n in shape))
    if rng.random() < 0.5:
        made.set_fill_value(np.array(1, dtype))
    # Optional filters are omitted for bytes without a pattern, which stay as large.
    most = int(rng.choice([2, 5, 256]))
    count = int(np.prod(shape)) * dtype.itemsize
    values = rng.integers(0, most, count, dtype=np.uint8)
    if dtype.kind == "b":
        values %= 2
    written = int(rng.integers(0, shape[0] + 1)) if rng.random() < 0.3 else shape[0]
    version = str(rng.choice(["earliest", "latest"]))
    with h5py.File(path, "w", libver=version) as file:
        stored = h5t.py_create(dtype, logical=True)
        space = h5s.create_simple(shape, (h5s.UNLIMITED,) * len(shape))
        data = h5py.Dataset(h5d.create(file.id, b"x", stored, space, made))
        if written:
            data[:written] = values.view(dtype).reshape(shape)[:written]


def compare_with_h5py(path: Path, rng: Any) -> str:
    """Compare random rows of a column, read by one or more threads, with h5py's."""
    with h5py.File(path) as file:
        stored = np.asarray(file["x"][...])
    expected = stored.astype(stored.dtype.newbyteorder("="))
    stage: Any = Dataset.from_files(path, columns="x").stage
    chosen = [rng.integers(0, len(expected), 20) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for rows, found in zip(
            chosen, pool.map(stage.read, chosen, [0] * 3), strict=True
        ):
            assert found.tobytes() == expected[rows].tobytes()
    whole = stage.read(slice(0, len(expected)), 0)
    assert whole.tobytes() == expected.tobytes()
    (column,) = stage.columns().values()
    return str(column.how)


@given(seed=st.integers(0, 10**9), is_compiled=st.booleans())
def test_random_filters_are_undone_as_h5py_undoes_them(
    tmp_path_factory: pytest.TempPathFactory, seed: int, is_compiled: bool
) -> None:
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.getbasetemp() / "filtered.h5"
    write_random_file(path, rng)
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(chunk_filters, "_READER", None)
        compare_with_h5py(path, rng)


@pytest.mark.parametrize("code", [h5z.FILTER_DEFLATE, ZSTD, LZ4, BLOSC])
def test_damaged_chunks_are_errors_and_never_other_values(
    tmp_path: Path, code: int
) -> None:
    rng = np.random.default_rng(code)
    values = np.arange(4000.0)
    for attempt in range(40):
        path = tmp_path / f"{attempt}.h5"
        with h5py.File(path, "w") as file:
            options = PARAMETERS.get(code, [{"compression": "gzip"}])[0]
            file.create_dataset(
                "x", data=values, chunks=(4000,), fletcher32=True, **options
            )
            place = file["x"].id.get_chunk_info(0)
        content = bytearray(path.read_bytes())
        where = place.byte_offset + int(rng.integers(0, place.size))
        content[where] ^= int(rng.integers(1, 256))
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{attempt}\.h5.*damaged bytes"):
            list(Dataset.from_files(path, "x").batch(4000))


@pytest.mark.parametrize("code", [h5z.FILTER_DEFLATE, ZSTD, LZ4, BLOSC])
@pytest.mark.parametrize("num_rows", [10, 30])
def test_chunks_with_fewer_or_more_bytes_than_rows_are_errors(
    tmp_path: Path, code: int, num_rows: int
) -> None:
    options = PARAMETERS.get(code, [{"compression": "gzip"}])[0]
    with h5py.File(tmp_path / "other.h5", "w") as file:
        data = np.arange(float(num_rows))
        other = file.create_dataset("x", data=data, chunks=(num_rows,), **options)
        mask, packed = other.id.read_direct_chunk((0,))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        made = file.create_dataset("x", (20,), "f8", chunks=(20,), **options)
        made.id.write_direct_chunk((0,), packed, mask)
    with pytest.raises(ValueError, match=r"x\.h5.*damaged bytes"):
        list(Dataset.from_files(tmp_path / "x.h5", "x").batch(20))


def test_columns_name_the_library_that_unpacks_them(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    packings = {
        "zstd": hdf5plugin.Zstd(),
        "lz4": hdf5plugin.LZ4(),
        "blosc": hdf5plugin.Blosc(),
        "blosc2": hdf5plugin.Blosc2(),
        "bitshuffle": hdf5plugin.Bitshuffle(),
    }
    values = np.arange(100.0)
    with h5py.File(path, "w") as file:
        for name, options in packings.items():
            file.create_dataset(name, data=values, chunks=(50,), **options)
    dataset = Dataset.from_files(path)
    stage: Any = dataset.stage
    how = {name: column.how for name, column in stage.columns().items()}
    direct = "chunks of 50 rows, unpacked by numcodecs"
    assert {name for name, one in how.items() if one == direct} == {
        "zstd",
        "lz4",
        "blosc",
    }
    (batch,) = dataset.batch(100)
    for name in packings:
        np.testing.assert_array_equal(batch[name], values)


# A new process has not imported hdf5plugin, whose import registers filters in HDF5.
READING = """
import sys
for name in sys.argv[2].split(","):
    sys.modules[name] = None
from hpcstrat.data import Dataset
dataset = Dataset.from_files(sys.argv[1], "x")
print(next(iter(dataset.stage.columns().values())).how)
print(next(iter(dataset.batch(100))).sum())
"""


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("none", "unpacked by numcodecs"),
        ("hdf5plugin", "unpacked by numcodecs"),
        ("numcodecs", "through h5py"),
        (
            "numcodecs,hdf5plugin",
            "column x of {path}, found filter 32015 (zstd), which is not installed; "
            "pip install hdf5plugin, or",
        ),
    ],
)
def test_missing_packages_leave_the_other_way_or_an_error(
    tmp_path: Path, missing: str, expected: str
) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.ones(100), chunks=(10,), **hdf5plugin.Zstd())
    # Other tests of this process may have loaded a package that sets the path.
    env = {k: v for k, v in os.environ.items() if k != "HDF5_PLUGIN_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", READING, str(path), missing],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if "found filter" in expected:
        assert expected.format(path=path) in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        how, total = done.stdout.split("\n")[:2]
        assert expected in how
        assert float(total) == 100
