"""Columns of any HDF5 file are what h5py reads, or an error names file and column."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.data import Dataset

# Classes of types that are not rows, or that only the writer of a file understands.
REFUSED = {"lists", "object reference", "region reference", "compound of lists"}


def _plain(rng: Any) -> Any:
    names = ["i1", "u2", ">i4", "i8", ">u8", "f2", ">f4", "f8", "g", "c8", ">c16", "?"]
    return h5t.py_create(np.dtype(str(rng.choice(names))), logical=True)


def _with_unused_bits(rng: Any) -> Any:
    size = int(rng.choice([1, 2, 4, 8]))
    name = f"{rng.choice(['<', '>'])}{rng.choice(['i', 'u'])}{size}"
    made = h5t.py_create(np.dtype(name)).copy()
    # HDF5 takes types with more unused bits for damaged ones.
    made.set_precision(int(rng.integers(4 * size + 1, 8 * size + 1)))
    made.set_offset(int(rng.integers(0, 8 * size - made.get_precision() + 1)))
    made.set_pad(int(rng.integers(0, 2)), int(rng.integers(0, 2)))
    return made


def _odd_float(rng: Any) -> Any:
    size = int(rng.choice([2, 4, 8]))
    made = h5t.py_create(np.dtype(f"{rng.choice(['<', '>'])}f{size}")).copy()
    exponent = int(rng.integers(4, {2: 9, 4: 9, 8: 12}[size]))
    mantissa = int(rng.integers(max(3, 4 * size - exponent), 8 * size - exponent))
    made.set_fields(exponent + mantissa, mantissa, exponent, 0, mantissa)
    made.set_precision(1 + exponent + mantissa)
    made.set_ebias(2 ** (exponent - 1) - 1)
    return made


def _enumeration(rng: Any) -> Any:
    base = np.dtype(str(rng.choice(["i1", ">i2", "u4"])))
    return h5t.py_create(h5py.enum_dtype({"LOW": 1, "HIGH": 100}, base), logical=True)


def _bits(rng: Any) -> Any:
    names = ["STD_B8LE", "STD_B16BE", "STD_B32LE", "STD_B64BE"]
    return getattr(h5t, str(rng.choice(names))).copy()


def _opaque(rng: Any) -> Any:
    made = h5t.create(h5t.OPAQUE, int(rng.integers(1, 9)))
    # h5py converts only those without a tag, or with its own tags.
    made.set_tag(rng.choice([b"", b"NUMPY:|V4", b"a tag"]))
    return made


def _compound(rng: Any) -> Any:
    members = [_plain, _with_unused_bits, _odd_float, _enumeration, _array, _opaque]
    parts = [members[i](rng) for i in rng.integers(0, len(members), 3)]
    gaps = rng.integers(0, 5, 3).tolist()
    made = h5t.create(h5t.COMPOUND, sum(p.get_size() for p in parts) + sum(gaps))
    offset = 0
    for index, (part, gap) in enumerate(zip(parts, gaps, strict=True)):
        made.insert(f"m{index}".encode(), offset, part)
        offset += part.get_size() + gap
    return made


def _array(rng: Any) -> Any:
    base = [_plain, _with_unused_bits, _enumeration][int(rng.integers(0, 3))](rng)
    return h5t.array_create(
        base, tuple(rng.integers(1, 4, rng.integers(1, 3)).tolist())
    )


def _text(rng: Any) -> Any:
    made = h5t.C_S1.copy()
    made.set_size(int(rng.integers(1, 9)))
    made.set_strpad(
        int(rng.choice([h5t.STR_NULLTERM, h5t.STR_NULLPAD, h5t.STR_SPACEPAD]))
    )
    made.set_cset(int(rng.choice([h5t.CSET_ASCII, h5t.CSET_UTF8])))
    return made


def _long_text(_: Any) -> Any:
    return h5t.py_create(h5py.string_dtype(), logical=True)


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": _plain,
    "unused bits": _with_unused_bits,
    "odd float": _odd_float,
    "enumeration": _enumeration,
    "bits": _bits,
    "opaque": _opaque,
    "compound": _compound,
    "array": _array,
    "text": _text,
    "long text": _long_text,
    "lists": lambda _: h5t.vlen_create(h5t.NATIVE_INT32),
    "object reference": lambda _: h5t.STD_REF_OBJ,
    "region reference": lambda _: h5t.STD_REF_DSETREG,
    "compound of lists": lambda _: h5t.py_create(
        np.dtype([("a", "f4"), ("b", h5py.vlen_dtype("i4"))]), logical=True
    ),
}
FILTERS = ["none", "deflate", "shuffle", "fletcher", "lzf", "szip", "scale", "nbit"]


def _properties(  # noqa: C901
    rng: Any, kind: str, shape: tuple[int, ...], stored: Any
) -> Any:
    """Return random creation properties: layout, chunks, filters, fill value."""
    made = h5p.create(h5p.DATASET_CREATE)
    made.set_fill_time(int(rng.choice([h5d.FILL_TIME_ALLOC, h5d.FILL_TIME_IFSET])))
    if kind == "plain" and rng.random() < 0.5:
        made.set_fill_value(np.array(1, stored.dtype))
    if rng.random() < 0.25:
        if rng.random() < 0.3:
            made.set_layout(h5d.COMPACT)
        return made
    made.set_chunk(tuple(int(rng.integers(1, n + 3)) for n in shape))
    chosen = str(rng.choice(FILTERS))
    is_number = stored.get_class() in {h5t.INTEGER, h5t.FLOAT}
    if kind == "long text" or kind in REFUSED:
        return made
    if chosen in {"shuffle", "nbit"} and rng.random() < 0.8:
        made.set_shuffle()
    if chosen in {"deflate", "shuffle"}:
        made.set_deflate(4)
    elif chosen == "fletcher":
        made.set_fletcher32()
    elif chosen == "lzf":
        made.set_filter(h5py.h5z.FILTER_LZF, h5z.FLAG_OPTIONAL)
    elif chosen == "scale" and kind == "plain" and stored.get_class() == h5t.INTEGER:
        made.set_scaleoffset(h5z.SO_INT, 0)
    elif chosen == "nbit" and is_number:
        made.set_filter(h5z.FILTER_NBIT, h5z.FLAG_OPTIONAL)
    return made


def _random_values(rng: Any, kind: str, dtype: Any, shape: tuple[int, ...]) -> Any:
    if kind == "long text":
        words = ["", "a", "Straße", "many words"]
        return np.array([words[i] for i in rng.integers(0, 4, shape).ravel()], object)
    count = int(np.prod(shape)) * dtype.itemsize
    if kind in {"text", "opaque"}:
        return rng.integers(65, 91, count, dtype=np.uint8).view(dtype)
    if kind == "compound":
        made = np.zeros(int(np.prod(shape)), dtype)
        for name in dtype.names:
            made[name] = (
                rng.integers(0, 2, made[name].shape)
                .astype(np.uint8)
                .astype(made[name].dtype)
                if made[name].dtype.kind != "V"
                else made[name]
            )
        return made
    base, inner = dtype.base, dtype.shape
    top = 2 if base.kind == "b" else 100
    return rng.integers(0, top, (int(np.prod(shape)), *inner)).astype(base)


def _write(file: Any, name: str, kind: str, rng: Any, shape: tuple[int, ...]) -> None:
    """Write a dataset of a random type, layout and filter, partly if it has chunks."""
    stored = KINDS[kind](rng)
    properties = _properties(rng, kind, shape, stored)
    limits = tuple(h5s.UNLIMITED for _ in shape)
    is_chunked = properties.get_layout() == h5d.CHUNKED
    space = h5s.create_simple(shape, limits if is_chunked else shape)
    parent = file.require_group(name.rpartition("/")[0] or "/")
    leaf = name.rpartition("/")[2].encode()
    made = h5py.Dataset(h5d.create(parent.id, leaf, stored, space, properties))
    if kind in REFUSED or rng.random() < 0.1 or not _can_convert(made):
        return
    values = _random_values(rng, kind, made.dtype, shape)
    values = values.reshape(*shape, *made.dtype.shape)
    part = (
        slice(int(rng.integers(0, shape[0] + 1))) if rng.random() < 0.3 else slice(None)
    )
    if 0 not in values[part].shape:
        made[part] = values[part]


def _can_convert(dataset: Any) -> bool:
    """Return whether h5py can convert the values of a dataset."""
    try:
        wanted = h5t.py_create(dataset.dtype)
    except ValueError:
        return False
    return h5t.find(dataset.id.get_type(), wanted) is not None


@given(seed=st.integers(0, 10**9), kind=st.sampled_from(sorted(KINDS)))
def test_a_column_of_any_type_is_what_h5py_reads(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.getbasetemp() / "any.h5"
    length = int(rng.integers(0, 12))
    shape = (length, *rng.integers(0, 4, rng.integers(0, 3)).tolist())
    block = int(rng.choice([0, 512]))
    bounds = [("earliest", "latest"), ("v108", "v110"), ("latest", "latest")]
    version = bounds[int(rng.integers(0, 3))]
    with h5py.File(path, "w", userblock_size=block, libver=version) as file:
        _write(file, "x", kind, rng, shape)
    if kind in REFUSED:
        with pytest.raises(ValueError, match=r"column x of .*any\.h5.*columns="):
            Dataset.from_files(path)
        return
    with h5py.File(path) as file:
        source = file["x"].asstr() if kind == "long text" else file["x"]
        expected = np.asarray(source[...]) if _can_convert(file["x"]) else None
    if expected is None:
        with pytest.raises(ValueError, match=r"column x of .*any\.h5.*columns="):
            Dataset.from_files(path)
        return
    stage: Any = Dataset.from_files(path, columns="x").stage
    places = rng.permutation(length)[: rng.integers(0, length + 1)]
    for rows in (slice(0, length), places):
        found = stage.read(rows, 0)
        if kind == "long text":
            assert found.tolist() == expected[rows].tolist()
            continue
        assert found.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, expected[rows])


def test_links_and_objects_that_are_no_columns(tmp_path: Path) -> None:
    path, other = tmp_path / "main.h5", tmp_path / "folder" / "other.h5"
    other.parent.mkdir()
    with h5py.File(other, "w") as file:
        file["x"] = np.arange(6) * 10
        file.create_dataset("zipped", data=np.arange(6) * 100, compression="lzf")
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(6)
        file.create_dataset("zipped", data=np.arange(6) * 2, compression="lzf")
        file["outside/x"] = h5py.ExternalLink("folder/other.h5", "/x")
        file["outside/zipped"] = h5py.ExternalLink("folder/other.h5", "/zipped")
        file["soft"] = h5py.SoftLink("/x")
        file["group/loop"] = file["/"]
        file["group/up"] = h5py.SoftLink("/group")
        file["group/type"] = np.dtype("f4")
        file["group/nothing"] = h5py.Empty("f4")
        file["group/scalar"] = 5
    (batch,) = Dataset.from_files(path).batch(6)
    assert sorted(batch) == ["outside", "soft", "x", "zipped"]
    expected = {"x": 1, "soft": 1, "zipped": 2}
    for name, factor in expected.items():
        assert batch[name].tolist() == [factor * row for row in range(6)], name
    assert batch["outside"]["x"].tolist() == list(range(0, 60, 10))
    assert batch["outside"]["zipped"].tolist() == list(range(0, 600, 100))
    with h5py.File(path) as file:
        (of_h5py,) = Dataset(file).batch(6)
    assert sorted(of_h5py) == sorted(batch)
    # The other file is checked, too.
    stage: Any = Dataset.from_files(path, ["outside/x"]).stage
    with h5py.File(other, "r+") as file:
        file["x"][:] = 0
        file["y"] = 0
    with pytest.raises(ValueError, match=r"folder/other\.h5.*has grown"):
        stage.read(slice(0, 6), 0)


def test_links_to_nothing_and_missing_sources_are_errors(tmp_path: Path) -> None:
    path, source = tmp_path / "main.h5", tmp_path / "source.h5"
    raw = tmp_path / "raw.bin"
    raw.write_bytes(bytes(24))
    with h5py.File(source, "w") as file:
        file["x"] = np.arange(6)
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(6)
        file["soft"] = h5py.SoftLink("/nothing")
        file["far"] = h5py.ExternalLink("gone.h5", "/x")
        layout = h5py.VirtualLayout((6,), "i8")
        layout[:] = h5py.VirtualSource("source.h5", "x", (6,))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("short", (6,), "f8", external=[(str(raw), 0, 48)])
    for name, found in (
        ("soft", "/nothing, which does not exist"),
        ("far", r"/x in gone\.h5, which does not exist"),
        ("short", r"some belong to .*raw\.bin"),
    ):
        with pytest.raises(ValueError, match=rf"column {name} of .*main\.h5.*{found}"):
            Dataset.from_files(path, ["x", name])
    stage: Any = Dataset.from_files(path, ["x", "virtual"]).stage
    assert stage.read(slice(0, 6), 0)["virtual"].tolist() == list(range(6))
    source.unlink()
    with pytest.raises(FileNotFoundError, match=r"source\.h5.*removed"):
        stage.read(slice(0, 6), 0)
    with pytest.raises(ValueError, match=r"virtual of .* belong to source\.h5"):
        Dataset.from_files(path, ["x", "virtual"])


def test_filters_and_types_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4)
        properties = h5p.create(h5p.DATASET_CREATE)
        properties.set_chunk((4,))
        properties.set_filter(32767, h5z.FLAG_OPTIONAL)
        space = h5s.create_simple((4,))
        h5d.create(file.id, b"packed", h5t.NATIVE_FLOAT, space, properties)
        h5d.create(file.id, b"time", h5t.UNIX_D32LE, space)
        file["bytes"] = np.array([b"a", b"b", b"c", b"d"], h5py.string_dtype())
        file["bytes"][2] = b"\xff"
    with pytest.raises(
        ValueError, match=r"column packed of .*filter 32767.*hdf5plugin"
    ):
        Dataset.from_files(path, ["x", "packed"])
    with pytest.raises(ValueError, match=r"column time of .*NumPy"):
        Dataset.from_files(path, ["x", "time"])
    with pytest.raises(ValueError, match=r"rows of bytes in .*odd\.h5.*utf-8"):
        list(Dataset.from_files(path, ["x", "bytes"]))


def test_files_need_few_descriptors(tmp_path: Path) -> None:
    for index in range(300):
        with h5py.File(tmp_path / f"{index:03}.h5", "w") as file:
            file.create_dataset("x", data=[index] * 2, compression="lzf")
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from hpcstrat.data import Dataset\n"
        f"data = Dataset.from_files({str(tmp_path / '*.h5')!r}, 'x').shuffle(seed=1)\n"
        "for _ in range(2):\n"
        "    rows = [int(x) for batch in data.batch(64) for x in batch]\n"
        "    assert sorted(rows) == sorted([*range(300)] * 2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_virtual_datasets_without_free_descriptors_are_errors(tmp_path: Path) -> None:
    """HDF5 would read fill values from the sources that it cannot open."""
    layout = h5py.VirtualLayout((60,), "i8")
    for index in range(60):
        with h5py.File(tmp_path / f"{index:02}.h5", "w") as file:
            file["x"] = [index]
        layout[index] = h5py.VirtualSource(f"{index:02}.h5", "x", (1,))
    path = tmp_path / "all.h5"
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "from hpcstrat.data import Dataset\n"
        f"list(Dataset.from_files({os.fspath(path)!r}, 'x').batch(60))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "Too many open files" in done.stderr
    assert "all.h5" in done.stderr.splitlines()[-1]
