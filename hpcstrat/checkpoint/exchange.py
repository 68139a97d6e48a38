"""Conversion of checkpoints to and from files of other programs.

The formats are NumPy's (.npz), plain HDF5 and safetensors. Values are converted one
after the other, so that a file need not fit in memory. The safetensors library is not
used, because its writer needs all values in memory. A safetensors file consists of the
header's length in 8 bytes, the header in JSON, and the values; see
huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5g, h5l, h5o, h5t
from numpy.lib import format as npy_format

from hpcstrat.checkpoint.file.schema import named_dtype
from hpcstrat.engine.hdf5_files import open_for_reading
from hpcstrat.engine.typing import Array

__all__ = [
    "read_hdf5",
    "read_npz",
    "read_safetensors",
    "write_hdf5",
    "write_npz",
    "write_safetensors",
]

# HDF5 has no bfloat16: store such values as float32, and "bfloat16" in this attribute.
_TYPE = "hpcstrat_dtype"
_BFLOAT16 = "bfloat16"
_CHUNK_BYTES = 16 << 20
# A larger value must have at least one stored byte for so many bytes: gzip, which
# compresses best, makes one byte of 1,032.
_MOST_BYTES = 1 << 30
_MOST_RATIO = 1100
_MOST_REPEATS = 10_000
_MOST_DEPTH = 1000
# HDF5 follows as many soft links, one after the other.
_MOST_SOFT_LINKS = 16
_NPY_HEADERS = {
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
}
# Place of two lengths in a member's ZIP header: of its name, and of its extra field.
_LENGTHS = slice(26, 30)
_HEADER_BYTES = 30


def write_npz(
    path: str, values: Mapping[str, Array], tick: Callable[[int], None]
) -> None:
    """Write values to an .npz file; the values may be memory-mapped."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, value in values.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy_format.write_array(member, value, allow_pickle=False)
            tick(value.nbytes)


def read_npz(path: str) -> dict[str, Array]:
    """Return an .npz file's values by name, memory-mapped if they are uncompressed."""
    found = dict[str, Array]()
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in found:
                raise ValueError(f"it has two values named {name!r}")
            with archive.open(info) as member:
                found[name] = _of_member(file, info, member)
                # At a member's end, zipfile compares the checksum.
                while member.read(_CHUNK_BYTES):
                    pass
            if found[name].dtype == np.dtype("V2"):
                # NumPy has no bfloat16, and writes such values as plain bytes.
                found[name] = found[name].view(named_dtype(_BFLOAT16))
    return found


def _of_member(file: Any, info: zipfile.ZipInfo, member: Any) -> Array:
    """Return a member of a ZIP archive as an array, memory-mapped if uncompressed."""
    version = npy_format.read_magic(member)
    if version not in _NPY_HEADERS:
        raise ValueError(f"{info.filename} is of version {version}, which is unknown")
    shape, is_fortran, dtype = _NPY_HEADERS[version](member)
    begin = member.tell()
    nbytes = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"{info.filename} holds objects of Python, or no array")
    if begin + nbytes != info.file_size:
        raise ValueError(
            f"{info.filename} has {info.file_size - begin:,} bytes, not the "
            f"{nbytes:,} of its shape {shape}"
        )
    if info.compress_type == zipfile.ZIP_STORED and nbytes:
        file.seek(info.header_offset)
        lengths = np.frombuffer(file.read(_HEADER_BYTES)[_LENGTHS], "<u2")
        begin += info.header_offset + _HEADER_BYTES + int(lengths.sum())
        raw: Array = np.memmap(file, np.uint8, "c", begin, (nbytes,))
    else:
        _require_plausible(info.filename, nbytes, info.compress_size)
        raw = np.frombuffer(bytearray(member.read(nbytes)), np.uint8)
    return raw.view(dtype).reshape(shape, order="F" if is_fortran else "C")


def _require_plausible(name: str, nbytes: int, stored: int) -> None:
    """Raise ValueError if so few stored bytes can hardly have been values."""
    if nbytes > _MOST_BYTES and nbytes > _MOST_RATIO * stored:
        raise ValueError(
            f"{name} is said to have {nbytes:,} bytes, but the file has {stored:,}"
        )


def write_hdf5(
    path: str, values: Mapping[str, Array], tick: Callable[[int], None]
) -> None:
    """Write values to an HDF5 file; each ``/`` in a name makes a group."""
    with h5py.File(path, "w") as plain:
        for name, value in values.items():
            if value.dtype.name == _BFLOAT16:
                _write_half(plain.create_dataset(name, value.shape, "<f4"), value)
            else:
                plain[name] = value
            tick(value.nbytes)


def _write_half(dataset: Any, value: Array) -> None:
    """Write bfloat16 as float32 by shifting bits, because a cast changes some NaN."""
    dataset.attrs[_TYPE] = _BFLOAT16
    bits = value.view(np.uint16)
    rows = max(1, _CHUNK_BYTES // max(1, bits[:1].nbytes)) if bits.ndim else 0
    starts = range(0, len(bits), rows) if bits.ndim else ()
    places: list[Any] = [slice(start, start + rows) for start in starts]
    for place in places if bits.ndim else [()]:
        wide = bits[place].astype(np.uint32) << np.uint32(16)
        dataset[place] = wide.view(np.float32)


def read_hdf5(path: str) -> dict[str, Array]:
    """Return an HDF5 file's values by path, memory-mapped if stored contiguously.

    A value with several names is returned under each of them. Raises ValueError if
    a part of the file is in another file, or if a group contains itself.
    """
    with open_for_reading(path) as plain:
        datasets = dict(_datasets(plain.id))
        return {
            name: _of_dataset(path, name, dataset) for name, dataset in datasets.items()
        }


def _datasets(file: Any) -> Iterator[tuple[str, Any]]:
    """Yield each dataset of a file with its path, once for each of its paths."""
    root, seen = h5g.open(file, b"/"), set[int]()
    budget = iter(range(_MOST_REPEATS))
    todo: list[tuple[str, Any, frozenset[int]]] = [("", root, frozenset())]
    while todo:
        path, found, outer = todo.pop()
        if isinstance(found, h5d.DatasetID):
            yield path, h5py.Dataset(found)
        elif isinstance(found, h5g.GroupID):
            address = h5o.get_info(found).addr
            if address in outer or len(outer) > _MOST_DEPTH:
                raise ValueError(
                    f"{path} contains itself, or is more than {_MOST_DEPTH} deep"
                )
            if address in seen:
                _count(budget)
            seen.add(address)
            for name in sorted(found, reverse=True):
                inner = f"{path}/{name.decode()}".removeprefix("/")
                try:
                    member = _member(root, found, name, budget)
                except LookupError as error:
                    raise ValueError(f"{inner} is a link to nothing") from error
                todo.append((inner, member, outer | {address}))


def _member(
    root: Any, group: Any, name: bytes, budget: Iterator[int], depth: int = 0
) -> Any:
    """Open a member of a group; follow soft links, but no link to another file."""
    if depth > _MOST_SOFT_LINKS or not group.links.exists(name):
        raise LookupError(name)
    kind = group.links.get_info(name).type
    if kind == h5l.TYPE_HARD:
        return h5o.open(group, name)
    if kind != h5l.TYPE_SOFT:
        raise ValueError(f"{name.decode()} is a link to another file; copy its values")
    _count(budget)
    target = group.links.get_val(name)
    found = root if target.startswith(b"/") else group
    for part in target.split(b"/"):
        if part not in (b"", b"."):
            if not isinstance(found, h5g.GroupID):
                raise KeyError(target)
            found = _member(root, found, part, budget, depth + 1)
    return found


def _count(budget: Iterator[int]) -> None:
    """Count a second name; a small file can have more of them than fit in memory."""
    if next(budget, None) is None:
        raise ValueError(f"it has more than {_MOST_REPEATS:,} links to other names")


def _of_dataset(path: str, name: str, dataset: Any) -> Array:
    made, dtype = dataset.id.get_create_plist(), dataset.dtype
    if made.get_external_count() or made.get_layout() == h5d.VIRTUAL:
        raise ValueError(f"the values of {name} are in another file; copy them")
    if dtype.kind not in "biufc" or dataset.shape is None:
        raise ValueError(f"{name} is of {dtype}, which is no number")
    nbytes = math.prod(dataset.shape) * dtype.itemsize
    offset = dataset.id.get_offset()
    # HDF5 converts values that it stores in another way than NumPy, such as integers
    # of 12 bits in 2 bytes.
    is_plain = dataset.id.get_type() == h5t.py_create(dtype, logical=True)
    if offset is None or not nbytes or not is_plain or made.get_nfilters():
        _require_plausible(name, nbytes, dataset.id.get_storage_size())
        value = dataset[()]
    else:
        raw = np.memmap(path, np.uint8, "c", offset, (nbytes,))
        value = raw.view(dtype).reshape(dataset.shape)
    value = np.asarray(value)
    if dataset.attrs.get(_TYPE) == _BFLOAT16:
        bits = (value.astype("<f4", copy=False).view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(named_dtype(_BFLOAT16))
    return value


_TYPES = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_NAMES = {name: letter for letter, name in _TYPES.items()}
_METADATA = "__metadata__"
# The safetensors library refuses longer headers.
_MOST_HEADER_BYTES = 100_000_000


def write_safetensors(
    path: str, values: Mapping[str, Array], tick: Callable[[int], None]
) -> None:
    """Write values to a safetensors file; the values may be memory-mapped."""
    header, end = dict[str, Any](), 0
    # Write wider types first, as safetensors does, so that each value is aligned.
    ordered = sorted(values, key=lambda name: (-values[name].dtype.itemsize, name))
    for name in ordered:
        value = values[name]
        letter = _NAMES.get(value.dtype.name)
        if letter is None or name == _METADATA:
            raise ValueError(
                f"expected values of types that safetensors has, found {name!r} of "
                f"{value.dtype.name}; choose another format, or leave it out by --part"
            )
        begin, end = end, end + value.nbytes
        offsets = [begin, end]
        header[name] = {"dtype": letter, "shape": value.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            raw = values[name].reshape(-1).view(np.uint8)
            for start in range(0, raw.size, _CHUNK_BYTES):
                chunk = raw[start : start + _CHUNK_BYTES]
                file.write(chunk.data)
                tick(chunk.size)


def read_safetensors(path: str) -> dict[str, Array]:
    """Return the values of a safetensors file by name, as memory-mapped arrays.

    Raises ValueError if the file is not a safetensors file.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(f"its header of {length} bytes does not fit in the file")
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("its header is no object of JSON")
    header.pop(_METADATA, None)
    if not all(isinstance(about, dict) for about in header.values()):
        raise ValueError("its header describes a value by something else than a dict")
    base = 8 + length
    offsets = sorted(about["data_offsets"] for about in header.values())
    # As in the safetensors library, the values fill the file, and none overlap.
    ends = itertools.chain([0], (end for _, end in offsets))
    if [*ends] != [*(begin for begin, _ in offsets), size - base]:
        raise ValueError(
            f"the places of its values do not fit in its {size - base:,} bytes of data"
        )
    return {name: _value(path, about, base) for name, about in header.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of an object of JSON as a dict; refuse a name that is twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"its header has one of the names {[*found]} twice")
    return found


def _value(path: str, about: dict[str, Any], base: int) -> Array:
    if about["dtype"] not in _TYPES:
        raise ValueError(f"its values of type {about['dtype']!r} are not supported")
    dtype, shape = named_dtype(_TYPES[about["dtype"]]), tuple(about["shape"])
    begin, end = about["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"its shape {shape}, or a place of values, is no count")
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise ValueError(f"its values of shape {shape} do not fit in the file")
    if not nbytes:
        return np.zeros(shape, dtype)
    # Map the values as bytes, because they may be unaligned in the file.
    raw = np.memmap(path, np.uint8, "c", base + begin, (nbytes,))
    return raw.view(dtype).reshape(shape)
